"""What a rewrite promises to keep. The driver measures it; a pass only says which one holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

UNIT = {torch.float64: 2**-52, torch.float32: 2**-23, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Unit roundoff a dtype; ``Rounding(k)`` allows k of them relative to the rms of the reference."""


@dataclass(frozen=True)
class Exact:
    """Every output is bitwise what it was."""

    def check(self, measured: dict[str, Any]) -> bool:
        return bool(measured["bitwise"])

    def __str__(self) -> str:
        return "exact"


@dataclass(frozen=True)
class Rounding:
    """Outputs move by at most ``k`` unit roundoffs, relative to the rms of the reference output."""

    k: float

    def check(self, measured: dict[str, Any]) -> bool:
        return bool(measured["ulps"] <= self.k)

    def __str__(self) -> str:
        return f"rounding({self.k:g})"


@dataclass(frozen=True)
class Metric:
    """A figure on real text or data stays below a bound (``kl`` in nats a position)."""

    name: str
    bound: float

    def check(self, measured: dict[str, Any]) -> bool:
        return math.isfinite(measured[self.name]) and measured[self.name] <= self.bound

    def __str__(self) -> str:
        return f"{self.name}<={self.bound:g}"


@dataclass(frozen=True)
class Structural:
    """The function changes on purpose; shapes, dtypes and structure stay. What changed is measured and reported."""

    def check(self, measured: dict[str, Any]) -> bool:
        return bool(measured["same_structure"])

    def __str__(self) -> str:
        return "structural"


Contract = Exact | Rounding | Metric | Structural


def combined(promised: list[Contract]) -> Contract:
    """What a sequence of rewrites promises together: roundings add up, anything that changes the function wins."""
    if any(isinstance(c, Structural) for c in promised) or sum(isinstance(c, Metric) for c in promised) > 1:
        return Structural()
    metric = next((c for c in promised if isinstance(c, Metric)), None)
    if metric is not None:
        return metric
    roundings = [c.k for c in promised if isinstance(c, Rounding)]
    return Rounding(sum(roundings)) if roundings else Exact()


def to_json(contract: Contract) -> dict[str, Any]:
    """Name and numbers of a contract."""
    return {"contract": type(contract).__name__, **vars(contract)}


def from_json(data: dict[str, Any]) -> Contract:
    """Inverse of :func:`to_json`."""
    kinds = {c.__name__: c for c in (Exact, Rounding, Metric, Structural)}
    return kinds[data["contract"]](**{k: v for k, v in data.items() if k != "contract"})


def compare(got: list[torch.Tensor], expected: list[torch.Tensor]) -> dict[str, Any]:
    """Differences of flat outputs.

    Args:
        got, expected: flat outputs over the same inputs.

    Returns:
        ``bitwise`` (NaN equals NaN), ``same_structure``, ``max_diff`` (absolute), ``ulps`` (unit roundoffs relative to
        the rms of the reference, the worst output), ``kl`` (mean KL over the last dimension of the first floating
        output, in nats), ``argmax`` (share of positions with the same largest entry there).
    """
    result: dict[str, Any] = {
        "bitwise": True,
        "same_structure": len(got) == len(expected),
        "max_diff": 0.0,
        "ulps": 0.0,
    }
    first = True
    for g, e in zip(got, expected, strict=False):
        if g.shape != e.shape or g.dtype != e.dtype:
            return {
                **result,
                "bitwise": False,
                "same_structure": False,
                "max_diff": math.inf,
                "ulps": math.inf,
                "kl": math.inf,
                "argmax": 0.0,
            }
        if not e.is_floating_point():
            result["bitwise"] &= torch.equal(g, e)
            continue
        same = torch.equal(g, e) or (
            torch.equal(torch.nan_to_num(g), torch.nan_to_num(e)) and torch.equal(g.isnan(), e.isnan())
        )
        result["bitwise"] &= same
        if not same:
            difference = (g.double() - e.double()).abs()
            worst = difference.max().item()
            finite = e.double()[e.isfinite()]
            rms = finite.square().mean().sqrt().item() if finite.numel() else 1.0
            result["max_diff"] = _worse(result["max_diff"], worst)
            result["ulps"] = _worse(result["ulps"], worst / max(rms, 1e-30) / UNIT.get(e.dtype, 2**-23))
        if first and e.dim() >= 2:
            result.update(_distributions(g, e, same))
        first = False
    result.setdefault("kl", 0.0)
    result.setdefault("argmax", 1.0)
    return result


def _worse(a: float, b: float) -> float:
    return math.inf if math.isnan(b) else max(a, b)


def _distributions(got: torch.Tensor, expected: torch.Tensor, same: bool) -> dict[str, float]:
    if same or not expected.numel():
        return {"kl": 0.0, "argmax": 1.0}
    p, q = expected.double().log_softmax(-1), got.double().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).mean().item()
    return {
        "kl": max(kl, 0.0) if not math.isnan(kl) else math.inf,
        "argmax": (got.argmax(-1) == expected.argmax(-1)).double().mean().item(),
    }


def merge(measurements: list[dict[str, Any]]) -> dict[str, Any]:
    """The worst of several measurements."""
    return {
        "bitwise": all(m["bitwise"] for m in measurements),
        "same_structure": all(m["same_structure"] for m in measurements),
        "max_diff": max(m["max_diff"] for m in measurements),
        "ulps": max(m["ulps"] for m in measurements),
        "kl": max(m["kl"] for m in measurements),
        "argmax": min(m["argmax"] for m in measurements),
    }
