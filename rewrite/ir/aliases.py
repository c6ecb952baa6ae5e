"""Which values of a graph share memory, and which ops write to it."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import fx

from .control import Control, While
from .dataflow import op_name, results_of, schema_of

_SAME_TENSOR = {
    "dropout",
    "feature_dropout",
    "alpha_dropout",
    "feature_alpha_dropout",
    "type_as",
    "atleast_1d",
    "atleast_2d",
    "atleast_3d",
}
"""Ops that may return their argument itself without saying so in their schema."""


def mutated(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node changes in place."""
    if (
        node.op != "call_function"
        or not isinstance(node.target, torch._ops.OpOverload)
        or not node.target._schema.is_mutable
    ):
        return []
    return [
        v for a, v in _arguments(node) if a.alias_info is not None and a.alias_info.is_write and isinstance(v, fx.Node)
    ]


class Aliases:
    """Which nodes share a storage, and which of them are the same view of it, by the schemas of the ops."""

    def __init__(self, graph: fx.Graph) -> None:
        self._root: dict[fx.Node, fx.Node] = {}
        self._view: dict[fx.Node, fx.Node] = {}
        self._group: dict[fx.Node, list[fx.Node]] = {}
        fetched: dict[str, fx.Node] = {}
        for node in graph.nodes:
            source = _aliased(node)
            if node.op == "get_attr":
                source = fetched.setdefault(str(node.target), node) if node.target in fetched else None
                fetched.setdefault(str(node.target), node)
            self._root[node] = self._root.get(source, source) if source is not None else node
            written = mutated(node)
            self._view[node] = self._view[written[0]] if len(written) == 1 and source is written[0] else node
            self._group.setdefault(self._root[node], []).append(node)

    @staticmethod
    def source(node: fx.Node) -> fx.Node:
        """The first node that a value shares its storage with, without a look at the rest of the graph."""
        while (before := _aliased(node)) is not None:
            node = before
        return node

    def root(self, node: fx.Node) -> fx.Node:
        """The value whose storage a node shares: itself, where it made its own."""
        return self._root[node]

    def members(self, node: fx.Node) -> list[fx.Node]:
        """All values over the same storage, in graph order."""
        return self._group[self._root[node]]

    def same(self, node: fx.Node) -> list[fx.Node]:
        """Those that are the same view of it: results of in-place ops are the tensor that these changed."""
        return [n for n in self.members(node) if self._view[n] is self._view[node]]

    def fresh(self, node: fx.Node, result: fx.Node) -> None:
        """A node has become a new value: what was made from it later shares its storage."""
        old = self._group[self._root[node]]
        view = self._view[node]
        cut = old.index(node)
        later = old[cut:]
        del old[cut:]
        for n in later:
            self._root[n] = node
            self._view[n] = node if self._view[n] is view else self._view[n]
        self._group[node] = later
        if result is not node:
            self._root[result], self._view[result] = node, node
            later.append(result)


def _arguments(node: fx.Node) -> Iterator[tuple[torch._C.Argument, Any]]:
    for index, argument in enumerate(schema_of(node).arguments):
        if index < len(node.args):
            yield argument, node.args[index]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]


def _aliased(node: fx.Node) -> fx.Node | None:
    """The argument whose storage the result may share."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        if isinstance(node.args[0].target, Control):
            return _shared(node.args[0].target, node.args[0].args, cast("int", node.args[1]))
        return node.args[0] if _aliased(node.args[0]) is not None else None
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    if op_name(node) in _SAME_TENSOR and node.args:
        return node.args[0] if isinstance(node.args[0], fx.Node) else None
    returns = node.target._schema.returns
    if not returns or returns[0].alias_info is None:
        return None
    return next(
        (
            v
            for a, v in _arguments(node)
            if a.alias_info is not None and isinstance(v, fx.Node) and not _converts(node, v)
        ),
        None,
    )


def _converts(node: fx.Node, source: fx.Node) -> bool:
    """``to`` with another dtype makes a new tensor."""
    before, after = source.meta.get("val"), node.meta.get("val")
    return isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor) and before.dtype != after.dtype


def _shared(target: Control, operands: tuple[Any, ...], index: int) -> fx.Node | None:
    """The operand whose memory a result of control flow may share, or None."""
    if isinstance(target, While):
        return cast("fx.Node", operands[index])  # without an iteration, what came in goes out
    for part, body in enumerate(target.bodies):
        results = results_of(body)
        root = Aliases(body).root(results[index]) if index < len(results) else None
        if root is not None and root.op == "placeholder":
            return cast("fx.Node", target.operands_of(operands, part)[list(body.nodes).index(root)])
    return None
