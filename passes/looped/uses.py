"""What changes from block to block: constants of each use of one parameter set, and values that blocks read from outside."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hcx.rewrite.ir.dataflow import Dataflow, is_identity, op_name, value
from hcx.rewrite.sites.blocks import repeats
from hcx.rewrite.sites.views import Block, BlockRun, Stack
from torch import fx


@dataclass(frozen=True)
class SharedUses:
    """Consecutive blocks that use one set of parameters again and again: a loop that the model brings itself.

    Attributes:
        start, end: positions of the blocks in the stack.
        count: number of uses.
        parameters: names of the shared tensors.
        constants: what differs between the uses, as text: ``conv1d dilation 1, 2, 4``.
    """

    start: int
    end: int
    count: int
    parameters: tuple[str, ...]
    constants: tuple[str, ...]

    def __str__(self) -> str:
        text = f"{self.count} uses of one parameter set ({_few(self.parameters)})"
        return text + (f"; what differs from use to use: {'; '.join(self.constants)}" if self.constants else "")


def shared_uses(graph: fx.Graph, stack: Stack) -> SharedUses | None:
    """The longest stretch of blocks that share their parameters, or None."""
    names = [_parameters(b) for b in stack.blocks]
    texts = [
        " ".join(n) if b.iteration == 1 else f"~{i}" for i, (n, b) in enumerate(zip(names, stack.blocks, strict=True))
    ]
    found = [r for r in repeats(texts) if all(names[r[0] : r[0] + r[2]])]
    if not found:
        return None
    start, end, period = max(found, key=lambda r: (r[1] - r[0]) // r[2])
    uses = [stack.blocks[i : i + period] for i in range(start, end, period)]
    shared = tuple(dict.fromkeys(n for part in names[start : start + period] for n in part))
    return SharedUses(start, end, len(uses), shared, tuple(_differences(Dataflow(graph), uses)))


def outside_notes(stack: Stack, start: int, end: int) -> list[str]:
    """What a loop over blocks [start, end) does with values that its blocks read beside the stream."""
    run = _run_of(stack, start, end)
    if run is None:
        return [f"blocks {start}..{end - 1} are not all equal in code; the loop repeats them as they are"]
    notes = []
    cycle = period_of(run)
    if cycle > 1 and (end - start) % cycle:
        notes.append(
            f"the blocks alternate with period {cycle} and the window has {end - start}: each block keeps its own "
            f"inputs in every pass, but passes do not join in turn; windows of {cycle}, {2 * cycle}, ... blocks do"
        )
    varying = [
        o for o, role in zip(stack.blocks[stack.position(start)].outside, run.roles, strict=False) if role == "varying"
    ]
    if varying:
        notes.append(
            f"each block has an input of its own ({_few([n.name for n in varying])} in block {start}); "
            "every pass reads that of the block it repeats"
        )
    return notes


def period_of(run: BlockRun) -> int:
    """Blocks after which both the code and what is read from outside repeat."""
    cycles = [int(m[1]) for role in run.roles if (m := re.fullmatch(r"periodic\((\d+)\)", role))]
    return max([run.period, *cycles])


def _run_of(stack: Stack, start: int, end: int) -> BlockRun | None:
    first, last = stack.position(start), stack.position(end - 1)
    if end - start == 1:
        return BlockRun(first, last + 1, 1, [])
    return next((r for r in stack.runs if r.start <= first and last < r.end), None)


def _parameters(block: Block) -> tuple[str, ...]:
    """Parameters inside the branches of a block, in order of use."""
    bodies = [b.body for r in block.residuals for b in r.branches]
    found = [o.target for body in bodies for n in body for o in n.all_input_nodes if o.op == "get_attr"]
    return tuple(dict.fromkeys(found))


def _differences(flow: Dataflow, uses: list[list[Block]]) -> list[str]:
    """Arguments of the branches' ops, and static values that the blocks read, that are not the same in every use."""
    found: dict[str, None] = {}
    for nodes in zip(*(_ops(u) for u in uses), strict=False):
        if len({op_name(n) for n in nodes}) > 1:
            continue
        for index, arguments in enumerate(zip(*(n.args for n in nodes), strict=False)):
            texts = list(dict.fromkeys(_literal(a) for a in arguments))
            if len(texts) > 1:
                found[f"{op_name(nodes[0])} {_argument(nodes[0], index)} {_few(texts)}"] = None
    for block in (b for use in uses for b in use):
        for node in block.outside:
            names = _sources(flow, node) if flow.is_static(node) else []
            if names:
                found[f"values made from {_few(names)}"] = None
    return list(found)


def _ops(use: list[Block]) -> list[fx.Node]:
    bodies = [b.body for block in use for r in block.residuals for b in r.branches]
    return [n for body in bodies for n in body if value(n) is not None and not is_identity(n)]


def _literal(argument: object) -> str:
    if isinstance(argument, fx.Node):
        return ""
    if isinstance(argument, list | tuple):
        return " ".join(str(a) for a in argument if not isinstance(a, fx.Node))
    return str(argument)


def _argument(node: fx.Node, index: int) -> str:
    schema = getattr(node.target, "_schema", None)
    return schema.arguments[index].name if schema is not None and index < len(schema.arguments) else f"argument {index}"


def _sources(flow: Dataflow, node: fx.Node) -> list[str]:
    """Parameters and buffers that a static value is made from."""
    reach = flow.ancestors[flow.index[node]] | 1 << flow.index[node]
    return [str(n.target) for i, n in enumerate(flow.nodes) if reach >> i & 1 and n.op == "get_attr"]


def _few(items, most: int = 12) -> str:
    items = list(items)
    return ", ".join(items if len(items) <= most else [*items[: most - 2], "...", items[-1]])
