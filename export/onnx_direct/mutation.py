"""In-place operators as new values.

torch.export's training graph keeps ``add_`` and friends. In ONNX a value never changes, so after ``y = x.add_(1)``
every later use of ``x`` must read ``y``. That is exact as long as no other view of the same storage is read afterwards.
"""

from __future__ import annotations

import torch
from hcx.rewrite.ir.aliases import Aliases, mutated
from torch import fx

from .emitting.unsupported import UnsupportedError


class AliasedError(UnsupportedError):
    """In-place arithmetic through views: the graph has to be made functional first."""


def without_mutation(graph: fx.Graph) -> fx.Graph:
    """The graph, or a copy in which later uses of a mutated tensor read the mutated value.

    Raises:
        AliasedError: another view of the storage is read after the mutation.
        UnsupportedError: a parameter or buffer is changed.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    if not any(mutated(node) for node in graph.nodes):
        return graph
    aliases = Aliases(graph)
    current: dict[fx.Node, fx.Node] = {}
    copied = fx.Graph()
    for node in graph.nodes:
        new = copied.node_copy(node, current.__getitem__) if node.op != "output" else None
        if node.op == "output":
            copied.output(torch.fx.node.map_arg(node.args[0], current.__getitem__))
            continue
        current[node] = new
        for target in mutated(node):
            _check(node, target, aliases, order)
            for name in aliases.same(target):
                current[name] = new
    return copied


def _check(node: fx.Node, target: fx.Node, aliases: Aliases, order: dict[fx.Node, int]) -> None:
    if aliases.root(target).op == "get_attr" and "detach_" not in str(node.target):
        raise UnsupportedError(f"{node.target} changes {aliases.root(target).target}")
    same = aliases.same(target)
    for other in aliases.members(target):
        late = [u for u in other.users if order[u] > order[node]]
        if order[other] < order[node] and other not in same and late:
            raise AliasedError(f"{node.target} changes a tensor of which another view is used later ({other.name})")
