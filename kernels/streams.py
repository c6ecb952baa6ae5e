"""``torch.ops.hcx.stream_*``: a residual stream carried as several streams.

Layout: streams first, ``X[n, ...]``, so that a static mix is one matrix product over everything behind it and norms over
trailing dimensions apply to all streams at once. Coefficients are static (``[n]``, ``[n, n]``) or vary per position
(``[n, ...]``, ``[n, n, ...]`` with the dimensions of a value but the last). They are kept in float32 or better, sums
run in that precision, and results are cast once.

The definitions here are plain torch with autograd; faster kernels may replace them behind the same names.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

_LIBRARY: Any = torch.library.Library("hcx", "DEF")
_LIBRARY.define("stream_expand(Tensor value, Tensor weights) -> Tensor")
_LIBRARY.define("stream_read(Tensor streams, Tensor weights) -> Tensor")
_LIBRARY.define("stream_write(Tensor streams, Tensor update, Tensor mix, Tensor weights) -> Tensor")
_LIBRARY.define("stream_blend(Tensor streams, Tensor update, Tensor mix, Tensor weights) -> Tensor")
_LIBRARY.define("stream_add(Tensor streams, Tensor update, Tensor weights) -> Tensor")


def expand(value: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``X_i = w_i x``: one value to n streams, ``[...] -> [n, ...]``."""
    return (_along(weights, value) * value.to(_precise(value, weights))).to(value.dtype)


def read(streams: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``h = sum_i w_i X_i``: n streams to one value, ``[n, ...] -> [...]``.

    >>> read(torch.tensor([[1.0], [3.0]]), torch.tensor([0.5, 0.5]))
    tensor([2.])
    """
    precise = streams.to(_precise(streams, weights))
    if weights.dim() == 1:
        flat = precise.reshape(precise.shape[0], -1)
        return (weights.to(flat.dtype) @ flat).reshape(precise.shape[1:]).to(streams.dtype)
    weights = weights.to(precise.dtype).unsqueeze(-1)
    if _at_once(precise):
        return (weights * precise).sum(0).to(streams.dtype)
    return _weighted(weights.unbind(0), precise.unbind(0)).to(streams.dtype)


def write(streams: torch.Tensor, update: torch.Tensor, mix: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``X'_i = sum_j H_ij X_j + w_i y``: H_ij is the weight from stream j to stream i.

    Args:
        streams: ``[n, ...]``.
        update: y, ``[...]``.
        mix: H, ``[n, n]`` or ``[n, n, ...]``.
        weights: w, ``[n]`` or ``[n, ...]``.
    """
    precise = streams.to(_precise(streams, mix))
    along, update = _along(weights, update), update.to(precise.dtype)
    if mix.dim() == 2:
        mixed = (mix.to(precise.dtype) @ precise.reshape(precise.shape[0], -1)).reshape(precise.shape)
        return torch.addcmul(mixed, along, update).to(streams.dtype)
    matrix = mix.to(precise.dtype).unsqueeze(-1)
    if _at_once(precise):
        return torch.addcmul((matrix * precise.unsqueeze(0)).sum(1), along, update).to(streams.dtype)
    parts = precise.unbind(0)
    rows = [_weighted(row.unbind(0), parts) for row in matrix.unbind(0)]
    return _written(rows, along, update).to(streams.dtype)


def blend(streams: torch.Tensor, update: torch.Tensor, mix: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """:func:`write` for a mix whose rows sum to 1: ``X'_i = X_i + sum_j H_ij (X_j - X_i) + w_i y``.

    The same function, but equal streams stay equal bit for bit, and where H is near the identity the large values of a
    stream are not rounded again.
    """
    precise = streams.to(_precise(streams, mix))
    along, update = _along(weights, update), update.to(precise.dtype)
    matrix = mix.to(precise.dtype)
    matrix = matrix.reshape([*mix.shape] + [1] * (precise.dim() - 1)) if mix.dim() == 2 else matrix.unsqueeze(-1)
    if _at_once(precise):
        moved = (matrix * (precise.unsqueeze(0) - precise.unsqueeze(1))).sum(1)
        return torch.addcmul(precise + moved, along, update).to(streams.dtype)
    rows = [row.unbind(0) for row in matrix.unbind(0)]
    parts = precise.unbind(0)
    mixed = list(parts)
    for i, j in itertools.combinations(range(len(parts)), 2):
        apart = parts[j] - parts[i]  # serves both directions
        mixed[i] = torch.addcmul(mixed[i], rows[i][j], apart)
        mixed[j] = torch.addcmul(mixed[j], rows[j][i], apart, value=-1)
    return _written(mixed, along, update).to(streams.dtype)


def add(streams: torch.Tensor, update: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``X'_i = X_i + w_i y``: a write whose mix is the identity."""
    precise = _precise(streams, weights)
    return torch.addcmul(streams.to(precise), _along(weights, update), update.to(precise)).to(streams.dtype)


def _weighted(weights: tuple[torch.Tensor, ...], parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    total = weights[0] * parts[0]
    for weight, part in zip(weights[1:], parts[1:], strict=True):
        total = torch.addcmul(total, weight, part)
    return total


def _written(mixed: list[torch.Tensor], weights: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.addcmul(x, w, update) for x, w in zip(mixed, weights.unbind(0), strict=True)])


_FEW = 1 << 14


def _at_once(streams: torch.Tensor) -> bool:
    """Whether to compute all n x n products in one tensor: fewer calls for a token or two, but n times the memory of the
    streams, which for 128 tokens already costs 30 times as much as going through the streams one by one."""
    size = streams.numel()
    return isinstance(size, int) and size <= _FEW and not torch.compiler.is_compiling()


def _along(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Static weights ``[n]`` or weights per position ``[n, ...]``, ready to multiply ``[n, *value.shape]``."""
    weights = weights.to(_precise(value, weights))
    return weights.unsqueeze(-1) if weights.dim() > 1 else weights.reshape([-1] + [1] * value.dim())


def _precise(*tensors: torch.Tensor) -> torch.dtype:
    """float32, or the widest of the operands where that is wider."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


DEFINITIONS = {
    "stream_expand": expand,
    "stream_read": read,
    "stream_write": write,
    "stream_blend": blend,
    "stream_add": add,
}
for _name, _function in DEFINITIONS.items():
    _LIBRARY.impl(_name, _function, "CompositeImplicitAutograd")
