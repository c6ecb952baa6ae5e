"""Views and copies: reshape, permute, slice, split, join, repeat."""

from __future__ import annotations

import onnx_ir as ir
import sympy
import torch
from hcx.export.onnx_direct.emitting.emitter import Emitter, Given, Operand
from hcx.export.onnx_direct.emitting.symbols import Size
from hcx.export.onnx_direct.emitting.unsupported import UnsupportedError

from .registry import Handler, op

END = 2**63 - 1


@op(
    "clone.default",
    "contiguous.default",
    "detach.default",
    "alias.default",
    "lift_fresh_copy.default",
    "lift_fresh.default",
    "view_as.default",
    "to.dtype",
    "to.dtype_layout",
    "to.device",
    "to.other",
    "_to_copy.default",
    "type_as.default",
)
def identity(e: Emitter, x: Operand, other: Given = None) -> ir.Value:
    """Copies and casts: values have no storage in ONNX."""
    if x.shape != e.out.shape:
        return e.reshape(x, e.out.shape)
    return e.cast(x, x.dtype, e.out.dtype)


@op(
    "view.default",
    "reshape.default",
    "_unsafe_view.default",
    "flatten.using_ints",
    "unflatten.int",
    "squeeze.default",
    "squeeze.dim",
    "squeeze.dims",
    "_reshape_alias.default",
)
def reshape(
    e: Emitter,
    x: Operand,
    size: Given = None,
    shape: Given = None,
    start_dim: Given = None,
    end_dim: Given = None,
    dim: Given = None,
    sizes: Given = None,
    stride: Given = None,
) -> ir.Value:
    """Anything that keeps the order of elements: the traced result says the shape."""
    return x.value if x.shape == e.out.shape else e.reshape(x, e.out.shape)


@op("unsqueeze.default")
def unsqueeze(e: Emitter, x: Operand, dim: Given) -> ir.Value:
    return e.op("Unsqueeze", x, e.axes(dim + x.rank + 1 if dim < 0 else dim))


def transposed(e: Emitter, x: Operand, perm: list[int]) -> ir.Value:
    return x.value if perm == sorted(perm) else e.op("Transpose", x, perm=perm)


@op("transpose.int", "swapaxes.default", "swapdims.default")
def transpose(e: Emitter, x: Operand, dim0: int, dim1: int) -> ir.Value:
    perm = list(range(x.rank))
    a, b = x.axis(dim0), x.axis(dim1)
    perm[a], perm[b] = b, a
    return transposed(e, x, perm)


@op("t.default", "numpy_T.default", "mT.default")
def matrix_transpose(e: Emitter, x: Operand) -> ir.Value:
    return x.value if x.rank < 2 else transpose(e, x, -1, -2)


@op("permute.default")
def permute(e: Emitter, x: Operand, dims: Given) -> ir.Value:
    return transposed(e, x, [x.axis(d) for d in dims])


@op("movedim.int")
def movedim(e: Emitter, x: Operand, source: Given, destination: Given) -> ir.Value:
    perm = [d for d in range(x.rank) if d != x.axis(source)]
    perm.insert(x.axis(destination), x.axis(source))
    return transposed(e, x, perm)


@op("expand.default", "expand_as.default", "broadcast_to.default")
def expand(e: Emitter, x: Operand, size: Given = None, other: Given = None) -> ir.Value:
    return e.expand(x, x.shape, e.out.shape)


@op("slice.Tensor")
def slice_(e: Emitter, x: Operand, dim: int = 0, start: Given = None, end: Given = None, step: Given = 1) -> ir.Value:
    axis = x.axis(dim)
    start = 0 if start is None else start
    whole = end is None or end == x.shape[axis] or (isinstance(end, int) and end >= END)
    if start == 0 and step == 1 and whole:
        return x.value
    return sliced(e, x, axis, start, END if end is None else end, step)


def sliced(e: Emitter, x: Operand, axis: int, start: Size, end: Size, step: Size = 1) -> ir.Value:
    return e.op("Slice", x, e.sizes([start]), e.sizes([end]), e.axes(axis), e.sizes([step]))


@op("narrow.default")
def narrow(e: Emitter, x: Operand, dim: Given, start: Given, length: Given) -> ir.Value:
    return sliced(e, x, x.axis(dim), start, start + length)


@op("select.int")
def select(e: Emitter, x: Operand, dim: Given, index: Given) -> ir.Value:
    position = e.const(index) if isinstance(index, int) else e.op("Squeeze", e.sizes([index]), e.axes(0))
    return e.op("Gather", x, position, axis=x.axis(dim))


