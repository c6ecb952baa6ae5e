"""A GGUF file's header: its metadata, and whether every tensor fits into the file."""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hcx.rewrite.errors import SourceError

from .files import check_not_empty, damaged

# the value types of fixed size: (struct format, bytes), by their number in the file
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_DEEPEST_ARRAY = 4


@dataclass
class _Cursor:
    """A position in the mapped file; reading past the end raises struct.error or IndexError."""

    blob: mmap.mmap
    at: int = 0

    def number(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self.blob, self.at)
        self.at += struct.calcsize(layout)
        return value

    def skip(self, count: int) -> None:
        if self.at + count > len(self.blob):
            raise IndexError
        self.at += count

    def string(self) -> str:
        length = self.number("<Q")
        start = self.at
        self.skip(length)
        return self.blob[start : self.at].decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        """One metadata value; arrays are walked over and given back as their length."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or depth > _DEEPEST_ARRAY:
            raise ValueError(f"metadata of unknown type {kind}")
        inner, count = self.number("<I"), self.number("<Q")
        if inner in _SCALARS:
            self.skip(count * struct.calcsize(_SCALARS[inner]))
        else:
            for _ in range(count):  # every element takes bytes, so the file's end stops a false count
                self.value(inner, depth + 1)
        return count


def check_gguf(path: Path) -> dict[str, object]:
    """Check that a GGUF file is whole, and return its metadata with each array replaced by its length.

    Raises:
        SourceError: not GGUF, a version that cannot be read, or "damaged or incomplete".
    """
    check_not_empty(path)
    with path.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as blob:
        if blob[:4] != b"GGUF":
            raise damaged(path, "it does not start with the GGUF mark")
        try:
            return _read(path, _Cursor(blob, 4))
        except (struct.error, IndexError, ValueError, OverflowError) as error:
            reason = f"its header makes no sense ({error})" if type(error) is ValueError else "it ends in its header"
            raise damaged(path, reason) from error


def _read(path: Path, cursor: _Cursor) -> dict[str, object]:
    """Metadata and tensor table; every tensor must end within the file."""
    version, tensors, entries = cursor.number("<I"), cursor.number("<Q"), cursor.number("<Q")
    if version not in (2, 3):
        raise SourceError(
            f"{path.name} is GGUF of version {version}; versions 2 and 3 of little-endian files are read",
            where=str(path),
            hint="convert it with a current llama.cpp",
        )
    metadata: dict[str, object] = {}
    for _ in range(entries):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.number("<I"))
    table = [_tensor(cursor) for _ in range(tensors)]
    if not table:
        raise damaged(path, "it holds no tensors")
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0:
        raise ValueError(f"alignment {alignment}")
    start = -(-cursor.at // alignment) * alignment
    for name, offset, count in table:
        if start + offset + count > len(cursor.blob):
            raise damaged(path, f"tensor {name!r} ends at byte {start + offset + count} of {len(cursor.blob)}")
    return metadata


def _tensor(cursor: _Cursor) -> tuple[str, int, int]:
    """(name, offset into the data, bytes) of one tensor."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    name, dimensions = cursor.string(), cursor.number("<I")
    if dimensions > 8:
        raise ValueError(f"a tensor of {dimensions} dimensions")
    shape = [cursor.number("<Q") for _ in range(dimensions)]
    kind, offset = cursor.number("<I"), cursor.number("<Q")
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    return name, offset, math.prod(shape) // block * block_bytes
