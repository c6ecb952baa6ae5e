"""Numbers that a caller gives: whole ones and token ids, of Python, numpy or torch."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any

import torch
from hcx.rewrite.errors import UsageError


def whole(number: Any, option: str, least: int) -> int:
    """The whole number that is meant.

    Raises:
        UsageError: it is none (a fraction, a truth value), or below ``least``.
    """
    found = _index(number)
    if found is None or found < least:
        raise UsageError(f"{option}={number} is no whole number from {least} on", where=option, hint=f"{least} or more")
    return found


def token_ids(ids: Iterable[Any], option: str) -> tuple[int, ...]:
    """Different token ids in order.

    Raises:
        UsageError: none, or something that is no id.
    """
    try:
        given = list(ids)
    except TypeError:
        raise UsageError(f"{option}={ids} is no list of token ids", where=option, hint=f"{option}=[ids]") from None
    found = [_index(i) for i in given]
    if not found or any(i is None or i < 0 for i in found):
        raise UsageError(f"{option}={given} are no token ids", where=option, hint="numbers from 0 on")
    return tuple(dict.fromkeys(found))


def _index(number: Any) -> int | None:
    """As ``operator.index``; None for what has none, and for truth values, which Python and torch count as numbers."""
    if isinstance(number, bool) or (isinstance(number, torch.Tensor) and number.dtype == torch.bool):
        return None
    try:
        return index(number)
    except TypeError:
        return None
