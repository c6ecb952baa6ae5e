"""Stretches of a graph between two values of the stream, with everything that belongs to them: what is copied to run
them again."""

from __future__ import annotations

from dataclasses import dataclass, field

from hcx.rewrite.ir.dataflow import Dataflow, private, value
from torch import fx


@dataclass
class Span:
    """Everything that is copied to run a window of blocks again.

    Attributes:
        entry, exit: stream before and after the window.
        nodes: copied nodes, in order.
        caches: cache placeholders the window reads.
        leaks: values that are used after the window other than the stream.
    """

    entry: fx.Node
    exit: fx.Node
    nodes: list[fx.Node]
    caches: list[fx.Node]
    leaks: list[fx.Node] = field(default_factory=list)


def span_of(graph: fx.Graph, entry: fx.Node, exit_: fx.Node, caches: set[fx.Node]) -> Span:
    """The nodes between two boundaries, with what they prepare from caches and what they leave for cache outputs."""
    flow = Dataflow(graph)
    body = flow.between(entry, exit_)
    members = set(body)
    own = [n for n in private(body, entry) if any(flow.reaches(c, n) for c in caches)]
    members.update(own)
    side: list[fx.Node] = []
    leaks: list[fx.Node] = []
    frontier = [u for n in body if n is not exit_ for u in n.users]
    while frontier:
        node = frontier.pop()
        if node in members or node.op == "output" or value(node) is None:
            continue
        if flow.reaches(exit_, node) or any(not _only_to_output(u, flow, exit_) for u in node.users):
            leaks.append(node)
            continue
        members.add(node)
        side.append(node)
        frontier += list(node.users)
    nodes = sorted([*own, *body, *side])
    used = [c for c in sorted(caches) if any(u in members for u in c.users)]
    return Span(entry, exit_, nodes, used, leaks)


def _only_to_output(node: fx.Node, flow: Dataflow, exit_: fx.Node) -> bool:
    return node.op == "output" or value(node) is None or not flow.reaches(exit_, node)
