"""Stores equal initializers once."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import onnx_ir as ir

SAMPLE = 64
"""Entries looked at before whole tensors are compared."""


def merge_equal(graph: ir.Graph, preferred: list[str] | None = None) -> None:
    """Keep one initializer of each content (dtype, shape and bytes); uses of the others are redirected.

    Args:
        graph: changed in place.
        preferred: names that win over others, best first.
    """
    rank = {name: index for index, name in enumerate(preferred or [])}
    kept = _Contents()
    for value in sorted(graph.initializers.values(), key=lambda v: rank.get(v.name, len(rank))):
        twin = kept.find(value.const_value)
        if twin is None or value.is_graph_output():
            kept.add(value.name, value.const_value)
        else:
            ir.convenience.replace_all_uses_with(value, graph.initializers[twin])
            del graph.initializers[value.name]


def aliases(graph: ir.Graph, tensors: dict[str, ir.TensorProtocol]) -> dict[str, str]:
    """Names of tensors that are not in the graph -> the initializer with their content."""
    held = _Contents()
    for name, value in graph.initializers.items():
        held.add(name, value.const_value)
    found = {name: held.find(t) for name, t in tensors.items() if name not in graph.initializers}
    return {name: home for name, home in found.items() if home is not None}


class _Contents:
    """Tensors by content; whole tensors are compared only where a few entries agree."""

    def __init__(self) -> None:
        self._groups: dict[tuple[Any, ...], list[tuple[str, np.ndarray]]] = defaultdict(list)

    def add(self, name: str, tensor: ir.TensorProtocol) -> None:
        self._groups[_signature(tensor)].append((name, tensor.numpy()))

    def find(self, tensor: ir.TensorProtocol) -> str | None:
        array = tensor.numpy()
        return next(
            (name for name, other in self._groups.get(_signature(tensor), ()) if _same_bytes(array, other)), None
        )


def _signature(tensor: ir.TensorProtocol) -> tuple[Any, ...]:
    array = np.ravel(tensor.numpy())
    step = max(1, array.size // SAMPLE)
    return tensor.dtype, tuple(tensor.shape), array[::step].tobytes()


def _same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    """Bit for bit (so that NaN equals NaN, and 0 differs from -0)."""
    return a.ctypes.data == b.ctypes.data or np.array_equal(_bytes(a), _bytes(b))


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
