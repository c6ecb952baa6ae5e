"""What a residual branch computes, told from its ops alone."""

from __future__ import annotations

from typing import Any

from hcx.rewrite.ir.dataflow import Dataflow, namespace, op_name, tensor_of, value
from torch import fx

_CONVS = ("conv1d", "conv2d", "conv3d", "convolution")


def branch_kind(flow: Dataflow, skip: fx.Node, body: list[fx.Node]) -> str:
    """attn, cross-attn, moe, ssm, conv-mlp, conv or mlp."""
    names = {op_name(n) for n in body}
    attention = _attention(flow, body)
    if attention is not None:
        return "cross-attn" if _reads_elsewhere(flow, skip, attention) else "attn"
    if _is_moe(flow, body, names):
        return "moe"
    if _is_ssm(body, names):
        return "ssm"
    if any(n in _CONVS for n in names):
        return "conv-mlp" if _ends_in_mlp(flow, skip, body) else "conv"
    return "mlp"


def _attention(flow: Dataflow, body: list[fx.Node]) -> fx.Node | None:
    """The attention op, or the product of softmax weights and values."""
    for node in body:
        name = op_name(node)
        if "attention" in name:
            return node
        if name not in ("softmax", "_softmax") or (val := value(node)) is None or val.dim() < 3:
            continue
        if any(op_name(o) in ("matmul", "bmm", "einsum", "baddbmm") for o in _weightless_ancestors(flow, node, 12)):
            return node
    return None


def _weightless_ancestors(flow: Dataflow, node: fx.Node, steps: int) -> list[fx.Node]:
    seen: dict[fx.Node, None] = {}
    frontier = [node]
    for _ in range(steps):
        frontier = [o for n in frontier for o in n.all_input_nodes if o not in seen and not flow.carries_weight(n)]
        seen.update(dict.fromkeys(frontier))
        if not frontier:
            break
    return [n for n in seen if not flow.carries_weight(n)]


def _reads_elsewhere(flow: Dataflow, skip: fx.Node, attention: fx.Node) -> bool:
    """Keys and values do not come from the stream."""
    if "attention" in op_name(attention):
        keys = [a for a in attention.args[1:3] if isinstance(a, fx.Node)]
        return bool(keys) and not any(flow.reaches(skip, k) for k in keys)
    product = next(
        (n for n in _weightless_ancestors(flow, attention, 12) if op_name(n) in ("matmul", "bmm", "einsum", "baddbmm")),
        None,
    )
    if product is None:
        return False
    pair: Any = (
        product.args[1:3]
        if op_name(product) == "baddbmm"
        else product.args[-1]
        if op_name(product) == "einsum"
        else product.args[:2]
    )
    operands = [o for o in pair if isinstance(o, fx.Node)]
    return bool(operands) and not all(flow.reaches(skip, o) for o in operands)


def _is_moe(flow: Dataflow, body: list[fx.Node], names: set[str]) -> bool:
    experts = any(
        o.op == "get_attr" and (v := value(o)) is not None and v.dim() == 3 and n is not None
        for n in body
        if op_name(n) not in _CONVS and (flow.carries_weight(n) or op_name(n) in ("index", "transpose", "index_select"))
        for o in n.all_input_nodes
    )
    return "topk" in names or "grouped_mm" in " ".join(names) or ("softmax" in names and experts)


def _is_ssm(body: list[fx.Node], names: set[str]) -> bool:
    custom = any("scan" in op_name(n) or "ssm" in op_name(n) for n in body if namespace(n) not in ("aten", ""))
    return custom or (
        "exp" in names and bool(names & {"softplus", "cumsum", "sigmoid"}) and bool(names & {"conv1d", "cumsum"})
    )


def _ends_in_mlp(flow: Dataflow, skip: fx.Node, body: list[fx.Node]) -> bool:
    """Two or more layers over channels alone (linear or 1 x 1) behind the last convolution over positions;
    those of a gate made from pooled values do not count."""
    layers = 0
    for node in body:
        made_of = value(node.args[0]) if node.args else None
        if made_of is None or made_of.dim() != tensor_of(skip).dim() or all(s == 1 for s in made_of.shape[2:]):
            continue
        if op_name(node) in _CONVS:
            weight = value(node.args[1]) if isinstance(node.args[1], fx.Node) else None
            pointwise = weight is not None and all(int(k) == 1 for k in weight.shape[2:])
            layers = layers + 1 if pointwise else 0
        elif op_name(node) in ("linear", "addmm", "mm", "matmul") and flow.carries_weight(node):
            layers += 1
    return layers >= 2
