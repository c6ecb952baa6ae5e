"""Tensors from nothing: ranges and fills."""

from __future__ import annotations

import onnx_ir as ir
import torch
from hcx.export.onnx_direct.emitting.emitter import Emitter, Given, Operand

from .registry import op


@op("arange.default")
def arange(e: Emitter, end: Given) -> ir.Value:
    return arange_step(e, 0, end, 1)


@op("arange.start")
def arange_start(e: Emitter, start: Given, end: Given) -> ir.Value:
    return arange_step(e, start, end, 1)


@op("arange.start_step")
def arange_step(e: Emitter, start: Given, end: Given, step: Given = 1) -> ir.Value:
    dtype = e.out.dtype
    return e.op(
        "Range",
        *(
            e.to(v if not isinstance(v, int | float) or dtype.is_floating_point else int(v), dtype)
            for v in (start, end, step)
        ),
    )


def _fill(e: Emitter, value: Given) -> ir.Value:
    """The value at the traced shape."""
    scalar = e.to(value, e.out.dtype)
    return e.expand(scalar, (), e.out.shape)


@op("full.default", "new_full.default", "full_like.default")
def full(e: Emitter, fill_value: Given, x: Given = None, size: Given = None) -> ir.Value:
    return _fill(e, _number(e, fill_value))


@op("ones.default", "new_ones.default", "ones_like.default")
def ones(e: Emitter, x: Given = None, size: Given = None) -> ir.Value:
    return _fill(e, _number(e, 1))


@op(
    "zeros.default",
    "new_zeros.default",
    "zeros_like.default",
    "empty.memory_format",
    "new_empty.default",
    "empty_like.default",
)
def zeros(e: Emitter, x: Given = None, size: Given = None) -> ir.Value:
    """Also for ``empty``: its content is free."""
    return _fill(e, _number(e, 0))


@op("scalar_tensor.default")
def scalar_tensor(e: Emitter, s: Given) -> ir.Value:
    return e.to(_number(e, s), e.out.dtype)


@op("fill.Scalar", "fill.Tensor")
def fill(e: Emitter, x: Operand, value: Given) -> ir.Value:
    return _fill(e, _number(e, value))


@op("zero.default")
def zero(e: Emitter, x: Operand) -> ir.Value:
    return zeros(e)


@op("copy.default")
def copy(e: Emitter, x: Operand, src: Operand) -> ir.Value:
    return e.expand(e.to(src, e.out.dtype), src.shape, e.out.shape)


def _number(e: Emitter, value: Given) -> Given:
    """Numbers in the result's kind: full(…, True, dtype=int64) is 1."""
    if not isinstance(value, bool | int | float):
        return value
    if e.out.dtype is torch.bool:
        return bool(value)
    return float(value) if e.out.dtype.is_floating_point else int(value)


@op("one_hot.default")
def one_hot(e: Emitter, x: Operand, num_classes: Given = -1) -> ir.Value:
    classes = num_classes if num_classes != -1 else e.out.shape[-1]
    return e.op("OneHot", x, e.sizes([classes]), e.const([0, 1], e.out.dtype), axis=-1)


@op("eye.default", "eye.m")
def eye(e: Emitter, n: Given, m: Given = None) -> ir.Value:
    zeros_ = _fill(e, _number(e, 0))
    return e.op("EyeLike", zeros_)
