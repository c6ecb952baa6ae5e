"""Moving nodes of a graph into the body of a branch or a loop; see :meth:`hcx.rewrite.edit.editor.Editor.cond`."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hcx.rewrite.errors import PlanError
from hcx.rewrite.ir.aliases import mutated
from hcx.rewrite.ir.control import Cond, Control, While
from hcx.rewrite.ir.dataflow import results_of
from hcx.rewrite.ir.tags import Part, Role
from torch import fx

from .inserting import Inserter

COUNT = Role("count", Part.BESIDE)
"""Counts the iterations of a loop."""


@dataclass(frozen=True)
class Region:
    """Nodes that become a body.

    Attributes:
        nodes: calls of the graph, in any order; what they read from outside (weights, positions) becomes operands.
        results: the values it gives: some of these nodes, or values from outside that it hands on.
    """

    nodes: Iterable[fx.Node]
    results: Sequence[fx.Node]


def insert_cond(editor: Inserter, predicate: fx.Node, then: Region, otherwise: Region) -> tuple[fx.Node, ...]:
    """See :meth:`Editor.cond`."""
    first, second = set(then.nodes), set(otherwise.nodes)
    if shared := first & second:
        raise PlanError(f"`{min(shared).name}` is in both branches", where=editor.pass_name)
    _check_pairs(editor, then.results, otherwise.results)
    if predicate in first | second:
        raise PlanError(f"`{predicate.name}` decides about itself", where=editor.pass_name)
    operands = _operands(then, otherwise)
    bodies = [_body(r, operands) for r in (then, otherwise)]
    return _replace(editor, Cond(*bodies), (predicate, *operands), [then, otherwise], list(otherwise.results))


def insert_repeat(editor: Inserter, trips: fx.Node, body: Region, carried: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """See :meth:`Editor.repeat`."""
    _check_pairs(editor, carried, body.results)
    place = min(body.nodes)
    with editor.before(place, role=COUNT):
        start = editor.inline(torch.zeros_like, trips)
    others = [o for o in _operands(body) if o not in carried]
    operands = [start, *carried, trips, *others]
    counted = _body(body, operands)
    with counted.inserting_before(counted.output_node()):
        following = _call(counted, torch.ops.aten.add.Tensor, next(iter(counted.nodes)), 1, like=start)
    counted.output_node().args = ((following, *results_of(counted)),)
    condition = fx.Graph()
    inputs = [_placeholder(condition, o) for o in operands]
    more = _call(condition, torch.ops.aten.lt.Tensor, inputs[0], inputs[1 + len(carried)], like=start, dtype=torch.bool)
    condition.output((more,))
    target = While(condition, counted, carried=1 + len(carried))
    return _replace(editor, target, tuple(operands), [body], [None, *body.results])[1:]


def _check_pairs(editor: Inserter, one: Sequence[fx.Node], other: Sequence[fx.Node]) -> None:
    if len(one) != len(other):
        raise PlanError(f"{len(one)} values stand against {len(other)}", where=editor.pass_name)
    for a, b in zip(one, other, strict=True):
        kinds = [(n.meta["val"].dtype, tuple(map(str, n.meta["val"].shape))) for n in (a, b)]
        if kinds[0] != kinds[1]:
            raise PlanError(f"`{a.name}` is {kinds[0]} and `{b.name}` is {kinds[1]}: one cannot stand for the other",
                            where=editor.pass_name)  # fmt: skip


def _operands(*regions: Region) -> list[fx.Node]:
    """What the regions read or hand on from outside, in graph order."""
    found: set[fx.Node] = set()
    for region in regions:
        own = set(region.nodes)
        found |= {o for n in own for o in n.all_input_nodes if o not in own} | set(region.results) - own
    inside = {n for region in regions for n in region.nodes}
    if mixed := [n for n in found if n in inside]:
        raise PlanError(f"one branch reads `{mixed[0].name}` of the other", where=mixed[0].name)
    return sorted(found)


def _body(region: Region, operands: Sequence[fx.Node]) -> fx.Graph:
    graph = fx.Graph()
    copies = {o: _placeholder(graph, o) for o in operands}
    for node in sorted(region.nodes):
        if node.op != "call_function" or mutated(node):
            raise PlanError(f"`{node.name}` ({node.target}) cannot run in a branch", where=node.name,
                            hint="write that line of the model without the in-place op")  # fmt: skip
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = dict(node.meta)
    graph.output(tuple(copies[r] for r in region.results))
    return graph


def _placeholder(graph: fx.Graph, node: fx.Node) -> fx.Node:
    new = graph.placeholder(node.name)
    new.meta = {"val": node.meta["val"]}
    return new


def _call(graph: fx.Graph, op: Any, *arguments: Any, like: fx.Node, dtype: torch.dtype | None = None) -> fx.Node:
    """A call with the shape, place and, unless given, the dtype of another node."""
    node = graph.call_function(op, arguments)
    val = like.meta["val"]
    with val.fake_mode:
        node.meta = {**like.meta, "val": torch.empty_like(val, dtype=dtype)}
    return node


def _replace(
    editor: Inserter, target: Control, arguments: tuple[fx.Node, ...], regions: list[Region], old: list[fx.Node | None]
) -> tuple[fx.Node, ...]:
    """Put the control-flow node where its operands are known, redirect the old results to its own, drop the nodes."""
    graph, members = editor.graph, {n for r in regions for n in r.nodes}
    with editor.after(max(arguments), role=Role(target.kind, Part.BESIDE)):
        node = graph.call_function(target, arguments)
        editor.mark(node)
        values = results_of(target.bodies[-1])
        node.meta["val"] = tuple(v.meta["val"] for v in values)
    made = []
    with editor.after(node, role=Role(target.kind, Part.BESIDE)):
        for index, value in enumerate(values):
            item = graph.call_function(operator.getitem, (node, index))
            item.meta["val"] = value.meta["val"]
            editor.mark(item)
            made.append(item)
    for before, after in zip(old, made, strict=True):
        if before in members:
            before.replace_all_uses_with(after, delete_user_cb=lambda u: u not in members)
    for member in sorted(members, reverse=True):
        if member.users:
            raise PlanError(f"`{next(iter(member.users)).name}` reads `{member.name}`, which moved into a branch",
                            where=editor.pass_name, hint="name it among the results")  # fmt: skip
        graph.erase_node(member)
    editor.counts["inserted"] += 1 + len(made)
    return tuple(made)
