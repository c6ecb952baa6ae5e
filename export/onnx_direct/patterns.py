"""Groups of ATen nodes that are one ONNX operator: RMS normalisation, rotary embedding, grouped attention.

A pattern returns ``{node: (emit, operands)}``; the inner nodes are emitted only if something else uses them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .emitting.emitter import Emitter, Operand
from .ops.attention import attention
from .ops.norm import rms
from .ops.shape import sliced
from .walk import OUTER, Fused

aten = torch.ops.aten
_SAME = {
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten._to_copy.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.alias.default,
    aten.slice.Tensor,
    aten.lift_fresh_copy.default,
}


def find(graph: fx.Graph, opset: int) -> Fused:
    """All patterns of a graph that the opset has an operator for."""
    if opset < 23:
        return {}
    fused: Fused = {}
    for node in graph.nodes:
        if node.op == "call_function":
            match = _rms_norm(node) or _rotary(node) or _grouped_attention(node)
            if match:
                fused[node] = match
    return fused


def through(node: Any) -> Any:
    """The value itself, seen through copies and whole slices that change neither dtype nor shape."""
    while isinstance(node, fx.Node):
        if node.op == "placeholder" and node.meta.get(OUTER) is not None:
            node = node.meta[OUTER]
            continue
        if node.op != "call_function" or node.target not in _SAME:
            break
        source = node.args[0]
        a, b = node.meta.get("val"), source.meta.get("val")
        if not (
            isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dtype == b.dtype and _same_shape(a, b)
        ):
            break
        if node.target is aten.slice.Tensor and not _whole(node):
            break
        node = source
    return node


def _whole(node: fx.Node) -> bool:
    return len(node.args) < 5 and (len(node.args) < 3 or node.args[2] in (0, None))


def _same_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dim() == b.dim() and all(_expr(x) == _expr(y) for x, y in zip(a.shape, b.shape, strict=True))


def _expr(size: int | torch.SymInt) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _call(node: Any, *targets: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def _rms_norm(node: fx.Node) -> tuple[Any, ...] | None:
    """weight · (x · rsqrt(mean(x²) + eps)), in either order of the factors."""
    if not _call(node, aten.mul.Tensor) or len(node.args) != 2:
        return None
    for weight, normed in (node.args, node.args[::-1]):
        x, eps = _over_rms(through(normed)) or (None, None)
        if x is not None and isinstance(weight, fx.Node) and _is_scale(weight, x):
            return (lambda e, x, weight, eps: rms(e, x, weight, eps)), (x, weight, eps)
    return None


def _is_scale(weight: fx.Node, x: fx.Node) -> bool:
    w, v = weight.meta.get("val"), x.meta["val"]
    return isinstance(w, torch.Tensor) and w.dim() == 1 and w.dtype == v.dtype and w.shape[0] == v.shape[-1]


def _over_rms(node: Any) -> tuple[Any, ...] | None:
    if not _call(node, aten.mul.Tensor):
        return None
    for x, factor in (node.args, node.args[::-1]):
        factor = through(factor)
        if not (
            _call(factor, aten.rsqrt.default)
            and _call(add := through(factor.args[0]), aten.add.Tensor, aten.add.Scalar)
        ):
            continue
        mean, eps = through(add.args[0]), add.args[1]
        if not (isinstance(eps, float) and not add.kwargs and _call(mean, aten.mean.dim) and _last_kept(mean)):
            continue
        power = through(mean.args[0])
        if _call(power, aten.pow.Tensor_Scalar) and power.args[1] == 2 and through(power.args[0]) is through(x):
            return through(x), eps
    return None


def _last_kept(mean: fx.Node) -> bool:
    rank = mean.args[0].meta["val"].dim()
    return list(mean.args[1]) in ([-1], [rank - 1]) and len(mean.args) > 2 and mean.args[2] is True and not mean.kwargs


def _grouped_attention(node: fx.Node) -> tuple[Any, ...] | None:
    """Attention over repeated heads reads the heads themselves: ONNX's Attention groups queries."""
    if not _call(node, aten.scaled_dot_product_attention.default):
        return None
    key, value = _unrepeated(node.args[1]), _unrepeated(node.args[2])
    if key is None or value is None or _heads(key) != _heads(value) or node.kwargs.get("enable_gqa"):
        return None
    rest = node.args[3:]
    options = {k: v for k, v in node.kwargs.items() if k not in ("enable_gqa", "attn_mask")}
    mask = node.kwargs.get("attn_mask", rest[0] if rest else None)

    def emit(e: Emitter, q: Operand, k: Operand, v: Operand, mask: Operand | None, *more):
        return attention(e, q, k, v, mask, *more, **options)

    return emit, (node.args[0], key, value, mask, *rest[1:])


