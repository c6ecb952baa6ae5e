"""What an op does with a weight, and what a view makes of it: the tables behind :mod:`hcx.rewrite.sites.weights`."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any, cast

from hcx.rewrite.ir.dataflow import op_name, value
from torch import fx

_CASTS = {"to", "_to_copy", "alias", "contiguous", "clone", "detach", "float", "half", "bfloat16", "double", "type_as"}
_SAME_CONTENT = {"view", "reshape", "unsqueeze", "squeeze", "expand", "unflatten", "flatten", "_unsafe_view"}
_REVERSED = {"t", "numpy_T", "matrix_H", "mT", "mH", "adjoint"}
_END = 2**63 - 1


@dataclass(frozen=True)
class Dim:
    """One dimension of a view: the axis of the parameter it runs along (None: none), and which part of it."""

    axis: int | None
    start: int = 0
    stop: int = 1


@dataclass(frozen=True)
class Role:
    """How an op uses an operand as its weight; dimensions are those of the operand.

    Attributes:
        kind: as in :class:`~hcx.rewrite.sites.weights.WeightUse`.
        out: dimension that becomes output features.
        summed: dimensions that are summed over.
        input: the other operand.
        batch: dimension of independent matrices.
        left: the weight stands left of the activation.
    """

    kind: str
    out: int
    summed: tuple[int, ...]
    input: fx.Node
    batch: int | None = None
    left: bool = False
    factor: float = 1.0


def role_of(node: fx.Node, operand: fx.Node) -> list[Role]:
    """The roles an op gives one of its operands as a weight; empty where it uses it otherwise."""
    name, args = op_name(node), node.args
    if name == "einsum":
        return _einsum(node, operand)
    places = [i for i, a in enumerate(args) if a is operand]
    val = value(operand)
    rank = val.dim() if val is not None else 0
    found = [_role(name, node, place, rank) for place in places if rank >= 2]
    return [r for r in found if r is not None and isinstance(r.input, fx.Node)]


def _role(name: str, node: fx.Node, place: int, rank: int) -> Role | None:
    args: tuple[Any, ...] = node.args
    if name == "linear" and place == 1:
        return Role("linear", 0, (1,), args[0])
    if name == "embedding" and place == 0:
        return Role("embedding", 1, (0,), args[1])
    if name.startswith("conv") and place == 1:
        transposed = "transpose" in name or (name == "convolution" and len(args) > 6 and bool(args[6]))
        return Role("conv", int(transposed), (int(not transposed), *range(2, rank)), args[0])
    if name in ("addmm", "baddbmm") and place in (1, 2):
        factor = float(cast("float", node.kwargs.get("alpha", 1)))
        return _product("addmm" if rank == 2 else "matmul", args[1], args[2], place == 1, rank, factor)
    if name in ("mm", "matmul", "bmm") and place in (0, 1):
        return _product("matmul", args[0], args[1], place == 0, rank)
    if "grouped_mm" in name and place == 1 and rank == 3:
        return _product("matmul", args[0], args[1], False, rank)
    return None


def _product(kind: str, first: fx.Node, second: fx.Node, left: bool, rank: int, factor: float = 1.0) -> Role:
    batch = rank - 3 if rank >= 3 else None
    if left:
        return Role(kind, rank - 2, (rank - 1,), second, batch, True, factor)
    return Role(kind, rank - 1, (rank - 2,), first, batch, False, factor)


def _einsum(node: fx.Node, operand: fx.Node) -> list[Role]:
    """Letters of the weight: summed ones are missing in the output; of the rest one is shared with the other operands
    or stands first (experts), the last one is the output."""
    if len(node.args) < 2 or not isinstance(node.args[0], str) or "." in node.args[0]:
        return []
    sources, arrow, result = node.args[0].replace(" ", "").partition("->")
    letters, operands = sources.split(","), list(cast("list[fx.Node]", node.args[1]))
    roles = []
    for place, (own, tensor) in enumerate(zip(letters, operands, strict=False)):
        others = set("".join(x for i, x in enumerate(letters) if i != place))
        summed = tuple(i for i, x in enumerate(own) if x not in result)
        out = [i for i, x in enumerate(own) if x in result and x not in others]
        batch = [i for i, x in enumerate(own) if x in result and x in others] + out[:-1]
        given = next((o for i, o in enumerate(operands) if i != place), None)
        if tensor is operand and arrow and out and summed and len(batch) <= 1 and given is not None:
            roles.append(Role("einsum", out[-1], summed, given, batch[0] if batch else None))
    return roles


def view_of(user: fx.Node, node: fx.Node, dims: tuple[Dim, ...]) -> tuple[Dim, ...] | None:
    """Dimensions of a view, cast or slice of a weight; None where the op computes something new."""
    name = op_name(user)
    args: tuple[Any, ...] = user.args
    if user.target is operator.getitem:
        return _item(user, node, dims)
    if not user.args or user.args[0] is not node:
        return None
    if name in _CASTS:
        return dims
    if name in _REVERSED:
        return (*dims[:-2], *reversed(dims[-2:]))
    if name == "transpose":
        order = list(range(len(dims)))
        a, b = (int(x) % len(dims) for x in args[1:3])
        order[a], order[b] = order[b], order[a]
        return tuple(dims[i] for i in order)
    if name == "permute":
        return tuple(dims[int(i) % len(dims)] for i in args[1])
    if name in _SAME_CONTENT:
        return _reshaped(user, dims)
    if name in ("slice", "narrow", "select", "index", "index_select"):
        return _part(name, user, dims)
    return dims if name in ("split", "split_with_sizes", "chunk", "unbind") else None


def _reshaped(user: fx.Node, dims: tuple[Dim, ...]) -> tuple[Dim, ...] | None:
    """Dimensions of size 1 come and go; anything else is not followed."""
    val = value(user)
    rest = [d for d in dims if d.stop - d.start != 1]
    result: list[Dim] = []
    for size in val.shape if val is not None else ():
        if rest and isinstance(size, int) and size == rest[0].stop - rest[0].start:
            result.append(rest.pop(0))
        else:
            result.append(Dim(None))
    if rest or val is None:
        return None
    ones = [d for d in dims if d.stop - d.start == 1 and d.axis is not None]
    places = [i for i, (d, s) in enumerate(zip(result, val.shape, strict=True)) if d.axis is None and s == 1]
    for dim, place in zip(ones, places, strict=False):
        result[place] = dim
    return tuple(result)


def _cut(dim: Dim, start: int, stop: int) -> Dim:
    size = dim.stop - dim.start
    start, stop = (min(max(x + size if x < 0 else x, 0), size) for x in (start, stop))
    return replace(dim, start=dim.start + start, stop=dim.start + stop)


def _part(name: str, user: fx.Node, dims: tuple[Dim, ...]) -> tuple[Dim, ...] | None:
    args: tuple[Any, ...] = user.args
    if name in ("index", "index_select"):
        first = name == "index" and isinstance(args[1], list | tuple) and len(args[1]) == 1 and len(dims) >= 3
        whole = value(args[1][0]) if first else None
        return dims if whole is not None and whole.dim() == 1 else None
    along = int(args[1] if len(args) > 1 else 0) % len(dims)
    if name == "select":
        return dims[:along] + dims[along + 1 :]
    if name == "narrow":
        bounds = (args[2], args[2] + args[3]) if all(isinstance(a, int) for a in args[2:4]) else None
    else:
        start, stop = (*args[2:4], None, None)[:2]
        bounds = (start or 0, _END if stop is None else stop)
        if len(args) > 4 and args[4] != 1:
            return None
    if bounds is None or not all(isinstance(b, int) for b in bounds):
        return None
    return (*dims[:along], _cut(dims[along], *bounds), *dims[along + 1 :])


def _item(user: fx.Node, node: fx.Node, dims: tuple[Dim, ...]) -> tuple[Dim, ...] | None:
    """One piece of a split; ``dims`` are those of the whole."""
    name, number = op_name(node), user.args[1]
    pieces = node.meta.get("val")
    if not isinstance(pieces, list | tuple) or not isinstance(number, int):
        return None
    args: tuple[Any, ...] = node.args
    along = int(args[2] if len(args) > 2 else cast("int", node.kwargs.get("dim", 0))) if name != "unbind" else 0
    if name == "unbind":
        along = int(args[1]) % len(dims) if len(args) > 1 else 0
        return dims[:along] + dims[along + 1 :]
    along %= len(dims)
    sizes = [int(p.shape[along]) for p in pieces]
    start = sum(sizes[:number])
    return (*dims[:along], _cut(dims[along], start, start + sizes[number]), *dims[along + 1 :])
