"""What a loop leaves on the graph so that it can be found again: after saving, after training, behind other passes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.signature import Fill
from hcx.rewrite.ir.tags import MIX, hcx_tag, set_tag
from torch import fx

from .roles import HEAD


@dataclass(frozen=True)
class Mark:
    """One looped window in a graph.

    Attributes:
        key: pass and window: ``looped_0`` for the first, ``looped_0.1`` for the second window of one pass.
        address: of the window.
        mix, steps: as planned.
        first, final: the stream after the first pass, and what the rest of the model reads.
    """

    key: str
    address: str
    mix: str
    steps: int
    first: fx.Node
    final: fx.Node

    @property
    def prefix(self) -> str:
        """Of its taps."""
        name, _, window = self.key.partition(".")
        return (name.removesuffix("_0") + f".{window}").rstrip(".")

    @property
    def tensor_prefix(self) -> str:
        """Of its parameters."""
        return f"hcx.{self.key}."

    def tensors(self, program: Program) -> dict[str, torch.Tensor]:
        """Its parameters by their short names."""
        found = {
            n.removeprefix(self.tensor_prefix): p
            for n, p in program.named_parameters()
            if n.startswith(self.tensor_prefix)
        }
        return {n: p.detach() for n, p in found.items() if not n[0].isdigit()}

    def copies(self, program: Program) -> list[tuple[fx.Node, int]]:
        """Nodes of the later passes with the number of their pass; mixes are not among them."""
        tagged = [(n, hcx_tag(n)) for n in program.graph.nodes]
        return [
            (n, t["iteration"]) for n, t in tagged if t.get("loop") == self.key and t.word not in (MIX.word, HEAD.word)
        ]

    def forget(self) -> None:
        """Take the mark off: the window is no loop any more."""
        tag = hcx_tag(self.final)
        set_tag(self.final, {k: v for k, v in tag.items() if k != "closes"}, tag.part)


def close(final: fx.Node, first: fx.Node, key: str, address: str, detail: dict[str, Any]) -> None:
    """Mark the end of a loop."""
    closes = {"loop": key, "address": address, "mix": detail["mix"], "steps": detail["steps"], "first": first.name}
    tag = hcx_tag(final)
    set_tag(final, {**tag, "closes": closes}, tag.part)


def windows(program: Program) -> list[Mark]:
    """The looped windows of a graph, in order; copies of a loop inside another one are left to that one."""
    named = {n.name: n for n in program.graph.nodes}
    found = []
    for node in program.graph.nodes:
        closes = hcx_tag(node).get("closes")
        if closes and closes["first"] in named:
            found.append(
                Mark(closes["loop"], closes["address"], closes["mix"], closes["steps"], named[closes["first"]], node)
            )
    return found


def made(key: str) -> int:
    """How many ``looped`` came before the one that made a loop."""
    return int(re.match(r"looped_(\d+)", key).group(1))


def members(program: Program, mark: Mark) -> list[fx.Node]:
    """Copies and mixes of a loop, and the cache placeholders that only they read."""
    own = {n for n in program.graph.nodes if hcx_tag(n).get("loop") == mark.key}
    slots = [n for n in program.graph.nodes if n.op == "placeholder" and n.users and all(u in own for u in n.users)]
    return [*slots, *(n for n in program.graph.nodes if n in own)]


def read_inside(program: Program, mark: Mark) -> list[fx.Node]:
    """Copies of later passes that are read from behind the loop (an exit inside the window) although its end is not."""
    own = {n for n, _ in mark.copies(program)}
    inside = set(members(program, mark))
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    specs = zip(placeholders, program.inputs, strict=True)
    slots = {spec.name.split(".")[1] for n, spec in specs if n in inside and spec.fill == Fill.EMPTY}
    output, names = program.graph.output_node(), [*program.output_names, *program.taps]
    pending = [
        n
        for n, name in zip(output.args[0], names, strict=True)
        if not name.startswith(f"{mark.prefix}.") and not (name.startswith("present.") and name.split(".")[1] in slots)
    ]
    seen, found = set(), []
    while pending:
        node = pending.pop()
        node = mark.first if node is mark.final else node
        if node in seen:
            continue
        seen.add(node)
        if node in own:
            found.append(node)
        else:
            pending += node.all_input_nodes
    return found
