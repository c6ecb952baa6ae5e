"""The values inside a graph that can be looked at, by address: streams, branches, and what goes into and out of modules.

Modules are known by the paths that tracing has left on the nodes. What passes have put into a module belongs to it (an
adapter, a scale); what only reads the stream beside it (a head of an exit) does not.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from hcx.rewrite.ir.dataflow import Dataflow, op_name, shape, value
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.tags import Part, hcx_tag
from hcx.rewrite.sites.finder import find
from hcx.rewrite.sites.views import Boundary, Branch, Residual, Stack
from torch import fx

from .roles import OBSERVE

SIDES = ("input", "output")
_NO_MODULE = "_empty_nn_module_stack"
"""What torch.export calls the place of a node that no module's forward has made."""


@dataclass(frozen=True)
class Module:
    """One run of a module of the model.

    Attributes:
        path: of the module.
        address: the path, ``@1`` for the second call by the model, ``~2`` in the second pass of a loop. The first ones
            are written out where one module is meant and no other: ``@0``, ``~1``; see :func:`spellings`.
        nodes: what it computes, in order.
    """

    path: str
    address: str
    nodes: list[fx.Node]


class Values:
    """Everything in a Program that can be observed; a view, made anew for each graph."""

    def __init__(self, program: Program):
        self.program, self.sites = program, find(program)
        self.flow = Dataflow(program.graph)
        output = program.graph.output_node()
        self._results = set(output.args[0][: len(program.output_names)])

    # ---- streams and branches

    def boundaries(self, stack: Stack) -> dict[str, Boundary]:
        """Address -> boundary, every pass of a loop by itself: ``layers@3``, ``layers@3~2``."""
        return {f"{stack.label}@{b.index}{_pass(b.iteration)}": b for b in stack.boundaries}

    def branches(self) -> dict[str, tuple[Branch, Residual]]:
        """Address -> branch and the residual it is part of."""
        residuals = [r for s in self.sites.stacks for block in s.blocks for r in block.residuals]
        return {b.address: (b, r) for r in residuals for b in r.branches}

    def of_branch(self, branch: Branch, residual: Residual, side: str) -> fx.Node | str:
        """The stream a branch reads or the term it adds, or why there is no such value."""
        if side == "output":
            return branch.value
        skip, term = value(residual.skip), value(branch.value)
        if skip.dim() == term.dim():
            return residual.skip
        reads = [n for n in branch.body if op_name(n) == "stream_read" and value(n) is not None]
        reads = [n for n in reads if value(n).dim() == term.dim()]
        return reads[0] if len(reads) == 1 else "the stream is carried as several, and the branch reads no single one"

    # ---- modules

    @cached_property
    def modules(self) -> dict[str, Module]:
        """Address -> module, in the order in which they are entered."""
        passes = self._passes()
        runs: dict[tuple[str, str], dict[int, list[fx.Node]]] = defaultdict(lambda: defaultdict(list))
        for node in self.program.graph.nodes:
            if node.op != "call_function" or not _belongs(node):
                continue
            for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
                if path and not key.startswith(("hcx_", _NO_MODULE)) and not path.startswith(_NO_MODULE):
                    runs[key.removeprefix("L__self__"), path][passes.get(node, 1)].append(node)
        found = {}
        for (call, path), by_pass in runs.items():
            # a module around a loop runs once, whatever is repeated in it: what follows the loop is its own too
            again = [n for i, ns in by_pass.items() if i > 1 for n in ns]
            around = any(self.flow.reaches(a, n) for a in again for n in by_pass.get(1, ()))
            parts = {1: [n for ns in by_pass.values() for n in ns]} if around else by_pass
            for iteration, nodes in parts.items():
                address = f"{path}{_call(call)}{_pass(iteration)}"
                found[address] = Module(path, address, sorted(nodes))
        return found

    def _passes(self) -> dict[fx.Node, int]:
        """The pass of a loop that each node runs in; what later passes put into a block has no mark of its own."""
        found = {n: hcx_tag(n).iteration for n in self.program.graph.nodes}
        for stack in self.sites.stacks:
            for block in stack.blocks:
                found |= dict.fromkeys((n for n in block.body if "iteration" not in hcx_tag(n)), block.iteration)
        return found

    def of_module(self, module: Module, side: str) -> fx.Node | str:
        """The tensor that goes into a module or comes out of it, or why no single one does.

        Of several inputs (masks, rotary tables, routing weights) it is the one that the module's first weight reads,
        else the one that all others are made from. Of several outputs it is the one that the others lead to.
        """
        return self._input(module) if side == "input" else self._output(module)

    def _input(self, module: Module) -> fx.Node | str:
        members = set(module.nodes)
        operands = dict.fromkeys(o for n in module.nodes for o in n.all_input_nodes if o not in members)
        given = [o for o in operands if value(o) is not None and not self.flow.is_static(o)]
        if len(given) > 1:
            first = next((n for n in module.nodes if self.flow.carries_weight(n)), None)
            read = [o for o in given if first is not None and self._leads(o, first, members)]
            if len(read) > 1:  # a mask of positions is read on the way too
                widths = {shape(o)[-1] for o in first.all_input_nodes if shape(o) and not self.flow.is_static(o)}
                read = [o for o in read if shape(o) and shape(o)[-1] in widths] or read
            given = read or [o for o in given if all(self.flow.reaches(o, other) for other in given)] or given
        return _single(given, "takes", module)

    def _leads(self, operand: fx.Node, node: fx.Node, members: set[fx.Node]) -> bool:
        """Whether an operand of a module reaches one of its nodes on a way inside it."""
        pending, seen = [node], {node}
        while pending:
            for before in pending.pop().all_input_nodes:
                if before is operand:
                    return True
                if before in members and before not in seen:
                    seen.add(before)
                    pending.append(before)
        return False

    def _output(self, module: Module) -> fx.Node | str:
        members = set(module.nodes)
        given = [
            n
            for n in module.nodes
            if value(n) is not None
            and (n in self._results or any(u not in members and u.op != "output" and _read(u) for u in n.users))
        ]
        ends = [n for n in given if not any(o is not n and self.flow.reaches(n, o) for o in given)]
        return _single(ends, "gives", module)


