"""Whether a model fits in memory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .stored import Stored

MEMINFO = Path("/proc/meminfo")


def shortage(tensors: Iterable[Stored]) -> dict[str, float] | None:
    """Gigabytes needed to check a model and those available; None where it fits, or where that is not known.

    Needed are the Program and its source model as stored, and the Program once more in float64 for gradients.
    """
    needed = 0
    for tensor in tensors:
        size = tensor.entry.stop - tensor.entry.start
        width = tensor.dtype.itemsize if tensor.dtype is not None else 1
        needed += 2 * size + size * 8 // width
    free = _available()
    return None if free is None or needed <= free else {"needed GB": needed / 1e9, "available GB": free / 1e9}


def _available() -> int | None:
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return None
    found = next((line.split() for line in lines if line.startswith("MemAvailable:")), None)
    return int(found[1]) * 1024 if found else None
