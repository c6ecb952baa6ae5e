"""Back to dense blocks: a loop that changes nothing is taken out, another becomes blocks with weights of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from hcx.rewrite.edit.editor import Editor
from hcx.rewrite.errors import UsageError
from hcx.rewrite.ir.dataflow import Dataflow
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.tags import hcx_tag
from hcx.rewrite.pipeline.contracts import Contract, Exact
from hcx.rewrite.pipeline.passbase import Pass
from hcx.rewrite.pipeline.plan import PassPlan, Reason, Site, Skip
from hcx.rewrite.sites.finder import cache_nodes
from torch import fx

from .forms import is_neutral
from .marks import Mark, made, members, read_inside, windows


@dataclass(frozen=True)
class Unloop(Pass):
    """Turn loops back into dense blocks, bitwise.

    A loop whose mix is neutral disappears, with its tensors, caches and readouts. Any other one is kept as the unrolled
    network that it is, in which every pass over the window gets a copy of the weights, free to train apart.

    Args:
        neutral: take out loops that change nothing; false: give them weights of their own too.
        separate: give the passes of the other loops weights of their own; false leaves these loops alone.
    """

    name: ClassVar[str] = "unloop"
    rank: ClassVar[int | None] = None

    neutral: bool = True
    separate: bool = True

    def __post_init__(self) -> None:
        if not (self.neutral or self.separate):
            raise UsageError("unloop{neutral=false,separate=false} does nothing", where="separate", hint="set one")

    def plan(self, program: Program) -> PassPlan:
        """One site a window that is looped now, the last one first."""
        plan = self.new_plan(sites=[])
        assert plan.sites is not None
        copied = 0
        # the last one that was made first: it may lie in a pass of an earlier one, or hold passes of it
        for mark in sorted(reversed(windows(program)), key=lambda m: -made(m.key)):
            still = self.neutral and is_neutral(mark.mix, mark.steps, mark.tensors(program))
            inside = read_inside(program, mark) if still and not mark.mix.startswith(("input", "restart")) else []
            if inside:
                reason = (
                    f"`{inside[0].name}` of a later pass is read behind the loop, and is not what the first pass gives"
                )
                plan.skips.append(Skip(mark.address, Reason.LEAK, reason))
            elif still or self.separate:
                action = "remove" if still else "separate"
                plan.sites.append(Site(mark.address, "loop", {"loop": mark.key, "action": action}))
                copied += 0 if still else sum(program.tensor(n).numel() for _, n in _weights(program, mark))
            else:
                plan.skips.append(Skip(mark.address, Reason.NOT_SELECTED, "its mix is not neutral, and separate=false"))
        for entry in program.history:
            options = entry.step["options"]
            if entry.name == "looped" and options.get("runtime"):
                reason = "its steps are an input of the call (runtime=true): rewrite without that option"
                plan.skips.append(Skip("looped", Reason.UNSUPPORTED, reason))
        if not plan.sites and not plan.skips:
            plan.skips.append(Skip("model", Reason.NO_BLOCKS, "no loop of `looped` is in this graph"))
        plan.estimate = {"new parameters": copied}
        return plan

    def apply(self, program: Program, plan: PassPlan, editor: Editor) -> None:
        """Take out or unshare each loop; later ones first, since their copies may hold earlier ones."""
        for site in plan.sites or ():
            mark = next(m for m in windows(program) if m.key == site.detail["loop"])
            if site.detail["action"] == "remove":
                remove(program, editor, mark)
            else:
                _separate(program, editor, mark)

    def misfit(self, program: Program, detail: dict[str, Any]) -> str | None:
        """A loop that is not there, or an action that would change the function."""
        mark = next((m for m in windows(program) if m.key == detail["loop"]), None)
        if mark is None:
            return f"there is no loop {detail['loop']!r}"
        if detail["action"] == "remove" and not is_neutral(mark.mix, mark.steps, mark.tensors(program)):
            return "its mix is not neutral, so that it cannot be removed"
        return None if detail["action"] in ("remove", "separate") else f"`action` is {detail['action']!r}"

    def preserves(self, program: Program, plan: PassPlan) -> Contract:
        """Exact, whatever was trained."""
        return Exact()

    def inert(self, name: str) -> str | None:
        """A copy of what has no gradient (a key's bias, which moves no softmax) has none."""
        return "it is a copy of a parameter of the window, and learns as that one does"

    def fold(self, program: Program, sites: list[Site], prefix: str, weights: dict[str, torch.Tensor]) -> str | None:
        """Nothing to do where loops were removed."""
        kept = next((s for s in sites if s.detail["action"] == "separate"), None)
        return None if kept is None else f"the passes over {kept.address} have weights of their own"


def remove(program: Program, editor: Editor, mark: Mark) -> None:
    """Let everything behind a loop read its first pass, and drop what is then left over."""
    named = {n.name: n for n in program.graph.nodes}
    for node in read_inside(program, mark):  # a neutral pass that begins at the same value repeats every value
        editor.redirect(node, named[hcx_tag(node)["of"]], only=lambda user: hcx_tag(user).get("loop") != mark.key)
    editor.drop_taps(f"{mark.prefix}.")
    editor.redirect(mark.final, mark.first)
    editor.drop_cache_slots(cache_nodes(program) & set(members(program, mark)))
    for name in mark.tensors(program):
        editor.drop_tensor(f"{mark.tensor_prefix}{name}")


def _weights(program: Program, mark: Mark) -> list[tuple[int, str]]:
    """(iteration, parameter) of everything the copies of a window use."""
    flow, parameters = Dataflow(program.graph), dict(program.named_parameters(remove_duplicate=False))
    found: dict[tuple[int, str], None] = {}
    for node, iteration in mark.copies(program):
        for operand in node.all_input_nodes:
            if flow.is_static(operand):
                reach = flow.ancestors[flow.index[operand]] | 1 << flow.index[operand]
                names = [n.target for i, n in enumerate(flow.nodes) if reach >> i & 1 and n.op == "get_attr"]
                found.update({(iteration, n): None for n in names if n in parameters})
    return list(found)


def _separate(program: Program, editor: Editor, mark: Mark) -> None:
    """Copies of the window's weights for every pass after the first, and of what is computed from weights alone."""
    flow, parameters = Dataflow(program.graph), dict(program.named_parameters(remove_duplicate=False))
    own: dict[tuple[int, fx.Node], fx.Node] = {}

    def of(node: fx.Node, iteration: int) -> fx.Node:
        if (iteration, node) not in own:
            own[iteration, node] = anew(node, iteration)
        return own[iteration, node]

    def anew(node: fx.Node, iteration: int) -> fx.Node:
        if node.op == "get_attr":
            values = parameters.get(str(node.target))
            return node if values is None else editor.parameter(f"{node.target}~{iteration}", values.detach().clone())
        mapping = {o: of(o, iteration) for o in node.all_input_nodes}
        if all(o is n for o, n in mapping.items()):
            return node
        with editor.after(max([node, *mapping.values()])):
            return editor.clone([node], mapping, iteration=iteration)[node]

    for node, iteration in mark.copies(program):
        for operand in node.all_input_nodes:
            if operand in flow.index and flow.is_static(operand) and (new := of(operand, iteration)) is not operand:
                node.replace_input_with(operand, new)
    mark.forget()
