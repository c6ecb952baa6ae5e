"""Scaled dot-product attention.

From opset 23 on ONNX's ``Attention``; before, its definition with a softmax whose fully masked rows are 0, as in torch
(torch.onnx's own decomposition fills with the smallest number there and gives uniform attention).
"""

from __future__ import annotations

import math

import onnx_ir as ir
import sympy
import torch
from hcx.export.onnx_direct.emitting.emitter import Emitter, Given, Operand
from hcx.export.onnx_direct.emitting.unsupported import UnsupportedError

from .activation import masked_softmax
from .registry import op


@op("scaled_dot_product_attention.default")
def attention(
    e: Emitter,
    query: Operand,
    key: Operand,
    value: Operand,
    attn_mask: Given = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Given = None,
    enable_gqa: bool = False,
) -> ir.Value:
    """query [..., H, L, E], key [..., G, S, E], value [..., G, S, Ev] → [..., H, L, Ev]; H is a multiple of G."""
    if dropout_p:
        raise UnsupportedError("attention with dropout")
    if query.rank not in (3, 4):
        raise UnsupportedError(f"attention of rank {query.rank}")
    if not isinstance(query.shape[-1], int):
        raise UnsupportedError("attention with an open head size")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    q, k, v = (_four(e, t) for t in (query, key, value))
    mask = _mask(e, q, k, attn_mask, is_causal)
    emit = _attention_node if e.opset >= 23 else _spelled_out
    result = emit(e, q, k, v, mask, scale)
    return result if query.rank == 4 else e.op("Squeeze", result, e.axes(1))


def _four(e: Emitter, x: Operand) -> Operand:
    """With a head dimension."""
    if x.rank == 4:
        return x
    return Operand(e.op("Unsqueeze", x, e.axes(1)), x.dtype, (x.shape[0], 1, *x.shape[1:]))


def _mask(e: Emitter, q: Operand, k: Operand, mask: Operand | None, is_causal: bool) -> Operand | None:
    """The mask at rank 4. A causal one is made here: run-times align ``is_causal`` differently when L < S."""
    length, total = q.shape[2], k.shape[2]
    if is_causal:
        rows = e.op("Range", e.to(0, torch.int64), e.to(length, torch.int64), e.to(1, torch.int64))
        columns = e.op("Range", e.to(0, torch.int64), e.to(total, torch.int64), e.to(1, torch.int64))
        lower = e.op("LessOrEqual", columns, e.op("Unsqueeze", rows, e.axes(1)))
        if mask is not None:
            raise UnsupportedError("attention with a mask and is_causal")
        return Operand(lower, torch.bool, (length, total))
    if mask is None or mask.rank in (2, 4):
        return mask
    return Operand(e.op("Unsqueeze", mask, e.axes(1)), mask.dtype, (mask.shape[0], 1, *mask.shape[1:]))


def _attention_node(e: Emitter, q: Operand, k: Operand, v: Operand, mask: Operand | None, scale: float) -> ir.Value:
    if mask is not None:  # the mask's last two dimensions must not need broadcasting
        target = (*mask.shape[:-2], q.shape[2], k.shape[2])
        mask = e.expand(mask if mask.dtype is torch.bool else _above_lowest(e, mask), mask.shape, target)
    return e.op("Attention", q, k, v, mask, scale=scale)


def _above_lowest(e: Emitter, mask: Operand) -> ir.Value:
    """ONNX Runtime takes the lowest finite number for "hidden": rows of it become 0, in torch they are an average."""
    dtype = e.dtype(mask.dtype)
    lowest = torch.finfo(dtype).min
    return e.op("Where", e.op("Equal", mask, e.const(lowest, dtype)), e.const(lowest / 2, dtype), mask)


def _spelled_out(e: Emitter, q: Operand, k: Operand, v: Operand, mask: Operand | None, scale: float) -> ir.Value:
    k, v = (_repeated(e, t, q.shape[1]) for t in (k, v))
    root = e.const(math.sqrt(scale), q.dtype) if scale > 0 else None
    if root is None:
        raise UnsupportedError("attention with a scale that is not positive")
    scores = e.op("MatMul", e.op("Mul", q, root), e.op("Mul", e.op("Transpose", k, perm=[0, 1, 3, 2]), root))
    if mask is None:
        return e.op("MatMul", e.op("Softmax", scores, axis=-1), v)
    if mask.dtype is torch.bool:
        scores = e.op("Where", mask, scores, e.const(-math.inf, q.dtype))
    else:
        scores = e.op("Add", scores, mask)
    return e.op("MatMul", masked_softmax(e, scores, 3, e.dtype(q.dtype)), v)


def _repeated(e: Emitter, x: Operand, heads: Given) -> Operand:
    """Key and value heads repeated for grouped queries."""
    groups = x.shape[1]
    if groups == heads:
        return x
    times = sympy.Integer(heads) // groups
    wide = e.expand(
        e.op("Unsqueeze", x, e.axes(2)),
        (x.shape[0], groups, 1, *x.shape[2:]),
        (x.shape[0], groups, int(times), *x.shape[2:]),
    )
    shape = (x.shape[0], heads, *x.shape[2:])
    return Operand(e.reshape(wide, shape), x.dtype, shape)
