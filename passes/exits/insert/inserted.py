"""One exit in the graph: view of the stream, logits, score, decision."""

from __future__ import annotations

import math
from typing import Any

import torch
from hcx.rewrite.edit.editor import Editor
from hcx.rewrite.ir.dataflow import Dataflow, op_name, value
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.tags import has_role, hcx_tag, set_tag
from hcx.rewrite.ir.traced import results, traced
from hcx.rewrite.sites.views import Stack
from torch import fx

from . import gates, places, sequences
from .heads import affine_view, classifier, features, pooled
from .heads_copied import copied_view, last_part, norm_parameters, own_copies, restricted_readout
from .roles import HEAD, SELECT
from .scores import CHAINED, FROM_LOGITS, READ_TWICE, cosine, patience, patience_start

NEVER = math.inf


def fires(score: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """Whether a position leaves here: ``score >= threshold``; NaN never does."""
    return score >= threshold


class Inserted:
    """Head, score and decision of one exit.

    Attributes:
        detail: what the plan says about it.
        at: blocks executed before it, and the pass of a loop where one was asked for; see :mod:`.places`.
        view: what the model's own readout would read here.
        logits: the exit's own answer.
        scored: the logits that the score reads: all rows of the head, or the candidates.
        score, fire: a figure and a decision for each position of the answer, or for each row of it.
        valid: which positions count in the score of a row, None where all do.
    """

    def __init__(
        self,
        editor: Editor,
        program: Program,
        stack: Stack,
        answer: fx.Node,
        detail: dict[str, Any],
        earlier: Inserted | None,
        count: int,
        valid: tuple[fx.Node, bool] | None = None,
    ):
        self.detail = detail
        self.at, self.site = detail["at"], str(detail["at"])
        self.editor, self.earlier, self.count = editor, earlier, count
        stream = places.boundary(stack, self.at).read(editor)
        end = stack.boundaries[-1].read(editor)
        before = None
        if detail["score"] in READ_TWICE:
            before = stack.boundaries[places.position(stack, self.at) - 1].read(editor)
        builds_on = earlier is not None and (detail["score"] in CHAINED or "candidates" in detail)
        self.valid = earlier.valid if earlier is not None else None
        mask = [valid[0]] if valid is not None else []
        place = max([stream, end, answer, *mask, *([earlier.fire] if builds_on or self.valid is not None else [])])
        with editor.after(place, role=HEAD, site=f"{stack.label}@{self.at}"):
            self._predict(program, stack, stream, end, answer, detail)
            threshold = NEVER if detail["threshold"] is None else detail["threshold"]
            limit = editor.buffer(
                f"{self.site}.threshold", torch.full((1,), threshold, dtype=torch.float32, device=traced(stream).device)
            )
            self.score = self._scored(detail["score"], stream, before, traced(answer).dim() - 1)
            if detail.get("per") == "sequence":
                self._average(valid)
            self.fire = editor.inline(fires, self.score, limit)

    def _average(self, valid: tuple[fx.Node, bool] | None) -> None:
        """One score a row; the exits share what says which positions count."""
        if valid is None:
            self.score = self.editor.inline(sequences.averaged, self.score)
            return
        if self.valid is None:
            keep = sequences.dropped_rows if valid[1] else sequences.kept_rows
            self.valid = self.editor.inline(keep, valid[0], self.score)
        self.score = self.editor.inline(sequences.averaged, self.score, self.valid)

    def _predict(
        self, program: Program, stack: Stack, stream: fx.Node, end: fx.Node, answer: fx.Node, detail: dict[str, Any]
    ) -> None:
        editor, head = self.editor, detail["head"]
        self.view = stream
        if head == "classifier":
            each = traced(answer).dim() > 2
            self.logits = self.scored = classifier(editor, self.site, stream, int(traced(answer).shape[-1]), each=each)
            return
        if head == "affine":
            self.view = affine_view(editor, self.site, stream)
        elif head in ("mlp", "block"):
            self.view = copied_view(editor, program, self.site, last_part(program, stack, head), stream)
        nodes = readout(program, end, answer)
        mapping = {end: self.view}
        mapping |= {n: self.view for n in program.graph.nodes if is_selection(n) and never(n) is end}
        if head == "norm":
            mapping |= own_copies(editor, program, self.site, nodes, norm_parameters(program, nodes))
        if head == "own":
            mapping |= own_copies(editor, program, self.site, nodes, lambda t: True)
        if count := detail.get("candidates"):
            self.scored = restricted_readout(editor, program, nodes, mapping, count)
            tag = hcx_tag(self.scored)
            set_tag(self.scored, {**tag, "scored": f"{editor.number}.{self.at}"}, tag.part)
        self.logits = self.view if not nodes else editor.clone(nodes, dict(mapping), role=HEAD)[never(answer)]
        if not count:
            self.scored = self.logits

    def _scored(self, name: str, stream: fx.Node, before: fx.Node | None, dims: int) -> fx.Node:
        """Insert the score; a stream with more positions than the answer is pooled first."""
        editor, earlier = self.editor, self.earlier
        made: fx.Node
        if name in FROM_LOGITS:
            made = editor.inline(FROM_LOGITS[name], self.scored)
            return made
        if name == "patience":
            if earlier is None:
                made = editor.inline(patience_start, self.scored)
                return made
            made = editor.inline(patience, earlier.scored, self.scored, earlier.score)
            return made
        if name == "jei":
            before_here: list[fx.Node] = []
            entry = earlier
            while entry is not None:
                before_here.insert(0, entry.score)
                entry = entry.earlier
            made = editor.inline(gates.jei, self.scored, *self._gate(4, math.log(1 / self.count)), *before_here)
            return made
        if traced(stream).dim() - 1 > dims:
            stream = editor.inline(pooled, stream)
            before = editor.inline(pooled, before) if before is not None else None
        if name == "cosine":
            assert before is not None  # it is read twice
            made = editor.inline(cosine, before, stream)
            return made
        if name == "palbert":
            assert before is not None
            share: fx.Node = editor.inline(gates.deep, stream, before, *self._layers(features(stream)))
            made = share if earlier is None else editor.inline(gates.joined, share, earlier.score)
            return made
        parameters = self._gate(features(stream), 0.0 if name == "probe" else math.log(1 / self.count))
        if name == "probe" or earlier is None:
            made = editor.inline(gates.probe, stream, *parameters)
            return made
        made = editor.inline(gates.cumulated, stream, *parameters, earlier.score)
        return made

    def _layers(self, width: int) -> list[fx.Node]:
        """PALBERT's layers, the same at all exits, in float32."""
        device, layers = traced(self.logits).device, gates.start(width, math.log(1 / self.count))
        return [self.editor.parameter(f"gate.{n}", t.to(device)) for n, t in layers.items()]

    def _gate(self, width: int, bias: float) -> tuple[fx.Node, fx.Node]:
        """Float32 weights of a gate; a bias of ``-ln K`` lets K gates in a row all keep a share to decide about."""
        device = traced(self.logits).device
        return (
            self.editor.parameter(f"{self.site}.gate.weight", torch.zeros(1, width, device=device)),
            self.editor.parameter(f"{self.site}.gate.bias", torch.full((1,), bias, device=device)),
        )


def answer_of(graph: fx.Graph, outputs: int, stack: Stack) -> fx.Node | None:
    """First output that can be read as logits: floating, made from the stream, two or more classes in its last dimension.

    Args:
        outputs: how many of the graph's results are outputs; taps come behind them.
    """
    flow, end = Dataflow(graph), stack.boundaries[-1].node
    for node in results(graph)[:outputs]:
        val = value(node)
        if val is None or not val.is_floating_point() or val.dim() < 2 or not flow.reaches(end, node):
            continue
        if isinstance(val.shape[-1], int) and val.shape[-1] > 1:
            return node
    return None


def readout(program: Program, end: fx.Node, answer: fx.Node) -> list[fx.Node]:
    """The model's own way from the last boundary to its answer, in order; empty where the boundary is the answer.

    Selections of exits that were inserted before are left out: a head reads what the model would say.
    """
    if never(answer) is end:
        return []
    return [n for n in Dataflow(program.graph).between(end, never(answer)) if not is_selection(n)]


def is_selection(node: fx.Node) -> bool:
    """Whether a node chooses between an exit's value and the later one."""
    return (
        op_name(node) == "where"
        and has_role(node, "exits", SELECT)
        and traced(node).is_floating_point()  # the depth that a tap reports is selected as well
    )


def never(node: fx.Node) -> fx.Node:
    """What a value is where nothing leaves."""
    while is_selection(node):
        node = node.args[2]
    return node


def stream_misfit(stream: tuple[str, ...], answer: tuple[str, ...]) -> str | None:
    """Why a score that reads the stream gives no figure for each position of the answer, or None; both are shapes."""
    rows, wanted = stream[:-1], answer[:-1]
    if rows == wanted or (len(wanted) == 1 and stream[0] == wanted[0]):
        return None
    return f"the stream has positions {list(rows)}, the answer {list(wanted)}".replace("'", "")
