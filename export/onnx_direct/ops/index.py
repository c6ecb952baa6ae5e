"""Reading and writing at computed positions."""

from __future__ import annotations

import onnx_ir as ir
import torch
from hcx.export.onnx_direct.emitting.emitter import Emitter, Given, Operand
from hcx.export.onnx_direct.emitting.symbols import Size
from hcx.export.onnx_direct.emitting.unsupported import UnsupportedError

from .registry import op


@op("index_select.default")
def index_select(e: Emitter, x: Operand, dim: Given, index: Operand) -> ir.Value:
    return e.op("Gather", x, index, axis=x.axis(dim))


@op("gather.default")
def gather(e: Emitter, x: Operand, dim: Given, index: Operand, sparse_grad: bool = False) -> ir.Value:
    return e.op("GatherElements", x, index, axis=x.axis(dim))


@op("take_along_dim.default")
def take_along_dim(e: Emitter, x: Operand, indices: Operand, dim: Given = None) -> ir.Value:
    if dim is None:
        raise UnsupportedError("take_along_dim without a dimension")
    axis = x.axis(dim)
    both = e.out.shape
    wide = e.expand(x, x.shape, tuple(x.shape[i] if i == axis else s for i, s in enumerate(both)))
    return e.op("GatherElements", wide, e.expand(indices, indices.shape, both), axis=axis)


@op("scatter.src", "scatter.value")
def scatter(e: Emitter, x: Operand, dim: Given, index: Operand, src: Given = None, value: Given = None) -> ir.Value:
    updates = src.value if src is not None else e.expand(e.to(value, x.dtype), (), index.shape)
    return e.op("ScatterElements", x, index, updates, axis=x.axis(dim))


@op("scatter_add.default")
def scatter_add(e: Emitter, x: Operand, dim: Given, index: Operand, src: Operand) -> ir.Value:
    return e.op("ScatterElements", x, index, src, axis=x.axis(dim), reduction="add")


@op("select_scatter.default")
def select_scatter(e: Emitter, x: Operand, src: Operand, dim: Given, index: Given) -> ir.Value:
    axis = x.axis(dim)
    return _replace(e, x, e.op("Unsqueeze", src, e.axes(axis)), axis, index, index + 1 if index != -1 else None, 1)


@op("slice_scatter.default")
def slice_scatter(
    e: Emitter, x: Operand, src: Operand, dim: int = 0, start: Given = None, end: Given = None, step: Given = 1
) -> ir.Value:
    return _replace(e, x, src.value, x.axis(dim), start or 0, end, step)


def _replace(e: Emitter, x: Operand, src: Given, axis: int, start: Size, end: Size | None, step: Size) -> ir.Value:
    """Write a slice: the positions are sliced like the tensor itself."""
    size = x.shape[axis]
    end = 2**63 - 1 if end is None else end
    if start == 0 and step == 1 and (end == size or (isinstance(end, int) and end >= 2**63 - 1)):
        return src
    positions = e.op("Range", e.to(0, torch.int64), e.to(size, torch.int64), e.to(1, torch.int64))
    chosen = e.op("Slice", positions, e.sizes([start]), e.sizes([end]), e.axes(0), e.sizes([step]))
    perm = [axis, *(d for d in range(x.rank) if d != axis)]
    back = [perm.index(d) for d in range(x.rank)]
    front = e.op("Transpose", x, perm=perm), e.op("Transpose", src, perm=perm)
    written = e.op("ScatterND", front[0], e.op("Unsqueeze", chosen, e.axes(1)), front[1])
    return e.op("Transpose", written, perm=back)


