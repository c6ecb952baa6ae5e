"""SiameseNorm: a second, post-norm stream beside the pre-norm one, with the same blocks.

Published (Li et al. 2026, arXiv 2602.08064): ``x <- PN(x)``; ``z = F(IN(x + QN(y)))``; ``x <- x + z / c``;
``y <- y + z`` with ``c = sqrt(2 (block + 1))``; at the end ``FN(PN(x) + QN(y))``. The second norm around a norm and the
ungated x change a trained model. Here QN is the model's own norm, IN is left out, and x enters behind a gate a feature
that starts at 0: ``z = F(QN(y) + g x)``, at the end ``QN(y) + g PN(x)``. The stream y is the model's own, untouched.

Source: docs/sources.md, siamese.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from hcx.rewrite.edit.editor import Editor
from hcx.rewrite.ir.dataflow import Dataflow, op_name, resolve, results_of, settle, shape, value
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.tags import MIX, hcx_tag
from hcx.rewrite.ir.traced import traced
from hcx.rewrite.pipeline.contracts import Contract, Exact
from hcx.rewrite.pipeline.passbase import Pass
from hcx.rewrite.pipeline.plan import PassPlan, Reason, Site, Skip
from hcx.rewrite.sites.finder import find
from hcx.rewrite.sites.views import Residual, Stack
from torch import fx

from .equations import advanced, joined, precise, rms_normed
from .roles import JOIN, NORM

NORMS = {"layer_norm", "native_layer_norm", "rms_norm", "rsqrt"}


@dataclass(frozen=True)
class Siamese(Pass):
    """Carry a normed stream beside each residual stream; every branch reads both.

    Args:
        stack: label of the stack to rewrite; default: all.
    """

    name: ClassVar[str] = "siamese"
    rank: ClassVar[int | None] = 10

    stack: str | None = None

    def plan(self, program: Program) -> PassPlan:
        """One site a residual."""
        plan = self.new_plan(sites=[])
        assert plan.sites is not None
        sites, flow = find(program), Dataflow(program.graph)
        if any(hcx_tag(n).get("pass") == self.name for n in program.graph.nodes):
            plan.skips.append(Skip("model", Reason.ALREADY, "it has a second stream"))
            return plan
        for stack in (s for s in sites.stacks if self.stack in (None, s.label)):
            problem = _problem(flow, stack)
            if problem is not None:
                plan.skips.append(Skip(stack.label, *problem))
                continue
            for number, residual in enumerate(_residuals(stack)):
                address = "+".join(b.address for b in residual.branches)
                if all(_normed(flow, residual, b.value) is not None for b in residual.branches):
                    plan.sites.append(Site(address, "residual", {"stack": stack.label, "number": number}))
                else:
                    plan.skips.append(
                        Skip(address, Reason.UNSUPPORTED, "no norm between the stream and its first weight")
                    )
        if not sites.residuals:
            plan.skips.append(Skip("model", Reason.NO_STREAM, "no x + f(x) found"))
        return plan

    def apply(self, program: Program, plan: PassPlan, editor: Editor) -> None:
        """Insert the second stream beside each planned stack."""
        flow, sites = Dataflow(program.graph), find(program)
        chosen = {(s.detail["stack"], s.detail["number"]) for s in plan.sites or ()}
        named = (sites.stack(label) for label in dict.fromkeys(label for label, _ in chosen))
        # all places first: the flow knows nothing of what is inserted
        planned = sorted((s for s in named if s is not None), key=sites.stacks.index)
        places = [(order, stack, _final(flow, stack)) for order, stack in enumerate(planned)]
        normed = {
            b.value: _normed(flow, r, b.value) for _, s, _ in places for r in _residuals(s) for b in r.branches
        }  # fmt: skip
        for order, stack, final in places:
            x = stack.boundaries[0].node
            depth = [block.index for block in stack.blocks for _ in block.residuals]
            for number, residual in enumerate(_residuals(stack)):
                if (stack.label, number) not in chosen:
                    continue
                x = _gain(editor, f"{order}.{number}.norm", x)
                bodies = {n for b in residual.branches for n in b.body}
                for place, norm in enumerate(dict.fromkeys(normed[b.value] for b in residual.branches)):
                    name = f"{order}.{number}.gate" + (f"_{place}" if place else "")
                    assert norm is not None  # the plan found one
                    editor.redirect(norm, _join(editor, name, norm, x), only=bodies.__contains__)
                updates = [b.value for b in residual.branches]
                with editor.after(max(x, *updates), role=MIX):
                    x = editor.inline(advanced(math.sqrt(2 * (depth[number] + 1))), x, *updates)
            if final is not None:
                norm, readers = final
                x = _gain(editor, f"{order}.norm", x)
                editor.redirect(norm, _join(editor, f"{order}.gate", norm, x), only=readers.__contains__)

    def preserves(self, program: Program, plan: PassPlan) -> Contract:
        """Bitwise: the second stream enters by zeros."""
        return Exact()

    def inert(self, name: str) -> str | None:
        """Gains of the second stream's norms."""
        return "behind gates that start at 0" if name.endswith("norm") else None