def _belongs(node: fx.Node) -> bool:
    tag = hcx_tag(node)
    return tag.part in (None, Part.INSIDE)


def _read(user: fx.Node) -> bool:
    """Whether a use counts: not where only observers read."""
    return hcx_tag(user).word != OBSERVE.word


def _single(nodes: list[fx.Node], verb: str, module: Module) -> fx.Node | str:
    if len(nodes) == 1:
        return nodes[0]
    texts = [f"{n.name} {[str(s) for s in value(n).shape]}".replace("'", "") for n in nodes[:4]]
    return f"{module.address} {verb} {len(nodes)} tensors{': ' if texts else ''}{', '.join(texts)}"


def exactly(address: str) -> str:
    """The address of a module with its call and its pass written out: it fits no other.

    >>> exactly("h.0.attn"), exactly("h.0.attn@2"), exactly("h.0.attn~3")
    ('h.0.attn@0~1', 'h.0.attn@2~1', 'h.0.attn@0~3')
    """
    return spellings(address)[-1]


def spellings(address: str) -> list[str]:
    """Every way to write the address of a module; the one that names call and pass is the last.

    >>> spellings("h.0.attn"), spellings("h.0.attn@2~3")
    (['h.0.attn', 'h.0.attn~1', 'h.0.attn@0', 'h.0.attn@0~1'], ['h.0.attn@2~3'])
    """
    path, call, iteration = re.fullmatch(r"(.*?)(@\d+)?(~\d+)?", address, re.DOTALL).groups()
    calls, passes = [call] if call else ["", "@0"], [iteration] if iteration else ["", "~1"]
    return [f"{path}{c}{p}" for c in calls for p in passes]


def _call(call: str) -> str:
    """``@1`` for the second call of a module, as tracing counts them."""
    number = call.rpartition("@")[2] if "@" in call else ""
    return f"@{number}" if number.isdigit() else ""


def _pass(iteration: int) -> str:
    return "" if iteration == 1 else f"~{iteration}"
