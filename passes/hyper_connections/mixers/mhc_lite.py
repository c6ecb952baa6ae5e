"""mHC-lite: mixtures of all permutations, doubly stochastic without iterations. Source: docs/sources.md, mhc-lite."""

from __future__ import annotations

from math import factorial
from typing import Any

import torch
from torch import fx

from .base import Head, Site
from .mhc import OFF, VERTEX


class MHCLite(Head):
    """``n C (2n + n!) + 2n + n! + 3`` parameters a site, so n is at most 4."""

    name = "mhc_lite"

    def refusal(self, n: int) -> str | None:
        """More than 24 permutations would be more parameters than the branch has."""
        return None if 2 <= n <= 4 else "it mixes all permutations of 2, 3 or 4 streams; use mhc, ohc or shc for more"

    def rows_sum_to_one(self, options: Any) -> bool:
        """Always."""
        return True

    def mix_bias(self, site: Site) -> torch.Tensor:
        """0 for the identity, which comes first, -8 for the others."""
        bias = torch.full((factorial(site.n),), OFF)
        bias[0] = 0.0
        return bias

    def inert(self, parts: list[str], init: str) -> str | None:
        """Logits of the mix, and what the common head explains."""
        return VERTEX if parts[-1] == "mix_bias" else super().inert(parts, init)

    def mix(self, site: Site, logits: fx.Node) -> fx.Node:
        """Softmax over permutations."""
        return site.editor.call(torch.ops.hcx.permutation_mix.default, logits, site.n)
