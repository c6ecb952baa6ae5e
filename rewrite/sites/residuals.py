"""Finding residual adds: ``x + f(x)`` with a weight on the way through f.

Rules, each of which a real model forced (casts that change nothing, tanh-GELU's ``x + c x^3``, parallel branches,
scaled skips, state-space blocks with a skip of their own): see :func:`find_residuals`.
"""

from __future__ import annotations

from typing import cast

from hcx.rewrite.ir.dataflow import (
    ADDS,
    SCALES,
    WRITES,
    Dataflow,
    live_users,
    op_name,
    operand_at,
    resolve,
    shape,
    value,
)
from hcx.rewrite.ir.tags import Part, hcx_tag, owner
from torch import fx

from .kinds import branch_kind
from .views import Branch, Residual


def find_residuals(flow: Dataflow) -> list[Residual]:
    """Residual adds in execution order.

    An add chain is a residual when one of its terms, scale and casts seen through, is an ancestor of every other term
    through a weight-carrying op. Chains of adds with a single reader, written in the same module, are one residual with
    parallel branches. Candidates inside a branch of another residual stream are that branch's own business.
    """
    found: list[Residual] = []
    taken: set[fx.Node] = set()
    for node in reversed(flow.nodes):
        if op_name(node) in WRITES and hcx_tag(node).part is not Part.READS:
            found.append(_written(flow, node))
        if node in taken or not _is_candidate(node):
            continue
        residual = _match(flow, node, flatten=True) or _match(flow, node, flatten=False)
        if residual is not None:
            found.append(residual)
            taken.update(residual.adds)
    found.reverse()
    return found


def other_adds(flow: Dataflow, residuals: list[Residual]) -> list[fx.Node]:
    """Adds of two full tensors that are no residual, for explanations."""
    taken = {a for r in residuals for a in r.adds}
    return [n for n in flow.nodes if n not in taken and _is_candidate(n)]


def _is_candidate(node: fx.Node) -> bool:
    if op_name(node) not in ADDS or len(node.args) < 2:
        return False
    if hcx_tag(node).part in (Part.CONTINUES, Part.READS):  # mixes of iterations; copies of blocks that only read out
        return False
    if not all(isinstance(a, fx.Node) for a in node.args[:2]):
        return False
    val = value(node)
    return (
        val is not None
        and val.is_floating_point()
        and val.dim() >= 2
        and any(shape(a) == shape(node) for a in node.args[:2])
    )


def _terms(node: fx.Node, top: fx.Node, flatten: bool) -> tuple[list[tuple[fx.Node, bool]], list[fx.Node]]:
    """(term, scaled by alpha) of an add chain, and the adds in it."""
    terms: list[tuple[fx.Node, bool]] = []
    adds = [node]
    for position, operand in enumerate(cast("tuple[fx.Node, fx.Node]", node.args[:2])):
        inner = resolve(operand)
        scaled = position == 1 and cast("float", node.kwargs.get("alpha", 1)) != 1
        if (
            flatten
            and not scaled
            and _is_candidate(inner)
            and len(live_users(inner)) == 1
            and owner(inner) == owner(top)
        ):
            deeper, more = _terms(inner, top, flatten)
            terms += deeper
            adds += more
        else:
            terms.append((operand, scaled))
    return terms, adds


def unscale(flow: Dataflow, node: fx.Node) -> tuple[fx.Node, bool]:
    """See through a multiplication or division by a scalar, parameter or constant."""
    node, scaled = resolve(node), False
    while op_name(node) in SCALES:
        tensors = [a for a in node.args[:2] if isinstance(a, fx.Node)]
        moving = [a for a in tensors if not flow.is_static(a)]
        if len(moving) != 1 or shape(moving[0]) != shape(node):
            break
        node, scaled = resolve(moving[0]), True
    return node, scaled


def _match(flow: Dataflow, node: fx.Node, flatten: bool) -> Residual | None:
    terms, adds = _terms(node, node, flatten)
    for number, (term, _) in reversed(list(enumerate(terms))):
        others = [t for i, t in enumerate(terms) if i != number]
        for skip, skip_scaled in dict.fromkeys([(resolve(term), False), unscale(flow, term)]):
            if shape(skip) != shape(node) or skip.op == "get_attr":
                continue
            if all(flow.reaches_by_weight(skip, t) for t, _ in others):
                branches = [_branch(flow, skip, t, scaled) for t, scaled in others]
                return Residual(node, skip, branches, skip_scaled, adds=tuple(adds))
    return _projected(flow, node, terms) if len(terms) == 2 and not flatten else None


def _written(flow: Dataflow, node: fx.Node) -> Residual:
    """A residual whose stream is carried as several streams."""
    skip, scaled = unscale(flow, operand_at(node))
    return Residual(node, skip, [_branch(flow, skip, operand_at(node, 1), False)], scaled, adds=(node,))


def _projected(flow: Dataflow, node: fx.Node, terms: list[tuple[fx.Node, bool]]) -> Residual | None:
    """A down-sampling shortcut: both terms come from one value, the skip through a single weight and no nonlinearity."""
    sides = [resolve(t) for t, _ in terms]
    common = flow.ancestors[flow.index[sides[0]]] & flow.ancestors[flow.index[sides[1]]]
    while common:
        source = flow.nodes[common.bit_length() - 1]
        common &= ~(1 << flow.index[source])
        val = value(source)
        if source.op in ("get_attr", "output") or val is None or not val.is_floating_point():
            continue
        for skip, branch in (sides, sides[::-1]):
            path, body = flow.between(source, skip), flow.between(source, branch)
            if _is_projection(path) and _is_deep(body) and flow.cut_vertices(source, node)[0] is source:
                kind = branch_kind(flow, source, body)
                return Residual(node, source, [Branch("", kind, branch, False, body)], projected=True, adds=(node,))
        return None
    return None


_SPATIAL = {"conv1d", "conv2d", "conv3d", "convolution", "avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool2d"}
_NONLINEAR = {
    "relu",
    "relu_",
    "gelu",
    "silu",
    "silu_",
    "hardswish",
    "hardswish_",
    "hardtanh",
    "hardtanh_",
    "leaky_relu",
    "leaky_relu_",
    "elu",
    "sigmoid",
    "tanh",
    "mish",
    "softmax",
    "relu6",
}


def _is_projection(path: list[fx.Node]) -> bool:
    names = [op_name(n) for n in path]
    return any(n in _SPATIAL for n in names) and not any(n in _NONLINEAR for n in names)


def _is_deep(body: list[fx.Node]) -> bool:
    names = [op_name(n) for n in body]
    return sum(n.startswith("conv") for n in names) >= 2 and any(n in _NONLINEAR for n in names)


def _branch(flow: Dataflow, skip: fx.Node, term: fx.Node, scaled: bool) -> Branch:
    _, by_factor = unscale(flow, term)
    body = flow.between(skip, resolve(term))
    return Branch("", branch_kind(flow, skip, body), term, scaled or by_factor, body)
