"""The semantic view of a graph: residual streams, their blocks and boundaries; stages where there is no stream."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import TYPE_CHECKING

from hcx.rewrite.ir.dataflow import WRITES, Dataflow, op_name, resolve, results_of, settle, tensor_of, value
from hcx.rewrite.ir.signature import Fill
from hcx.rewrite.ir.tags import Part, hcx_tag
from hcx.rewrite.ir.values import fake_mode_of
from torch import fx

from .blocks import canonical, find_runs, group, iteration_of, residual_signature
from .residuals import find_residuals, other_adds
from .stages import find_stages
from .views import Block, Boundary, Carrier, Residual, Rule, Sites, Stack, Streams

if TYPE_CHECKING:
    from hcx.rewrite.ir.program import Program

Groups = list[tuple[str, list[Residual]]]


def find(program: Program) -> Sites:
    """Stacks, blocks, branches and boundaries of a Program; main stack last."""
    fake_mode_of(program)
    return find_in_graph(program.graph, cache_nodes(program))


def cache_nodes(program: Program) -> set[fx.Node]:
    """Placeholders that hold caches."""
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    return {n for n, spec in zip(placeholders, program.inputs, strict=True) if spec.fill == Fill.EMPTY}


def find_in_graph(graph: fx.Graph, caches: Set[fx.Node] = frozenset()) -> Sites:
    """The same for a bare graph (values need ``meta['val']``; module stacks are optional)."""
    flow = Dataflow(graph)
    residuals = find_residuals(flow)
    trunks, rejected = _chosen(flow, _trunks(flow, residuals))
    kept = [r for trunk in trunks for r in trunk]
    stacks = [_stack(flow, trunk, caches, number) for number, trunk in enumerate(trunks)]
    stacks = _main_last(flow, graph, stacks)
    if not stacks:
        stacks = find_stages(flow, graph)
    _address_branches(stacks)
    others = other_adds(flow, kept)
    return Sites(stacks, kept, others, {add: rejected.get(add, Rule.NO_WEIGHT) for add in others})


def _chosen(flow: Dataflow, trunks: list[list[Residual]]) -> tuple[list[list[Residual]], dict[fx.Node, Rule]]:
    """The chains that are streams of the model, and the adds of the others with the rule that took them out."""
    rejected: dict[fx.Node, Rule] = {}
    kept = []
    for trunk in trunks:
        plain = _without_previews(trunk)
        left = _without_nested(flow, plain)
        rejected |= {r.add: Rule.PREVIEW for r in trunk if r not in plain}
        rejected |= {r.add: Rule.NESTED for r in plain if r not in left}
        kept.append(left)
    inner = _inner(kept)
    rejected |= {r.add: rule for number, rule in inner.items() for r in kept[number]}
    return [trunk for number, trunk in enumerate(kept) if number not in inner], rejected


def _trunks(flow: Dataflow, residuals: list[Residual]) -> list[list[Residual]]:
    """Chain residuals whose skip is the stream that an earlier one made."""
    trunks: list[list[Residual]] = []
    home: dict[fx.Node, list[Residual]] = {}
    for residual in residuals:
        earlier = [a for a in home if flow.reaches(a, residual.skip)]
        plain = [a for a in earlier if not flow.reaches_by_weight(a, residual.skip)]
        link = max(plain, key=flow.index.__getitem__, default=None)
        if link is None:
            link = next(
                (
                    a
                    for a in sorted(earlier, key=flow.index.__getitem__, reverse=True)
                    if _is_transition(flow, home[a], a, residual.skip)
                ),
                None,
            )
        trunk = home[link] if link is not None else []
        if link is None:
            trunks.append(trunk)
        trunk.append(residual)
        home[residual.add] = trunk
    return trunks


def _is_transition(flow: Dataflow, trunk: list[Residual], add: fx.Node, skip: fx.Node) -> bool:
    """A new width or resolution on the same stream: everything from the trunk goes through its last add, and nothing
    else that depends on the inputs joins on the way."""
    if trunk[-1].add is not add or add not in flow.cut_vertices(trunk[0].skip, skip):
        return False
    path = flow.between(add, skip)
    inside = {add, *path}
    for node in path:
        for operand in node.all_input_nodes:
            if operand not in inside and value(operand) is not None and _depends_on_input(flow, operand):
                return False
    return True


def _depends_on_input(flow: Dataflow, node: fx.Node) -> bool:
    return node.op == "placeholder" or any(
        flow.nodes[i].op == "placeholder" for i in _bits(flow.ancestors[flow.index[node]])
    )


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _without_previews(trunk: list[Residual]) -> list[Residual]:
    """Drop ``h + g(h)`` where the stream goes on as ``h + f(h + g(h))``: only f reads that sum, it is no new stream."""
    streams = [resolve(r.skip) for r in trunk]
    inside = [{n for b in r.branches for n in b.body} for r in trunk]
    return [
        r
        for i, r in enumerate(trunk)
        if not any(
            streams[j] is streams[i] and r.add in inside[j] and r.add not in streams for j in range(i + 1, len(trunk))
        )
    ]


def _without_nested(flow: Dataflow, trunk: list[Residual]) -> list[Residual]:
    """Drop ``h + g(h)`` inside a branch of the same stream, where h is the branch's own value: a gate, not the stream."""
    for residual in trunk:
        for other in trunk:
            inside = {n for b in other.branches for n in b.body} if other is not residual else set()
            if residual.add not in inside or resolve(residual.skip) not in inside:
                continue
            if not any(r is not residual and r.add in inside and flow.reaches(r.add, residual.skip) for r in trunk):
                return _without_nested(flow, [r for r in trunk if r is not residual])
    return trunk


