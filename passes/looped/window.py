"""Which blocks to loop, and whether a window can be looped at all."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

from hcx.rewrite.dataflow import Dataflow, private, shape, value
from hcx.rewrite.observe import sink_jumps, stream_rms
from hcx.rewrite.program import Program
from hcx.rewrite.sites import Stack
from torch import fx


def default_length(depth: int) -> int:
    """Blocks in a training-free window: about an eighth of the depth, at least 4 where a quarter of it allows that."""
    return max(1, min(max(4, ceil(0.13 * depth)), ceil(depth / 4)))


def default_window(stack: Stack, jumps: list[int]) -> tuple[int, int] | None:
    """A half-open window of original block numbers inside one run of equal blocks: it starts as near to 0.4 of the
    depth as a jump of the attention sink allows; after the jump where it can."""
    depth = stack.depth
    target, wanted = ceil(0.4 * depth), default_length(depth)
    best = None
    for run in stack.runs:
        first, last = stack.blocks[run.start].index, stack.blocks[run.end - 1].index + 1
        if not keeps_shape(stack, first, first + 1):  # the first block of a stage brings the new width
            first += 1
        length = max(run.period, min(wanted, last - first) // run.period * run.period)
        for start in range(first, last - length + 1, run.period):
            if not keeps_shape(stack, start, start + length):
                continue
            inside = any(start <= j < start + length for j in jumps)
            cost = (inside, abs(start - target), start < target)
            if best is None or cost < best[0]:
                best = (cost, (start, start + length))
    return best[1] if best else None


def keeps_shape(stack: Stack, start: int, end: int) -> bool:
    """Whether the stream has the same shape and dtype before and after a window."""
    before, after = stack.boundary(start).node, stack.boundary(end).node
    return shape(before) == shape(after) and value(before).dtype == value(after).dtype


def after_norm(program: Program, end: fx.Node) -> fx.Node:
    """The end of a stack behind the model's final norm: the last value on every way to an output that still has the
    stream's shape, before a weight is contracted with it."""
    flow = Dataflow(program.graph)
    answer = next((o for o in program.graph.output_node().args[0] if o is not end and flow.reaches(end, o)), end)
    found = end
    for node in flow.cut_vertices(end, answer)[1:]:
        if flow.carries_weight(node):
            break
        if shape(node) == shape(end) and value(node).dtype == value(end).dtype:
            found = node
    return found


def measured_jumps(program, stack: Stack) -> list[int]:
    """Original numbers of the blocks in which the attention sink appears on the example input; empty where the stream
    has no token dimension or the tensors are not there."""
    nodes = [b.node for b in stack.boundaries]
    if any(value(n).dim() != 3 or shape(n) != shape(nodes[0]) for n in nodes) or any(
        p.is_meta for p in program.parameters()
    ):
        return []
    positions = sink_jumps(stream_rms(program, nodes, program.check_inputs(1)[0]))
    return [stack.blocks[p].index for p in positions]


@dataclass
class Loop:
    """Everything that is copied for one more iteration.

    Attributes:
        entry, exit: stream before and after the window.
        nodes: copied nodes, in order.
        caches: cache placeholders the window reads.
        leaks: values that are used after the window other than the stream.
    """

    entry: fx.Node
    exit: fx.Node
    nodes: list[fx.Node]
    caches: list[fx.Node]
    leaks: list[fx.Node] = field(default_factory=list)


def loop_of(graph: fx.Graph, entry: fx.Node, exit_: fx.Node, caches: set[fx.Node]) -> Loop:
    """The nodes between two boundaries, with what they prepare from caches and what they leave for cache outputs."""
    flow = Dataflow(graph)
    body = flow.between(entry, exit_)
    members = set(body)
    own = [n for n in private(body, entry) if any(flow.reaches(c, n) for c in caches)]
    members.update(own)
    side: list[fx.Node] = []
    leaks: list[fx.Node] = []
    frontier = [u for n in body if n is not exit_ for u in n.users]
    while frontier:
        node = frontier.pop()
        if node in members or node.op == "output" or value(node) is None:
            continue
        if flow.reaches(exit_, node) or any(not _only_to_output(u, flow, exit_) for u in node.users):
            leaks.append(node)
            continue
        members.add(node)
        side.append(node)
        frontier += list(node.users)
    nodes = sorted([*own, *body, *side])
    used = [c for c in sorted(caches) if any(u in members for u in c.users)]
    return Loop(entry, exit_, nodes, used, leaks)


def _only_to_output(node: fx.Node, flow: Dataflow, exit_: fx.Node) -> bool:
    return node.op == "output" or value(node) is None or not flow.reaches(exit_, node)
