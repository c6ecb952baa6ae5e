"""Equations of gated norms. All compute in float32 or wider and return the dtype of their first argument.

Sources: docs/sources.md (Norms and scales).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F

EPS = 1e-5
"""Of layer norms (torch's default) and rms norms."""


def gated_layer_norm(a: torch.Tensor, gate: torch.Tensor, gain: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """``a + g (LN(a) - a)``: ``a`` bit for bit at g = 0, the layer norm at g = 1. ``[..., C]``; all others ``[C]``."""
    wide = a.to(gate.dtype)
    return (wide + gate * (F.layer_norm(wide, [a.shape[-1]], gain, shift, EPS) - wide)).to(a.dtype)


def rms_normed(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """``x / rms(x) * gain``: ``[..., C]`` with gain ``[C]``."""
    wide = x.to(gain.dtype)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * gain).to(x.dtype)


def joined(h: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """``h + g x``: what a branch reads of two streams, ``[..., C]`` each, gate ``[C]``."""
    return (h.to(gate.dtype) + gate * x.to(gate.dtype)).to(h.dtype)


@cache
def advanced(divisor: float) -> Callable[..., torch.Tensor]:
    """``x + (z_1 + z_2 + ...) / c``."""

    def step(x: torch.Tensor, *updates: torch.Tensor) -> torch.Tensor:
        return x + sum(updates[1:], updates[0]) / divisor

    return step


def precise(val: torch.Tensor) -> torch.dtype:
    """Dtype of new norms and gates beside a value."""
    return torch.float64 if val.dtype == torch.float64 else torch.float32
