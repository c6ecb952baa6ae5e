"""Building blocks of the direct emitter: operands, nodes, constants and casts."""

from __future__ import annotations

import functools
from collections import ChainMap
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, overload

import numpy as np
import onnx_ir as ir
import torch

from .decompose import Known
from .symbols import Size, Symbols
from .unsupported import UnsupportedError

Given: TypeAlias = Any
"""An argument as the graph gives it: what its kind is depends on the operator's schema and on the call."""

DTYPES: dict[torch.dtype, ir.DataType] = {
    torch.float32: ir.DataType.FLOAT,
    torch.float64: ir.DataType.DOUBLE,
    torch.float16: ir.DataType.FLOAT16,
    torch.int64: ir.DataType.INT64,
    torch.int32: ir.DataType.INT32,
    torch.int16: ir.DataType.INT16,
    torch.int8: ir.DataType.INT8,
    torch.uint8: ir.DataType.UINT8,
    torch.bool: ir.DataType.BOOL,
}


def onnx_dtype(dtype: torch.dtype) -> ir.DataType:
    """ONNX element type; raises UnsupportedError for types without arithmetic in ONNX Runtime on CPU."""
    if dtype not in DTYPES:
        raise UnsupportedError(f"dtype {dtype}")
    return DTYPES[dtype]


@dataclass(frozen=True)
class Operand:
    """One tensor of the fx graph: its ONNX value with torch's dtype and shape (sizes are ints or expressions)."""

    value: ir.Value
    dtype: torch.dtype
    shape: tuple[Size, ...]

    @property
    def rank(self) -> int:
        return len(self.shape)

    def axis(self, dim: int) -> int:
        """A dimension index counted from the front."""
        return dim + max(self.rank, 1) if dim < 0 else dim


Scalar = bool | int | float | Any  # Any: a sympy expression


