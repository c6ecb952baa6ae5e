"""From a plain residual stream to several: which nodes lie on the stream, and whether they act on each row alone."""

from __future__ import annotations

from dataclasses import dataclass

from hcx.rewrite.ir.dataflow import Dataflow, op_name, resolve, settle, value
from hcx.rewrite.sites.views import Residual, Stack
from torch import fx

_POINTWISE = {
    "relu", "relu_", "gelu", "silu", "silu_", "tanh", "sigmoid", "hardswish", "leaky_relu", "elu", "mish", "dropout", "dropout_",
    "to", "_to_copy", "alias", "contiguous", "clone", "detach", "mul", "add", "sub", "div", "neg", "pow", "rsqrt", "sqrt", "square", "abs",
}  # fmt: skip
_LAST_DIMS = {"layer_norm", "rms_norm", "native_layer_norm"}
REGROUPINGS = {"view", "reshape", "_unsafe_view"}
"""Rows in another arrangement where the last dimension stays: ``[B, S, C]`` as ``[B S, C]``, and back."""
_REDUCTIONS = {"mean", "var", "amax", "sum"}
_NONLINEAR = _LAST_DIMS | _REDUCTIONS | {"relu", "relu_", "gelu", "silu", "silu_", "tanh", "sigmoid", "pow", "rsqrt"}


@dataclass
class Link:
    """One residual with the stream nodes that lead to it.

    Attributes:
        start: stream value before (the entry, or the last residual's add).
        skip: stream value that the residual's branches read.
        path: nodes from ``start`` to the skip, which act on each stream alone (norms of post-norm blocks, activations).
        scale: nodes from the skip to the add's own operand (a scaled skip).
    """

    residual: Residual
    start: fx.Node
    skip: fx.Node
    path: list[fx.Node]
    scale: list[fx.Node]


def links(flow: Dataflow, stack: Stack) -> list[Link]:
    """The residuals of a stack with what lies between them."""
    found: list[Link] = []
    start = stack.boundaries[0].node
    for residual in (r for b in stack.blocks for r in b.residuals):
        skip = settle(residual.skip)
        path = flow.between(start, skip) if skip is not start else []
        found.append(Link(residual, start, skip, path, _scale(flow, residual)))
        start = residual.add
    return found


def tail(flow: Dataflow, stack: Stack) -> Link:
    """What the last block still does to the stream behind its last add, as a link without a residual of its own."""
    last, end = stack.blocks[-1].residuals[-1], stack.boundaries[-1].node
    return Link(last, last.add, end, flow.between(last.add, end), [])


def _scale(flow: Dataflow, residual: Residual) -> list[fx.Node]:
    if not residual.skip_scaled:
        return []
    for add in residual.adds:
        for operand in add.args[:2]:
            if (
                resolve(operand) is not residual.skip
                and op_name(resolve(operand)) in ("mul", "div")
                and flow.reaches(residual.skip, operand)
            ):
                nodes = flow.between(residual.skip, operand)
                if not any(n in branch.body for branch in residual.branches for n in nodes):
                    return nodes
    return []


def obstacle(flow: Dataflow, link: Link) -> str | None:
    """Why the path cannot be applied to several streams at once, or None."""
    if link.skip is not link.start and not flow.reaches(link.start, link.skip):
        return f"`{link.residual.add.name}` adds to an earlier value of the stream"
    for node in [*link.path, *link.scale]:
        name, val = op_name(node), value(node)
        others = [
            o for o in node.all_input_nodes if o not in link.path and o is not link.start and value(o) is not None
        ]
        if any(not flow.is_static(o) for o in others if o is not link.skip):
            return f"`{name}` also reads `{next(o.name for o in others if not flow.is_static(o))}`"
        if name in REGROUPINGS and not _keeps_features(node):
            return f"`{name}` does not keep the features of a row together"
        if name in _REDUCTIONS and not _negative_dims(node):
            return f"`{name}` does not reduce trailing dimensions only"
        if name not in _POINTWISE | _LAST_DIMS | _REDUCTIONS | REGROUPINGS or val is None:
            return f"`{name}` does not act on each row alone"
    if link.residual.projected:
        return "the shortcut has weights of its own"
    return None


def restrided(link: Link) -> bool:
    """Whether the stream is a picture ``[B, C, H, W]`` that does not lie in memory in that order (channels last)."""
    val = value(link.skip)
    last = val.stride()[-1] if val is not None and val.dim() > 3 else 1
    return not (isinstance(last, int) and last == 1)


def _keeps_features(node: fx.Node) -> bool:
    before, after = value(node.args[0]), value(node)
    return before is not None and len(after.shape) > 1 and before.shape[-1] == after.shape[-1]


def _negative_dims(node: fx.Node) -> bool:
    dims = node.args[1] if len(node.args) > 1 else None
    return isinstance(dims, list | tuple) and all(isinstance(d, int) and d < 0 for d in dims)


def is_post_norm(stack_links: list[Link]) -> bool:
    """Whether something nonlinear acts on the stream between residuals: only replicated streams stay exact then."""
    return any(op_name(n) in _NONLINEAR for link in stack_links for n in link.path)
