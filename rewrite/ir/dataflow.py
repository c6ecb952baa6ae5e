"""Questions about a graph that the finder asks: what is the same value, what depends on what, where weights enter."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx

IDENTITY = {
    "to",
    "_to_copy",
    "alias",
    "contiguous",
    "clone",
    "detach",
    "lift_fresh_copy",
    "dropout",
    "feature_dropout",
    "dropout_",
    "positive",
}
"""Ops that hand on their first argument unchanged in value (casts only where the dtype stays; dropout by its role)."""

CONTRACTIONS = {
    "linear",
    "addmm",
    "mm",
    "matmul",
    "bmm",
    "baddbmm",
    "einsum",
    "conv1d",
    "conv2d",
    "conv3d",
    "convolution",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "_grouped_mm",
    "bilinear",
    "multi_head_attention_forward",
}
"""Ops that carry a weight where one of their arguments is a parameter of two or more dimensions."""

_END = 2**63 - 1

ADDS = {"add", "add_"}
WRITES = {"stream_write", "stream_blend", "stream_add"}
"""Ops that add a branch to a residual stream carried as several streams: (streams, branch value, ...)."""

SCALES = {"mul", "mul_", "div", "div_"}


def op_name(node: object) -> str:
    """Overload-free name of an ATen (or other) op; empty for anything that is not a call."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return ""
    packet = getattr(node.target, "overloadpacket", None)
    return packet.__name__ if packet is not None else getattr(node.target, "__name__", "")


def namespace(node: fx.Node) -> str:
    """Namespace of an op: ``aten``, ``hcx``, a custom one, or empty."""
    return getattr(node.target, "namespace", "")


def value(node: object) -> torch.Tensor | None:
    """The fake tensor a node was traced with."""
    val = node.meta.get("val") if isinstance(node, fx.Node) else None
    return val if isinstance(val, torch.Tensor) else None


def tensor_of(node: object) -> torch.Tensor:
    """The same of a node that has one."""
    return cast("torch.Tensor", value(node))


def operand_at(node: fx.Node, index: int = 0) -> fx.Node:
    """An argument of a node that is a node itself."""
    return cast("fx.Node", node.args[index])


def results_of(graph: fx.Graph) -> tuple[Any, ...]:
    """What a graph returns: nodes, and sizes that are numbers."""
    return cast("tuple[Any, ...]", graph.output_node().args[0])


def schema_of(node: fx.Node) -> torch._C.FunctionSchema:
    """The schema of the op that a node calls; control flow and Python's own functions have none."""
    return cast("torch._ops.OpOverload", node.target)._schema


def shape(node: object) -> tuple[str, ...] | None:
    """Symbolic shape as text, comparable between nodes of one graph."""
    val = value(node)
    return None if val is None else tuple(str(s) for s in val.shape)


def is_identity(node: fx.Node) -> bool:
    """Whether the node only hands on its first argument: a cast to the same dtype, a view of everything."""
    if op_name(node) == "slice" and list(node.args[2:]) in ([0, _END], [None, None], [0, None], []):
        return True
    if op_name(node) not in IDENTITY or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    before, after = value(node.args[0]), value(node)
    return before is not None and after is not None and before.dtype == after.dtype


def resolve(node: fx.Node) -> fx.Node:
    """The node that really made this value.

    A cast that changes nothing returns its argument when traced, so the residual operand of an add may be credited to
    the norm that casts it.
    """
    while is_identity(node):
        node = operand_at(node)
    return node


