"""Activation functions."""

from __future__ import annotations

import math

import onnx_ir as ir
import torch
from hcx.export.onnx_direct.emitting.emitter import Emitter, Given, Operand
from hcx.export.onnx_direct.emitting.unsupported import UnsupportedError

from .registry import op


def _one(e: Emitter, value: float) -> ir.Value:
    return e.const(value, e.out.dtype)


@op("relu.default")
def relu(e: Emitter, x: Operand) -> ir.Value:
    return e.op("Relu", x) if x.dtype.is_floating_point else e.op("Max", x, e.const(0, x.dtype))


@op("relu6.default")
def relu6(e: Emitter, x: Operand) -> ir.Value:
    return e.op("Clip", x, _one(e, 0), _one(e, 6))


@op("silu.default")
def silu(e: Emitter, x: Operand) -> ir.Value:
    return e.op("Mul", x, e.op("Sigmoid", x))


@op("gelu.default")
def gelu(e: Emitter, x: Operand, approximate: str = "none") -> ir.Value:
    """Gelu from opset 20 on; its definition before."""
    if e.opset >= 20:
        return e.op("Gelu", x, approximate=approximate)
    half = e.op("Mul", x, _one(e, 0.5))
    if approximate == "tanh":
        cube = e.op("Mul", e.op("Mul", e.op("Mul", x, x), x), _one(e, 0.044715))
        gate = e.op("Tanh", e.op("Mul", e.op("Add", x, cube), _one(e, math.sqrt(2 / math.pi))))
    else:
        gate = e.op("Erf", e.op("Mul", x, _one(e, math.sqrt(0.5))))
    return e.op("Mul", half, e.op("Add", gate, _one(e, 1.0)))


@op("leaky_relu.default")
def leaky_relu(e: Emitter, x: Operand, negative_slope: float = 0.01) -> ir.Value:
    return e.op("LeakyRelu", x, alpha=float(negative_slope))


@op("prelu.default", "_prelu_kernel.default")
def prelu(e: Emitter, x: Operand, weight: Operand) -> ir.Value:
    """The slope belongs to dimension 1."""
    slope = weight.value
    if weight.rank == 1 and x.rank > 2:
        slope = e.op("Reshape", weight, e.const([-1] + [1] * (x.rank - 2)))
    return e.op("PRelu", x, slope)


@op("elu.default")
def elu(e: Emitter, x: Operand, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> ir.Value:
    if (scale, input_scale) != (1, 1):
        raise UnsupportedError("elu with scales")
    return e.op("Elu", x, alpha=float(alpha))


@op("selu.default")
def selu(e: Emitter, x: Operand) -> ir.Value:
    return e.op("Selu", x, alpha=1.6732632423543772, gamma=1.0507009873554805)


@op("celu.default")
def celu(e: Emitter, x: Operand, alpha: float = 1.0) -> ir.Value:
    return e.op("Celu", x, alpha=float(alpha))


@op("softplus.default")
def softplus(e: Emitter, x: Operand, beta: float = 1.0, threshold: float = 20.0) -> ir.Value:
    """log(1+exp(beta·x))/beta, and x itself where beta·x is above the threshold."""
    scaled = e.op("Mul", x, _one(e, beta))
    smooth = e.op("Div", e.op("Softplus", scaled), _one(e, beta))
    return e.op("Where", e.op("Greater", scaled, _one(e, threshold)), x, smooth)


@op("hardtanh.default")
def hardtanh(e: Emitter, x: Operand, min_val: Given = -1.0, max_val: float = 1.0) -> ir.Value:
    return e.op("Clip", x, _one(e, min_val), _one(e, max_val))


@op("hardsigmoid.default")
def hardsigmoid(e: Emitter, x: Operand) -> ir.Value:
    return e.op("HardSigmoid", x, alpha=1 / 6, beta=0.5)


@op("hardswish.default")
def hardswish(e: Emitter, x: Operand) -> ir.Value:
    return e.op("HardSwish", x)


@op("mish.default")
def mish(e: Emitter, x: Operand) -> ir.Value:
    return e.op("Mul", x, e.op("Tanh", e.op("Softplus", x)))


@op("log_sigmoid.default")
def log_sigmoid(e: Emitter, x: Operand) -> ir.Value:
    return e.op("Neg", e.op("Softplus", e.op("Neg", x)))


@op("glu.default")
def glu(e: Emitter, x: Operand, dim: Given = -1) -> ir.Value:
    value, gate = e.op("Split", x, axis=x.axis(dim), num_outputs=2, outputs=2)
    return e.op("Mul", value, e.op("Sigmoid", gate))


@op("softmax.int", "_softmax.default")
def softmax(e: Emitter, x: Operand, dim: Given, half_to_float: bool = False) -> ir.Value:
    return e.op("Softmax", e.to(x, e.out.dtype), axis=x.axis(dim))


@op("log_softmax.int", "_log_softmax.default")
def log_softmax(e: Emitter, x: Operand, dim: Given, half_to_float: bool = False) -> ir.Value:
    return e.op("LogSoftmax", e.to(x, e.out.dtype), axis=x.axis(dim))


@op("_safe_softmax.default")
def safe_softmax(e: Emitter, x: Operand, dim: Given) -> ir.Value:
    """Softmax whose rows of nothing but −inf are 0."""
    return masked_softmax(e, e.to(x, e.out.dtype), x.axis(dim), e.out.dtype)


def masked_softmax(e: Emitter, scores: Given, axis: int, dtype: torch.dtype) -> ir.Value:
    """Softmax; a row that is −inf throughout becomes 0 (and a NaN stays NaN)."""
    top = e.op("ReduceMax", scores, e.axes(axis), keepdims=1)
    empty = e.op("Equal", top, e.const(-math.inf, dtype))
    return e.op("Where", empty, e.const(0.0, dtype), e.op("Softmax", scores, axis=axis))


@op("dropout.default", "feature_dropout.default", "alpha_dropout.default")
def dropout(e: Emitter, x: Operand, p: Given, train: bool) -> ir.Value:
    if train and p:
        raise UnsupportedError("dropout in training mode")
    return x.value
