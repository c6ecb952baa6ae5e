"""A .safetensors header, checked against the file's size before anything is allocated."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hcx.rewrite.errors import SourceError

from .files import check_not_empty, damaged, read_json

# bits of one element; a dtype that is not listed is checked for its offsets alone
_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}


def check_safetensors(path: Path) -> int:
    """Check that a .safetensors file is whole, and return how many tensors it holds.

    The layout is 8 bytes of header length (little-endian), the JSON header, then the data; the tensors' byte ranges
    must cover the data without gap, overlap or rest.

    Raises:
        SourceError: "damaged or incomplete", with what does not fit.
    """
    header, data_size = _header(path)
    spans = sorted(_span(path, name, entry) for name, entry in header.items() if name != "__metadata__")
    expected = 0
    for start, stop, name in spans:
        if start != expected:
            raise damaged(path, f"tensor {name!r} starts at byte {start} of the data, not at {expected}")
        expected = stop
    if expected != data_size:
        raise damaged(path, f"its header describes {expected} bytes of data and the file holds {data_size}")
    return len(spans)


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: dtype as the format spells it, shape, and its bytes ``[start, stop)`` in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def entries(path: Path) -> dict[str, Entry]:
    """What a file holds by name, from its header alone.

    Raises:
        SourceError: the header is damaged.
    """
    header, data_size = _header(path)
    offset, found = path.stat().st_size - data_size, {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, stop, _ = _span(path, name, entry)
            found[name] = Entry(entry["dtype"], tuple(entry["shape"]), offset + start, offset + stop)
    return found


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The JSON header and the number of data bytes after it."""
    check_not_empty(path)
    size = path.stat().st_size
    with path.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if length > size - 8:
            raise damaged(path, f"its header claims {length} bytes and the file has {size}")
        text = handle.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(path, "its header is not JSON") from error
    if not isinstance(header, dict):
        raise damaged(path, "its header is not a JSON object")
    return header, size - 8 - length


def _span(path: Path, name: str, entry: object) -> tuple[int, int, str]:
    """(start, stop, name) of one tensor, with its shape checked against its bytes."""
    try:
        (start, stop), shape, dtype = entry["data_offsets"], entry["shape"], entry["dtype"]  # type: ignore[index]
        whole = all(type(number) is int and number >= 0 for number in (start, stop, *shape)) and start <= stop
    except (TypeError, KeyError, ValueError) as error:
        raise damaged(path, f"the header entry of {name!r} is malformed") from error
    if not whole:
        raise damaged(path, f"the header entry of {name!r} holds impossible numbers")
    bits = _BITS.get(dtype)
    if bits and math.prod(shape) * bits != (stop - start) * 8:
        raise damaged(path, f"tensor {name!r} of shape {shape} and dtype {dtype} does not have {stop - start} bytes")
    return start, stop, name


def shards(index: Path) -> list[Path]:
    """The weight files that a ``*.index.json`` names, each of which must lie beside it.

    Raises:
        SourceError: a shard is missing, or its name leads out of the folder.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise damaged(index, "it has no weight_map")
    files = []
    for name in sorted({str(value) for value in weight_map.values()}):
        if Path(name).name != name:
            raise SourceError(
                f"{index.name} names a file outside its folder: {name!r}",
                where=str(index),
                hint="shards must lie beside the index",
            )
        if not (index.parent / name).is_file():
            raise damaged(index.parent / name, f"the file is missing, and {index.name} says it belongs to the model")
        files.append(index.parent / name)
    return files
