"""The graphs of two Programs side by side: which nodes belong to which block, and which of them differ."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any, Literal

from hcx.rewrite.errors import ArtefactError
from hcx.rewrite.ir import graph_text
from hcx.rewrite.ir.dataflow import Dataflow, private
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.tags import MIX, hcx_tag
from hcx.rewrite.ir.values import fake_mode_of
from hcx.rewrite.sites.finder import find
from hcx.rewrite.sites.views import Stack, Streams
from torch import fx

Status = Literal["added", "removed", "changed", "unchanged"]
START = "start"
"""Address of what is computed before any block."""


@dataclass
class Line:
    """One node before and after; None where a side does not have it."""

    before: str | None
    after: str | None
    status: Status


@dataclass
class Place:
    """A block, or what is computed between two blocks, in one of the Programs.

    Attributes:
        branches: kinds, those of one add joined by ``||``.
        streams: values that carry the residual stream here.
        passes: how often the block is executed; ``number`` says which execution this is.
        taps: auxiliary outputs made here.
        roles: what passes inserted here, as ``pass role``.
        leaves: whether something inserted here is read elsewhere than in the next block (an exit head).
    """

    nodes: int = 0
    branches: list[str] = field(default_factory=list)
    streams: int = 1
    number: int = 1
    passes: int = 1
    taps: list[str] = field(default_factory=list)
    roles: list[str] = field(default_factory=list)
    leaves: bool = False


@dataclass
class Region:
    """One block (``layers.3``, ``layers.3~2`` in the second pass of a loop) or boundary (``layers@3``) in both.

    Attributes:
        lines: all nodes, in order.
    """

    address: str
    is_block: bool
    before: Place | None
    after: Place | None
    lines: list[Line]

    @property
    def status(self) -> Status:
        """Whether the region is there on both sides, and whether its nodes are the same."""
        if self.before is None or self.after is None:
            return "added" if self.before is None else "removed"
        return "changed" if any(x.status != "unchanged" for x in self.lines) else "unchanged"

    def count(self, status: Status) -> int:
        """Number of nodes of a status."""
        return sum(x.status == status for x in self.lines)


def regions(one: Layout, other: Layout) -> list[Region]:
    """Blocks and boundaries of both Programs, in the order of the second; boundaries without a node are left out."""
    pairs = _fetched(one.flow.graph, other.flow.graph)
    aligned = {key: _align(one, other, key, pairs) for key in _merged(one, other)}
    _join_moved(aligned, pairs)
    names = {after.name: before.name for after, before in pairs.items()}
    found = []
    for key, rows in aligned.items():
        lines = [_line(one, other, before, after, names) for before, after in rows]
        is_block = key in one.blocks or key in other.blocks
        if lines or is_block:
            found.append(Region(key, is_block, one.places.get(key), other.places.get(key), lines))
    return found


def _fetched(a: fx.Graph, b: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Inputs and tensors of the second graph -> those of the same name in the first."""
    one, other = ({(n.op, n.target): n for n in g.nodes if n.op in _FETCHES} for g in (a, b))
    return {node: one[key] for key, node in other.items() if key in one}


_FETCHES = ("placeholder", "get_attr")


def node_lines(program: Program) -> dict[fx.Node, str]:
    """One line of text a node, see :func:`hcx.rewrite.ir.graph_text.text`.

    Sizes are named as in the call signature, others ``d0``, ``d1``, ... in order of appearance: the symbols that a
    trace or a file comes with do not show.

    Raises:
        ArtefactError: the graph cannot be written as text.
    """
    fake_mode_of(program)  # gives every node its value
    names = _dim_names(program)
    lines = graph_text.node_lines(program.graph)
    if any("\n" in line for line in lines):
        raise ArtefactError("a name in the graph holds a line break", where="graph.json")
    shape = re.compile(r"( : \w+\[)[^]]*(\](?:  [@#].*)?)$")

    def named(node: fx.Node, line: str) -> str:
        kind, sizes = _sizes(node)
        text = ", ".join(_renamed(str(s), names[kind]) for s in sizes)
        return shape.sub(lambda m: m[1] + text + m[2], line)

    return {node: named(node, line) for node, line in zip(program.graph.nodes, lines, strict=True)}


