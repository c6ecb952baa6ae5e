"""What exits say on real inputs, position by position or sequence by sequence, beside what the model says when nothing
leaves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hcx.passes.exits.applied import Applied, applied
from hcx.passes.exits.insert.places import Place
from hcx.passes.exits.insert.sequences import choose
from hcx.rewrite.errors import UsageError
from hcx.rewrite.ir.control import copy_graph
from hcx.rewrite.ir.program import Program
from hcx.rewrite.run.reading import reader
from torch import fx

from .costs import Costs
from .hypotheses import IGNORE, spelled

Batches = Sequence[list[torch.Tensor]]
"""Flat inputs, one list a call."""

LEAST_SHARE = 0.05
"""An exit that fewer positions take is reported as useless: its score is paid by all."""


@dataclass
class Trials:
    """Scores and answers of K exits over N positions, or over N sequences where these leave as wholes.

    Attributes:
        places: blocks before each exit; ``depth``: blocks of the model.
        scores: ``[K, N]``.
        answers: most likely class at each exit and, last, of the model, ``[K + 1, N]``; of sequences a number for
            each different hypothesis.
        labels: ``[N]`` where the truth is known.
        before: blocks executed before each exit, where ``places`` name passes of a loop.
        rule: which of the exits that are sure enough is taken, see :func:`.sequences.choose`.
        own: with ``max`` the model's own score, ``[N]``.
        hypotheses: of sequences, what each number in ``answers`` and ``labels`` stands for.
    """

    places: list[Place]
    depth: int
    scores: torch.Tensor
    answers: torch.Tensor
    labels: torch.Tensor | None = None
    before: list[int] | None = None
    rule: str = "first"
    own: torch.Tensor | None = None
    hypotheses: list[tuple[int, ...]] | None = None

    @property
    def agrees(self) -> torch.Tensor:
        """Where each exit gives the model's answer, ``[K, N]``."""
        return self.answers[:-1] == self.answers[-1]

    @property
    def blocks(self) -> torch.Tensor:
        """Blocks of each way through the model, ``[K + 1]`` in float64."""
        return torch.tensor([*(self.before or self.places), self.depth], dtype=torch.float64)

    def leave(self, thresholds: Sequence[float]) -> torch.Tensor:
        """Number of the exit that each position takes, ``[N]``; K where it never leaves."""
        return choose(self.scores, thresholds, self.rule, self.own)

    def figures(self, thresholds: Sequence[float], costs: Costs | None = None) -> dict[str, Any]:
        """What these thresholds lead to: shares, mean depth, agreement, accuracy, net operations."""
        taken = self.leave(thresholds)
        shares = torch.bincount(taken, minlength=len(self.places) + 1).double() / taken.numel()
        chosen = self.answers.gather(0, taken[None])[0]
        result: dict[str, Any] = {
            "positions": taken.numel(),
            "mean_depth": float(shares @ self.blocks),
            "agreement": float((chosen == self.answers[-1]).double().mean()),
            "shares": {str(k): float(s) for k, s in zip([*self.places, self.depth], shares, strict=True)},
            "useless": [k for k, s in zip(self.places, shares, strict=False) if s < LEAST_SHARE],
        }
        if self.labels is not None:
            result["accuracy"] = float((chosen == self.labels).double().mean())
            result["full_accuracy"] = float((self.answers[-1] == self.labels).double().mean())
        if costs is not None:
            result["net_flops"] = costs.net(shares.tolist())
        return result

    def part(self, start: int, end: int) -> Trials:
        """Some of the positions."""
        labels = self.labels[start:end] if self.labels is not None else None
        own = self.own[start:end] if self.own is not None else None
        return Trials(
            self.places, self.depth, self.scores[:, start:end], self.answers[:, start:end], labels, self.before,
            self.rule, own, self.hypotheses,
        )  # fmt: skip

    def __len__(self) -> int:
        return self.scores.shape[1]


