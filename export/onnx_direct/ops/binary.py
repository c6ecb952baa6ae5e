"""Elementwise operators of two or three tensors or numbers, with torch's type promotion."""

from __future__ import annotations

import onnx_ir as ir
import torch
from hcx.export.onnx_direct.emitting.emitter import Emitter, Given, Operand, Scalar
from hcx.export.onnx_direct.emitting.symbols import floor_divide

from .registry import Handler, op

COMPARISONS = {"eq": "Equal", "lt": "Less", "le": "LessOrEqual", "gt": "Greater", "ge": "GreaterOrEqual"}
LOGIC = {"and": "And", "or": "Or", "xor": "Xor"}
BOTH = ("{}.Tensor", "{}.Scalar")


def _binary(e: Emitter, kind: str, a: Given, b: Given) -> ir.Value:
    """Compute in the promoted dtype (int32 for bools, which ONNX arithmetic does not take), return in the result's."""
    dtype = e.promote(a, b)
    dtype = torch.int32 if dtype is torch.bool else dtype
    return e.result(e.op(kind, e.to(a, dtype), e.to(b, dtype)), dtype)


def _is(x: Given, number: float) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and x == number


def _unchanged(e: Emitter, x: Operand) -> bool:
    return x.dtype == e.out.dtype and x.shape == e.out.shape


@op("add.Tensor", "add.Scalar")
def add(e: Emitter, x: Operand, other: Given, alpha: float = 1) -> ir.Value:
    if _is(other, 0) and _unchanged(e, x):
        return x.value
    return _binary(e, "Add", x, _scaled(e, other, alpha))


@op("sub.Tensor", "sub.Scalar")
def sub(e: Emitter, x: Operand, other: Given, alpha: float = 1) -> ir.Value:
    return _binary(e, "Sub", x, _scaled(e, other, alpha))


@op("rsub.Tensor", "rsub.Scalar")
def rsub(e: Emitter, x: Operand, other: Given, alpha: float = 1) -> ir.Value:
    return _binary(e, "Sub", other, _scaled(e, x, alpha))


def _scaled(e: Emitter, x: Given, alpha: float) -> Operand | Scalar:
    if _is(alpha, 1):
        return x
    if not isinstance(x, Operand):
        return x * alpha
    dtype = e.promote(x, alpha)
    return Operand(e.op("Mul", e.to(x, dtype), e.to(alpha, dtype)), dtype, x.shape)


@op("mul.Tensor", "mul.Scalar", "multiply.Tensor")
def mul(e: Emitter, x: Operand, other: Given) -> ir.Value:
    if _is(other, 1) and _unchanged(e, x):
        return x.value
    return _binary(e, "Mul", x, other)


@op("div.Tensor", "div.Scalar", "true_divide.Tensor", "divide.Tensor", "div.Tensor_mode", "div.Scalar_mode")
def div(e: Emitter, x: Operand, other: Given, rounding_mode: Given = None) -> ir.Value:
    if rounding_mode == "floor":
        return floor_div(e, x, other)
    dtype = e.promote(x, other)
    if rounding_mode is None:
        dtype = dtype if dtype.is_floating_point else e.out.dtype
        return e.result(e.op("Div", e.to(x, dtype), e.to(other, dtype)), dtype)
    quotient = e.op("Div", e.to(x, dtype), e.to(other, dtype))
    if dtype.is_floating_point:
        quotient = e.op("Mul", e.op("Sign", quotient), e.op("Floor", e.op("Abs", quotient)))
    return e.result(quotient, dtype)


@op("floor_divide.default", "floor_divide.Scalar")
def floor_div(e: Emitter, x: Operand, other: Given) -> ir.Value:
    dtype = e.promote(x, other)
    a, b = e.to(x, dtype), e.to(other, dtype)
    return e.result(e.op("Floor", e.op("Div", a, b)) if dtype.is_floating_point else floor_divide(e, a, b), dtype)


@op("remainder.Tensor", "remainder.Scalar")
def remainder(e: Emitter, x: Operand, other: Given) -> ir.Value:
    """The sign of the divisor, as in torch."""
    dtype = e.promote(x, other)
    a, b = e.to(x, dtype), e.to(other, dtype)
    if not dtype.is_floating_point:
        return e.result(e.op("Mod", a, b), dtype)
    return e.result(e.op("Sub", a, e.op("Mul", b, e.op("Floor", e.op("Div", a, b)))), dtype)


@op("fmod.Tensor", "fmod.Scalar")
def fmod(e: Emitter, x: Operand, other: Given) -> ir.Value:
    dtype = e.promote(x, other)
    return e.result(e.op("Mod", e.to(x, dtype), e.to(other, dtype), fmod=1), dtype)


