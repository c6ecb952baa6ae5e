"""Elementwise operators of one tensor."""

from __future__ import annotations

import math

import onnx_ir as ir
import torch
from hcx.export.onnx_direct.emitting.emitter import Emitter, Given, Operand

from .registry import Handler, op

FLOAT_ONLY = {
    "exp": "Exp",
    "log": "Log",
    "sqrt": "Sqrt",
    "sin": "Sin",
    "cos": "Cos",
    "tan": "Tan",
    "tanh": "Tanh",
    "asin": "Asin",
    "acos": "Acos",
    "atan": "Atan",
    "sinh": "Sinh",
    "cosh": "Cosh",
    "asinh": "Asinh",
    "acosh": "Acosh",
    "atanh": "Atanh",
    "sigmoid": "Sigmoid",
    "erf": "Erf",
    "reciprocal": "Reciprocal",
}
ANY_NUMBER = {"abs": "Abs", "neg": "Neg", "sign": "Sign"}
WHOLE = {"floor": "Floor", "ceil": "Ceil", "round": "Round"}


def _unary(kind: str) -> Handler:
    def emit(e: Emitter, x: Operand) -> ir.Value:
        return e.op(kind, e.to(x, e.out.dtype))

    return emit


def _whole(kind: str) -> Handler:
    def emit(e: Emitter, x: Operand) -> ir.Value:
        return e.op(kind, x) if x.dtype.is_floating_point else x.value

    return emit


for _name, _kind in (FLOAT_ONLY | ANY_NUMBER).items():
    op(f"{_name}.default")(_unary(_kind))
for _name, _kind in WHOLE.items():
    op(f"{_name}.default")(_whole(_kind))


@op("rsqrt.default")
def rsqrt(e: Emitter, x: Operand) -> ir.Value:
    return e.op("Reciprocal", e.op("Sqrt", e.to(x, e.out.dtype)))


@op("square.default")
def square(e: Emitter, x: Operand) -> ir.Value:
    return e.op("Mul", x, x)


@op("trunc.default")
def trunc(e: Emitter, x: Operand) -> ir.Value:
    return e.op("Mul", e.op("Sign", x), e.op("Floor", e.op("Abs", x))) if x.dtype.is_floating_point else x.value


@op("log1p.default")
def log1p(e: Emitter, x: Operand) -> ir.Value:
    """log(1+x) exact for small x: x·log(u)/(u−1) with u = 1+x (Kahan)."""
    value, one = e.to(x, e.out.dtype), e.const(1.0, e.out.dtype)
    u = e.op("Add", value, one)
    exact = e.op("Mul", e.op("Log", u), e.op("Div", value, e.op("Sub", u, one)))
    return e.op("Where", e.op("Equal", u, one), value, e.op("Where", e.op("IsInf", u), u, exact))


@op("expm1.default")
def expm1(e: Emitter, x: Operand) -> ir.Value:
    """exp(x)−1 as 2·tanh(x/2)/(1−tanh(x/2)) for small x, direct otherwise."""
    dtype = e.out.dtype
    value, one, two = e.to(x, dtype), e.const(1.0, dtype), e.const(2.0, dtype)
    half = e.op("Tanh", e.op("Div", value, two))
    small = e.op("Div", e.op("Mul", two, half), e.op("Sub", one, half))
    return e.op("Where", e.op("Less", e.op("Abs", value), one), small, e.op("Sub", e.op("Exp", value), one))


def _scaled_log(base: float) -> Handler:
    def emit(e: Emitter, x: Operand) -> ir.Value:
        return e.op("Div", e.op("Log", e.to(x, e.out.dtype)), e.const(math.log(base), e.out.dtype))

    return emit


op("log2.default")(_scaled_log(2.0))
op("log10.default")(_scaled_log(10.0))


@op("exp2.default")
def exp2(e: Emitter, x: Operand) -> ir.Value:
    return e.op("Pow", e.const(2.0, e.out.dtype), e.to(x, e.out.dtype))


@op("isnan.default")
def isnan(e: Emitter, x: Operand) -> ir.Value:
    return e.op("IsNaN", x) if x.dtype.is_floating_point else e.op("Less", x, x)


@op("isinf.default")
def isinf(e: Emitter, x: Operand) -> ir.Value:
    return e.op("IsInf", x) if x.dtype.is_floating_point else e.op("Less", x, x)


@op("isfinite.default")
def isfinite(e: Emitter, x: Operand) -> ir.Value:
    if not x.dtype.is_floating_point:
        return e.op("Equal", x, x)
    return e.op("Not", e.op("Or", e.op("IsNaN", x), e.op("IsInf", x)))


@op("logical_not.default")
def logical_not(e: Emitter, x: Operand) -> ir.Value:
    return e.op("Not", e.to(x, torch.bool))


@op("bitwise_not.default")
def bitwise_not(e: Emitter, x: Operand) -> ir.Value:
    return e.op("Not" if x.dtype is torch.bool else "BitwiseNot", x)


@op("clamp.default", "clamp.Tensor", "clip.default", "clip.Tensor")
def clamp(e: Emitter, x: Operand, min: Given = None, max: Given = None) -> ir.Value:
    value = e.to(x, e.out.dtype)
    if min is not None:
        value = e.op("Max", value, e.to(min, e.out.dtype))
    return value if max is None else e.op("Min", value, e.to(max, e.out.dtype))


@op("clamp_min.default", "clamp_min.Tensor")
def clamp_min(e: Emitter, x: Operand, min: Given) -> ir.Value:
    return clamp(e, x, min=min)


@op("clamp_max.default", "clamp_max.Tensor")
def clamp_max(e: Emitter, x: Operand, max: Given) -> ir.Value:
    return clamp(e, x, max=max)


@op("nan_to_num.default")
def nan_to_num(e: Emitter, x: Operand, nan: Given = None, posinf: Given = None, neginf: Given = None) -> ir.Value:
    if not x.dtype.is_floating_point:
        return x.value
    limits = torch.finfo(x.dtype)
    value = e.op("Where", e.op("IsNaN", x), e.const(nan or 0.0, x.dtype), x)
    top, low = limits.max if posinf is None else posinf, limits.min if neginf is None else neginf
    value = e.op("Where", e.op("IsInf", value, detect_negative=0), e.const(top, x.dtype), value)
    return e.op("Where", e.op("IsInf", value, detect_positive=0), e.const(low, x.dtype), value)
