"""Equations of group-wise round-to-nearest.

Rows run over the inputs of one output. A group of ``g`` consecutive inputs shares a scale ``s`` and, if asymmetric, a
zero point ``z``; a weight becomes the code ``q = clamp(round(w / s) + z, 0, 2^b - 1)`` and reads as ``(q - z) s``.

- asymmetric: ``lo = min(w, 0)``, ``hi = max(w, 0)``, ``s = (hi - lo) / (2^b - 1)``, ``z = round(-lo / s)``
- symmetric: ``s = max |w| / (2^(b-1) - 1)``, ``z = 2^(b-1)``

Zero is always a code, so zeros stay exactly zero, and zeros that fill up the last group never widen its scale. Scales
are stored in float16, rounded up (no weight is then outside the range, and ``|w - (q - z) s| <= s / 2`` holds with the
stored scale); they are float32 for a weight that is too large or too small for float16. A group of zeros has scale 1.
The product of a code and a float16 scale is exact in float32; it is rounded once, to the dtype of the weight.
Source: docs/sources.md, round-to-nearest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

import torch

from .packing import pack, packed_size, unpack


@dataclass(frozen=True)
class Layout:
    """How a weight lies in codes.

    Attributes:
        shape: shape of the weight.
        columns: axes that run along a row (the inputs); all others count rows.
        bits: width of a code.
        group: inputs that share a scale; 0: the whole row.
        symmetric: zero point in the middle, none stored.
    """

    shape: tuple[int, ...]
    columns: tuple[int, ...]
    bits: int
    group: int
    symmetric: bool

    @property
    def order(self) -> tuple[int, ...]:
        """Axes of the weight: rows, then columns."""
        return (*(i for i in range(len(self.shape)) if i not in self.columns), *self.columns)

    @property
    def count(self) -> int:
        """Inputs a row."""
        return prod(self.shape[i] for i in self.columns)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return prod(self.shape) // max(self.count, 1)

    @property
    def size(self) -> int:
        """Inputs a group; a row shorter than a group is one group of its own length."""
        return min(self.group or self.count, self.count)

    @property
    def groups(self) -> int:
        """Groups a row, the last one possibly shorter."""
        return ceil(self.count / self.size)

    def bytes(self, scale_bytes: int = 2) -> int:
        """Stored bytes: codes, scales and zero points."""
        zeros = 0 if self.symmetric else packed_size(self.groups, self.bits)
        return self.rows * (packed_size(self.groups * self.size, self.bits) + self.groups * scale_bytes + zeros)


def quantise(weight: torch.Tensor, layout: Layout) -> dict[str, torch.Tensor]:
    """Codes and scales of a finite weight.

    Returns:
        ``codes`` uint8 ``[rows, bytes]``, ``scales`` float16 or float32 ``[rows, groups]`` and, if asymmetric,
        ``zeros`` uint8 ``[rows, bytes]``; codes and zero points are packed.
    """
    rows = weight.detach().permute(layout.order).reshape(layout.rows, layout.count)
    rows = rows if rows.dtype == torch.float64 else rows.float()
    rows = torch.nn.functional.pad(rows, (0, layout.groups * layout.size - layout.count))
    grouped = rows.unflatten(-1, (layout.groups, layout.size))
    top = 2**layout.bits - 1
    if layout.symmetric:
        scales = _stored(grouped.abs().amax(-1) / (2 ** (layout.bits - 1) - 1))
        zeros = torch.full_like(scales, 2 ** (layout.bits - 1), dtype=rows.dtype)
    else:
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scales = _stored(high / top - low / top)
        zeros = (-low / scales.to(rows.dtype)).round().clamp(0, top)
    codes = ((grouped / scales.to(rows.dtype).unsqueeze(-1)).round() + zeros.unsqueeze(-1)).clamp(0, top)
    result = {"codes": pack(codes.to(torch.uint8).flatten(-2), layout.bits), "scales": scales}
    return result if layout.symmetric else {**result, "zeros": pack(zeros.to(torch.uint8), layout.bits)}


def _stored(scales: torch.Tensor) -> torch.Tensor:
    """Scales as they are stored, all positive and finite."""
    largest = float(scales.max()) if scales.numel() and not scales.is_meta else 1.0
    if largest and not 2.0**-14 <= largest <= torch.finfo(torch.float16).max:
        scales = scales.float()
        return torch.where(scales > 0, scales, 1.0)
    half = scales.to(torch.float16)
    up = (half.view(torch.int16) + 1).view(torch.float16)
    half = torch.where(half.to(scales.dtype) < scales, up, half)
    return torch.where(half > 0, half, torch.ones_like(half))


def dequantise_rows(
    layout: Layout,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    constants: Sequence[torch.Tensor],
) -> torch.Tensor:
    """``(q - z) s`` of packed rows with any leading dimensions: float32 ``[..., count]``.

    Args:
        constants: from :func:`~hcx.passes.quantization.packing.fields`.
    """
    levels = unpack(codes, layout.bits, layout.groups * layout.size, constants)
    levels = levels.unflatten(-1, (layout.groups, layout.size))
    if zeros is None:
        offsets = levels - 2.0 ** (layout.bits - 1)
    else:
        offsets = levels - unpack(zeros, layout.bits, layout.groups, constants).unsqueeze(-1)
    rows: torch.Tensor = (offsets * scales.to(torch.float32).unsqueeze(-1)).flatten(-2)
    return rows if rows.shape[-1] == layout.count else rows.narrow(-1, 0, layout.count)


def dequantise(
    layout: Layout,
    dtype: torch.dtype,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    constants: Sequence[torch.Tensor],
) -> torch.Tensor:
    """The weight that packed codes stand for, contiguous, in its own shape and dtype; see :func:`dequantise_rows`."""
    weight = dequantise_rows(layout, codes, scales, zeros, constants)
    weight = weight.reshape([layout.shape[i] for i in layout.order])
    inverse = [layout.order.index(i) for i in range(len(layout.order))]
    if inverse != sorted(inverse):
        weight = weight.permute(inverse).contiguous()
    return weight if dtype == torch.float32 else weight.to(dtype)
