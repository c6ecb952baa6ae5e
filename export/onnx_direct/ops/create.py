"""Tensors from nothing: ranges and fills."""

from __future__ import annotations

import torch
from hcx.export.onnx_direct.emitting.emitter import Emitter, Operand

from .registry import op


@op("arange.default")
def arange(e: Emitter, end):
    return arange_step(e, 0, end, 1)


@op("arange.start")
def arange_start(e: Emitter, start, end):
    return arange_step(e, start, end, 1)


@op("arange.start_step")
def arange_step(e: Emitter, start, end, step=1):
    dtype = e.out.dtype
    return e.op(
        "Range",
        *(
            e.to(v if not isinstance(v, int | float) or dtype.is_floating_point else int(v), dtype)
            for v in (start, end, step)
        ),
    )


def _fill(e: Emitter, value):
    """The value at the traced shape."""
    scalar = e.to(value, e.out.dtype)
    return e.expand(scalar, (), e.out.shape)


@op("full.default", "new_full.default", "full_like.default")
def full(e: Emitter, fill_value, x=None, size=None):
    return _fill(e, _number(e, fill_value))


@op("ones.default", "new_ones.default", "ones_like.default")
def ones(e: Emitter, x=None, size=None):
    return _fill(e, _number(e, 1))


@op(
    "zeros.default",
    "new_zeros.default",
    "zeros_like.default",
    "empty.memory_format",
    "new_empty.default",
    "empty_like.default",
)
def zeros(e: Emitter, x=None, size=None):
    """Also for ``empty``: its content is free."""
    return _fill(e, _number(e, 0))


@op("scalar_tensor.default")
def scalar_tensor(e: Emitter, s):
    return e.to(_number(e, s), e.out.dtype)


@op("fill.Scalar", "fill.Tensor")
def fill(e: Emitter, x: Operand, value):
    return _fill(e, _number(e, value))


@op("zero.default")
def zero(e: Emitter, x: Operand):
    return zeros(e)


@op("copy.default")
def copy(e: Emitter, x: Operand, src: Operand):
    return e.expand(e.to(src, e.out.dtype), src.shape, e.out.shape)


def _number(e: Emitter, value):
    """Numbers in the result's kind: full(…, True, dtype=int64) is 1."""
    if not isinstance(value, bool | int | float):
        return value
    if e.out.dtype is torch.bool:
        return bool(value)
    return float(value) if e.out.dtype.is_floating_point else int(value)


@op("one_hot.default")
def one_hot(e: Emitter, x: Operand, num_classes=-1):
    classes = num_classes if num_classes != -1 else e.out.shape[-1]
    return e.op("OneHot", x, e.sizes([classes]), e.const([0, 1], e.out.dtype), axis=-1)


@op("eye.default", "eye.m")
def eye(e: Emitter, n, m=None):
    zeros_ = _fill(e, _number(e, 0))
    return e.op("EyeLike", zeros_)