@op(
    "split.Tensor",
    "split_with_sizes.default",
    "split.sizes",
    "chunk.default",
    "unsafe_split.Tensor",
    "unsafe_chunk.default",
    "unsafe_split_with_sizes.default",
    "tensor_split.sections",
)
def split(
    e: Emitter,
    x: Operand,
    split_size: Given = None,
    split_sizes: Given = None,
    chunks: Given = None,
    sections: Given = None,
    dim: int = 0,
) -> list[ir.Value]:
    """The traced results say the sizes of the parts."""
    axis = x.axis(dim)
    parts = [out.shape[axis] for out in e.outs]
    if len(parts) == 1:
        return [x.value]
    made = e.op("Split", x, e.sizes(parts), axis=axis, outputs=len(parts))
    return list(made)


@op("unbind.int")
def unbind(e: Emitter, x: Operand, dim: int = 0) -> list[ir.Value]:
    axis = x.axis(dim)
    return [e.op("Gather", x, e.const(i), axis=axis) for i in range(len(e.outs))]


@op("cat.default", "concat.default", "concatenate.default")
def cat(e: Emitter, tensors: Given, dim: int = 0) -> ir.Value:
    """torch ignores 1-d empty tensors among tensors of another rank (an empty cache)."""
    rank = e.out.rank
    kept = [t for t in tensors if not (t.rank == 1 and rank != 1 and t.shape == (0,))]
    values = [e.to(t, e.out.dtype) for t in kept]
    return values[0] if len(values) == 1 else e.op("Concat", *values, axis=e.out.axis(dim))


@op("stack.default")
def stack(e: Emitter, tensors: Given, dim: int = 0) -> ir.Value:
    axis = e.out.axis(dim)
    return e.op("Concat", *(e.op("Unsqueeze", e.to(t, e.out.dtype), e.axes(axis)) for t in tensors), axis=axis)


@op("repeat.default")
def repeat(e: Emitter, x: Operand, repeats: Given) -> ir.Value:
    value = e.reshape(x, (1,) * (len(repeats) - x.rank) + x.shape) if len(repeats) > x.rank else x.value
    return value if all(r == 1 for r in repeats) else e.op("Tile", value, e.sizes(repeats))


@op("tile.default")
def tile(e: Emitter, x: Operand, dims: Given) -> ir.Value:
    return repeat(e, x, [1] * (x.rank - len(dims)) + list(dims))


@op("repeat_interleave.self_int")
def repeat_interleave(e: Emitter, x: Operand, repeats: Given, dim: Given = None, output_size: Given = None) -> ir.Value:
    """Each element ``repeats`` times in place: a new axis behind ``dim``, broadcast, folded in."""
    flat = Operand(e.reshape(x, (sympy.Mul(*x.shape),)), x.dtype, (sympy.Mul(*x.shape),)) if dim is None else x
    axis = flat.axis(dim or 0)
    wide = e.op("Unsqueeze", flat, e.axes(axis + 1))
    shape = (*flat.shape[: axis + 1], 1, *flat.shape[axis + 1 :])
    target = (*flat.shape[: axis + 1], repeats, *flat.shape[axis + 1 :])
    return e.reshape(e.expand(wide, shape, target), e.out.shape)


@op("flip.default")
def flip(e: Emitter, x: Operand, dims: Given) -> ir.Value:
    value = x.value
    for dim in dims:
        value = e.op("Slice", value, e.const([-1]), e.const([-END]), e.axes(x.axis(dim)), e.const([-1]))
    return value


@op("roll.default")
def roll(e: Emitter, x: Operand, shifts: Given, dims: Given = ()) -> ir.Value:
    if not dims:
        raise UnsupportedError("roll of a flattened tensor")
    value = x.value
    for shift, dim in zip(shifts, dims, strict=True):
        axis = x.axis(dim)
        now = Operand(value, x.dtype, x.shape)
        value = (
            e.op("Concat", sliced(e, now, axis, -shift, END), sliced(e, now, axis, 0, -shift), axis=axis)
            if shift
            else value
        )
    return value


@op("constant_pad_nd.default", "pad.default")
def pad(e: Emitter, x: Operand, pad: Given, mode: str = "constant", value: Given = None) -> ir.Value:
    """torch lists pads from the last dimension; negative ones cut."""
    kind = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}[mode]
    before, after = [0] * x.rank, [0] * x.rank
    for index in range(len(pad) // 2):
        before[x.rank - 1 - index], after[x.rank - 1 - index] = pad[2 * index], pad[2 * index + 1]
    fill = e.to(value or 0, x.dtype) if kind == "constant" else None
    return e.op("Pad", x, e.sizes(before + after), fill, mode=kind)


def _triangle(upper: int) -> Handler:
    def emit(e: Emitter, x: Operand, diagonal: Given = 0) -> ir.Value:
        return e.op("Trilu", x, e.to(diagonal, torch.int64), upper=upper)

    return emit


op("tril.default")(_triangle(0))
op("triu.default")(_triangle(1))
