"""Deep delta learning: each write also erases what its value channel holds along the branch's direction.

Published (Zhang et al. 2026, arXiv 2601.00417): ``X' = X + beta k (v^T - k^T X)`` with ``k = f / |f|``, X of m value
channels. Only the direction of f enters, so that no trained branch survives it at any setting. Here, exact at
``s = 0``, ``rho`` as the writes of the start: ``X' = X + f rho^T - s beta k (k^T X - v^T)``, which is the delta rule
with the target ``v* = rho |f| / beta + (1 - s) k^T X + s v``. In the normal form that is a write ``b_j`` of f that
depends on f: ``b_j = rho_j - s beta (k . X_j - v_j) / |f|``, with the identity as mix.

Source: docs/sources.md, ddl.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import fx

from .base import Coefficients, Mixer, Site, along

FLOOR = 1e-10
"""Added to ``|f|^2``, as published."""


class DDL(Mixer):
    """``C (m + 1) + 3 m + 2`` parameters a site: rho, s, reads, and the heads of beta and v. The published convolution over
    time is left out: it would be one more decoding state."""

    name = "ddl"
    static_reads = True

    def refusal(self, n: int) -> str | None:
        """One value channel is the plain stream."""
        return None if n >= 1 else "at least one value channel is needed"

    def starts_at_identity(self, options: Any) -> bool:
        """Always: the mix is the identity."""
        return True

    def insert(self, site: Site) -> Coefficients:
        """Static reads; the write is made behind the branch."""
        n = site.n
        one_stream = site.editor.constant("read", torch.ones(1, dtype=site.dtype)) if n == 1 else None
        read = one_stream or site.parameter("read", site.start.read)
        rho = site.parameter("write", site.start.write)
        strength = site.parameter("strength", torch.zeros(1))
        weight = site.parameter("phi", torch.zeros(1 + n, site.width))
        bias = site.parameter("phi_bias", torch.zeros(1 + n))

        def late(view: fx.Node, update: fx.Node) -> fx.Node:
            tensors = (site.streams, view, update, rho, strength, weight, bias)
            written: fx.Node = site.editor.inline(_write_at(site.options.eps), *tensors)
            return written

        return Coefficients(read, rho, late=late)

    def inert(self, parts: list[str], init: str) -> str | None:
        """Heads multiply a strength that starts at 0."""
        if parts[-1] in ("phi", "phi_bias"):
            return "behind a strength that starts at 0"
        return None


@cache
def _write_at(eps: float) -> Callable[..., torch.Tensor]:
    def write(streams: torch.Tensor, view: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return delta_write(streams, view, *rest, eps=eps)

    return write


def delta_write(
    streams: torch.Tensor,
    view: torch.Tensor,
    update: torch.Tensor,
    rho: torch.Tensor,
    strength: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    eps: float = 1e-6,
) -> torch.Tensor:
    """``b_j = rho_j - g (k . X_j - v_j) / |f|`` with ``g = s beta`` in [0, 2]: ``[n, ...]``.

    Args:
        streams: X, ``[n, ..., C]``; view: what the branch read; update: f, what it returned, ``[..., C]`` each.
        rho: ``[n]``; strength: s, ``[1]``; weight, bias: heads of ``beta = 2 sigmoid`` and ``v = 4 sigmoid`` on the view at
            rms 1, ``[1 + n, C]`` and ``[1 + n]``.
    """
    x, h, f = (t.to(weight.dtype) for t in (streams, view, update))
    scale = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    logits = torch.nn.functional.linear(h * scale, weight, bias).movedim(-1, 0)
    gate = strength * 2 * torch.sigmoid(logits[0])
    # the gradient of a clamp would leave s dead for ever where its first step goes below 0
    gate = gate + (gate.clamp(0, 2) - gate).detach()
    inverse = torch.rsqrt(f.square().sum(-1) + FLOOR)
    along_k = (x * f).sum(-1) * inverse
    return along(rho, along_k) - gate * (along_k - 4 * torch.sigmoid(logits[1:])) * inverse
