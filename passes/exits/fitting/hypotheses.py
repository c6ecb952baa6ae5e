"""What is read out of a sequence: greedy hypotheses of CTC, how sure one is, and errors against a truth.

Plain functions of tensors, for taps and for calibration.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from hcx.rewrite.errors import UsageError

IGNORE = -100
"""Label that does not count, as in :mod:`hcx.passes.exits.fitting.losses`."""


def spelled(
    classes: torch.Tensor, valid: torch.Tensor | None = None, blank: int | None = None
) -> list[tuple[int, ...]]:
    """What each row says.

    Args:
        classes: ``[B, ...]``; ``valid``: which positions count, of the same shape: bool, or a mask that is not 0 there.
        blank: of CTC: repeats are joined, then blanks taken out; None leaves the classes as they are.

    >>> spelled(torch.tensor([[3, 3, 0, 3, 4]]), blank=0), spelled(torch.tensor([[3, 3, 4]]))
    ([(3, 3, 4)], [(3, 3, 4)])
    """
    rows = classes.reshape(len(classes), -1)
    keep = torch.ones_like(rows, dtype=torch.bool) if valid is None else valid.reshape(len(rows), -1) != 0
    found = []
    for row, kept in zip(rows, keep, strict=True):
        row = row[kept]
        if blank is not None:
            row = torch.unique_consecutive(row)
            row = row[row != blank]
        found.append(tuple(row.tolist()))
    return found


def hypothesis_posterior(logits: torch.Tensor, valid: torch.Tensor | None = None, blank: int = 0) -> torch.Tensor:
    """Mean log posterior of each row's greedy hypothesis: over all CTC alignments with it, a frame, ``[B, T, C] -> [B]``.

    ``valid`` is bool or a mask that is not 0 where frames count. The figure is never below that of the best path (the score
    ``posterior``), which is one of these alignments.
    """
    log_p = logits.float().log_softmax(-1)
    valid = valid != 0 if valid is not None else None  # a mask of numbers: `~` turns its bits over
    frames = _frames(logits, valid)
    found = spelled(logits.argmax(-1), valid, blank)
    lengths = torch.tensor([len(h) for h in found])
    targets = torch.tensor([c for h in found for c in h], dtype=torch.long)
    log_p = _left_aligned(log_p, valid)
    total = F.ctc_loss(log_p.transpose(0, 1), targets, frames.cpu(), lengths, blank=blank, reduction="none")
    return -total / frames


def _frames(logits: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """Positions of each row that count, ``[B]``."""
    if valid is None:
        return torch.full((len(logits),), logits.shape[1], dtype=torch.long, device=logits.device)
    return valid.sum(1)


def _left_aligned(values: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """Rows whose positions that count come first, in order; torch's CTC reads so many from the start."""
    if valid is None:
        return values
    order = (~valid).to(torch.int8).argsort(dim=1, stable=True)
    return values.gather(1, order[..., None].expand_as(values))


def error_rate(found: Sequence[Sequence[int]], truth: Sequence[Sequence[int]]) -> float:
    """Label error rate: insertions, deletions and substitutions over the labels of the truth.

    Raises:
        UsageError: not as many rows as truths.

    >>> error_rate([(1, 2, 3), (5,)], [(1, 3), (4, 5)])
    0.5
    """
    if len(found) != len(truth):
        raise UsageError(f"{len(found)} hypotheses for {len(truth)} truths", where="found", hint="one a row, in order")
    return sum(map(distance, found, truth)) / max(1, sum(map(len, truth)))


def distance(one: Sequence[object], other: Sequence[object]) -> int:
    """Levenshtein distance."""
    row = list(range(len(other) + 1))
    for number, a in enumerate(one, 1):
        left, row = row, [number]
        for place, b in enumerate(other):
            row.append(min(left[place] + (a != b), left[place + 1] + 1, row[-1] + 1))
    return row[-1]
