"""mHC: doubly stochastic mixes by 20 Sinkhorn steps.

Source: Xie et al. 2025, arXiv 2512.24880; docs/sources.md, mhc.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .base import Head, Site

OFF = -8.0
"""Static logits off the diagonal: ``|H - I|`` 1e-3 at the start. As in the published code of mHC-lite."""


def identity_logits(n: int, off: float = OFF) -> torch.Tensor:
    """0 on the diagonal, ``off`` elsewhere, flat ``[n^2]``; symmetric, so rows and columns both sum to 1 exactly."""
    return torch.full((n, n), off, dtype=torch.float64).fill_diagonal_(0.0).flatten()


class MHC(Head):
    """``n C (n^2 + 2n) + n^2 + 2n + 3`` parameters a site."""

    name = "mhc"

    def rows_sum_to_one(self, options: Any) -> bool:
        """Always."""
        return True

    def mix_bias(self, site: Site) -> torch.Tensor:
        """Near the identity."""
        return identity_logits(site.n)

    def inert(self, parts: list[str], init: str) -> str | None:
        """Logits of the mix, and what the common head explains."""
        return VERTEX if parts[-1] == "mix_bias" else super().inert(parts, init)

    def mix(self, site: Site, logits: fx.Node) -> fx.Node:
        """Columns, then rows, ``sinkhorn_iters`` times."""
        square = site.editor.inline(_square, logits)
        options = site.options
        return site.editor.call(
            torch.ops.hcx.sinkhorn.default, square, options.sinkhorn_iters, options.gradient == "implicit"
        )


VERTEX = "a mix that keeps the mean has no gradient at the start, and beside the identity the map scales it by 3e-4"


def _square(logits: torch.Tensor) -> torch.Tensor:
    n = round(logits.shape[0] ** 0.5)
    return logits.reshape([n, n, *logits.shape[1:]])
