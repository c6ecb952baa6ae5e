"""Normalisation layers, in evaluation mode."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import sympy
import torch
from hcx.export.onnx_direct.emitting.emitter import Emitter, Given, Operand
from hcx.export.onnx_direct.emitting.unsupported import UnsupportedError

from .registry import op


@op("layer_norm.default")
def layer_norm(
    e: Emitter,
    x: Operand,
    normalized_shape: Given,
    weight: Operand | None = None,
    bias: Operand | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> ir.Value:
    axis = x.rank - len(normalized_shape)
    scale = (
        weight if weight is not None else e.array(np.ones(normalized_shape, dtype=e.const(1.0, x.dtype).dtype.numpy()))
    )
    return e.op("LayerNormalization", x, scale, bias, axis=axis, epsilon=float(eps))


@op("native_layer_norm.default")
def native_layer_norm(
    e: Emitter, x: Operand, normalized_shape: Given, weight: Given, bias: Given, eps: float
) -> list[ir.Value]:
    axis = x.rank - len(normalized_shape)
    if weight is None:
        raise UnsupportedError("native_layer_norm without a weight")
    return list(e.op("LayerNormalization", x, weight, bias, axis=axis, epsilon=float(eps), outputs=3))


@op("rms_norm.default")
def rms_norm(
    e: Emitter, x: Operand, normalized_shape: Given, weight: Operand | None = None, eps: Given = None
) -> ir.Value:
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    if weight is not None and len(normalized_shape) == 1:
        return rms(e, x, weight, eps)
    dims = e.axes(*range(x.rank - len(normalized_shape), x.rank))
    value = _over_rms(e, x, dims, eps)
    return value if weight is None else e.op("Mul", value, weight)


def rms(e: Emitter, x: Operand, weight: Operand, eps: float) -> ir.Value:
    """x / sqrt(mean(x², last) + eps) · weight; one node from opset 23 on."""
    if e.opset >= 23:
        return e.op("RMSNormalization", x, weight, axis=-1, epsilon=float(eps))
    return e.op("Mul", _over_rms(e, x, e.axes(x.rank - 1), eps), weight)


def _over_rms(e: Emitter, x: Operand, axes: Given, eps: float) -> ir.Value:
    mean = e.op("ReduceMean", e.op("Mul", x, x), axes, keepdims=1)
    return e.op("Mul", x, e.op("Reciprocal", e.op("Sqrt", e.op("Add", mean, e.const(float(eps), x.dtype)))))


@op("batch_norm.default")
def batch_norm(
    e: Emitter,
    x: Operand,
    weight: Given,
    bias: Given,
    running_mean: Given,
    running_var: Given,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> ir.Value:
    if training:
        raise UnsupportedError("batch_norm with the statistics of the batch")
    return _batch_norm(e, x, weight, bias, running_mean, running_var, eps)


@op("_native_batch_norm_legit_no_training.default")
def batch_norm_no_training(
    e: Emitter,
    x: Operand,
    weight: Given,
    bias: Given,
    running_mean: Given,
    running_var: Given,
    momentum: float,
    eps: float,
) -> list[ir.Value]:
    empty = e.const([], x.dtype)
    return [_batch_norm(e, x, weight, bias, running_mean, running_var, eps), empty, empty]


def _batch_norm(
    e: Emitter, x: Operand, weight: Given, bias: Given, mean: Operand, variance: Operand, eps: float
) -> ir.Value:
    channels = mean.shape[0]
    scale = weight if weight is not None else e.const([1.0] * channels, x.dtype)
    shift = bias if bias is not None else e.const([0.0] * channels, x.dtype)
    return e.op("BatchNormalization", x, scale, shift, mean, variance, epsilon=float(eps))


@op("group_norm.default")
def group_norm(
    e: Emitter,
    x: Operand,
    num_groups: int,
    weight: Operand | None = None,
    bias: Operand | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> ir.Value:
    """Instance normalisation of each group as one channel, then the affine part by channel."""
    rest = sympy.Mul(*x.shape[1:]) / num_groups
    grouped = e.reshape(x, (x.shape[0], num_groups, int(rest) if rest.is_Integer else rest))
    ones, zeros = e.const([1.0] * num_groups, x.dtype), e.const([0.0] * num_groups, x.dtype)
    value = e.reshape(e.op("InstanceNormalization", grouped, ones, zeros, epsilon=float(eps)), x.shape)
    by_channel = (x.shape[1],) + (1,) * (x.rank - 2)
    if weight is not None:
        value = e.op("Mul", value, e.reshape(weight, by_channel))
    return value if bias is None else e.op("Add", value, e.reshape(bias, by_channel))


@op("instance_norm.default")
def instance_norm(
    e: Emitter,
    x: Operand,
    weight: Given,
    bias: Given,
    running_mean: Given,
    running_var: Given,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> ir.Value:
    if not use_input_stats:
        return _batch_norm(e, x, weight, bias, running_mean, running_var, eps)
    channels = x.shape[1]
    if not isinstance(channels, int):
        raise UnsupportedError("instance_norm over an open number of channels")
    scale = weight if weight is not None else e.const([1.0] * channels, x.dtype)
    shift = bias if bias is not None else e.const([0.0] * channels, x.dtype)
    return e.op("InstanceNormalization", x, scale, shift, epsilon=float(eps))


@op("_weight_norm.default", "_weight_norm_interface.default")
def weight_norm(e: Emitter, v: Operand, g: Operand, dim: int = 0) -> ir.Value | list[ir.Value]:
    """v · g / ‖v‖ over all dimensions but one; the interface also returns the norm."""
    others = [d for d in range(v.rank) if d != v.axis(dim)] if dim != -1 or v.rank == 1 else list(range(v.rank))
    norm = e.op("ReduceL2", v, e.axes(*others), keepdims=1)
    value = e.op("Mul", v, e.op("Div", g, norm))
    return [value, norm] if len(e.outs) == 2 else value
