"""Codes of 2 to 8 bits in bytes.

The last axis is packed, low bits first: a byte holds ``8 / p`` codes of ``p`` bits for ``p`` in 1, 2, 4, 8, so two
4-bit codes ``(2k, 2k + 1)`` share byte k with the first in the low half (the layout of ONNX Runtime's MatMulNBits). A
code of any other width is cut into such parts, low part first (6 = 2 + 4), and the parts are stored one after another:
every width takes exactly its bits, up to the last byte of a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import torch


def parts(bits: int) -> list[int]:
    """Widths that a code is cut into, low bits first.

    >>> [parts(b) for b in (3, 4, 5, 6, 7)]
    [[1, 2], [4], [1, 4], [2, 4], [1, 2, 4]]
    """
    return [p for p in (1, 2, 4, 8) if bits & p]


def packed_size(count: int, bits: int) -> int:
    """Bytes for ``count`` codes."""
    return sum(ceil(count * p / 8) for p in parts(bits))


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """``uint8[..., count] -> uint8[..., packed_size(count, bits)]``.

    >>> pack(torch.tensor([1, 2, 3], dtype=torch.uint8), 4)
    tensor([33,  3], dtype=torch.uint8)
    """
    planes, low = [], 0
    for width in parts(bits):
        each = 8 // width
        plane = (codes >> low) & (2**width - 1)
        plane = torch.nn.functional.pad(plane, (0, -plane.shape[-1] % each)).unflatten(-1, (-1, each))
        byte = plane[..., 0].clone()
        for place in range(1, each):
            byte |= plane[..., place] << (place * width)
        planes.append(byte)
        low += width
    return torch.cat(planes, -1)


def fields(bits: int) -> list[torch.Tensor]:
    """What :func:`unpack` needs: for each part the masks of its fields in a byte (uint8), and what a masked byte is
    multiplied with to give its share of the code (float32); exact, and no shifts, which few exporters know.

    >>> fields(4)
    [tensor([ 15, 240], dtype=torch.uint8), tensor([1.0000, 0.0625])]
    """
    found, low = [], 0
    for width in parts(bits) if bits < 8 else ():
        places = range(0, 8, width)
        found.append(torch.tensor([(2**width - 1) << place for place in places], dtype=torch.uint8))
        found.append(torch.tensor([2.0 ** (low - place) for place in places]))
        low += width
    return found


def unpack(packed: torch.Tensor, bits: int, count: int, constants: Sequence[torch.Tensor]) -> torch.Tensor:
    """Inverse of :func:`pack` as float32; leading dimensions may be of any (also symbolic) size.

    Args:
        constants: from :func:`fields`.

    >>> unpack(torch.tensor([33, 3], dtype=torch.uint8), 4, 3, fields(4))
    tensor([1., 2., 3.])
    """
    if bits == 8:
        return packed.to(torch.float32)
    result: torch.Tensor | None = None
    start = 0
    for width, masks, factors in zip(parts(bits), constants[::2], constants[1::2], strict=True):
        size = ceil(count * width / 8)
        plane = packed.narrow(-1, start, size) if size != packed.shape[-1] else packed
        levels = ((plane.unsqueeze(-1) & masks).to(torch.float32) * factors).flatten(-2)
        levels = levels.narrow(-1, 0, count) if size * 8 // width != count else levels
        result = levels if result is None else result + levels
        start += size
    assert result is not None  # every width has parts
    return result
