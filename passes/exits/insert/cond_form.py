"""Exits that skip: what follows an exit runs only while somebody is still on the way.

Blocks, exit heads and the model's own head after an exit lie in the ``otherwise`` body of a branch on ``all rows and
positions have left``; the branches stand side by side, one an exit. What has left keeps the logits of its exit, so
every row gives what the select form gives, whoever shares its batch.

With a cache the blocks that a step skips still owe it keys and values. ``kv=propagate`` computes them from the stream at
the exit: a position that has left stays as it is, also while others go on, so that a row's keys and values do not depend
on its batch either, and a step that skips runs the projections to keys and values alone.

Sources: docs/sources.md, exit-forms; docs/sources.md, skipped-caches; docs/sources.md, row-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from hcx.rewrite.edit.editor import Editor
from hcx.rewrite.edit.regions import Region
from hcx.rewrite.ir.dataflow import Dataflow, private, shape, value
from hcx.rewrite.ir.graphs import sort_graph
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.traced import results, traced
from hcx.rewrite.pipeline.plan import Reason, Skip
from hcx.rewrite.sites.finder import cache_nodes
from hcx.rewrite.sites.views import Stack
from torch import fx

from .places import Place
from .roles import HOLD, PROPAGATE, SELECT, SKIP
from .selection import depth_of, select


def refusal(program: Program, stack: Stack, answer: fx.Node, places: Sequence[Place], kv: str | None) -> Skip | None:
    """Why blocks of this stack cannot be skipped, or None."""
    if any(isinstance(k, str) for k in places):
        return Skip(stack.label, Reason.UNSUPPORTED, "branches skip blocks behind the last pass of a loop, not within")
    flow, nodes = Dataflow(program.graph), [b.node for b in stack.boundaries]
    first = min(_position(stack, k) for k in places)
    stored = {o for o in _stored(program) if flow.reaches(nodes[first], o)}
    caches = cache_nodes(program)
    if stored and kv is None:
        return Skip(stack.label, Reason.UNSUPPORTED,
                    "a step that skips blocks owes the cache their keys and values: give kv=propagate")  # fmt: skip
    if kv is not None and stack.boundaries[first].carrier.kind != "plain":
        return Skip(stack.label, Reason.UNSUPPORTED, "kv=propagate needs one plain stream, this one is several")
    if kv is not None and not stored and (where := _reshaped(stack, first)):
        return Skip(stack.label, Reason.UNSUPPORTED,
                    f"kv=propagate holds the stream, whose shape changes behind block {where}: leave kv out, there is no cache")  # fmt: skip
    others = [o for o in results(program.graph) if o is not answer and o not in stored and o not in caches]
    for output in others:
        needed = isinstance(output, fx.Node) and flow.reaches(nodes[first], output) and not flow.reaches(answer, output)
        if needed and "taps" not in _purpose(program, output):
            return Skip(stack.label, Reason.LEAK, f"the output `{output.name}` needs the blocks that would be skipped")
    taps = dict(zip(results(program.graph)[len(program.output_names) :], program.taps, strict=True))
    for segment in _segments(stack, places):
        start, end = nodes[segment.start], nodes[segment.end] if segment.end < len(nodes) else answer
        inside = _between(flow, start, [end, *stored])
        later = {o for o in stored if flow.reaches(nodes[min(segment.end, len(nodes) - 1)], o)}
        for node in inside - _between(flow, end, later):
            if node is not end and node in taps:
                return Skip(stack.label, Reason.LEAK,
                            f"the tap `{taps[node]}` shows a value of blocks that would be skipped")  # fmt: skip
            outside = [u for u in node.users if u not in inside and u.op != "output" and value(node) is not None]
            if node is not end and outside:
                return Skip(
                    stack.label, Reason.LEAK, f"`{node.name}` of a skipped block is read by `{outside[0].name}`"
                )
    return None


def _reshaped(stack: Stack, first: int) -> int | None:
    """Number of blocks before the first change of the stream's shape behind a boundary, but at the end."""
    held = stack.boundaries[first:-1]
    return next((b.index for a, b in pairwise(held) if shape(a.node) != shape(b.node)), None)


def _purpose(program: Program, output: fx.Node) -> str:
    flat = results(program.graph)
    return "taps" if output not in flat[: len(program.output_names)] else "output"


def _stored(program: Program) -> list[fx.Node]:
    """Outputs that are the cache after this call."""
    flat = results(program.graph)
    return [n for n, name in zip(flat, program.output_names, strict=False) if name.startswith("present.")]


def _position(stack: Stack, at: int) -> int:
    return next(i for i, b in enumerate(stack.boundaries) if b is stack.boundary(at))