class Emitter:
    """Collects ONNX nodes; equal nodes are made once.

    Attributes:
        opset: version of the default domain.
        out: dtype and shape of the fx node being emitted (``value`` is unset until it is done).
        outs: the same for nodes with several results.
        scope: module path of that node, used in node names.
    """

    def __init__(self, opset: int, upcast: bool = False, reserved: list[str] | None = None):
        self.opset, self.upcast, self._reserved = opset, upcast, set(reserved or ())
        self.symbols = Symbols(self)
        self.nodes: list[ir.Node] = []
        self.initializers: dict[str, ir.Value] = {}
        self.scope = ""
        self.definitions: Known = {}
        self.outs: tuple[Operand, ...] = ()
        self._known: ChainMap[tuple[Any, ...], tuple[ir.Value, ...]] = ChainMap()
        self.constants: dict[tuple[Any, ...], ir.Value] = {}
        self._names: dict[str, int] = dict.fromkeys(self._reserved, 1)

    @property
    def out(self) -> Operand:
        return self.outs[0]

    # -- nodes

    @overload
    def op(
        self, kind: str, *inputs: ir.Value | Operand | None, outputs: Literal[1] = 1, **attributes: Any
    ) -> ir.Value: ...

    @overload
    def op(
        self, kind: str, *inputs: ir.Value | Operand | None, outputs: int, **attributes: Any
    ) -> tuple[ir.Value, ...]: ...

    def op(
        self, kind: str, *inputs: ir.Value | Operand | None, outputs: int = 1, **attributes: Any
    ) -> ir.Value | tuple[ir.Value, ...]:
        """Add a node (or return the equal one made before); a value, or a tuple if ``outputs`` > 1."""
        values = [v.value if isinstance(v, Operand) else v for v in inputs]
        while values and values[-1] is None:
            values.pop()
        key = (kind, outputs, *(id(v) for v in values), *((k, _frozen(v)) for k, v in sorted(attributes.items())))
        if key not in self._known:
            node = ir.node(kind, values, attributes or None, num_outputs=outputs, name=self.name(kind))
            for index, value in enumerate(node.outputs):
                value.name = node.name if outputs == 1 else f"{node.name}.{index}"
            self.nodes.append(node)
            self._known[key] = tuple(node.outputs)
        made = self._known[key]
        return made[0] if outputs == 1 else made

    def name(self, kind: str) -> str:
        """A unique node name below the current module path."""
        stem = f"{self.scope}/{kind}" if self.scope else kind
        self._names[stem] = count = self._names.get(stem, 0) + 1
        return stem if count == 1 else f"{stem}_{count}"

    def subgraph(self) -> Emitter:
        """An emitter for the body of a control-flow node; it sees outer values, the outer one does not see its own."""
        inner = Emitter.__new__(Emitter)
        inner.__dict__.update(self.__dict__)
        inner.nodes, inner._known = [], self._known.new_child()
        inner.symbols = self.symbols.child(inner)
        return inner

    # -- constants

    def const(self, value: Any, dtype: torch.dtype = torch.int64) -> ir.Value:
        """An initializer from a number or nested list; equal constants are one initializer."""
        return self.array(np.array(value, dtype=onnx_dtype(self.dtype(dtype)).numpy()))

    def array(self, array: np.ndarray) -> ir.Value:
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self.constants:
            name = f"const.{len(self.constants)}"
            tensor = ir.tensor(array, name=name)
            self.constants[key] = self.initializer(name, tensor)
        return self.constants[key]

    def initializer(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        """Register a stored tensor under a name; one that is an input's or output's steps aside."""
        name = f"{name}.stored" if name in self._reserved else name
        value = ir.Value(name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=tensor.shape)
        self.initializers[name] = value
        return value

    def axes(self, *dims: int) -> ir.Value:
        return self.const(list(dims))

    # -- operands

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype computed in: bfloat16 becomes float32 when upcasting."""
        return torch.float32 if self.upcast and dtype is torch.bfloat16 else dtype

    def cast(self, value: ir.Value | Operand, source: torch.dtype, target: torch.dtype) -> ir.Value:
        value = value.value if isinstance(value, Operand) else value
        source, target = self.dtype(source), self.dtype(target)
        return value if source == target else self.op("Cast", value, to=int(onnx_dtype(target)))

    def to(self, x: Operand | Scalar, dtype: torch.dtype) -> ir.Value:
        """A tensor or number as a value of the dtype; numbers become 0-d."""
        if isinstance(x, Operand):
            return self.cast(x, x.dtype, dtype)
        if isinstance(x, bool | int | float):
            return self.const(x, dtype)
        return self.cast(self.op("Squeeze", self.symbols.value(x), self.axes(0)), torch.int64, dtype)

    def result(self, value: ir.Value, dtype: torch.dtype) -> ir.Value:
        """Cast a computed value to the dtype of the node's output."""
        return self.cast(value, dtype, self.out.dtype)

    def promote(self, *items: Operand | Scalar) -> torch.dtype:
        """torch's type promotion: tensors with dimensions first, then 0-d tensors, then numbers by category only."""
        result: torch.dtype | None = None
        for group in _promotion_groups(items):
            dtype = functools.reduce(torch.promote_types, group)
            if result is None or _category(dtype) > _category(result):
                result = dtype
        return self.dtype(result or torch.float32)

    # -- shapes

    def shape(self, sizes: tuple[Size, ...] | list[Size]) -> ir.Value:
        """Target of a Reshape; at most one -1."""
        unknown = [i for i, s in enumerate(sizes) if not isinstance(s, int)]
        if len(unknown) == 1 and 0 not in sizes:
            return self.const([s if isinstance(s, int) else -1 for s in sizes])
        return self.sizes(sizes)

    def sizes(self, sizes: tuple[Size, ...] | list[Size]) -> ir.Value:
        """A 1-d int64 tensor of sizes."""
        if all(isinstance(s, int) for s in sizes):
            return self.const([int(s) for s in sizes])
        parts: list[Any] = []
        for size in sizes:
            if isinstance(size, int) and parts and isinstance(parts[-1], list):
                parts[-1].append(size)
            else:
                parts.append([size] if isinstance(size, int) else self.symbols.value(size))
        values = [self.const(p) if isinstance(p, list) else p for p in parts]
        return values[0] if len(values) == 1 else self.op("Concat", *values, axis=0)

    def reshape(self, value: ir.Value | Operand, sizes: tuple[Size, ...] | list[Size]) -> ir.Value:
        """Reshape; a Reshape of a Reshape is one.

        A size of 0 is a size (an empty cache), not ONNX's "copy that dimension".
        """
        value = value.value if isinstance(value, Operand) else value
        producer = value.producer()
        if producer is not None and producer.op_type == "Reshape":
            value = producer.inputs[0]
        shape = self.shape(sizes)
        constant = shape.const_value is not None and 0 not in sizes
        return self.op("Reshape", value, shape) if constant else self.op("Reshape", value, shape, allowzero=1)

    def expand(self, value: ir.Value | Operand, shape: tuple[Size, ...], target: tuple[Size, ...]) -> ir.Value:
        """Broadcast; dimensions that keep their size are left to ONNX broadcasting (1 in the target)."""
        shape = (1,) * (len(target) - len(shape)) + tuple(shape)
        wanted = [1 if a == b else b for a, b in zip(shape, target, strict=True)]
        if all(isinstance(s, int) and s == 1 for s in wanted):
            return value.value if isinstance(value, Operand) else value
        return self.op("Expand", value, self.sizes(wanted))


def _frozen(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return id(value) if isinstance(value, ir.Graph) else value


def _promotion_groups(items: tuple[Operand | Scalar, ...]) -> list[list[torch.dtype]]:
    tensors = [i for i in items if isinstance(i, Operand)]
    numbers = [i for i in items if not isinstance(i, Operand)]
    kinds = [
        torch.bool if isinstance(n, bool) else torch.float32 if isinstance(n, float) else torch.int64 for n in numbers
    ]
    groups = [[t.dtype for t in tensors if t.rank], [t.dtype for t in tensors if not t.rank], kinds]
    return [g for g in groups if g]


def _category(dtype: torch.dtype) -> int:
    return 0 if dtype is torch.bool else 2 if dtype.is_floating_point else 3 if dtype.is_complex else 1
