"""How much the later blocks still turn the stream: what an exit's cached keys and values are expected to be off by.

``c_l`` is the cosine of the stream before and after block l, and ``e_k``, the sum of ``1 - mean c_l`` over the blocks
after an exit at k, predicts the error that tokens leaving there accumulate. River-LLM leaves where the exit's own ``c``
(``score=cosine``) reaches a threshold and ``e_k`` is within a budget. The second condition does not depend on the token:
an exit beyond the budget has an infinite threshold.

Source: Shen and Zou 2026, arXiv 2604.18396; docs/sources.md, river.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from hcx.passes.exits.applied import applied
from hcx.passes.exits.insert.inserted import NEVER
from hcx.passes.exits.insert.scores import cosine
from hcx.passes.exits.run.split import layout_of
from hcx.rewrite.errors import UsageError
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.traced import sizes
from hcx.rewrite.run.reading import reader

from .calibrate import set_thresholds
from .trials import Batches, kept


@dataclass(frozen=True)
class Drift:
    """Mean cosines on some text.

    Attributes:
        cosines: of the stream before and after each block, in order of execution.
        errors: blocks before an exit -> sum of ``1 - mean cosine`` over the blocks after it.
        positions: how many tokens the means are over.
    """

    cosines: list[float]
    errors: dict[int, float]
    positions: int

    def within(self, budget: float) -> list[int]:
        """Exits whose error is at most the budget."""
        return [k for k, error in self.errors.items() if error <= budget]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "errors": {str(k): e for k, e in self.errors.items()}}


def drift(program: Program, batches: Batches, *, skip: int = 0) -> Drift:
    """Measure mean cosines with nothing leaving; see :class:`Drift`.

    Args:
        program: with exits in select form, at numbers of blocks.
        batches: calls to measure on; see :func:`hcx.passes.exits.token_batches`.
        skip: leading positions of each row that are left out: a decoder's first token is an attention sink.

    Raises:
        UsageError: no exits, a stream without one vector a position of the answer, or nothing to measure on.
    """
    applied(program)
    layout = layout_of(program)
    nodes = {n.name: n for n in layout.graph.nodes}
    wanted = sizes(nodes[layout.answer[0]])[:-1]
    if other := [b for b in layout.boundaries if sizes(nodes[b])[:-1] != wanted]:
        raise UsageError(
            f"the stream at `{other[0]}` has no vector for each position of the answer", where=program.signature.model
        )
    read = reader(program, layout.graph, layout.boundaries)
    total, positions = torch.zeros(len(layout.boundaries) - 1, dtype=torch.float64), 0
    for flat in batches:
        streams = [kept(s, skip) for s in read(program.signature.complete(flat))]
        turned = [cosine(one, other).double() for one, other in pairwise(streams)]
        total += torch.stack([t.sum() for t in turned])
        positions += turned[0].numel()
    if not positions:
        raise UsageError("there is nothing to measure on", where="batches", hint="give at least one call's inputs")
    cosines = (total / positions).tolist()
    starts = {k: layout.boundaries.index(s) for k, s in zip(layout.places, layout.streams, strict=True)}
    return Drift(cosines, {k: sum(1 - c for c in cosines[i:]) for k, i in starts.items()}, positions)


def within_budget(program: Program, measured: Drift, budget: float) -> Program:
    """A new Program in which exits beyond a budget of error never leave; the other thresholds stay as they are.

    Raises:
        UsageError: no exits in select form, others than were measured, or a budget that is no number.
    """
    if not budget >= 0:
        raise UsageError(f"a budget of {budget}", where="budget", hint="the error of an exit that may leave, or more")
    near = measured.within(budget)
    new = set_thresholds(program, {k: NEVER for k in measured.errors if k not in near})
    applied(new).entry["drift"] = {**measured.to_json(), "budget": budget, "within": near}
    return new