def _sizes(node: fx.Node) -> tuple[str, list[Any]]:
    """Whether the sizes are those of the file a graph was read from or of a computed value, and the sizes."""
    if "shape" in node.meta:
        return "stored", list(node.meta["shape"])
    return "computed", list(getattr(node.meta.get("val"), "shape", ()))


def _dim_names(program: Program) -> dict[str, dict[str, str]]:
    """Symbols of sizes -> names of the call signature's dimensions, for stored and for computed sizes."""
    names: dict[str, dict[str, str]] = {"stored": {}, "computed": {}}
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    for node, spec in zip(placeholders, program.inputs, strict=True):
        computed = getattr(node.meta.get("val"), "shape", ())
        for kind, sizes in (("stored", node.meta.get("shape", ())), ("computed", computed)):
            for size, dim in zip(sizes, spec.shape, strict=False):
                if isinstance(dim, str) and str(size).isidentifier():
                    names[kind].setdefault(str(size), dim)
    return names


def _renamed(size: str, names: dict[str, str]) -> str:
    def named(symbol: re.Match[str]) -> str:
        return names.setdefault(symbol[0], f"d{sum(v.startswith('d') and v[1:].isdigit() for v in names.values())}")

    text = re.sub(r"\b[su]\d+\b", named, size)
    text = re.sub(r"\w+(?:\*\w+)+", lambda m: "*".join(sorted(m[0].split("*"))), text)
    return " + ".join(sorted(text.split(" + ")))


class Layout:
    """The nodes of a Program by block and boundary.

    Attributes:
        lines: node -> its line of text.
        places: address -> place, in order of execution.
        nodes: address -> nodes.
        blocks: addresses that are blocks.
    """

    def __init__(self, program: Program):
        sites = find(program)
        self.flow = Dataflow(program.graph)
        self.lines = node_lines(program)
        self.places: dict[str, Place] = {START: Place()}
        self.nodes: dict[str, list[fx.Node]] = {START: []}
        self.blocks: set[str] = set()
        self._exits: list[tuple[fx.Node, str, fx.Node | None]] = []
        home: dict[fx.Node, str] = {}
        ordered = [(s, i) for s in sites.stacks for i in range(len(s.blocks))]
        for stack, position in sorted(ordered, key=lambda x: self.flow.index[x[0].blocks[x[1]].exit]):
            self._add_block(stack, position, home)
        self._fill(program, home)

    def _add_block(self, stack: Stack, position: int, home: dict[fx.Node, str]) -> None:
        block = stack.blocks[position]
        suffix = "" if block.iteration == 1 else f"~{block.iteration}"
        key = block.address + suffix
        if key in self.places:  # two stacks with blocks of one name
            key = f"{key}#{stack.label}"
        is_last = stack.position(block.index, last=True) == position
        end = f"{stack.label}@{block.index + 1}" + ("" if is_last else f"~{block.iteration}")
        kinds = [" || ".join(b.kind + "*" * b.scaled for b in r.branches) for r in block.residuals]
        carrier = stack.boundaries[position].carrier
        streams = carrier.count if isinstance(carrier, Streams) else 1
        passes = sum(b.index == block.index for b in stack.blocks)
        self.places[key] = Place(branches=kinds, streams=streams, number=block.iteration, passes=passes)
        self.places[end] = Place(streams=streams, number=block.iteration, passes=passes)
        self.nodes[key], self.nodes[end] = [], []
        self.blocks.add(key)
        for node in [*private(block.body, block.entry), *block.body]:
            # what joins the passes of a loop is computed between two blocks, though the finder counts it to the first
            home.setdefault(node, end if hcx_tag(node).word == MIX.word else key)
        following = stack.blocks[position + 1].exit if position + 1 < len(stack.blocks) else None
        self._exits.append((block.exit, end, following))

    def _fill(self, program: Program, home: dict[fx.Node, str]) -> None:
        output = program.graph.output_node()
        taps = dict(zip(list(output.args[0])[len(program.output_names) :], program.taps, strict=True))
        for node in self.flow.nodes:
            if node.op in _FETCHES:
                continue
            last = next((x for x in reversed(self._exits) if self.flow.reaches(x[0], node)), None)
            key = home.get(node) or (last[1] if last else START)
            place, tag = self.places[key], hcx_tag(node)
            self.nodes[key].append(node)
            place.nodes += 1
            place.taps += [taps[node]] if node in taps else []
            role = f"{tag['pass']} {tag.get('role', 'copy')}" if "pass" in tag else ""
            place.roles += [role] if role and role not in place.roles else []
            if tag and node not in home and last and last[2] is not None:
                place.leaves |= not self.flow.reaches(node, last[2])


