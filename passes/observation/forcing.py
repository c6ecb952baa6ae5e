"""Changing the scores of the next token: leave tokens out, or leave one in."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from hcx.rewrite.errors import UsageError

IMPOSSIBLE = float("-inf")


def token_ids(ids: Iterable[int], option: str) -> tuple[int, ...]:
    """Different token ids in order.

    Raises:
        UsageError: none, or something that is no id.
    """
    found = tuple(dict.fromkeys(ids))
    if not found or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in found):
        raise UsageError(f"{option}={list(found)} are no token ids", where=option, hint="numbers from 0 on")
    return found


def fit_vocabulary(ids: Iterable[int], scores: torch.Tensor, option: str) -> None:
    """Refuse ids that ``[B, V]`` scores have no column for."""
    if (largest := max(ids)) >= scores.shape[-1]:
        raise UsageError(f"token {largest} is not among {scores.shape[-1]} scores", where=option)


def without(scores: torch.Tensor, rows: torch.Tensor, ids: Iterable[int]) -> torch.Tensor:
    """Scores ``[B, V]`` in which the chosen rows (bool ``[B]``) cannot take these tokens."""
    columns = torch.zeros(scores.shape[-1], dtype=torch.bool, device=scores.device)
    columns[list(ids)] = True
    return scores.masked_fill(rows[:, None] & columns, IMPOSSIBLE)


def only(scores: torch.Tensor, rows: torch.Tensor, token: int) -> torch.Tensor:
    """Scores ``[B, V]`` in which the chosen rows (bool ``[B]``) can take nothing but one token."""
    forced = torch.full_like(scores, IMPOSSIBLE)
    forced[:, token] = 0
    return torch.where(rows[:, None], forced, scores)