@dataclass
class _Segment:
    """Blocks between two exits, or the last exit and the end: positions of boundaries in the stack."""

    start: int
    end: int


def _segments(stack: Stack, places: Sequence[int]) -> list[_Segment]:
    starts = [_position(stack, k) for k in sorted(set(places))]
    return [_Segment(a, b) for a, b in zip(starts, [*starts[1:], len(stack.boundaries)], strict=True)]


def _between(flow: Dataflow, start: fx.Node, ends: Sequence[fx.Node] | set[fx.Node]) -> set[fx.Node]:
    return {n for end in ends if flow.reaches(start, end) and start is not end for n in flow.between(start, end)}


def either(left: torch.Tensor, fire: torch.Tensor) -> torch.Tensor:
    """Who has left by now."""
    return left | fire


def everyone(left: torch.Tensor) -> torch.Tensor:
    """A single bool: nobody is on the way any more."""
    return left.all()


def unknown(score: torch.Tensor) -> torch.Tensor:
    """The score of an exit that nobody asked."""
    return torch.full_like(score, float("nan"))


@dataclass
class _Step:
    """One exit with what has been decided up to it.

    Attributes:
        stream: the boundary of the exit, with positions that left before held where they left.
        left, logits, depth: who has left, with which logits, after how many blocks.
        kept: cache output -> what stands for it where its block is skipped.
        copies: the nodes that compute that, block by block.
    """

    entry: Any
    stream: fx.Node
    left: fx.Node
    logits: fx.Node
    depth: fx.Node
    done: fx.Node
    kept: dict[fx.Node, fx.Node] = field(default_factory=dict)
    copies: list[list[fx.Node]] = field(default_factory=list)


def insert(
    program: Program,
    stack: Stack,
    editor: Editor,
    entries: Sequence[Any],
    answer: fx.Node,
    readers: set[fx.Node],
    *,
    hold: bool,
    tap: Callable[[fx.Node], None],
) -> None:
    """Decide, hold what has left where it is, and move the rest into branches.

    Args:
        entries: exits in order: ``at``, ``logits``, ``score`` and ``fire`` in the graph.
        answer: the model's own logits.
        readers: who reads the selected logits in their place.
        hold: keep the stream of positions that left, for the keys and values of later blocks.
        tap: adds the taps, given the depth that each position took; nodes move into branches after that.
    """
    segments = _segments(stack, [e.at for e in entries])
    _asked_heads(program, stack, editor, entries, answer)
    steps = _decide(stack, editor, entries)
    with editor.after(max(answer, steps[-1].logits, steps[-1].left), role=SELECT):
        chosen = editor.inline(select, steps[-1].left, steps[-1].logits, answer)
    editor.redirect(answer, chosen, only=readers.__contains__)
    boundaries = [b.node for b in stack.boundaries]
    if hold:
        boundaries = _held(editor, boundaries, segments, steps)
    for step, segment in zip(steps, segments, strict=True):
        step.stream = boundaries[segment.start]
    sort_graph(program.graph)
    if hold:
        _propagated(program, editor, boundaries, segments, steps)
        sort_graph(program.graph)
    tap(steps[-1].depth)
    _branch(program, editor, boundaries, segments, steps, chosen)


def nobody(fire: torch.Tensor) -> torch.Tensor:
    """A single bool: no row or position leaves here."""
    return ~fire.any()


def _asked_heads(program: Program, stack: Stack, editor: Editor, entries: Sequence[Any], answer: fx.Node) -> None:
    """Run the head of an exit only where somebody leaves there, when its score does not need it: a probe then costs next
    to nothing where nobody leaves."""
    flow = Dataflow(program.graph)
    needed = _ancestors(flow, [answer, *(n for e in entries for n in (e.score, e.fire))])
    for entry in entries:
        if entry.logits in needed:
            continue
        head = _between(flow, stack.boundary(entry.at).node, [entry.logits]) - needed
        known = set(program.graph.nodes)
        with editor.after(max(entry.logits, entry.fire), role=SKIP):
            quiet = editor.inline(nobody, entry.fire)
            val = traced(entry.logits)
            sizes = [editor.size(s) for s in val.shape]
            unasked = editor.call(torch.ops.aten.full.default, sizes, float("nan"), dtype=val.dtype, device=val.device)
        made = {n for n in program.graph.nodes if n not in known and n.op == "call_function"}
        made -= _makers(quiet)
        (entry.logits,) = editor.cond(quiet, Region(made, [unasked]), Region(head, [entry.logits]))
    sort_graph(program.graph)


def _makers(node: fx.Node) -> set[fx.Node]:
    found, todo = {node}, list(node.all_input_nodes)
    while todo:
        if (other := todo.pop()) not in found:
            found.add(other)
            todo += other.all_input_nodes
    return found


