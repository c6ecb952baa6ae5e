"""Sizes that depend on the inputs: as expressions over named dimensions, and as ONNX values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import sympy
import torch

from .unsupported import UnsupportedError

if TYPE_CHECKING:
    import onnx_ir as ir

    from .emitter import Emitter

Size: TypeAlias = "int | sympy.Expr"


class Symbols:
    """Canonical size expressions and their values in the ONNX graph.

    torch.export gives each dimension its own symbol; here dimensions that the Program names alike are one symbol, so
    ``s89+s70`` and ``s0+s70`` are both ``past+sequence`` and computed once.
    """

    def __init__(self, emitter: Emitter):
        self._emitter = emitter
        self._names: dict[sympy.Symbol, sympy.Expr] = {}
        self._sources: dict[sympy.Expr, tuple[ir.Value, int]] = {}
        self._scalars: dict[sympy.Symbol, ir.Value] = {}
        self._canonical: dict[sympy.Expr, Size] = {}

    def child(self, emitter: Emitter) -> Symbols:
        """The same names for another emitter (the body of a control-flow node)."""
        inner = Symbols.__new__(Symbols)
        inner.__dict__.update(self.__dict__)
        inner._emitter = emitter
        inner._sources, inner._scalars = dict(self._sources), dict(self._scalars)
        return inner

    def name_dims(self, fake: torch.Tensor, dims: tuple[int | str, ...]) -> None:
        """Identify the symbols of a traced input with the Program's dimension names."""
        for size, dim in zip(fake.shape, dims, strict=True):
            if isinstance(size, torch.SymInt) and isinstance(dim, str) and size.node.expr.is_Symbol:
                self._names[size.node.expr] = named(dim)

    def bind_input(self, value: ir.Value, shape: tuple[Size, ...]) -> None:
        """Let sizes, sums included, be read from an input."""
        for axis, size in enumerate(shape):
            if not isinstance(size, int):
                self._sources.setdefault(size, (value, axis))

    def bind_result(self, value: ir.Value, shape: tuple[Size, ...]) -> None:
        """Let sizes that only the data knows (of a ``nonzero``) be read from the result."""
        for axis, size in enumerate(shape):
            if isinstance(size, sympy.Symbol):
                self._sources.setdefault(size, (value, axis))

    def bind_scalar(self, size: Size, value: ir.Value) -> None:
        """Let a size be read from a 1-element int64 tensor (``aten.item``)."""
        if isinstance(size, sympy.Symbol):
            self._scalars[size] = value

    def size(self, size: int | torch.SymInt) -> Size:
        """An int, or a canonical expression."""
        if isinstance(size, int):
            return size
        expr = size.node.expr
        if expr not in self._canonical:
            known = sympy.sympify(expr.xreplace({s: n for s, n in self._names.items() if s in expr.free_symbols}))
            self._canonical[expr] = int(known) if known.is_Integer else known
        return self._canonical[expr]

    def shape(self, fake: torch.Tensor) -> tuple[Size, ...]:
        return tuple(self.size(s) for s in fake.shape)

    def value(self, size: Size) -> ir.Value:
        """A size as an int64 tensor of shape [1]."""
        if isinstance(size, int):
            return self._emitter.const([size])
        if size in self._scalars:
            return self._scalars[size]
        if size in self._sources:
            source, axis = self._sources[size]
            return self._emitter.op("Shape", source, start=axis, end=axis + 1)
        if isinstance(size, sympy.Symbol):
            raise UnsupportedError(f"size {size} is not a dimension of an input")
        return self._expression(size)

    def _expression(self, size: sympy.Expr) -> ir.Value:
        kind = type(size).__name__
        if kind == "Integer" or size.is_Integer:
            return self._emitter.const([int(size)])
        arguments = [self.value(int(a) if a.is_Integer else a) for a in size.args]
        if kind in ("Add", "Mul", "Max", "Min"):
            total = arguments[0]
            for other in arguments[1:]:
                total = self._emitter.op(kind, total, other)
            return total
        if kind == "Pow" and size.args[1].is_Integer and int(size.args[1]) > 1:
            return self._emitter.op("Pow", *arguments)
        if kind in ("FloorDiv", "CleanDiv"):
            return floor_divide(self._emitter, *arguments)
        if kind in ("Mod", "PythonMod"):
            return self._emitter.op("Mod", *arguments)
        raise UnsupportedError(f"size expression {size}")


def floor_divide(e: Emitter, a: Any, b: Any) -> ir.Value:
    """Integer division rounding down; ONNX's Div rounds towards zero, Mod has the sign of the divisor."""
    return e.op("Div", e.op("Sub", a, e.op("Mod", a, b)), b)


def named(dim: str) -> sympy.Expr:
    """``past+sequence`` as an expression over dimension symbols."""
    return sympy.Add(*(sympy.Symbol(name, integer=True, nonnegative=True) for name in dim.split("+")))


def dim_text(size: Size) -> int | str:
    """How a size is declared in the file: a number, a name, or an expression over names."""
    if isinstance(size, int):
        return size
    if isinstance(size, sympy.Add) and all(a.is_Symbol for a in size.args):
        return "+".join(sorted(str(a) for a in size.args))
    return str(size).replace(" ", "")