@op("index.Tensor", "_unsafe_index.Tensor")
def index(e: Emitter, x: Operand, indices: Given) -> ir.Value:
    """Advanced indexing: one tensor is a Gather, several are a GatherND over their common shape."""
    used = [(d, i) for d, i in enumerate(indices) if i is not None]
    if any(i.dtype in (torch.bool, torch.uint8) for _, i in used):
        return _masked(e, x, used)
    if len(used) == 1:
        dim, positions = used[0]
        return e.op("Gather", x, positions, axis=dim)
    dims = [d for d, _ in used]
    adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
    perm = dims + [d for d in range(x.rank) if d not in dims]
    front = x.value if perm == sorted(perm) else e.op("Transpose", x, perm=perm)
    common = _common(i.shape for _, i in used)
    value = e.op("GatherND", front, _tuples(e, [i for _, i in used], common))
    if not adjacent or dims[0] == 0:
        return value
    shared, before = len(common), dims[0]  # torch puts the indexed dimensions where they were
    order = [*range(shared, shared + before), *range(shared), *range(shared + before, e.out.rank)]
    return e.op("Transpose", value, perm=order)


def _tuples(e: Emitter, indices: list[Operand], common: tuple[Size, ...]) -> ir.Value:
    """Index tensors as one tensor of tuples [*common, n]."""
    wide = [e.expand(e.to(i, torch.int64), i.shape, common) for i in indices]
    return e.op("Concat", *(e.op("Unsqueeze", w, e.axes(len(common))) for w in wide), axis=-1)


def _common(shapes: Given) -> tuple[Size, ...]:
    """Broadcast shape; of two open sizes the traced graph guarantees equality."""
    shapes = list(shapes)
    rank = max(len(s) for s in shapes)
    padded = [(1,) * (rank - len(s)) + tuple(s) for s in shapes]
    return tuple(next((s for s in column if s != 1), 1) for column in zip(*padded, strict=True))


def _masked(e: Emitter, x: Operand, used: list[tuple[int, Operand]]) -> ir.Value:
    if len(used) > 1 or used[0][0] != 0:
        raise UnsupportedError("indexing by several tensors of which one is a mask")
    positions = e.op("Transpose", e.op("NonZero", e.to(used[0][1], torch.bool)), perm=[1, 0])
    return e.op("GatherND", x, positions)


@op("index_put.default", "_unsafe_index_put.default")
def index_put(e: Emitter, x: Operand, indices: Given, values: Operand, accumulate: bool = False) -> ir.Value:
    used = [(d, i) for d, i in enumerate(indices) if i is not None]
    if [d for d, _ in used] != list(range(len(used))):
        raise UnsupportedError("index_put behind a dimension that is kept")
    if any(i.dtype in (torch.bool, torch.uint8) for _, i in used):
        return _put_where(e, x, used, values, accumulate)
    common = _common(i.shape for _, i in used)
    target = (*common, *x.shape[len(used) :])
    updates = e.expand(values, values.shape, target)
    return e.op(
        "ScatterND", x, _tuples(e, [i for _, i in used], common), updates, reduction="add" if accumulate else "none"
    )


def _put_where(e: Emitter, x: Operand, used: Given, values: Operand, accumulate: bool) -> ir.Value:
    """A mask and one value."""
    if len(used) > 1 or values.rank or accumulate:
        raise UnsupportedError("index_put with a mask and more than one value")
    mask = used[0][1]
    shape = (*mask.shape, *(1,) * (x.rank - mask.rank))
    return e.op("Where", mask if mask.rank == x.rank else e.reshape(mask, shape), values, x)


@op("nonzero.default")
def nonzero(e: Emitter, x: Operand) -> ir.Value:
    return e.op("Transpose", e.op("NonZero", x), perm=[1, 0])


@op("masked_select.default")
def masked_select(e: Emitter, x: Operand, mask: Operand) -> ir.Value:
    shape = _common([x.shape, mask.shape])
    return e.op(
        "Compress",
        e.op("Reshape", e.expand(x, x.shape, shape), e.const([-1])),
        e.op("Reshape", e.expand(mask, mask.shape, shape), e.const([-1])),
        axis=0,
    )
