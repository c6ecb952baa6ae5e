"""A Program's graph in parts that can be modules of their own: one part a block, and what lies between.

Blocks are those of the finder. The parts are in an order in which they can run; within it nodes keep the graph's order
as far as possible, so that random numbers are drawn as before.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass

from hcx.rewrite.ir.aliases import Aliases, mutated
from hcx.rewrite.ir.dataflow import private
from hcx.rewrite.ir.program import Program
from hcx.rewrite.sites.finder import find
from torch import fx

_Unit = list[fx.Node]


@dataclass
class Part:
    """Nodes that run together.

    Attributes:
        nodes: calls, in graph order.
        block: address of the block, or None for what lies between blocks.
        owner: path of the module that holds the weights which only this block reads (and blocks of the same owner: the
            passes of a loop); empty where there is no such module.
    """

    nodes: list[fx.Node]
    block: str | None
    owner: str = ""


def partition(program: Program) -> list[Part]:
    """Parts of ``program.graph``, taps included."""
    graph = program.graph
    blocks = _blocks(program)
    parts = None
    while parts is None:
        parts = _ordered(graph, blocks)
    owners = _owners(program, parts)
    for part, owner in zip(parts, owners, strict=True):
        part.owner = owner
    return parts


def _blocks(program: Program) -> dict[str, _Unit]:
    """Address -> nodes of each block of each stack.

    Left out: a block that shares nodes with an earlier one, or writes to a tensor from outside (it could not run twice).
    """
    aliases = Aliases(program.graph)
    found: dict[str, _Unit] = {}
    taken: set[fx.Node] = set()
    calls = [n for n in program.graph.nodes if n.op == "call_function"]
    place = {n: i for i, n in enumerate(calls)}
    writing = any(mutated(n) for n in calls)
    edges = list(_dependencies(program.graph, calls)) if writing else []
    for stack in find(program).stacks:
        for block in stack.blocks:
            members = {n for n in (*private(block.body, block.entry), *block.body) if n.op == "call_function"}
            if writing and members:
                members = _closed(members, edges)
            writes = {aliases.root(t) for n in members for t in mutated(n)}
            address = block.address if block.iteration == 1 else f"{block.address}~{block.iteration}"
            if members and not members & taken and writes <= members and address not in found:
                taken |= members
                found[address] = sorted(members, key=place.__getitem__)
    return found


def _closed(members: set[fx.Node], edges: list[tuple[fx.Node, fx.Node]]) -> set[fx.Node]:
    """With what runs after one member and before another: writes to a member are no operands of what reads it later."""
    after, before = set(members), set(members)
    for early, late in edges:  # in the order of their late ends, so one walk reaches everything
        if early in after:
            after.add(late)
    for early, late in reversed(edges):
        if late in before:
            before.add(early)
    return after & before


def _ordered(graph: fx.Graph, blocks: dict[str, _Unit]) -> list[Part] | None:
    """Parts in an order in which they can run, or None after taking a block that has none apart."""
    calls = [n for n in graph.nodes if n.op == "call_function"]
    place = {n: i for i, n in enumerate(calls)}
    home: dict[fx.Node, str | int] = {n: address for address, nodes in blocks.items() for n in nodes}
    home |= {n: i for n, i in place.items() if n not in home}
    units: dict[str | int, _Unit] = defaultdict(list)
    for node in calls:
        units[home[node]].append(node)
    waits: dict[str | int, set[str | int]] = {key: set() for key in units}
    for early, late in _dependencies(graph, calls):
        if home[early] != home[late]:
            waits[home[late]].add(home[early])
    followers: dict[str | int, list[str | int]] = defaultdict(list)
    for key, before in waits.items():
        for other in before:
            followers[other].append(key)
    ready = [(place[units[key][0]], str(key), key) for key, before in waits.items() if not before]
    heapq.heapify(ready)
    parts: list[Part] = []
    done = 0
    while ready:
        _, _, key = heapq.heappop(ready)
        done += 1
        if isinstance(key, str):
            parts.append(Part(units[key], key))
        elif parts and parts[-1].block is None:
            parts[-1].nodes += units[key]
        else:
            parts.append(Part(list(units[key]), None))
        for other in followers[key]:
            waits[other].discard(key)
            if not waits[other]:
                heapq.heappush(ready, (place[units[other][0]], str(other), other))
    if done == len(units):
        return parts
    stuck = [key for key, before in waits.items() if before and isinstance(key, str)]
    del blocks[stuck[0]]
    return None


def _dependencies(graph: fx.Graph, calls: list[fx.Node]):
    """(early, late) pairs in the order of the late ones: operands, and everything around a write to a tensor."""
    aliases = Aliases(graph)
    written = {aliases.root(t) for n in calls for t in mutated(n)}
    last: dict[fx.Node, fx.Node] = {}
    for node in calls:
        for operand in node.all_input_nodes:
            if operand.op == "call_function":
                yield operand, node
        for root in {aliases.root(o) for o in node.all_input_nodes} & written if written else ():
            if root in last:
                yield last[root], node
            last[root] = node


def _owners(program: Program, parts: list[Part]) -> list[str]:
    """Owner of each part; see :class:`Part`."""
    readers: dict[int, set[int | None]] = defaultdict(set)  # tensor -> parts that read it; None: between blocks
    paths: list[str] = []
    for number, part in enumerate(parts):
        names = [o.target for n in part.nodes for o in n.all_input_nodes if o.op == "get_attr"]
        for name in names:
            readers[id(program.tensor(name))].add(number if part.block else None)
        paths.append(_common([n for n in names if n not in program.origin]) if part.block else "")
    for node in program.graph.output_node().all_input_nodes:
        if node.op == "get_attr":
            readers[id(program.tensor(node.target))].add(None)
    below: dict[str, set[int | None]] = {path: set() for path in paths if path}
    for name, tensor in program.named_tensors():
        for path in below:
            if name.startswith(path + "."):
                below[path] |= readers[id(tensor)]
    whole = {path for path, who in below.items() if who and all(n is not None and paths[n] == path for n in who)}
    return [path if path in whole else "" for path in paths]


def _common(names: list[str]) -> str:
    """Longest module path that all tensors lie below."""
    split = [name.split(".")[:-1] for name in names]
    path = []
    for level in zip(*split, strict=False):
        if len(set(level)) > 1:
            break
        path.append(level[0])
    return ".".join(path)