def measure(
    program: Program | Applied,
    batches: Batches,
    *,
    skip: int = 0,
    labels: Iterable[torch.Tensor] | None = None,
    blank: int | None = None,
) -> Trials:
    """Run a Program with exits in select form as if none ever fired.

    Args:
        skip: leading positions of each row to leave out: a decoder's first token says little, and nothing fair can be
            said of it. Sequences are taken whole.
        labels: the truth for each call, of the shape of the answer without its classes; of sequences ``[B, labels]``,
            filled up with -100.
        blank: of CTC: sequences are the same where they are without repeats and blanks; not for positions.

    Raises:
        UsageError: no exits in select form, nothing to run on, ``skip`` of sequences, or a ``blank`` of positions or that
            is no class.
    """
    exits = program if isinstance(program, Applied) else applied(program)
    whole = exits.per == "sequence"
    if whole and skip:
        raise UsageError(f"skip={skip}: sequences are taken whole", where="skip", hint="leave it out with per=sequence")
    if blank is not None and not whole:
        raise UsageError(f"blank={blank}: positions are compared one by one", where="blank", hint="per=sequence")
    graph, answers_at = _with_answers(exits, blank)
    own, valid = ([n] if n is not None else [] for n in (exits.own_score, exits.valid))
    read = reader(exits.program, graph, [*exits.scores, *own, *answers_at, *valid])
    count = len(exits.places) + len(own)
    scores: list[torch.Tensor] = []
    answers: list[torch.Tensor] = []
    hypotheses = _Hypotheses()
    for flat in batches:
        values = read(exits.program.signature.complete(flat))
        said, keep = values[count : count + len(answers_at)], values[-1] if valid else None
        if whole:
            said = [hypotheses.numbered(v, keep, blank) for v in said]
        figures = [kept(v, skip).reshape(-1) for v in (*values[:count], *said)]
        scores.append(torch.stack(figures[:count]).float())
        answers.append(torch.stack(figures[count:]))
    if not scores:
        raise UsageError("there is nothing to measure on", where="batches", hint="give at least one call's inputs")
    truth = None
    if labels is not None:
        truth = torch.cat([hypotheses.numbered(t, t != IGNORE) if whole else kept(t, skip).reshape(-1) for t in labels])
    every = torch.cat(scores, 1)
    return Trials(
        exits.places, exits.depth, every[: len(exits.places)], torch.cat(answers, 1), truth, exits.before,
        exits.rule, every[-1] if own else None, list(hypotheses.numbers) if whole else None,
    )  # fmt: skip


def _with_answers(exits: Applied, blank: int | None) -> tuple[fx.Graph, list[str]]:
    """A graph with the most likely class at each exit and of the model, and the names of these."""
    graph = copy_graph(exits.graph)
    nodes = {n.name: n for n in graph.nodes}
    classes = int(nodes[exits.answer].meta["val"].shape[-1])
    if blank is not None and not 0 <= blank < classes:
        raise UsageError(f"blank={blank} is no class of {classes}", where="blank", hint=f"0 to {classes - 1}")
    with graph.inserting_before(graph.output_node()):
        names = [
            graph.call_function(torch.ops.aten.argmax.default, (nodes[name], -1)).name
            for name in (*exits.logits, exits.answer)
        ]
    return graph, names


class _Hypotheses:
    """Numbers of different sequences, in the order in which they are met."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[int, ...], int] = {}

    def numbered(self, classes: torch.Tensor, keep: torch.Tensor | None, blank: int | None = None) -> torch.Tensor:
        """The number of each row, ``[B]``."""
        numbers = self.numbers
        return torch.tensor([numbers.setdefault(s, len(numbers)) for s in spelled(classes, keep, blank)])


def kept(value: torch.Tensor, skip: int) -> torch.Tensor:
    """Positions of ``[batch, sequence, ...]`` after the first few; values without a sequence stay as they are."""
    return value[:, skip:] if skip and value.dim() > 1 else value


def token_batches(program: Program, ids: torch.Tensor, length: int, rows: int = 1) -> list[list[torch.Tensor]]:
    """Flat inputs from consecutive windows of a token row, ``[n]``; what does not fill a window is left out.

    Raises:
        UsageError: the Program takes no token ids, or there are too few.
    """
    name = program.signature.tokens
    if name is None:
        raise UsageError("this model does not take `input_ids`, so no text can be read", where=program.signature.model)
    count = len(ids) // length
    if not count:
        raise UsageError(f"{len(ids)} tokens do not fill a window of {length}", where="text", hint="give a longer text")
    windows = ids[: count * length].reshape(count, length)
    return [program.signature.by_name({name: part.contiguous()}) for part in torch.split(windows, rows)]
