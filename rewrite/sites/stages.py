"""Stages of a network without a residual stream: the stretches between cut vertices."""

from __future__ import annotations

from itertools import pairwise

from hcx.rewrite.ir.dataflow import Dataflow, results_of, tensor_of, value
from torch import fx

from .blocks import canonical
from .views import Block, Boundary, Carrier, Stack


def find_stages(flow: Dataflow, graph: fx.Graph) -> list[Stack]:
    """One stack of stages on the way from the first input to the first output, or none.

    A boundary is the last value that everything passes through before the next weight. Where the network changes its
    resolution, only the boundaries at such changes are kept.
    """
    outputs = [n for n in results_of(graph) if isinstance(n, fx.Node)]
    sources = [
        n
        for n in graph.nodes
        if n.op == "placeholder" and outputs and flow.reaches(n, outputs[0]) and n is not outputs[0]
    ]
    if not sources:
        return []
    cuts = flow.cut_vertices(sources[0], outputs[0])
    candidates = _before_weights(flow, cuts)
    if len(candidates) < 2:
        return []
    rank = tensor_of(candidates[0]).dim()
    flat = next((n for n in candidates if tensor_of(n).dim() != rank), None)
    candidates = [n for n in candidates if tensor_of(n).dim() == rank]
    if flat is not None and (last := _before_flattening(flow, cuts, candidates[-1], flat)) is not None:
        candidates.append(last)
    if rank > 2 and len({_resolution(n) for n in candidates}) > 1:
        candidates = _at_changes(flow, sources[0], candidates)
    if not candidates:
        return []
    return [_as_stack(flow, [sources[0], *candidates])]


def _before_weights(flow: Dataflow, cuts: list[fx.Node]) -> list[fx.Node]:
    """Cut vertices after a weight-carrying op and last before the next one."""
    found, seen_weight = [], False
    for here, after in zip(cuts, [*cuts[1:], None], strict=True):
        seen_weight = seen_weight or flow.carries_weight(here)
        val = value(here)
        if after is None or val is None or not val.is_floating_point() or val.dim() < 2:
            continue
        if seen_weight and flow.reaches_by_weight(here, after) and here.op != "placeholder":
            found.append(here)
    return found


def _before_flattening(flow: Dataflow, cuts: list[fx.Node], last: fx.Node, flat: fx.Node) -> fx.Node | None:
    """Where the last stage ends: the last value like ``last`` on the way to ``flat``, which a classifier reads."""
    between = cuts[cuts.index(last) + 1 : cuts.index(flat)] if last in cuts and flow.reaches(last, flat) else []
    alike = [n for n in between if (v := value(n)) is not None and v.dim() == tensor_of(last).dim()]
    return alike[-1] if alike and flow.reaches_by_weight(last, alike[-1]) else None


def _at_changes(flow: Dataflow, source: fx.Node, candidates: list[fx.Node]) -> list[fx.Node]:
    """The ends of stages: behind a pooling, before a strided weight, and the last candidate."""
    kept: dict[fx.Node, None] = {}
    for before, here in zip([source, *candidates], candidates, strict=False):
        if _resolution(before) == _resolution(here):
            continue
        weights = [n for n in flow.between(before, here) if flow.carries_weight(n)]
        strided = bool(weights) and _resolution(weights[-1]) == _resolution(here)
        if not strided:
            kept[here] = None
        elif before is not source:
            kept[before] = None
    return sorted({*kept, candidates[-1]})


def _resolution(node: fx.Node) -> tuple[str, ...]:
    return tuple(str(s) for s in tensor_of(node).shape[2:])


def _as_stack(flow: Dataflow, nodes: list[fx.Node]) -> Stack:
    blocks = []
    for index, (entry, exit_) in enumerate(pairwise(nodes)):
        body = flow.between(entry, exit_)
        key, outside = canonical(body, entry)
        blocks.append(Block(_name(flow, body, index), index, 1, [], entry, exit_, body, key, outside))
    names = [b.address for b in blocks]
    for block in blocks:
        if names.count(block.address) > 1:
            block.address = f"{block.address}[{block.index}]"
    boundaries = [Boundary(i, n, Carrier()) for i, n in enumerate(nodes)]
    return Stack("stages", blocks, boundaries, [], residual=False)


def _name(flow: Dataflow, body: list[fx.Node], index: int) -> str:
    """Longest module path shared by the weight-carrying ops of the stage."""
    paths = [
        list(n.meta.get("nn_module_stack", {}).values())[-1][0].split(".")
        for n in body
        if flow.carries_weight(n) and n.meta.get("nn_module_stack")
    ]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared) or f"stage[{index}]"
