"""Reductions, scans, sorting."""

from __future__ import annotations

import onnx_ir as ir
import torch
from hcx.export.onnx_direct.emitting.emitter import Emitter, Given, Operand
from hcx.export.onnx_direct.emitting.unsupported import UnsupportedError

from .registry import op


def _axes(e: Emitter, x: Operand, dim: Given) -> ir.Value | None:
    """Axes as an ONNX input; None means all."""
    dims = [] if dim is None else [dim] if isinstance(dim, int) else list(dim)
    return e.axes(*(x.axis(d) for d in dims)) if dims else None


def _reduce(e: Emitter, kind: str, x: Operand, dim: Given, keepdim: bool, dtype: torch.dtype | None = None) -> ir.Value:
    dtype = dtype or e.out.dtype
    if not x.rank:
        return e.to(x, dtype)
    return e.op(kind, e.to(x, dtype), _axes(e, x, dim), keepdims=int(keepdim))


@op("sum.default", "sum.dim_IntList")
def sum_(e: Emitter, x: Operand, dim: Given = None, keepdim: bool = False) -> ir.Value:
    return _reduce(e, "ReduceSum", x, dim, keepdim)


@op("mean.default", "mean.dim")
def mean(e: Emitter, x: Operand, dim: Given = None, keepdim: bool = False) -> ir.Value:
    return _reduce(e, "ReduceMean", x, dim, keepdim)


@op("prod.default", "prod.dim_int")
def prod(e: Emitter, x: Operand, dim: Given = None, keepdim: bool = False) -> ir.Value:
    return _reduce(e, "ReduceProd", x, dim, keepdim)


def _extreme(e: Emitter, kind: str, x: Operand, dim: Given, keepdim: bool) -> ir.Value:
    """Max and min; ORT has no bool kernels for them."""
    if x.dtype is torch.bool:
        return e.cast(_reduce(e, kind, x, dim, keepdim, torch.int32), torch.int32, torch.bool)
    return _reduce(e, kind, x, dim, keepdim)


@op("amax.default", "max.default")
def amax(e: Emitter, x: Operand, dim: Given = None, keepdim: bool = False) -> ir.Value:
    return _extreme(e, "ReduceMax", x, dim, keepdim)


@op("amin.default", "min.default")
def amin(e: Emitter, x: Operand, dim: Given = None, keepdim: bool = False) -> ir.Value:
    return _extreme(e, "ReduceMin", x, dim, keepdim)


@op("any.default", "any.dim", "any.dims")
def any_(e: Emitter, x: Operand, dim: Given = None, keepdim: bool = False) -> ir.Value:
    truth = Operand(e.to(x, torch.bool), torch.bool, x.shape)
    return _extreme(e, "ReduceMax", truth, dim, keepdim)


@op("all.default", "all.dim", "all.dims")
def all_(e: Emitter, x: Operand, dim: Given = None, keepdim: bool = False) -> ir.Value:
    truth = Operand(e.to(x, torch.bool), torch.bool, x.shape)
    return _extreme(e, "ReduceMin", truth, dim, keepdim)


@op("max.dim")
def max_dim(e: Emitter, x: Operand, dim: Given, keepdim: bool = False) -> list[ir.Value]:
    return [_extreme(e, "ReduceMax", x, dim, keepdim), argmax(e, x, dim, keepdim)]


@op("min.dim")
def min_dim(e: Emitter, x: Operand, dim: Given, keepdim: bool = False) -> list[ir.Value]:
    return [_extreme(e, "ReduceMin", x, dim, keepdim), argmin(e, x, dim, keepdim)]


def _arg(e: Emitter, kind: str, x: Operand, dim: Given, keepdim: bool) -> ir.Value:
    value, axis = e.to(x, torch.int32 if x.dtype is torch.bool else x.dtype), 0 if dim is None else x.axis(dim)
    if dim is None:
        value = e.op("Reshape", value, e.const([-1]))
        found = e.op(kind, value, axis=0, keepdims=0)
        return e.op("Reshape", found, e.const([1] * x.rank)) if keepdim else found
    return e.op(kind, value, axis=axis, keepdims=int(keepdim))


@op("argmax.default")
def argmax(e: Emitter, x: Operand, dim: Given = None, keepdim: bool = False) -> ir.Value:
    return _arg(e, "ArgMax", x, dim, keepdim)


