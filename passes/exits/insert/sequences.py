"""Exits that whole sequences take: the mean of a score over the positions that count, the surest of all exits.

Source: docs/sources.md, sequence-exits (encoders of speech: entropy of the frames, posterior of the sentence).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hcx.rewrite.errors import UsageError

RULES = ("first", "max")
"""Leave at the first exit that is sure enough, or at the surest of them."""


def averaged(score: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
    """Mean score of each row over its positions that count, ``[B, ...] -> [B]``.

    Args:
        valid: bool, of the shape of ``score``; None counts all. A row where nothing counts has no score: NaN, which
            never leaves.

    >>> averaged(torch.tensor([[0.5, 0.25, 9.0]]), torch.tensor([[True, True, False]]))
    tensor([0.3750])
    """
    if score.dim() == 1:
        return score
    score = score.flatten(1)
    if valid is None:
        return score.mean(1)
    valid = valid.flatten(1)
    # not a product: what stands in padding may be no number
    return torch.where(valid, score, torch.zeros_like(score)).sum(1) / valid.sum(1)


def kept_rows(mask: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    """Which positions count, as bool with the rows of ``score``, from a mask that is not 0 where they do.

    Rows are taken by number: a graph may not know that a mask has as many rows as the data, and must not compare them.
    """
    return mask[torch.arange(score.shape[0], device=score.device)] != 0


def dropped_rows(mask: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    """The same from a mask that is 0 where positions count."""
    return mask[torch.arange(score.shape[0], device=score.device)] == 0


def surest(end: torch.Tensor, *scores_and_fires: torch.Tensor) -> torch.Tensor:
    """The largest of the last score and those of exits that may be left at; NaN where the last one is.

    Args:
        scores_and_fires: score and decision of each exit in turn.
    """
    best = end
    for score, fire in zip(scores_and_fires[::2], scores_and_fires[1::2], strict=True):
        best = torch.maximum(best, torch.where(fire, score, torch.full_like(score, float("-inf"))))
    return best


def is_surest(fire: torch.Tensor, score: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """Whether an exit may be left at and none is surer; of equal ones the first is taken by who reads this."""
    return fire & (score >= best)


def choose(
    scores: torch.Tensor, thresholds: Sequence[float], rule: str = "first", end: torch.Tensor | None = None
) -> torch.Tensor:
    """Number of the exit that each sequence or position takes, ``[N]``; K is the model itself.

    Args:
        scores: of K exits, ``[K, N]``, larger is surer.
        thresholds: K of them; ``-inf`` lets every number pass, infinity none.
        rule: ``first`` that reaches its threshold; ``max``: the surest of those that do, and of the model.
        end: the model's own score, ``[N]``, for ``max``; without it the model is taken only where no exit may be.

    Raises:
        UsageError: another rule, or not one threshold an exit.

    >>> scores = torch.tensor([[0.2, 0.6, 0.1], [0.9, 0.7, 0.2]])
    >>> choose(scores, [0.5, 0.5]).tolist(), choose(scores, [0.5, 0.5], "max", torch.tensor([0.8, 0.8, 0.8])).tolist()
    ([1, 0, 2], [1, 2, 2])
    """
    if rule not in RULES:
        raise UsageError(f"there is no rule `{rule}`", where="rule", hint=" or ".join(RULES))
    if len(thresholds) != len(scores):
        raise UsageError(f"{len(thresholds)} thresholds for {len(scores)} exits", where="thresholds",
                         hint="one an exit, in order; infinity never leaves")  # fmt: skip
    limits = torch.tensor(list(thresholds), dtype=scores.dtype, device=scores.device)
    fires = scores >= limits[:, None]
    if rule == "max":
        last = torch.full_like(scores[0], float("-inf")) if end is None else end.to(scores.dtype)
        best = surest(last, *(t for pair in zip(scores, fires, strict=True) for t in pair))
        fires = torch.stack([is_surest(f, s, best) for f, s in zip(fires, scores, strict=True)])
    fires = torch.cat([fires, torch.ones_like(fires[:1])])
    return fires.int().argmax(0)
