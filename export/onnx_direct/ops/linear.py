"""Matrix products and lookups.

A linear layer is ``Gemm(transB=1)`` on rows: the weight keeps torch's layout and name, nothing is transposed at load
or at run time (measured on SmolLM2-sized layers in ONNX Runtime 1.32: the same speed as a stored transpose, and four
times faster than MatMul of a Transpose with graph optimisations off).
"""

from __future__ import annotations

import onnx_ir as ir
import sympy
from hcx.export.onnx_direct.emitting.emitter import Emitter, Given, Operand
from hcx.export.onnx_direct.emitting.symbols import Size
from hcx.export.onnx_direct.emitting.unsupported import UnsupportedError

from .registry import op


@op("linear.default")
def linear(e: Emitter, x: Operand, weight: Operand, bias: Operand | None = None) -> ir.Value:
    """x [..., K], weight [N, K], bias [N] → [..., N]."""
    if x.rank == 1:
        product = e.op("MatMul", x, e.op("Transpose", weight, perm=[1, 0]))
        return product if bias is None else e.op("Add", product, bias)
    rows = x.value if x.rank == 2 else e.reshape(x, (_product(x.shape[:-1]), x.shape[-1]))
    product = e.op("Gemm", rows, weight, bias, transB=1)
    return product if x.rank == 2 else e.reshape(product, e.out.shape)


def _product(sizes: tuple[Size, ...]) -> Size:
    product = sympy.Mul(*sizes)
    return int(product) if product.is_Integer else product


@op("matmul.default", "mm.default", "bmm.default", "dot.default", "mv.default")
def matmul(
    e: Emitter, x: Operand, other: Given = None, mat2: Given = None, tensor: Given = None, vec: Given = None
) -> ir.Value:
    right = next(o for o in (other, mat2, tensor, vec) if o is not None)
    return e.op("MatMul", x, right)


@op("addmm.default")
def addmm(e: Emitter, x: Operand, mat1: Operand, mat2: Operand, beta: float = 1, alpha: float = 1) -> ir.Value:
    """beta·x + alpha·mat1·mat2, for instance GPT-2's Conv1D."""
    return e.op("Gemm", mat1, mat2, x, alpha=float(alpha), beta=float(beta))


@op("baddbmm.default")
def baddbmm(e: Emitter, x: Operand, batch1: Operand, batch2: Operand, beta: float = 1, alpha: float = 1) -> ir.Value:
    product = e.op("MatMul", batch1, batch2)
    product = product if alpha == 1 else e.op("Mul", product, e.to(alpha, x.dtype))
    if beta == 0:
        return product
    return e.op("Add", x.value if beta == 1 else e.op("Mul", x, e.to(beta, x.dtype)), product)


@op("outer.default", "ger.default")
def outer(e: Emitter, x: Operand, vec2: Operand) -> ir.Value:
    return e.op("Mul", e.op("Unsqueeze", x, e.axes(1)), e.op("Unsqueeze", vec2, e.axes(0)))


@op("einsum.default")
def einsum(e: Emitter, equation: str, tensors: Given, path: Given = None) -> ir.Value:
    if "..." in equation and "->" not in equation:
        raise UnsupportedError("einsum with an implied output")
    return e.op("Einsum", *tensors, equation=equation.replace(" ", ""))


@op("embedding.default")
def embedding(
    e: Emitter,
    weight: Operand,
    indices: Operand,
    padding_idx: Given = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> ir.Value:
    """Rows of the table; padding and sparsity concern gradients only."""
    return e.op("Gather", weight, indices, axis=0)


def _pads(padding: Given) -> list[int]:
    return [*padding, *padding]


@op("conv1d.default", "conv2d.default", "conv3d.default")
def conv(
    e: Emitter,
    x: Operand,
    weight: Operand,
    bias: Operand | None = None,
    stride: Given = (1,),
    padding: Given = (0,),
    dilation: Given = (1,),
    groups: int = 1,
) -> ir.Value:
    dims = weight.rank - 2
    return _convolve(e, x, weight, bias, _each(stride, dims), _each(padding, dims), _each(dilation, dims), groups)


@op("conv1d.padding", "conv2d.padding")
def conv_padding(
    e: Emitter,
    x: Operand,
    weight: Operand,
    bias: Operand | None = None,
    stride: Given = (1,),
    padding: str = "valid",
    dilation: Given = (1,),
    groups: int = 1,
) -> ir.Value:
    """padding='same' puts the odd element behind, as ONNX's SAME_UPPER does."""
    dims = weight.rank - 2
    strides, dilations = _each(stride, dims), _each(dilation, dims)
    kernel = [int(s) for s in weight.shape[2:]]
    total = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilations, kernel, strict=True)]
    before = [t // 2 for t in total]
    return e.op(
        "Conv",
        x,
        weight,
        bias,
        strides=strides,
        dilations=dilations,
        group=groups,
        kernel_shape=kernel,
        pads=before + [t - b for t, b in zip(total, before, strict=True)],
    )


@op("convolution.default", "_convolution.default")
def convolution(
    e: Emitter,
    x: Operand,
    weight: Operand,
    bias: Given,
    stride: Given,
    padding: Given,
    dilation: Given,
    transposed: bool,
    output_padding: Given,
    groups: int,
) -> ir.Value:
    dims = weight.rank - 2
    if transposed:
        return _transposed(e, x, weight, bias, stride, padding, output_padding, groups, dilation)
    return _convolve(e, x, weight, bias, _each(stride, dims), _each(padding, dims), _each(dilation, dims), groups)


@op("conv_transpose1d.default", "conv_transpose2d.input", "conv_transpose3d.input")
def conv_transpose(
    e: Emitter,
    x: Operand,
    weight: Operand,
    bias: Operand | None = None,
    stride: Given = (1,),
    padding: Given = (0,),
    output_padding: Given = (0,),
    groups: int = 1,
    dilation: Given = (1,),
) -> ir.Value:
    return _transposed(e, x, weight, bias, stride, padding, output_padding, groups, dilation)


def _convolve(
    e: Emitter, x: Given, weight: Given, bias: Given, strides: Given, padding: Given, dilations: Given, groups: int
) -> ir.Value:
    return _batched(
        e,
        x,
        weight,
        lambda v: e.op(
            "Conv",
            v,
            weight,
            bias,
            strides=strides,
            dilations=dilations,
            group=groups,
            pads=_pads(padding),
            kernel_shape=[int(s) for s in weight.shape[2:]],
        ),
    )


def _transposed(
    e: Emitter,
    x: Given,
    weight: Given,
    bias: Given,
    stride: Given,
    padding: Given,
    output_padding: Given,
    groups: int,
    dilation: Given,
) -> ir.Value:
    dims = weight.rank - 2
    return _batched(
        e,
        x,
        weight,
        lambda v: e.op(
            "ConvTranspose",
            v,
            weight,
            bias,
            strides=_each(stride, dims),
            dilations=_each(dilation, dims),
            group=groups,
            pads=_pads(_each(padding, dims)),
            output_padding=_each(output_padding, dims),
            kernel_shape=[int(s) for s in weight.shape[2:]],
        ),
    )


def _batched(e: Emitter, x: Operand, weight: Operand, emit: Given) -> ir.Value:
    """ONNX convolutions need the batch dimension that torch lets one leave out."""
    if x.rank == weight.rank:
        return emit(x.value)
    return e.op("Squeeze", emit(e.op("Unsqueeze", x, e.axes(0))), e.axes(0))


def _each(value: Given, dims: int) -> list[int]:
    return list(value) * dims if len(value) == 1 else list(value)