def _merged(one: Layout, other: Layout) -> list[str]:
    """Addresses of both in the order of the second; what only the first has goes after what precedes it there."""
    keys = list(other.places)
    previous = None
    for key in one.places:
        if key not in other.places:
            keys.insert(keys.index(previous) + 1 if previous else 0, key)
            previous = key
        elif key in one.blocks or previous is None:
            previous = key
    return keys


def _align(one: Layout, other: Layout, key: str, pairs: dict[fx.Node, fx.Node]) -> list[tuple[Any, ...]]:
    """(node of a or None, node of b or None), in order; pairs are added to ``pairs``."""
    left, right = one.nodes.get(key, []), other.nodes.get(key, [])
    rows: list[tuple[fx.Node | None, fx.Node | None]] = []
    matcher = SequenceMatcher(None, [_form(n) for n in left], [_form(n) for n in right], autojunk=False)
    for kind, i, j, k, m in matcher.get_opcodes():
        if kind == "equal":
            rows += zip(left[i:j], right[k:m], strict=True)
            pairs.update(zip(right[k:m], left[i:j], strict=True))
        else:
            rows += [(n, None) for n in left[i:j]] + [(None, n) for n in right[k:m]]
    return rows


def _join_moved(aligned: dict[str, list[tuple[Any, ...]]], pairs: dict[fx.Node, fx.Node]) -> None:
    """Pair nodes that one side counts to another block: a table read by one block is private, by two it is not."""
    left: dict[tuple[Any, ...], list[fx.Node]] = {}
    for rows in aligned.values():
        for before, after in rows:
            if after is None:
                left.setdefault((_form(before), str(hcx_tag(before))), []).append(before)
    moved: set[fx.Node] = set()
    for rows in aligned.values():
        for position, (before, after) in enumerate(rows):
            if before is None and (same := left.get((_form(after), str(hcx_tag(after))))):
                pairs[after] = same.pop(0)
                rows[position] = (pairs[after], after)
                moved.add(pairs[after])
    for key, rows in aligned.items():
        aligned[key] = [(x, y) for x, y in rows if y is not None or x not in moved]


def _form(node: fx.Node) -> str:
    """What a node does, without the names of the values it reads."""

    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            return "%"
        if isinstance(value, list | tuple):
            return "[" + ",".join(map(text, value)) + "]"
        return repr(value)

    if node.op == "output":
        return node.op
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    options = [f"{k}={text(v)}" for k, v in node.kwargs.items()]
    return f"{node.target}{text(node.args)}{options}@{stack[-1][0] if stack else ''}"


def _line(one: Layout, other: Layout, before: fx.Node | None, after: fx.Node | None, names: dict[str, str]) -> Line:
    if before is None:
        return Line(None, other.lines[after], "added")
    if after is None:
        return Line(one.lines[before], None, "removed")
    same = re.sub(r"%(\w+)", lambda m: f"%{names.get(m[1], '+')}", other.lines[after]) == one.lines[before]
    return Line(one.lines[before], other.lines[after], "unchanged" if same else "changed")
