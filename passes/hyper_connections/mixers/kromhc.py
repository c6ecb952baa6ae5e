"""KromHC: Kronecker products of small permutation mixtures, doubly stochastic. Source: docs/sources.md, kromhc."""

from __future__ import annotations

from math import factorial
from typing import Any

import torch
from hcx.kernels.maps import kronecker_factors
from torch import fx

from .base import Head, Site
from .mhc import OFF, VERTEX

LARGEST = 3
"""Largest factor: a factor of f streams has f! logits, so 5 would already be most of a site's parameters."""


class KromHC(Head):
    """``n C (2n + k) + 2n + k + 3`` parameters a site, k = 2 log2 n for a power of two. H is symmetric there, and all H
    commute: eigenvalues are products of 1 and ``2 a_j - 1``."""

    name = "kromhc"

    def refusal(self, n: int) -> str | None:
        """Streams that are no product of pairs and triples have no small factors."""
        if n < 2:
            return super().refusal(n)
        if max(kronecker_factors(n)) <= LARGEST:
            return None
        return "it mixes by factors of 2 and 3 streams; use mhc, ohc or shc for other numbers"

    def rows_sum_to_one(self, options: Any) -> bool:
        """Always."""
        return True

    def mix_bias(self, site: Site) -> torch.Tensor:
        """In each factor 0 for the identity, which comes first, -8 for the others."""
        return torch.cat(
            [torch.full((factorial(f),), OFF).index_fill(0, torch.tensor([0]), 0.0) for f in kronecker_factors(site.n)]
        )

    def inert(self, parts: list[str], init: str) -> str | None:
        """Logits of the mix, and what the common head explains."""
        return VERTEX if parts[-1] == "mix_bias" else super().inert(parts, init)

    def mix(self, site: Site, logits: fx.Node) -> fx.Node:
        """Product of the factors."""
        return site.editor.call(torch.ops.hcx.kronecker_mix.default, logits, site.n)
