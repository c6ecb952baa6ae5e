"""Pooling and resampling of images and signals."""

from __future__ import annotations

import onnx_ir as ir
from hcx.export.onnx_direct.emitting.emitter import Emitter, Given, Operand
from hcx.export.onnx_direct.emitting.unsupported import UnsupportedError

from .registry import Handler, op


def _each(value: Given, dims: int) -> list[int]:
    return list(value) * dims if len(value) == 1 else list(value)


def _batched(e: Emitter, x: Operand, dims: int, emit: Given) -> ir.Value:
    """ONNX pools need the batch dimension that torch lets one leave out."""
    if x.rank == dims + 2:
        return emit(x.value)
    return e.op("Squeeze", emit(e.op("Unsqueeze", x, e.axes(0))), e.axes(0))


def _max_pool(dims: int) -> Handler:
    def emit(
        e: Emitter,
        x: Operand,
        kernel_size: Given,
        stride: Given = (),
        padding: Given = (0,),
        dilation: Given = (1,),
        ceil_mode: bool = False,
    ) -> ir.Value:
        kernel, pads = _each(kernel_size, dims), _each(padding, dims)
        return _batched(
            e,
            x,
            dims,
            lambda v: e.op(
                "MaxPool",
                v,
                kernel_shape=kernel,
                strides=_each(stride, dims) if stride else kernel,
                pads=[*pads, *pads],
                dilations=_each(dilation, dims),
                ceil_mode=int(ceil_mode),
            ),
        )

    return emit


def _avg_pool(dims: int) -> Handler:
    def emit(
        e: Emitter,
        x: Operand,
        kernel_size: Given,
        stride: Given = (),
        padding: Given = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: Given = None,
    ) -> ir.Value:
        if divisor_override is not None or ceil_mode:
            raise UnsupportedError("avg_pool with divisor_override or ceil_mode")
        kernel, pads = _each(kernel_size, dims), _each(padding, dims)
        return _batched(
            e,
            x,
            dims,
            lambda v: e.op(
                "AveragePool",
                v,
                kernel_shape=kernel,
                strides=_each(stride, dims) if stride else kernel,
                pads=[*pads, *pads],
                count_include_pad=int(count_include_pad),
            ),
        )

    return emit


for _dims in (1, 2, 3):
    op(f"max_pool{_dims}d.default")(_max_pool(_dims))
    op(f"avg_pool{_dims}d.default")(_avg_pool(_dims))


def _adaptive(kind: str, reduce: str, dims: int) -> Handler:
    def emit(e: Emitter, x: Operand, output_size: Given) -> ir.Value:
        """To size 1 a reduction; to a divisor of a fixed size an ordinary pool."""
        target, sizes = _each(output_size, dims), x.shape[-dims:]
        if all(t == 1 for t in target):
            return e.op(reduce, x, e.axes(*range(x.rank - dims, x.rank)), keepdims=1)
        if not all(isinstance(s, int) and s % t == 0 for s, t in zip(sizes, target, strict=True)):
            raise UnsupportedError(f"adaptive pool of {sizes} to {target}")
        kernel = [s // t for s, t in zip(sizes, target, strict=True)]
        return _batched(e, x, dims, lambda v: e.op(kind, v, kernel_shape=kernel, strides=kernel))

    return emit


for _dims in (1, 2, 3):
    op(f"adaptive_avg_pool{_dims}d.default")(_adaptive("AveragePool", "ReduceMean", _dims))


@op("upsample_nearest1d.vec", "upsample_nearest2d.vec", "upsample_nearest3d.vec")
def upsample_nearest(e: Emitter, x: Operand, output_size: Given, scale_factors: Given) -> ir.Value:
    return e.op(
        "Resize",
        x,
        None,
        None,
        e.sizes(e.out.shape),
        mode="nearest",
        nearest_mode="floor",
        coordinate_transformation_mode="asymmetric",
    )


@op("upsample_linear1d.vec", "upsample_bilinear2d.vec", "upsample_trilinear3d.vec")
def upsample_linear(e: Emitter, x: Operand, output_size: Given, align_corners: bool, scale_factors: Given) -> ir.Value:
    return e.op(
        "Resize",
        x,
        None,
        None,
        e.sizes(e.out.shape),
        mode="linear",
        coordinate_transformation_mode="align_corners" if align_corners else "pytorch_half_pixel",
    )


@op("pixel_shuffle.default")
def pixel_shuffle(e: Emitter, x: Operand, upscale_factor: int) -> ir.Value:
    return e.op("DepthToSpace", x, blocksize=upscale_factor, mode="CRD")
