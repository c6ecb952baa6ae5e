"""Which blocks to loop, and whether a window can be looped at all. Source: docs/sources.md, attention-sink."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from hcx.rewrite.ir.dataflow import Dataflow, shape
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.traced import results, traced
from hcx.rewrite.run.inputs import check_inputs
from hcx.rewrite.run.reading import sink_jumps, stream_rms
from hcx.rewrite.sites.views import Stack
from torch import fx

from .uses import period_of


def default_length(depth: int) -> int:
    """Blocks in a training-free window: about an eighth of the depth, at least 4 where a quarter of it allows that."""
    return max(1, min(max(4, ceil(0.13 * depth)), ceil(depth / 4)))


def default_window(stack: Stack, jumps: list[Jump]) -> tuple[int, int] | None:
    """A half-open window of original block numbers inside one run of equal blocks: it starts as near to 0.4 of the
    depth as a jump of the attention sink allows; after the jump where it can."""
    target, wanted = ceil(0.4 * stack.depth), default_length(stack.depth)
    best = None
    for first, last, period in _stretches(stack):
        length = max(period, min(wanted, last - first) // period * period)
        for start in range(first, last - length + 1, period):
            if not keeps_shape(stack, start, start + length):
                continue
            inside = any(start <= j.block < start + length for j in jumps)
            cost = (inside, abs(start - target), start < target)
            if best is None or cost < best[0]:
                best = (cost, (start, start + length))
    return best[1] if best else None


def candidate_windows(stack: Stack, jumps: list[Jump]) -> list[tuple[int, int]]:
    """Windows worth measuring, in order: the default one, neighbours of its length over the whole depth, and wide ones
    (the middle third, three fifths, everything). Only windows of whole periods that keep the stream's shape."""
    depth, length = stack.depth, default_length(stack.depth)
    found = [w for w in [default_window(stack, jumps)] if w]
    for first, last, period in _stretches(stack):
        step = max(period, length // period * period)
        found += [(start, start + step) for start in range(first, last - step + 1, step)]
        wide = [(depth // 3, 2 * depth // 3), (depth // 5, 4 * depth // 5), (0, depth)]
        for start, end in ((max(first, s), min(last, e)) for s, e in wide):
            found.append((start, start + (end - start) // period * period))
    return [(s, e) for s, e in dict.fromkeys(found) if s < e and keeps_shape(stack, s, e)]


def run_windows(stack: Stack) -> list[tuple[int, int]]:
    """Every run of equal blocks as a window of whole periods; the block that opens a stage with a new width is left out."""
    whole = [(first, first + (last - first) // period * period) for first, last, period in _stretches(stack)]
    return [(start, end) for start, end in whole if start < end and keeps_shape(stack, start, end)]


def _stretches(stack: Stack) -> list[tuple[int, int, int]]:
    """Runs of equal blocks as (start, end, period) of original block numbers."""
    found = []
    for run in stack.runs:
        first, last = stack.blocks[run.start].index, stack.blocks[run.end - 1].index + 1
        if not keeps_shape(stack, first, first + 1):  # the first block of a stage brings the new width
            first += 1
        found.append((first, last, period_of(run)))
    return found


def keeps_shape(stack: Stack, start: int, end: int) -> bool:
    """Whether the stream has the same shape and dtype before and after a window."""
    before, after = stack.boundary(start).node, stack.boundary(end).node
    return shape(before) == shape(after) and traced(before).dtype == traced(after).dtype


def after_norm(program: Program, end: fx.Node) -> fx.Node:
    """The end of a stack behind the model's final norm: the last value on every way to an output that still has the
    stream's shape, before a weight is contracted with it."""
    flow = Dataflow(program.graph)
    answer = next((o for o in results(program.graph) if o is not end and flow.reaches(end, o)), end)
    found = end
    for node in flow.cut_vertices(end, answer)[1:]:
        if flow.carries_weight(node):
            break
        if shape(node) == shape(end) and traced(node).dtype == traced(end).dtype:
            found = node
    return found


@dataclass(frozen=True)
class Jump:
    """A block in which one position's norm explodes: an attention sink appears.

    Attributes:
        block: original number of the block.
        position: token position, from 0.
        before, after: its rms over the features before and after the block.
    """

    block: int
    position: int
    before: float
    after: float


def measured_jumps(program, stack: Stack) -> list[Jump]:
    """Blocks in which the attention sink appears on the example input; empty where the stream has no token dimension or
    the tensors are not there."""
    nodes = [b.node for b in stack.boundaries]
    if any(traced(n).dim() != 3 or shape(n) != shape(nodes[0]) for n in nodes) or any(
        p.is_meta for p in program.parameters()
    ):
        return []
    rms = stream_rms(program, nodes, check_inputs(program, 1)[0])
    found = []
    for place in sink_jumps(rms):
        position = int((rms[place + 1] / rms[place].clamp_min(1e-12)).argmax())
        before, after = float(rms[place, position]), float(rms[place + 1, position])
        found.append(Jump(stack.blocks[place].index, position, before, after))
    return found


def sink_notes(jumps: list[Jump], stack: Stack, start: int, end: int) -> list[str]:
    """What a window that holds a jump should know, with the windows that avoid it."""
    inside = [j for j in jumps if start <= j.block < end]
    if not inside:
        return []
    edges = [0, *(e for j in jumps for e in (j.block, j.block + 1)), stack.depth]
    free = [f"[{a},{b})" for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
    jump = inside[0]
    return [
        f"the attention sink appears in block {jump.block}, inside the window: the rms of position {jump.position} goes "
        f"from {jump.before:.3g} to {jump.after:.3g} there; mix=input_rms or mix=output is gentler, and windows within "
        f"{' or '.join(free)} avoid it"
    ]


def grows(program: Program, node: fx.Node) -> bool:
    """Whether a cache placeholder holds one entry a token (keys, values), not a state of fixed size."""
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    return any(isinstance(d, str) and "past" in d for d in program.inputs[placeholders.index(node)].shape)
