"""oHC: rotations of the streams; at n=4 by a pair of unit quaternions. Source: docs/sources.md, ohc."""

from __future__ import annotations

from typing import Any

import torch
from hcx.kernels.maps import logits_of_rotation
from torch import fx

from .base import Head, Site


class OHC(Head):
    """``n C (2n + k) + 2n + k + 2`` parameters a site, k = 8 at n = 4. The mix gate is frozen, as published: it has no
    freedom of its own and its gradient dominates clipping."""

    name = "ohc"
    learned_mix_gate = False

    def starts_at_identity(self, options: Any) -> bool:
        """Always."""
        return True

    def mix_bias(self, site: Site) -> torch.Tensor:
        """Zero logits: the identity bit for bit."""
        return torch.zeros(logits_of_rotation(site.n))

    def mix(self, site: Site, logits: fx.Node) -> fx.Node:
        """A rotation in SO(n)."""
        return site.editor.call(torch.ops.hcx.rotation.default, logits, site.n)
