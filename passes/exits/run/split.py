"""Exits in split form: a Program cut at its exits into Programs that a host runs one after the other.

Source: docs/sources.md, exit-forms: the simplest form that saves time with caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hcx.passes.exits.applied import NAME, applied, never_leaving, without_taps
from hcx.passes.exits.insert.inserted import answer_of
from hcx.rewrite.errors import UsageError
from hcx.rewrite.ir.dataflow import Dataflow
from hcx.rewrite.ir.history import runs_of
from hcx.rewrite.ir.program import Program
from hcx.rewrite.run.pieces import cut
from hcx.rewrite.sites.finder import cache_nodes, find_in_graph
from torch import fx


@dataclass
class Layout:
    """Where a Program is cut, and what lies where; all nodes by name.

    Attributes:
        graph: in which nothing leaves.
        places: blocks before each cut, in order; ``depth``: blocks of the model.
        streams: the boundary at each cut; ``end``: the last one; ``boundaries``: all of them.
        stored: for each segment the outputs that it gives: cache slots, and in the last one the rest.
        heads: place -> score and logits, of places that have an exit.
        answer: the model's own logits, and the output name that they have.
        thresholds: place -> name of the tensor that the score must reach.
    """

    graph: fx.Graph
    places: list[int]
    depth: int
    streams: list[str]
    end: str
    stored: list[dict[str, str]]
    answer: tuple[str, str]
    boundaries: list[str]
    heads: dict[int, tuple[str, str]] = field(default_factory=dict)
    thresholds: dict[int, str] = field(default_factory=dict)


def split(program: Program, at: int | Sequence[int] | None = None) -> list[Program]:
    """Cut a Program at its exits: one Program up to each, and one for the rest.

    A piece up to the exit after K blocks gives ``stream.K``, and where the Program has an exit there ``score.K`` and
    ``logits.K``; a position may leave where the score reaches the exit's threshold. The next piece takes ``stream.K``, the
    masks and positions, and the cache slots of its own blocks, which may be shorter or longer than those of other pieces:
    then positions must be given. Each piece can be saved, exported and run by itself, and shares the tensors of the whole.

    Args:
        program: plain, or with exits in select form.
        at: blocks before each cut; default: where it has exits.

    Raises:
        UsageError: no places, or places that there are not, or other forms of exits.
    """
    layout = layout_of(program, at)
    stages = []
    for number, k in enumerate(layout.places):
        stage = {f"stream.{k}": layout.streams[number]}
        if k in layout.heads:
            stage |= {f"score.{k}": layout.heads[k][0], f"logits.{k}": layout.heads[k][1]}
        stages.append(stage | layout.stored[number])
    return cut(program, layout.graph, [*stages, layout.stored[-1]])


def layout_of(program: Program, at: int | Sequence[int] | None = None) -> Layout:
    """Find the places to cut a Program at; see :func:`split`."""
    places = [at] if isinstance(at, int) else None if at is None else sorted(set(at))
    heads: dict[int, tuple[str, str]] = {}
    thresholds: dict[int, str] = {}
    label = None
    if runs_of(program.history, NAME):
        exits = applied(program)
        heads = dict(zip(exits.places, zip(exits.scores, exits.logits, strict=True), strict=True))
        thresholds = {k: exits.tensor(k, "threshold") for k in exits.places}
        places, label = exits.places if places is None else places, exits.details[0]["stack"]
    if not places:
        raise UsageError("it is not said where to cut", where=program.signature.model,
                         hint="at=[20], or rewrite the program with `exits` first")  # fmt: skip
    if inner := [k for k in places if not isinstance(k, int)]:
        raise UsageError(f"the exit at {inner[0]} lies inside a loop, which is not cut", where="at",
                         hint="exits at numbers of blocks, or form=select")  # fmt: skip
    graph = never_leaving(program)
    count = len(program.output_names)
    plain = without_taps(graph, count)
    caches = {n.name for n in cache_nodes(program)}
    stack = find_in_graph(plain, {n for n in plain.nodes if n.name in caches}).stack(label)
    if stack is None or not all(0 < k < stack.depth for k in places):
        depth = stack.depth if stack is not None else 0
        raise UsageError(f"cannot cut after {places} blocks: there are {depth}", where="at", hint="0 < at < depth")
    flow = Dataflow(plain)
    nodes = [stack.boundary(k).node for k in places]
    stored: list[dict[str, str]] = [{} for _ in range(len(places) + 1)]
    for output, name in zip(plain.output_node().args[0], program.output_names, strict=True):
        number = sum(flow.reaches(n, output) for n in nodes) if name.startswith("present.") else len(places)
        stored[number][name] = output.name
    answer = answer_of(plain, count, stack)
    if answer is None:
        raise UsageError("no output can be read as logits", where=program.signature.model)
    name = next(n for o, n in zip(plain.output_node().args[0], program.output_names, strict=True) if o is answer)
    return Layout(graph, list(places), stack.depth, [n.name for n in nodes], stack.boundaries[-1].node.name, stored,
                  (answer.name, name), [b.node.name for b in stack.boundaries], {k: h for k, h in heads.items() if k in places}, thresholds)  # fmt: skip
