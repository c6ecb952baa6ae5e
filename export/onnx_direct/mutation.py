"""In-place operators as new values.

torch.export's training graph keeps ``add_`` and friends. In ONNX a value never changes, so after ``y = x.add_(1)``
every later use of ``x`` must read ``y``. That is exact as long as no other view of the same storage is read afterwards.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from hcx.rewrite.ir.mutation import mutated
from torch import fx

from .symbols import Unsupported


class Aliased(Unsupported):
    """In-place arithmetic through views: the graph has to be made functional first."""


def without_mutation(graph: fx.Graph) -> fx.Graph:
    """The graph, or a copy in which later uses of a mutated tensor read the mutated value.

    Raises:
        Aliased: another view of the storage is read after the mutation.
        Unsupported: a parameter or buffer is changed.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    if not any(mutated(node) for node in graph.nodes):
        return graph
    aliases = _Aliases()
    current: dict[fx.Node, fx.Node] = {}
    copied = fx.Graph()
    for node in graph.nodes:
        new = copied.node_copy(node, current.__getitem__) if node.op != "output" else None
        if node.op == "output":
            copied.output(torch.fx.node.map_arg(node.args[0], current.__getitem__))
            continue
        current[node] = new
        aliases.add(node)
        for target in mutated(node):
            _check(node, target, aliases, order)
            for name in aliases.same(target):
                current[name] = new
            aliases.rename(node, target)
    return copied


def _arguments(node: fx.Node) -> Iterator[tuple]:
    for index, argument in enumerate(node.target._schema.arguments):
        if index < len(node.args):
            yield argument, node.args[index]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]


def _check(node: fx.Node, target: fx.Node, aliases: _Aliases, order: dict[fx.Node, int]) -> None:
    if aliases.root(target).op == "get_attr" and "detach_" not in str(node.target):
        raise Unsupported(f"{node.target} changes {aliases.root(target).target}")
    same = aliases.same(target)
    for other in aliases.members(target):
        late = [u for u in other.users if order[u] > order[node]]
        if other not in same and other is not node and late:
            raise Aliased(f"{node.target} changes a tensor of which another view is used later ({other.name})")


class _Aliases:
    """Which nodes share a storage, and which of them are the same view of it."""

    def __init__(self) -> None:
        self._root: dict[fx.Node, fx.Node] = {}
        self._view: dict[fx.Node, fx.Node] = {}

    def add(self, node: fx.Node) -> None:
        source = _aliased(node)
        self._root[node] = self._root[source] if source is not None else node
        self._view[node] = node

    def root(self, node: fx.Node) -> fx.Node:
        return self._root[node]

    def members(self, node: fx.Node) -> list[fx.Node]:
        return [n for n, root in self._root.items() if root is self._root[node]]

    def same(self, node: fx.Node) -> list[fx.Node]:
        return [n for n in self.members(node) if self._view[n] is self._view[node]]

    def rename(self, node: fx.Node, target: fx.Node) -> None:
        """The result of an in-place operator is the tensor it changed."""
        self._root[node], self._view[node] = self._root[target], self._view[target]


def _aliased(node: fx.Node) -> fx.Node | None:
    """The argument whose storage the result may share, by the operator's schema."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return node.args[0] if _aliased(node.args[0]) is not None else None
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
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