class Dataflow:
    """Order, ancestors and weight-carrying paths of a graph, as bit sets over node positions.

    Attributes:
        nodes: all nodes in order; ``index`` is the inverse.
        ancestors: bit i of ``ancestors[j]``: node i reaches node j.
        weighted: as ancestors, over paths with a weight-carrying op after node i.
    """

    def __init__(self, graph: fx.Graph):
        self.graph = graph
        self.nodes: list[fx.Node] = list(graph.nodes)
        self.index = {n: i for i, n in enumerate(self.nodes)}
        self.ancestors: list[int] = []
        self.weighted: list[int] = []
        self.inputs = sum(1 << i for i, n in enumerate(self.nodes) if n.op == "placeholder")
        for node in self.nodes:
            reach = heavy = 0
            for operand in node.all_input_nodes:
                j = self.index[operand]
                reach |= self.ancestors[j] | (1 << j)
                heavy |= self.weighted[j]
            self.ancestors.append(reach)
            self.weighted.append(heavy)
            if self.carries_weight(node):
                self.weighted[-1] = reach

    def is_static(self, node: object, dims: int = 0) -> bool:
        """Whether a value depends on parameters and constants only, and has at least ``dims`` dimensions.

        Covers weights that are computed: transposed, normalised, merged with an adapter, dequantised.
        """
        if not isinstance(node, fx.Node) or node.op == "placeholder":
            return False
        if node.op != "get_attr" and self.ancestors[self.index[node]] & self.inputs:
            return False
        val = value(node)
        return val is not None and val.dim() >= dims

    def carries_weight(self, node: fx.Node) -> bool:
        """A contraction with a parameter: what makes a side path a branch."""
        if op_name(node) in CONTRACTIONS or namespace(node) not in ("aten", "prims", "hcx", ""):
            return any(self.is_static(a, 2) for a in node.all_input_nodes)
        return False

    def reaches(self, early: fx.Node, late: fx.Node) -> bool:
        """Whether ``late`` depends on ``early`` (a node depends on itself)."""
        return early is late or bool(self.ancestors[self.index[late]] >> self.index[early] & 1)

    def reaches_by_weight(self, early: fx.Node, late: fx.Node) -> bool:
        """Whether a weight-carrying op lies on a path from ``early`` to ``late``."""
        return bool(self.weighted[self.index[late]] >> self.index[early] & 1)

    def between(self, start: fx.Node, end: fx.Node) -> list[fx.Node]:
        """Nodes on paths from start (left out) to end (included), in order."""
        wanted = self.ancestors[self.index[end]] | (1 << self.index[end])
        first, last = self.index[start], self.index[end]
        return [self.nodes[i] for i in range(first + 1, last + 1) if wanted >> i & 1 and self.ancestors[i] >> first & 1]

    def cut_vertices(self, start: fx.Node, end: fx.Node) -> list[fx.Node]:
        """Nodes that every path from start to end passes through, both ends included, in order."""
        inside = [start, *self.between(start, end)]
        members = set(inside)
        position = {n: i for i, n in enumerate(inside)}
        cuts: list[fx.Node] = []
        reach = 0  # furthest node that an edge from before the current node leads to
        for i, node in enumerate(inside):
            if i >= reach:
                cuts.append(node)
            reach = max([reach, *(position[u] for u in node.users if u in members)])
        return cuts


def live_users(node: fx.Node) -> list[fx.Node]:
    """Users of a value, seen through identity ops."""
    users: list[fx.Node] = []
    for user in node.users:
        users.extend(live_users(user)) if is_identity(user) else users.append(user)
    return users


def settle(node: fx.Node) -> fx.Node:
    """Move a value past dropout that every reader sees: in training that is the stream."""
    while len(node.users) == 1 and "dropout" in op_name(user := next(iter(node.users))):
        node = user
    return node


def private(body: list[fx.Node], entry: fx.Node) -> list[fx.Node]:
    """Computations outside a body that only the body reads, such as its own view of a shared table; in order.

    Args:
        body: nodes of a block.
        entry: the stream that comes in; it and what it is made from are never private.
    """
    members = set(body)
    found: list[fx.Node] = []
    frontier = [o for n in body for o in n.all_input_nodes]
    while frontier:
        node = frontier.pop()
        if node in (entry, resolve(entry)) or node in members or node.op != "call_function" or value(node) is None:
            continue
        if all(u in members for u in node.users):
            members.add(node)
            found.append(node)
            frontier += node.all_input_nodes
    return sorted(found)
