"""JPmHC: softmax routing with a bistochastic, Cayley or Grassmann mix. Source: docs/sources.md, jpmhc."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from .base import Coefficients, Mixer, Site
from .mhc import identity_logits

ALPHA = 0.1
"""Step of the Cayley transform, as published."""


class JPMHC(Mixer):
    """One projection of the layer-normed ``vec(X)`` to three n x n matrices. Reads are means over rows of a row softmax,
    writes row sums of a column softmax: ``sum p = 1`` and ``sum b = n`` always.

    ``manifold=cayley``: orthogonal, exact closed form up to n = 4, starts at the identity. ``bistochastic``: 20 Sinkhorn
    steps with the implicit gradient. ``grassmann``: a static projector of rank ``rank`` that keeps the mean.
    """

    name = "jpmhc"

    def starts_at_identity(self, options: Any) -> bool:
        """With the Cayley transform of zero logits."""
        return bool(options.manifold == "cayley")

    def rows_sum_to_one(self, options: Any) -> bool:
        """Rotations do not keep sums."""
        return bool(options.manifold != "cayley")

    def insert(self, site: Site) -> Coefficients:
        """The fused projection, its bias and the layer norm."""
        n, width, manifold = site.n, site.width, site.options.manifold
        static = manifold == "grassmann"
        norm, shift = (
            site.parameter("norm.weight", torch.ones(n * width)),
            site.parameter("norm.bias", torch.zeros(n * width)),
        )
        read = torch.log(site.start.read.double()).expand(n, n)
        write = torch.log(site.start.write.double() / n).unsqueeze(1).expand(n, n)
        if not read.isfinite().all():
            read = torch.where(site.start.read > 0, 0.0, -30.0).double().expand(n, n)
        # equal logits as zeros, whose softmax is exact
        read, write = (x - x.amax(d, keepdim=True) for x, d in ((read, 1), (write, 0)))
        mix = identity_logits(n) if manifold == "bistochastic" else torch.zeros(n * n)
        biases = [read.flatten(), write.flatten(), *([] if static else [mix])]
        weight = site.parameter("phi", torch.zeros(len(biases) * n * n, n * width))
        bias = site.parameter("phi_bias", torch.cat([b.double() for b in biases]))
        logits = site.editor.inline(normed_head(n), site.streams, norm, shift, weight, bias)
        p, b = site.editor.inline(routing(n), logits)
        if static:
            basis = site.parameter("basis", torch.eye(n - 1, site.options.projector_rank - 1))
            return Coefficients(p, b, site.editor.call(torch.ops.hcx.pinned_projector.default, basis), True)
        square = site.editor.inline(mix_logits(n), logits)
        if manifold == "cayley":
            return Coefficients(p, b, site.editor.call(torch.ops.hcx.cayley.default, square, ALPHA))
        mixed = site.editor.call(torch.ops.hcx.sinkhorn.default, square, site.options.sinkhorn_iters, True)
        return Coefficients(p, b, mixed, True)

    def inert(self, parts: list[str], init: str) -> str | None:
        """The norm stands before a projection that starts at 0."""
        if "norm" in parts:
            return "live after the first step, when the projection has left 0"
        return None


@cache
def normed_head(n: int) -> Callable[..., torch.Tensor]:
    """``phi LayerNorm(vec X) + bias``: ``[n, ..., C] -> [k n^2, ...]``."""

    def head(
        streams: torch.Tensor, norm: torch.Tensor, shift: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        rows = streams.to(weight.dtype).movedim(0, -2).flatten(-2)
        rows = torch.nn.functional.layer_norm(rows, [rows.shape[-1]], norm, shift)
        return torch.nn.functional.linear(rows, weight, bias).movedim(-1, 0)

    return head


@cache
def routing(n: int) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Reads and writes of both softmaxes, ``[n, ...]`` each."""

    def route(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pre, post = (logits[i * n * n : (i + 1) * n * n].unflatten(0, (n, n)) for i in (0, 1))
        return torch.softmax(pre, 1).mean(0), torch.softmax(post, 0).sum(1)

    return route


@cache
def mix_logits(n: int) -> Callable[..., torch.Tensor]:
    """The third matrix."""

    def third(logits: torch.Tensor) -> torch.Tensor:
        return logits[2 * n * n :].unflatten(0, (n, n))

    return third
