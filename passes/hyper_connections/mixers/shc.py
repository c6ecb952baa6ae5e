"""sHC: ``H = J + Z U diag(tanh s) V^T Z^T``, rows and columns sum to 1, spectral norm 1.

Source: docs/sources.md, shc.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .base import Coefficients, Head, Site, along

MIDDLE = 4.0
"""Start of s: tanh 4 = 0.9993, so ``|H - I|`` is 5e-4."""


class SHC(Head):
    """``n C (2n + (n-1)^2) + 2n + (n-1)^2 + 7`` parameters a site: separate gates and angles for U, V and s."""

    name = "shc"

    def rows_sum_to_one(self, options: Any) -> bool:
        """Always."""
        return True

    def mix_bias(self, site: Site) -> torch.Tensor:
        """Logits of U, of V, and s."""
        m = site.n - 1
        return torch.cat([torch.zeros(m * (m - 1)), torch.full((m,), MIDDLE)])

    def insert(self, site: Site) -> Coefficients:
        """As the common head, with three gates in place of one."""
        n, bias = site.n, self.mix_bias(site)
        m = n - 1
        angles = m * (m - 1) // 2
        logits, p, b = self.routing(site, bias.numel())
        static = site.parameter("mix_bias", bias)
        middle = site.editor.inline(_part(2 * angles, m), logits, site.gate("middle_gate"), static)
        if angles:
            left, right = (
                site.editor.inline(
                    _angles(start, angles), logits, site.gate(f"{side}_gate"), static, site.parameter(f"{side}_scale", torch.ones(1))
                )
                for side, start in (("left", 0), ("right", angles))
            )  # fmt: skip
        else:
            left = right = middle
        return Coefficients(p, b, site.editor.call(torch.ops.hcx.spectral_mix.default, left, right, middle, n), True)

    def inert(self, parts: list[str], init: str) -> str | None:
        """Row- and column-stochastic mixes have no gradient while all streams or all gradients are equal."""
        if parts[-1] in ("left_scale", "right_scale"):
            return "multiplies angles that start at 0"
        if parts[-1] == "mix_bias":
            return (
                "a mix that keeps the mean has no gradient while the functional is the mean; live after the first step"
            )
        return super().inert(parts, init)


_PARTS: dict[tuple[int, int, str], Callable[..., torch.Tensor]] = {}


def _part(start: int, count: int) -> Callable[..., torch.Tensor]:
    """``a l + c`` of ``count`` mix logits from ``start`` on; one function object a choice, which the editor caches by."""

    def part(logits: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        mine = logits[-bias.numel() :][start : start + count]
        return mine * gate + along(bias[start : start + count], mine)

    return _PARTS.setdefault((start, count, "part"), part)


def _angles(start: int, count: int) -> Callable[..., torch.Tensor]:
    """``scale * tanh(a l + c)``: bounded entries of a skew matrix."""

    def angles(logits: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return scale * torch.tanh(_part(start, count)(logits, gate, bias))

    return _PARTS.setdefault((start, count, "angles"), angles)
