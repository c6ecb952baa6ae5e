"""Complex tensors as pairs of real numbers in a last dimension of 2.

ONNX has no complex arithmetic. What rotary embeddings need is covered: making pairs, moving them about, multiplying.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
from hcx.export.onnx_direct.emitting.emitter import Emitter, Given, Operand
from hcx.export.onnx_direct.emitting.symbols import Size
from hcx.export.onnx_direct.emitting.unsupported import UnsupportedError

from .registry import H, op
from .shape import slice_ as real_slice


def complex_op(*names: str) -> Callable[[H], H]:
    return op(*names, complex_numbers=True)


def _pairs(e: Emitter, x: Operand) -> ir.Value:
    """[..., 2] of a complex or real operand."""
    if x.dtype.is_complex:
        return x.value
    real = e.op("Unsqueeze", x, e.axes(x.rank))
    return e.op("Concat", real, e.op("Sub", real, real), axis=-1)


def _split(e: Emitter, x: Operand) -> tuple[ir.Value, ...]:
    return e.op("Split", _pairs(e, x), axis=-1, num_outputs=2, outputs=2)


@complex_op(
    "view_as_complex.default",
    "view_as_real.default",
    "clone.default",
    "detach.default",
    "alias.default",
    "contiguous.default",
    "lift_fresh_copy.default",
    "to.dtype",
    "to.device",
    "to.dtype_layout",
    "resolve_conj.default",
)
def same(e: Emitter, x: Operand) -> ir.Value:
    return x.value


@complex_op("polar.default")
def polar(e: Emitter, abs: Operand, angle: Operand) -> ir.Value:
    parts = (e.op("Mul", abs, e.op(kind, angle)) for kind in ("Cos", "Sin"))
    return e.op("Concat", *(e.op("Unsqueeze", p, e.axes(e.out.rank)) for p in parts), axis=-1)


@complex_op("complex.default")
def make(e: Emitter, real: Operand, imag: Operand) -> ir.Value:
    return e.op("Concat", *(e.op("Unsqueeze", p, e.axes(e.out.rank)) for p in (real, imag)), axis=-1)


@complex_op("mul.Tensor", "mul.Scalar")
def mul(e: Emitter, x: Operand, other: Given) -> ir.Value:
    """(a + bi)(c + di) = (ac − bd) + (ad + bc)i; a real factor scales both."""
    if isinstance(other, int | float):
        return e.op("Mul", x, e.const(float(other), e.out.dtype.to_real()))
    if not isinstance(other, Operand):
        raise UnsupportedError("multiplication with a complex number")
    if not x.dtype.is_complex or not other.dtype.is_complex:
        pair, real = (x, other) if x.dtype.is_complex else (other, x)
        return e.op("Mul", pair, e.op("Unsqueeze", real, e.axes(real.rank)))
    (a, b), (c, d) = _split(e, x), _split(e, other)
    first = e.op("Sub", e.op("Mul", a, c), e.op("Mul", b, d))
    return e.op("Concat", first, e.op("Add", e.op("Mul", a, d), e.op("Mul", b, c)), axis=-1)


@complex_op("conj.default", "_conj.default", "conj_physical.default")
def conj(e: Emitter, x: Operand) -> ir.Value:
    return e.op("Mul", x, e.const([1.0, -1.0], e.out.dtype.to_real()))


@complex_op("real.default")
def real(e: Emitter, x: Operand) -> ir.Value:
    return e.op("Gather", x, e.const(0), axis=-1)


@complex_op("imag.default")
def imag(e: Emitter, x: Operand) -> ir.Value:
    return e.op("Gather", x, e.const(1), axis=-1)


@complex_op("unsqueeze.default")
def unsqueeze(e: Emitter, x: Operand, dim: Given) -> ir.Value:
    return e.op("Unsqueeze", x, e.axes(dim + x.rank + 1 if dim < 0 else dim))


@complex_op("slice.Tensor")
def slice_(e: Emitter, x: Operand, dim: int = 0, start: Given = None, end: Given = None, step: Given = 1) -> ir.Value:
    return real_slice(e, x, dim, start, end, step)


@complex_op("select.int")
def select(e: Emitter, x: Operand, dim: Given, index: Given) -> ir.Value:
    return e.op("Gather", x, e.const(index), axis=x.axis(dim))


@complex_op("index.Tensor")
def index(e: Emitter, x: Operand, indices: Given) -> ir.Value:
    """Rows of a table, for instance by position."""
    if len(indices) != 1:
        raise UnsupportedError("indexing a complex tensor along several dimensions")
    return e.op("Gather", x, indices[0], axis=0)


@complex_op("view.default", "reshape.default", "_unsafe_view.default", "flatten.using_ints")
def reshape(
    e: Emitter, x: Operand, size: Given = None, shape: Given = None, start_dim: Given = None, end_dim: Given = None
) -> ir.Value:
    return e.reshape(x, _with_pair(e.out.shape))


@complex_op("transpose.int")
def transpose(e: Emitter, x: Operand, dim0: int, dim1: int) -> ir.Value:
    perm = list(range(x.rank + 1))
    a, b = x.axis(dim0), x.axis(dim1)
    perm[a], perm[b] = b, a
    return e.op("Transpose", x, perm=perm)


@complex_op("expand.default")
def expand(e: Emitter, x: Operand, size: Given) -> ir.Value:
    return e.expand(x, _with_pair(x.shape), _with_pair(e.out.shape))


def _with_pair(shape: tuple[Size, ...]) -> tuple[Size, ...]:
    return (*shape, 2)
