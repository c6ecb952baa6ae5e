"""Changing the scores of the next token: leave tokens out, or leave one in."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from hcx.rewrite.errors import UsageError

IMPOSSIBLE = float("-inf")


def fit_vocabulary(ids: Iterable[int], scores: torch.Tensor, option: str) -> None:
    """Refuse ids that ``[B, V]`` scores have no column for."""
    if (largest := max(ids)) >= scores.shape[-1]:
        raise UsageError(f"token {largest} is not among {scores.shape[-1]} scores", where=option)


def without(scores: torch.Tensor, rows: torch.Tensor, ids: Iterable[int]) -> torch.Tensor:
    """Scores ``[B, V]`` in which the chosen rows (bool ``[B]``) cannot take these tokens.

    Raises:
        UsageError: nothing is left for a chosen row; argmax would take token 0 of it, without a word.
    """
    columns = torch.zeros(scores.shape[-1], dtype=torch.bool, device=scores.device)
    columns[list(ids)] = True
    left = scores.masked_fill(rows[:, None] & columns, IMPOSSIBLE)
    if bool((rows & (left == IMPOSSIBLE).all(-1)).any()):
        raise UsageError(f"without {int(columns.sum())} of {len(columns)} tokens nothing can follow", where="suppress",
                         hint="suppress fewer tokens, also with the processors in front of this one")  # fmt: skip
    return left


def only(scores: torch.Tensor, rows: torch.Tensor, token: int) -> torch.Tensor:
    """Scores ``[B, V]`` in which the chosen rows (bool ``[B]``) can take nothing but one token."""
    forced = torch.full_like(scores, IMPOSSIBLE)
    forced[:, token] = 0
    return torch.where(rows[:, None], forced, scores)
