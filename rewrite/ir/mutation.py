"""In-place ops as new values, and a guard for those that must stay.

``torch.export`` keeps ``add_`` and friends. A pass that reads a stream later, or runs a block again, would read or write
a tensor that has changed since. Where no view that was made before is read afterwards, ``y = x.add_(z)`` becomes
``y = x + z`` with every later use of ``x`` reading ``y``: the same numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from hcx.rewrite.errors import PlanError
from torch import fx

from .aliases import Aliases, mutated
from .dataflow import shape
from .tags import hcx_tag


def functional(graph: fx.Graph) -> None:
    """Turn in-place ops into new values where that is exact; others stay."""
    _without_detach(graph)
    aliases = Aliases(graph)
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        targets = mutated(node)
        op = _functional_op(node) if len(targets) == 1 else None
        if op is None or aliases.root(targets[0]).op == "get_attr":
            continue
        target = targets[0]
        same = aliases.same(target)
        late = [  # views that are made afterwards are views of the new value
            u
            for other in aliases.members(target)
            if other not in same and order[other] < order[node]
            for u in other.users
            if order[u] > order[node]
        ]
        if late:
            continue
        before, after = target.meta.get("val"), node.meta.get("val")
        if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
            continue
        tensors = [v.meta.get("val") for v in node.all_input_nodes if isinstance(v.meta.get("val"), torch.Tensor)]
        node.target = op
        if op is torch.ops.aten.copy.default:
            _differentiable_copy(graph, node, order)
        result = node
        if any(v.dtype != before.dtype for v in tensors if v.dim()):  # in place keeps the dtype
            with graph.inserting_after(node):
                result = graph.call_function(torch.ops.aten.to.dtype, (node, before.dtype))
            result.meta = dict(node.meta)
            order[result] = order[node]
            node.replace_all_uses_with(result, delete_user_cb=partial(operator.is_not, result))
        for other in same:
            other.replace_all_uses_with(result, delete_user_cb=_later(order, node))
        aliases.fresh(node, result)


def _later(order: dict[fx.Node, int], node: fx.Node) -> Callable[[fx.Node], bool]:
    """Whether a user comes after a node."""
    return lambda user: order[user] > order[node]


def _without_detach(graph: fx.Graph) -> None:
    """``detach_`` of a constant writes no value, whatever its schema says: ``torch.tensor`` inside a forward ends in it."""
    for node in graph.nodes:
        if node.target is torch.ops.aten.detach_.default and Aliases.source(node).op == "get_attr":
            node.target = torch.ops.aten.detach.default


def _differentiable_copy(graph: fx.Graph, node: fx.Node, order: dict[fx.Node, int]) -> None:
    """``copy`` has no gradient: write it as the clone of the source in the shape and dtype of the target."""
    target, source = cast("tuple[fx.Node, fx.Node]", node.args[:2])
    before = target.meta["val"]

    def insert(op: torch._ops.OpOverload, *arguments: Any) -> fx.Node:
        with graph.inserting_before(node):
            new = graph.call_function(op, (source, *arguments))
        values = fx.map_arg(new.args, lambda n: n.meta["val"])
        with torch.no_grad(), node.meta["val"].fake_mode:
            new.meta = {**node.meta, "val": op(*values)}
        order[new] = order[node]
        return new

    if source.meta["val"].dtype != before.dtype:
        source = insert(torch.ops.aten.to.dtype, before.dtype)
    if shape(source) != shape(target):
        source = insert(torch.ops.aten.expand_as.default, target)
    layout: dict[str, Any] = {"memory_format": torch.contiguous_format} if before.is_contiguous() else {}
    node.target, node.args, node.kwargs = torch.ops.aten.clone.default, (source,), layout


def _functional_op(node: fx.Node) -> torch._ops.OpOverload | None:
    target = cast("torch._ops.OpOverload", node.target)
    name = target.overloadpacket.__name__
    if target.namespace != "aten" or not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(torch.ops.aten, name[:-1], None)
    op: torch._ops.OpOverload | None = getattr(packet, target._overloadname, None)
    return op if op is not None and not op._schema.is_mutable and _same_arguments(op, target) else None


def _same_arguments(one: torch._ops.OpOverload, other: torch._ops.OpOverload) -> bool:
    def names(op: torch._ops.OpOverload) -> list[tuple[str, str]]:
        return [(a.name, str(a.type)) for a in op._schema.arguments]

    return names(one)[1:] == names(other)[1:] and len(one._schema.returns) == 1


def check_hazards(graph: fx.Graph, pass_name: str) -> None:
    """Refuse a rewrite in which a pass reads a tensor after it was changed in place, or changes one that is still read.

    Raises:
        PlanError: with the op and the value.
    """
    aliases = Aliases(graph)
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        for target in mutated(node):
            for other in aliases.members(target):
                if order[other] >= order[node]:
                    continue
                for user in other.users:
                    if (
                        order[user] > order[node]
                        and (_of_pass(user) or _of_pass(node))
                        and not _copied_together(user, node)
                    ):
                        raise PlanError(
                            f"`{pass_name}` would read `{other.name}` after `{node.name}` has changed it in place",
                            where=_where(node),
                            hint="write that line of the model without the in-place op (x = x + y instead of x += y)",
                        )


def _of_pass(node: fx.Node) -> bool:
    return hcx_tag(node).of_pass is not None


def _copied_together(one: fx.Node, other: fx.Node) -> bool:
    """Copies of one iteration keep the order of their originals, writes included."""
    a, b = hcx_tag(one), hcx_tag(other)
    both = a.original is not None and b.original is not None
    return both and a.of_pass == b.of_pass and a.get("iteration") == b.get("iteration")


def _where(node: fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return f"{stack[-1][0] if stack else ''} {node.target}".strip()