@op("argmin.default")
def argmin(e: Emitter, x: Operand, dim: Given = None, keepdim: bool = False) -> ir.Value:
    return _arg(e, "ArgMin", x, dim, keepdim)


@op("logsumexp.default")
def logsumexp(e: Emitter, x: Operand, dim: Given, keepdim: bool = False) -> ir.Value:
    """max + log Σ exp(x − max): ONNX's ReduceLogSumExp overflows in some run-times."""
    axes = _axes(e, x, dim)
    top = e.op("ReduceMax", x, axes, keepdims=1)
    total = e.op("Log", e.op("ReduceSum", e.op("Exp", e.op("Sub", x, top)), axes, keepdims=1))
    total = e.op("Add", total, top)
    return total if keepdim else e.op("Squeeze", total, axes)


def _moments(e: Emitter, x: Operand, dim: Given, keepdim: bool, correction: Given) -> tuple[ir.Value, ...]:
    """Mean and variance over dims; ``correction`` is subtracted from the count."""
    axes, dims = (
        _axes(e, x, dim),
        range(x.rank) if not dim and dim != 0 else [x.axis(d) for d in ([dim] if isinstance(dim, int) else dim)],
    )
    centre = e.op("ReduceMean", x, axes, keepdims=1)
    away = e.op("Sub", x, centre)
    variance = e.op("ReduceMean", e.op("Mul", away, away), axes, keepdims=int(keepdim))
    if correction:
        count: object = 1
        for d in dims:
            count = count * x.shape[d]
        n = e.to(count, x.dtype)
        variance = e.op("Mul", variance, e.op("Div", n, e.op("Sub", n, e.const(float(correction), x.dtype))))
    return variance, centre if keepdim else e.op("Squeeze", centre, axes)


@op("var.correction", "var.dim", "var.default")
def var(
    e: Emitter, x: Operand, dim: Given = None, correction: Given = None, unbiased: bool = True, keepdim: bool = False
) -> ir.Value:
    return _moments(e, x, dim, keepdim, (1 if unbiased else 0) if correction is None else correction)[0]


@op("std.correction", "std.dim", "std.default")
def std(
    e: Emitter, x: Operand, dim: Given = None, correction: Given = None, unbiased: bool = True, keepdim: bool = False
) -> ir.Value:
    return e.op("Sqrt", var(e, x, dim, correction, unbiased, keepdim))


@op("var_mean.correction")
def var_mean(
    e: Emitter, x: Operand, dim: Given = None, correction: Given = None, keepdim: bool = False
) -> list[ir.Value]:
    return list(_moments(e, x, dim, keepdim, 1 if correction is None else correction))


@op("linalg_vector_norm.default", "norm.ScalarOpt_dim", "norm.Scalar")
def vector_norm(
    e: Emitter, x: Operand, ord: Given = None, p: Given = None, dim: Given = None, keepdim: bool = False
) -> ir.Value:
    order = ord if ord is not None else p if p is not None else 2
    kinds = {1: "ReduceL1", 2: "ReduceL2"}
    if order not in kinds:
        raise UnsupportedError(f"norm of order {order}")
    return _reduce(e, kinds[order], x, dim, keepdim)


@op("cumsum.default")
def cumsum(e: Emitter, x: Operand, dim: Given) -> ir.Value:
    return e.op("CumSum", e.to(x, e.out.dtype), e.const(x.axis(dim))) if x.rank else e.to(x, e.out.dtype)


@op("topk.default")
def topk(
    e: Emitter, x: Operand, k: Given, dim: Given = -1, largest: bool = True, sorted: bool = True
) -> list[ir.Value]:
    return list(e.op("TopK", x, e.sizes([k]), axis=x.axis(dim), largest=int(largest), sorted=int(sorted), outputs=2))


@op("sort.default", "sort.stable")
def sort(e: Emitter, x: Operand, dim: Given = -1, descending: bool = False, stable: Given = None) -> list[ir.Value]:
    if x.dtype is torch.bool:
        raise UnsupportedError("sort of bools")
    axis = x.axis(dim)
    return list(e.op("TopK", x, e.sizes([x.shape[axis]]), axis=axis, largest=int(descending), sorted=1, outputs=2))


@op("argsort.default", "argsort.stable")
def argsort(e: Emitter, x: Operand, dim: Given = -1, descending: bool = False, stable: Given = None) -> ir.Value:
    return sort(e, x, dim, descending)[1]
