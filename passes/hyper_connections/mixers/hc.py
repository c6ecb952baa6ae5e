"""HC: p, H and b are free learned tensors, with ``dynamic`` plus gated functions of the normed streams.

Source: Zhu et al. 2024, arXiv 2409.19606; docs/sources.md, hc.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from .base import GATE, Coefficients, Mixer, Site, along


class HC(Mixer):
    """``n^2 + 2n`` parameters a site; dynamic ``C (n + 3) + 2`` more. H is unconstrained."""

    name = "hc"
    channels_last_only = False
    static_reads = True

    def starts_at_identity(self, options: Any) -> bool:
        """Always."""
        return True

    def insert(self, site: Site) -> Coefficients:
        """Static tensors, and the dynamic parts where asked for."""
        read, write = site.parameter("read", site.start.read), site.parameter("write", site.start.write)
        mix = site.parameter("mix", torch.eye(site.n))
        if not site.options.dynamic:
            return Coefficients(read, write, mix)
        n, width = site.n, site.width
        norm = site.parameter("norm", torch.ones(width))
        weight = site.parameter("projection", torch.zeros(n + 2, width))
        gates = site.parameter("gates", torch.full((2,), GATE))
        p, b, h = site.editor.inline(_dynamic_at(site.options.eps), site.streams, norm, weight, gates, read, write, mix)
        return Coefficients(p, b, h)

    def inert(self, parts: list[str], init: str) -> str | None:
        """Reads of parallel streams, and what multiplies projections that start at 0."""
        if parts[-1] in ("gates", "norm"):
            return "live after the first step, when the projection has left 0"
        return None


@cache
def _dynamic_at(eps: float) -> Callable[..., tuple[torch.Tensor, ...]]:
    return partial(dynamic, eps=eps)


def dynamic(
    streams: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    gates: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    mix: torch.Tensor,
    *,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``p_i + s tanh(x_i w_m)``, ``b_i + s' tanh(x_i w_b)``, ``H_ij + s tanh(x_j W)_i`` with x the normed streams.

    Args:
        streams: ``[n, ..., C]``; norm: ``[C]``; weight: rows w_m, w_b, W^T, ``[n + 2, C]``; gates: s and s', ``[2]``.

    Returns:
        ``[n, ...]``, ``[n, ...]`` and ``[n, n, ...]``.
    """
    n = streams.shape[0]
    x = streams.to(weight.dtype)
    scale = torch.rsqrt(x.square().mean(-1) + eps)
    # the norm's scale is one number a row, so it goes behind the product
    products = torch.nn.functional.linear(x, weight * norm)
    logits = torch.tanh(products.movedim(-1, 0) * scale.unsqueeze(0))
    p = along(read, logits[0]) + gates[0] * logits[0]
    b = along(write, logits[1]) + gates[1] * logits[1]
    h = mix.reshape([n, n] + [1] * (streams.dim() - 2)) + gates[0] * logits[2:]
    return p, b, h