@op("maximum.default", "max.other")
def maximum(e: Emitter, x: Operand, other: Given) -> ir.Value:
    return _binary(e, "Max", x, other)


@op("minimum.default", "min.other")
def minimum(e: Emitter, x: Operand, other: Given) -> ir.Value:
    return _binary(e, "Min", x, other)


@op("pow.Tensor_Scalar", "pow.Tensor_Tensor")
def pow_(e: Emitter, x: Operand, exponent: Given) -> ir.Value:
    if _is(exponent, 2):
        value = e.to(x, e.out.dtype)
        return e.op("Mul", value, value)
    if _is(exponent, 0.5):
        return e.op("Sqrt", e.to(x, e.out.dtype))
    return _power(e, x, exponent)


@op("pow.Scalar")
def pow_of_number(e: Emitter, x: Given, exponent: Operand) -> ir.Value:
    return _power(e, x, exponent)


def _power(e: Emitter, x: Given, exponent: Given) -> ir.Value:
    dtype = e.promote(x, exponent)
    return e.result(e.op("Pow", e.to(x, dtype), e.to(exponent, dtype)), dtype)


def _comparison(kind: str, negated: bool = False) -> Handler:
    def emit(e: Emitter, x: Operand, other: Given) -> ir.Value:
        dtype = e.promote(x, other)
        dtype = torch.int32 if dtype is torch.bool and kind != "Equal" else dtype
        value = e.op(kind, e.to(x, dtype), e.to(other, dtype))
        return e.op("Not", value) if negated else value

    return emit


for _name, _kind in COMPARISONS.items():
    op(*(b.format(_name) for b in BOTH))(_comparison(_kind))
op("ne.Tensor", "ne.Scalar")(_comparison("Equal", negated=True))


def _logical(kind: str) -> Handler:
    def emit(e: Emitter, x: Operand, other: Given) -> ir.Value:
        return e.op(kind, e.to(x, torch.bool), e.to(other, torch.bool))

    return emit


def _bitwise(kind: str) -> Handler:
    def emit(e: Emitter, x: Operand, other: Given) -> ir.Value:
        dtype = e.promote(x, other)
        return e.result(
            e.op(kind if dtype is torch.bool else f"Bitwise{kind}", e.to(x, dtype), e.to(other, dtype)), dtype
        )

    return emit


for _name, _kind in LOGIC.items():
    op(f"logical_{_name}.default")(_logical(_kind))
    op(*(b.format(n) for n in (f"bitwise_{_name}", f"__{_name}__") for b in BOTH))(_bitwise(_kind))


@op("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def where(e: Emitter, condition: Operand, x: Given, other: Given) -> ir.Value:
    return e.op("Where", e.to(condition, torch.bool), e.to(x, e.out.dtype), e.to(other, e.out.dtype))


@op("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(e: Emitter, x: Operand, mask: Operand, value: Given) -> ir.Value:
    return e.op("Where", mask, e.to(value, x.dtype), x)


@op("lerp.Scalar", "lerp.Tensor")
def lerp(e: Emitter, x: Operand, end: Operand, weight: Given) -> ir.Value:
    return e.op("Add", x, e.op("Mul", e.to(weight, x.dtype), e.op("Sub", end, x)))


@op("addcmul.default")
def addcmul(e: Emitter, x: Operand, tensor1: Operand, tensor2: Operand, value: Given = 1) -> ir.Value:
    product = Operand(_binary(e, "Mul", tensor1, tensor2), e.out.dtype, e.out.shape)
    return _binary(e, "Add", x, _scaled(e, product, value))


@op("addcdiv.default")
def addcdiv(e: Emitter, x: Operand, tensor1: Operand, tensor2: Operand, value: Given = 1) -> ir.Value:
    quotient = Operand(_binary(e, "Div", tensor1, tensor2), e.out.dtype, e.out.shape)
    return _binary(e, "Add", x, _scaled(e, quotient, value))


def _shift(direction: str) -> Handler:
    def emit(e: Emitter, x: Operand, other: Given) -> ir.Value:
        """Bits of unsigned numbers; of signed ones a product or a division that rounds down."""
        dtype = e.promote(x, other)
        a, b = e.to(x, dtype), e.to(other, dtype)
        if dtype is torch.uint8:
            return e.op("BitShift", a, b, direction=direction)
        power = e.op("Pow", e.const(2, dtype), b)
        return e.op("Mul", a, power) if direction == "LEFT" else floor_divide(e, a, power)

    return emit


for _name, _word, _direction in (("rshift", "right", "RIGHT"), ("lshift", "left", "LEFT")):
    op(f"__{_name}__.Tensor", f"__{_name}__.Scalar", f"bitwise_{_word}_shift.Tensor")(_shift(_direction))
    op(f"bitwise_{_word}_shift.Tensor_Scalar")(_shift(_direction))
