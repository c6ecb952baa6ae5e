"""In-place ops to ordinary ones, where every reader of the written tensor can be told the new value.

A rewrite replaces values; an op that writes into a value another name still refers to would be replaced wrongly. Writes
through views are left to torch.export's own functionalisation.
"""

from __future__ import annotations

import torch
from torch import fx

from .dataflow import op_name

_VIEWS = {
    "view", "reshape", "transpose", "permute", "slice", "select", "expand", "unsqueeze", "squeeze", "narrow", "t", "split", "chunk", "unbind",
    "split_with_sizes", "alias", "detach", "unflatten", "flatten", "view_as", "expand_as", "diagonal", "as_strided", "movedim", "swapaxes",
    "getitem", "to", "contiguous", "numpy_T", "mT", "T", "unfold", "real", "imag", "view_as_real", "view_as_complex", "_to_copy", "dropout",
}  # fmt: skip
"""Ops whose result may share memory with their first argument."""


def writes(node: fx.Node) -> bool:
    """Whether an op writes into its first argument."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable and bool(schema.arguments) and schema.arguments[0].is_write


def needs_functionalisation(graph: fx.Graph) -> bool:
    """Whether some write reaches memory that a view also names, or an input or a stored tensor."""
    return any(writes(n) and not _simple(n) for n in graph.nodes if n.op == "call_function")


def make_functional(graph: fx.Graph) -> None:
    """Replace simple in-place ops: later readers of the written value read the result."""
    order = {n: i for i, n in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.op != "call_function" or not writes(node) or not _simple(node):
            continue
        plain = _out_of_place(node)
        if plain is None:
            continue
        node.target = plain
        written = node.args[0]
        for user in [u for u in written.users if u is not node and order[u] > order[node]]:
            user.replace_input_with(written, node)


def _simple(node: fx.Node) -> bool:
    """The written value is a fresh one that no view shares, and an out-of-place form of the op exists."""
    written = node.args[0]
    if not isinstance(written, fx.Node) or written.op != "call_function" or _out_of_place(node) is None:
        return False
    if _may_be_view(written):
        return False
    return not any(_may_be_view(u) and u.args and u.args[0] is written and u is not node for u in written.users)


def _may_be_view(node: fx.Node) -> bool:
    name = op_name(node)
    if name in ("to", "contiguous", "dropout", "_to_copy", "reshape", "flatten"):
        before, after = node.args[0].meta.get("val"), node.meta.get("val")
        if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor) and before.dtype != after.dtype:
            return False
    return name in _VIEWS


def _out_of_place(node: fx.Node):
    packet = getattr(node.target, "overloadpacket", None)
    if packet is None or not packet.__name__.endswith("_"):
        return None
    other = getattr(getattr(torch.ops, node.target.namespace), packet.__name__.rstrip("_"), None)
    names = [a.name for a in node.target._schema.arguments]
    for overload in other.overloads() if other is not None else ():
        candidate = getattr(other, overload)
        if [a.name for a in candidate._schema.arguments] == names and not candidate._schema.is_mutable:
            return candidate
    return None