def _inner(trunks: list[list[Residual]]) -> dict[int, Rule]:
    """Chains that live inside a branch of a chain at least as long, and long skips around a longer chain."""
    branches = [(len(t), number, {n for r in t for b in r.branches for n in b.body}) for number, t in enumerate(trunks)]
    found = {}
    for number, trunk in enumerate(trunks):
        nodes = {r.add for r in trunk}
        around = [
            other
            for n, other in enumerate(trunks)
            if n != number and {r.add for r in other} <= branches[number][2] and len(other) > len(trunk)
        ]
        if any(n != number and nodes <= body and length >= len(trunk) for length, n, body in branches):
            found[number] = Rule.INNER
        elif around:
            found[number] = Rule.AROUND
    return found


def _stack(flow: Dataflow, trunk: list[Residual], caches: Set[fx.Node], number: int) -> Stack:
    signatures = [residual_signature(flow, r) for r in trunk]
    groups = group(trunk, signatures)
    entries = [_entry(flow, members[0], address) for address, members in groups]
    exits = [_exit(flow, groups, entries, i) for i in range(len(groups))]
    blocks: list[Block] = []
    first_index: dict[str, int] = {}
    copies: dict[str, str] = {}  # first add of a block -> its name, for blocks without a module
    for (address, members), entry, exit_ in zip(groups, entries, exits, strict=True):
        iteration = iteration_of(members[0])
        add = members[0].add
        name = address or copies.get(hcx_tag(add).get("of", "")) or f"stack{number}[{len(first_index)}]"
        copies[add.name] = name
        index = first_index.setdefault(name, len(first_index))
        body = flow.between(entry, exit_)
        key, outside = canonical(body, entry)
        blocks.append(Block(name, index, iteration, members, entry, exit_, body, key, outside))
    carrier = _carrier(trunk)
    boundaries = [Boundary(0, entries[0], carrier)]
    states = [_state(flow, blocks, groups, i) for i in range(len(blocks))]
    boundaries += [
        Boundary(b.index + 1, e, carrier, b.iteration, s) for b, e, s in zip(blocks, exits, states, strict=True)
    ]
    return Stack(_label(blocks, number), blocks, boundaries, find_runs(blocks, caches))


def _entry(flow: Dataflow, first: Residual, call: str) -> fx.Node:
    """Where a block begins: its first skip, or the value before what its own module does to make that skip (a norm that
    the skip starts behind)."""
    skip = settle(first.skip)
    iteration = iteration_of(first)
    if not call or not _inside(skip, call, iteration):
        return skip
    mine = [skip]
    outside: dict[fx.Node, None] = {}
    for node in mine:
        for operand in node.all_input_nodes:
            if _inside(operand, call, iteration):
                mine += [operand] if operand not in mine else []
            elif value(operand) is not None and operand.op != "get_attr":
                outside[operand] = None
    entry = next(iter(outside)) if len(outside) == 1 else skip
    before, after = tensor_of(entry), tensor_of(skip)
    alike = before.shape == after.shape and before.dtype == after.dtype
    return settle(entry) if alike and not flow.reaches_by_weight(entry, skip) else skip