def _unrepeated(node: Any) -> fx.Node | None:
    """x of reshape(expand(unsqueeze(x, 2)))."""
    folded = through(node)
    if not _call(folded, aten.reshape.default, aten.view.default, aten._unsafe_view.default):
        return None
    wide = through(folded.args[0])
    if not _call(wide, aten.expand.default):
        return None
    narrow = through(wide.args[0])
    if not _call(narrow, aten.unsqueeze.default) or narrow.args[1] not in (2, -3):
        return None
    x = narrow.args[0]
    before, after = x.meta["val"], folded.meta["val"]
    if before.dim() != 4 or after.dim() != 4 or not isinstance(before.shape[1], int):
        return None
    whole = [_expr(before.shape[d]) == _expr(after.shape[d]) for d in (0, 2, 3)]
    return x if all(whole) and _expr(wide.meta["val"].shape[1]) == before.shape[1] else None


def _heads(node: fx.Node) -> Any:
    return _expr(node.meta["val"].shape[1])


def _rotary(node: fx.Node) -> tuple[Any, ...] | None:
    """x · cos + cat(−x[half:], x[:half]) · sin, where both halves of cos and of sin are the same."""
    if not _call(node, aten.add.Tensor) or node.kwargs or len(node.args) != 2:
        return None
    for straight, turned in (node.args, node.args[::-1]):
        first, second = _factors(straight), _factors(turned)
        if not (first and second):
            continue
        for x, cos in (first, first[::-1]):
            for rotated, sin in (second, second[::-1]):
                if _is_rotation(rotated, x) and (tables := _tables(cos, sin)):
                    return _emit_rotary, (x, *tables)
    return None


def _factors(node: Any) -> tuple[Any, ...] | None:
    node = through(node)
    return tuple(through(a) for a in node.args) if _call(node, aten.mul.Tensor) else None


def _is_rotation(node: Any, x: Any) -> bool:
    """cat(−x[half:], x[:half]) along the last dimension of a [batch, heads, length, size] tensor."""
    if not (_call(node, aten.cat.default) and isinstance(x, fx.Node) and x.meta["val"].dim() == 4):
        return False
    size = x.meta["val"].shape[-1]
    parts = [through(p) for p in node.args[0]]
    if (
        not isinstance(size, int)
        or size % 2
        or len(parts) != 2
        or node.args[1:] not in ((-1,), (3,))
        or not _call(parts[0], aten.neg.default)
    ):
        return False
    return _part(through(parts[0].args[0]), x, size // 2, size) and _part(parts[1], x, 0, size // 2)


def _part(node: Any, x: fx.Node, start: int, end: int) -> bool:
    if not _call(node, aten.slice.Tensor) or through(node.args[0]) is not x or len(node.args) < 4:
        return False
    dim, begin, stop = node.args[1:4]
    return (
        dim in (3, -1)
        and (begin or 0) == start
        and (stop == end or (end == x.meta["val"].shape[-1] and stop >= end))
        and len(node.args) == 4
    )


def _tables(cos: Any, sin: Any) -> tuple[fx.Node, fx.Node] | None:
    """The [batch, length, size] tables behind their head dimension."""
    found = []
    for node in (cos, sin):
        if not (_call(node, aten.unsqueeze.default) and node.args[1] in (1, -3) and node.meta["val"].dim() == 4):
            return None
        table = through(node.args[0])
        if not _twice(table):
            return None
        found.append(table)
    return found[0], found[1]


def _twice(node: Any) -> bool:
    """Whether the last dimension is one half repeated: an elementwise function of cat(a, a)."""
    node = through(node)
    if _call(node, aten.cos.default, aten.sin.default):
        return _twice(node.args[0])
    if _call(node, aten.mul.Tensor) and not isinstance(node.args[1], fx.Node):
        return _twice(node.args[0])
    return (
        _call(node, aten.cat.default)
        and len(node.args[0]) == 2
        and node.args[0][0] is node.args[0][1]
        and node.args[1:] in ((-1,), (2,))
    )


def _emit_rotary(e: Emitter, x: Operand, cos: Operand, sin: Operand):
    """RotaryEmbedding takes half tables with the batch of x."""
    half = x.shape[-1] // 2

    def table(t: Operand):
        cut = sliced(e, t, 2, 0, half)
        return e.expand(cut, (*t.shape[:2], half), (x.shape[0], x.shape[2], half))

    return e.op("RotaryEmbedding", x, table(cos), table(sin), interleaved=0)