def _decide(stack: Stack, editor: Editor, entries: Sequence[Any]) -> list[_Step]:
    steps: list[_Step] = []
    for entry in entries:
        with editor.after(max(entry.fire, entry.logits, *([steps[-1].done] if steps else [])), role=SELECT):
            if not steps:
                left, logits = entry.fire, entry.logits
                depth = editor.inline(depth_of(entry.at, stack.depth), entry.fire)
            else:
                last = steps[-1]
                left = editor.inline(either, last.left, entry.fire)
                logits = editor.inline(select, last.left, last.logits, entry.logits)
                here = editor.inline(depth_of(entry.at, stack.depth), entry.fire)
                depth = editor.inline(torch.where, last.left, last.depth, here)
            done = editor.inline(everyone, left)
        steps.append(_Step(entry, entry.fire, left, logits, depth, done))
    return steps


def _held(editor: Editor, nodes: list[fx.Node], segments: list[_Segment], steps: list[_Step]) -> list[fx.Node]:
    """Boundaries with the positions that have left as they were at their exit; the last one is read no more by them."""
    held = list(nodes)
    for segment, step in zip(segments, steps, strict=True):
        for position in range(segment.start + 1, min(segment.end + 1, len(nodes) - 1)):
            with editor.after(max(held[position], step.left), role=HOLD):
                held[position] = editor.inline(select, step.left, held[segment.start], nodes[position])
            editor.redirect(nodes[position], held[position])
    return held


def _propagated(
    program: Program, editor: Editor, nodes: list[fx.Node], segments: list[_Segment], steps: list[_Step]
) -> None:
    """What each skipped block leaves in the cache, from the stream at the exit instead of its own input."""
    flow = Dataflow(program.graph)
    for segment, step in zip(segments, steps, strict=True):
        for position in range(segment.start, min(segment.end, len(nodes) - 1)):
            own = [o for o in _stored(program)
                   if flow.reaches(nodes[position], o) and not flow.reaches(nodes[position + 1], o)]  # fmt: skip
            if own:
                body = sorted(_between(flow, nodes[position], own))
                with editor.after(max([step.stream, *own]), role=PROPAGATE):
                    copies = editor.clone(body, {nodes[position]: step.stream}, role=PROPAGATE)
                step.kept.update({o: copies[o] for o in own})
                step.copies.append([copies[n] for n in body])


def _branch(
    program: Program,
    editor: Editor,
    nodes: list[fx.Node],
    segments: list[_Segment],
    steps: list[_Step],
    chosen: fx.Node,
) -> None:
    """Move each segment with what is decided at its end into a branch; from the last to the first, so that what a later
    one reads is still in the graph."""
    flow = Dataflow(program.graph)
    before = [_ancestors(flow, [s.stream, s.left, s.logits, s.depth, s.done, s.entry.score]) for s in steps]
    for number in reversed(range(len(steps))):
        step = steps[number]
        kept, made = step.kept, {n for o in step.copies for n in o}
        if number + 1 == len(steps):
            otherwise, then = [chosen], [step.logits]
        else:
            nxt = steps[number + 1]
            otherwise = [nxt.stream, nxt.left, nxt.logits, nxt.depth, nxt.entry.logits, nxt.entry.score]
            known = set(program.graph.nodes)
            with editor.after(max(step.stream, step.entry.score), role=SKIP):
                stream = _stand_in(editor, step.stream, nxt.stream)
                score = editor.inline(unknown, step.entry.score)
            made |= {n for n in program.graph.nodes if n not in known and n.op == "call_function"}
            then = [stream, step.left, step.logits, step.depth, step.logits, score]
        body = _between(flow, step.stream, [*otherwise, *kept]) - before[number]
        body |= set(private(sorted(body), step.stream)) - before[number]
        editor.cond(step.done, Region(made, [*then, *kept.values()]), Region(body, [*otherwise, *kept]))
        sort_graph(program.graph)


def _ancestors(flow: Dataflow, ends: list[fx.Node]) -> set[fx.Node]:
    """The values and everything they are made from."""
    bits = 0
    for end in ends:
        bits |= flow.ancestors[flow.index[end]] | 1 << flow.index[end]
    return {n for i, n in enumerate(flow.nodes) if bits >> i & 1}


def _stand_in(editor: Editor, stream: fx.Node, later: fx.Node) -> fx.Node:
    """What a branch that skips returns as the stream: nobody reads it, but it has the later one's shape."""
    if shape(stream) == shape(later) and traced(stream).dtype == traced(later).dtype:
        return stream
    val = traced(later)
    sizes = [editor.size(s) for s in val.shape]
    return editor.call(torch.ops.aten.zeros.default, sizes, dtype=val.dtype, device=val.device)