def _residuals(stack: Stack) -> list[Residual]:
    return [r for block in stack.blocks for r in block.residuals]


def _problem(flow: Dataflow, stack: Stack) -> tuple[Reason, str] | None:
    if not stack.residual:
        return Reason.NO_STREAM, "stages without x + f(x)"
    if stack.boundaries[0].carrier.kind != "plain":
        return Reason.ALREADY, "the stream is carried as several streams already"
    if len({shape(b.node) for b in stack.boundaries}) > 1:
        return Reason.WIDTH_CHANGES, "the stream changes its shape on the way"
    if traced(stack.boundaries[0].node).dim() >= 4:
        return Reason.UNSUPPORTED, "its features are not in the last dimension"
    if _post_norm(flow, stack):
        return Reason.UNSUPPORTED, "a post-norm stream is normed already; the second stream would be the first"
    if any("alpha" in a.kwargs for r in _residuals(stack) for a in r.adds):
        return Reason.UNSUPPORTED, "branches are added with a factor inside the add"
    return None


def _post_norm(flow: Dataflow, stack: Stack) -> bool:
    """Whether a norm acts on the stream between its residuals, or behind the last one inside its block."""
    residuals = _residuals(stack)
    starts = [stack.boundaries[0].node, *(r.add for r in residuals)]
    ends = [*(settle(r.skip) for r in residuals), stack.boundaries[-1].node]
    between = [n for a, b in zip(starts, ends, strict=True) if a is not b for n in flow.between(a, b)]
    return any(op_name(n) in NORMS for n in between)


def _normed(flow: Dataflow, residual: Residual, end: fx.Node) -> fx.Node | None:
    """What a branch's first weights read: the model's own norm of the stream."""
    return _last_norm(flow, residual.skip, resolve(end))


def _last_norm(flow: Dataflow, start: fx.Node, end: fx.Node) -> fx.Node | None:
    cuts = flow.cut_vertices(start, end)
    free = [n for n in cuts if n is not start and shape(n) == shape(start) and not flow.reaches_by_weight(start, n)]
    if not free or not any(op_name(n) in NORMS for n in flow.between(start, free[-1])):
        return None
    return free[-1]


def _final(flow: Dataflow, stack: Stack) -> tuple[fx.Node, set[fx.Node]] | None:
    """The norm behind the last block and who reads it on the way to the first output that it reaches; None without."""
    end, output = stack.boundaries[-1].node, flow.nodes[-1]
    for result in (n for n in results_of(flow.graph) if isinstance(n, fx.Node) and value(n) is not None):
        if traced(result).is_floating_point() and flow.reaches(end, result) and result is not end:
            norm = _last_norm(flow, end, result)
            return None if norm is None else (norm, {u for u in norm.users if u is output or flow.reaches(u, result)})
    return None


def _gain(editor: Editor, name: str, x: fx.Node) -> fx.Node:
    """``PN(x)``."""
    val = traced(x)
    gain = editor.parameter(name, torch.ones(int(val.shape[-1]), dtype=precise(val), device=val.device))
    with editor.after(max(x, gain), role=NORM):
        made: fx.Node = editor.inline(rms_normed, x, gain)
        return made


def _join(editor: Editor, name: str, norm: fx.Node, x: fx.Node) -> fx.Node:
    val = traced(norm)
    gate = editor.parameter(name, torch.zeros(int(val.shape[-1]), dtype=precise(val), device=val.device))
    with editor.after(max(norm, x, gate), role=JOIN):
        made: fx.Node = editor.inline(joined, norm, x, gate)
        return made
