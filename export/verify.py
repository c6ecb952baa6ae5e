"""Runs a written file in ONNX Runtime and compares it with the Program."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hcx.rewrite.errors import ExportError, SourceError, UsageError

from .report import Comparison
from .samples import Sample
from .session import OnnxSession

TOLERANCE: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-3, 30.0),
    torch.float32: (1e-3, 30.0),
    torch.float16: (5e-3, 1.0),
    torch.bfloat16: (2e-2, 1.0),
}
"""Absolute error allowed, and the values up to which it holds (30: a decoder's logits); larger ones allow more."""

TIE = 1e-5
"""Relative to the scale: entries closer than this are a tie, whose order rounding may change."""


def references(program: Any, sets: list[Sample], taps: bool) -> list[list[torch.Tensor]]:
    """What the Program gives; inputs are copied, since a graph may change them."""
    with torch.no_grad():
        return [[t.detach().clone() for t in program.run_flat([t.clone() for t in s.flat], taps=taps)] for s in sets]


def compare(
    path: Path,
    names: list[str],
    sets: list[Sample],
    expected: list[list[torch.Tensor]],
    *,
    dtype: torch.dtype | None = None,
) -> list[Comparison]:
    """Run the file on every sample, with graph optimisations off and on.

    Args:
        path: the model file.
        names: output names.
        sets: inputs.
        expected: the Program's outputs on them.
        dtype: whose tolerance holds; by default that of each output.

    Raises:
        ExportError: an output differs, and the message names it; or ONNX Runtime cannot load or run the file.
    """
    try:
        return _compare(path, names, sets, expected, dtype)
    except (SourceError, UsageError) as error:
        raise ExportError(
            error.what,
            where=None if isinstance(error, SourceError) else error.where,
            hint="nothing was written; try another opset or producer",
        ) from error


def _compare(
    path: Path, names: list[str], sets: list[Sample], expected: list[Any], dtype: torch.dtype | None
) -> list[Comparison]:
    found = []
    for optimized in (False, True):
        session = OnnxSession(path, optimize=optimized)
        for sample, reference in zip(sets, expected, strict=True):
            got = session.run_flat([t.clone() for t in sample.flat])
            run = _Run(
                optimized,
                {n: tuple(t.shape) for n, t in zip(session.input_names, sample.flat, strict=True)},
                sample.slack,
                dtype,
            )
            errors = [run.difference(name, g, r) for name, g, r in zip(names, got, reference, strict=True)]
            scale = max((_largest(r) for r in reference), default=0.0)
            top1 = sample.slack > 1 or run.top1(names, got, reference)
            found.append(Comparison(optimized, run.shapes, max(errors, default=0.0), scale, top1))
    return found


@dataclass(frozen=True)
class _Run:
    """One sample in one session."""

    optimized: bool
    shapes: dict[str, tuple[int, ...]]
    slack: float
    dtype: torch.dtype | None = None

    def difference(self, name: str, got: torch.Tensor, reference: torch.Tensor) -> float:
        """Largest error of one output."""
        if got.shape != reference.shape:
            raise self._disagree(name, f"shape {tuple(got.shape)} instead of {tuple(reference.shape)}")
        if not reference.dtype.is_floating_point:
            if not torch.equal(got.to(reference.dtype), reference):
                raise self._disagree(name, f"{int((got != reference).sum())} of {reference.numel()} entries")
            return 0.0
        tolerance, upto = TOLERANCE[self.dtype or reference.dtype]
        got, reference = got.double(), reference.double()
        finite = torch.isfinite(reference)
        if not torch.equal(_strange(got), _strange(reference)):
            raise self._disagree(name, "NaN or infinity at other places")
        error = float((got - reference)[finite].abs().max()) if finite.any() else 0.0
        allowed = self.slack * tolerance * max(1.0, _largest(reference) / upto)
        if error > allowed:
            raise self._disagree(name, f"max error {error:.3g}, allowed {allowed:.3g}")
        return error

    def top1(self, names: list[str], got: list[torch.Tensor], reference: list[torch.Tensor]) -> bool:
        """Whether the first floating output has its largest entries at the same places; False only where they tie."""
        for name, g, r in zip(names, got, reference, strict=True):
            if not r.dtype.is_floating_point or not r.dim() or not r.numel() or not torch.isfinite(r).all():
                continue
            mine = g.argmax(-1)
            margin = (r.amax(-1) - r.gather(-1, mine[..., None])[..., 0]).max()
            dtype = self.dtype or r.dtype
            tie = TIE if dtype in (torch.float32, torch.float64) else TOLERANCE[dtype][0]
            if float(margin) > tie * max(1.0, _largest(r)):
                raise self._disagree(name, f"the largest entry is at another place (margin {float(margin):.3g})")
            return bool(torch.equal(mine, r.argmax(-1)))
        return True

    def _disagree(self, name: str, what: str) -> ExportError:
        shapes = ", ".join(f"{n} {list(s)}" for n, s in list(self.shapes.items())[:4])
        shapes += " (with masks that hide whole rows)" if self.slack > 1 else ""
        return ExportError(
            f"ONNX Runtime disagrees with the program on output `{name}`: {what}",
            where=f"ONNX Runtime with graph optimisations {'on' if self.optimized else 'off'}, inputs {shapes}",
            hint="nothing was written; try optimize=False, another opset, or another producer",
        )


def _strange(values: torch.Tensor) -> torch.Tensor:
    """1 for NaN, 2 for inf, 3 for -inf, 0 elsewhere."""
    return values.isnan().int() + 2 * values.isposinf().int() + 3 * values.isneginf().int()


def _largest(tensor: torch.Tensor) -> float:
    if not tensor.dtype.is_floating_point or not tensor.numel():
        return 0.0
    return float(torch.nan_to_num(tensor.double(), nan=0.0, posinf=0.0, neginf=0.0).abs().max())
