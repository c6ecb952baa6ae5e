"""How sure an exit is: one figure a position; larger is surer. Of whole sequences: see :mod:`.sequences`.

Source: docs/sources.md, exit-scores. Shares and probabilities lie in [0, 1], and float32 rounding can reach exactly
1 (0 for their logarithm), so "never" is a threshold of infinity, not of 1.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def max_prob(logits: torch.Tensor) -> torch.Tensor:
    """Largest softmax probability, ``[..., C] -> [...]``, in float32.

    >>> max_prob(torch.tensor([[0.0, 0.0]]))
    tensor([0.5000])
    """
    return logits.float().softmax(-1).amax(-1)


def margin(logits: torch.Tensor) -> torch.Tensor:
    """Difference of the two largest softmax probabilities, ``[..., C] -> [...]``, in float32.

    >>> margin(torch.tensor([[2.0, 2.0, 0.0]]))
    tensor([0.])
    """
    top = logits.float().softmax(-1).topk(2, -1).values
    return top[..., 0] - top[..., 1]


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """``1 - H(p) / ln C``: 1 for a certain answer, 0 for a uniform one; ``[..., C] -> [...]``, in float32.

    >>> entropy(torch.tensor([[0.0, 0.0, 0.0]])).abs()
    tensor([0.])
    """
    log_p = logits.float().log_softmax(-1)
    return 1 + (log_p.exp() * log_p).sum(-1) / math.log(logits.shape[-1])


def posterior(logits: torch.Tensor) -> torch.Tensor:
    """Logarithm of the largest softmax probability, ``[..., C] -> [...]``, in float32.

    Averaged over the frames of a sentence it is the mean log posterior of its best path.

    >>> posterior(torch.tensor([[0.0, 0.0]]))
    tensor([-0.6931])
    """
    return logits.float().log_softmax(-1).amax(-1)


def cosine(before: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
    """Cosine of the stream with what it was a block earlier, ``[..., d] -> [...]``, in float32 (CALM's "state")."""
    return F.cosine_similarity(before.float(), stream.float(), -1)


def patience_start(logits: torch.Tensor) -> torch.Tensor:
    """PABEE's counter at the first exit: no answer has been repeated yet. ``[..., C] -> [...]``."""
    return torch.zeros_like(logits[..., 0], dtype=torch.float32)


def patience(previous_logits: torch.Tensor, logits: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """PABEE: how many exits in a row gave the same answer as the one before them; ``[..., C] -> [...]``.

    >>> patience(torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0]]), torch.tensor([1.0]))
    tensor([2.])
    """
    return torch.where(previous_logits.argmax(-1) == logits.argmax(-1), count + 1, torch.zeros_like(count))


FROM_LOGITS = {"max_prob": max_prob, "margin": margin, "entropy": entropy, "posterior": posterior}
"""Scores that read the exit's own logits and nothing else."""

SCORES = (*FROM_LOGITS, "cosine", "patience", "probe", "gate", "palbert", "jei")
"""All scores; the last four are learned, see :mod:`hcx.passes.exits.insert.gates`."""

CHEAP = ("cosine", "probe", "gate", "palbert")
"""Scores that read the stream only, so that no head runs where nothing leaves."""

READ_TWICE = ("cosine", "palbert")
"""Scores that also read the stream of a block earlier."""

FOR_SEQUENCES = (*FROM_LOGITS, "cosine")
"""Scores that can be averaged over the positions of a row."""

CHAINED = ("patience", "gate", "palbert", "jei")
"""Scores that also read what the exit before them found."""