def _carrier(trunk: list[Residual]) -> Carrier:
    """Several streams where the residuals are written by stream ops, else plain."""
    last = trunk[-1].add
    return Streams(int(tensor_of(last).shape[0])) if op_name(last) in WRITES else Carrier()


def _exit(flow: Dataflow, groups: Groups, entries: list[fx.Node], i: int) -> fx.Node:
    """Boundary after block i: the next block's skip, or the end of the block's own tail (post-norm, activation)."""
    add = groups[i][1][-1].add
    if i + 1 < len(groups) and flow.reaches(add, entries[i + 1]) and not flow.reaches_by_weight(add, entries[i + 1]):
        return entries[i + 1]
    if groups[i][0]:
        return _tail(flow, add, groups[i][0], iteration_of(groups[i][1][-1]))
    return _like_before(flow, groups, entries, i, add)


def _state(flow: Dataflow, blocks: list[Block], groups: Groups, i: int) -> fx.Node | None:
    """What a pass of a loop ends with, where the next block begins another pass."""
    if i + 1 == len(blocks) or blocks[i + 1].iteration <= blocks[i].iteration:
        return None
    add = blocks[i].residuals[-1].add
    if groups[i][0]:
        return _tail(flow, add, groups[i][0], blocks[i].iteration)
    way = [add, *flow.between(add, blocks[i].exit)] if flow.reaches(add, blocks[i].exit) else [add]
    return [n for n in way if hcx_tag(n).iteration <= blocks[i].iteration][-1]


def _tail(flow: Dataflow, add: fx.Node, call: str, iteration: int) -> fx.Node:
    """Last value that the block's own module (or the loop around it) makes from its last add."""
    start = flow.index[add]
    mine: list[fx.Node] = []
    reached = {add}
    for node in flow.nodes[start + 1 :]:
        if any(o in reached for o in node.all_input_nodes) and hcx_tag(node).part in (None, Part.CONTINUES):
            reached.add(node)
            if value(node) is not None and _inside(node, call, iteration):
                mine.append(node)
    for node in reversed(mine):
        if not any(u in mine for u in node.users) and not flow.carries_weight(node):
            return node
    return add


def _inside(node: fx.Node, call: str, iteration: int) -> bool:
    return (
        any(key.removeprefix("L__self__") == call for key in node.meta.get("nn_module_stack") or {})
        and hcx_tag(node).iteration == iteration
    )


def _like_before(flow: Dataflow, groups: Groups, entries: list[fx.Node], i: int, add: fx.Node) -> fx.Node:
    """Without module names: the same ops after the add as in the block before."""
    if i == 0:
        return add
    pattern = [str(n.target) for n in flow.between(groups[i - 1][1][-1].add, entries[i])]
    start = flow.index[add]
    for node in flow.nodes[start + 1 : start + 4 * len(pattern) + 8] if pattern else ():
        if flow.reaches(add, node) and [str(n.target) for n in flow.between(add, node)] == pattern:
            return node
    return add


def _label(blocks: list[Block], number: int) -> str:
    first = blocks[0].address.split("@")[0]
    if "[" in first:
        return f"stack{number}"
    return first.rsplit(".", 1)[0] if "." in first else "blocks"


def _main_last(flow: Dataflow, graph: fx.Graph, stacks: list[Stack]) -> list[Stack]:
    outputs = [n for n in results_of(graph) if isinstance(n, fx.Node)]

    def rank(stack: Stack) -> tuple[bool, int]:
        end = stack.boundaries[-1].node
        return (bool(outputs) and flow.reaches(end, outputs[0]), flow.index[end])

    ordered = sorted(stacks, key=rank)
    names: dict[str, int] = {}
    for stack in ordered:
        names[stack.label] = names.get(stack.label, 0) + 1
        if names[stack.label] > 1:
            stack.label = f"{stack.label}#{names[stack.label]}"
    return ordered


def _address_branches(stacks: list[Stack]) -> None:
    for stack in stacks:
        for block in stack.blocks:
            counts: dict[str, int] = {}
            for branch in (b for r in block.residuals for b in r.branches):
                number = counts[branch.kind] = counts.get(branch.kind, 0) + 1
                suffix = "" if block.iteration == 1 else f"~{block.iteration}"
                branch.address = f"{block.address}{suffix}/{branch.kind}" + (f".{number}" if number > 1 else "")
