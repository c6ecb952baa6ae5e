"""NormFormer: head scales and extra layer norms in the branches.

Source: Shleifer et al. 2021, arXiv 2110.09456; docs/sources.md, normformer.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any, ClassVar

import torch
from hcx.rewrite.edit.editor import Editor
from hcx.rewrite.errors import UsageError
from hcx.rewrite.ir.dataflow import Dataflow, is_identity, op_name, resolve, value
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.traced import traced
from hcx.rewrite.pipeline.contracts import Contract, Exact, Structural
from hcx.rewrite.pipeline.passbase import Pass
from hcx.rewrite.pipeline.plan import PassPlan, Reason, Site, Skip
from hcx.rewrite.sites.finder import find
from hcx.rewrite.sites.residuals import unscale
from hcx.rewrite.sites.views import Branch, Residual, Sites
from torch import fx

from .equations import gated_layer_norm, precise
from .roles import CARRY, HEAD_SCALE, NORM

ATTENTION = ("attn", "cross-attn")
PRODUCTS = {"linear": 0, "addmm": 1, "matmul": 0, "mm": 0}
"""Ops that a feed-forward branch ends in, with the place of the activation."""


@dataclass(frozen=True)
class NormFormer(Pass):
    """Scale each attention head, and norm what attention returns and what the last matrix of an MLP reads.

    A layer norm erases the size of a token, which no gain brings back: the published norms change any trained model. Here
    they stand behind gates, ``a + g (LN(a) - a)`` with a gate a feature.

    Args:
        gate: start of the gates. 0 keeps the function bitwise; 1 is the published form, which does not keep it, and the
            contract then says so.
        scale_residual: also scale the stream where an MLP is added to it, a number a feature that starts at 1.
    """

    name: ClassVar[str] = "normformer"

    gate: float = 0.0
    scale_residual: bool = False

    def __post_init__(self) -> None:
        if not isfinite(self.gate):
            raise UsageError(
                f"normformer{{gate={self.gate}}}: not a finite number", where="gate", hint="0 keeps the model"
            )

    def plan(self, program: Program) -> PassPlan:
        """One site a branch of attention or MLP."""
        plan = self.new_plan(sites=[])
        assert plan.sites is not None
        sites, flow = find(program), Dataflow(program.graph)
        for residual, branch in _branches(sites):
            detail, problem = self._parts(flow, residual, branch)
            if detail:
                plan.sites.append(Site(branch.address, "branch", {"kind": branch.kind, **detail}))
            else:
                plan.skips.append(Skip(branch.address, Reason.UNSUPPORTED, problem))
        if not sites.residuals:
            plan.skips.append(Skip("model", Reason.NO_STREAM, "no x + f(x) found"))
        return plan

    def _parts(self, flow: Dataflow, residual: Residual, branch: Branch) -> tuple[dict[str, Any], str]:
        """What a branch gets; empty with the reason."""
        if traced(branch.value).dim() >= 4:
            return {}, "its features are not in the last dimension"
        detail: dict[str, Any] = {}
        if branch.kind in ATTENTION:
            if (heads := heads_of(branch)) is not None:
                detail["heads"] = int(traced(heads).shape[1])
            detail["width"] = int(traced(branch.value).shape[-1])
        elif branch.kind == "mlp" and (read := inner_of(flow, residual, branch)) is not None:
            detail["inner"] = int(traced(read[1]).shape[-1])
            if self.scale_residual and _joint(residual) is not None:
                detail["stream"] = int(traced(residual.add).shape[-1])
        return detail, f"no attention and no MLP of two matrices: {branch.kind}"

    def apply(self, program: Program, plan: PassPlan, editor: Editor) -> None:
        """Insert what each site's detail lists."""
        flow = Dataflow(program.graph)
        chosen = {s.address: s.detail for s in plan.sites or ()}
        places = []
        for residual, branch in _branches(find(program)):
            if branch.address in chosen:
                inner = inner_of(flow, residual, branch) if "inner" in chosen[branch.address] else None
                returned = unscale(flow, branch.value)[0]
                rest = {*flow.between(returned, branch.value), *residual.adds}  # scales and dropout behind it
                places.append((residual, branch, chosen[branch.address], heads_of(branch), inner, (returned, rest)))
        for residual, branch, detail, heads, inner, (returned, rest) in places:
            if "heads" in detail:
                assert heads is not None  # the plan found them
                val = traced(heads)
                scale = torch.ones(detail["heads"], 1, 1, dtype=val.dtype, device=val.device)
                with editor.after(heads, role=HEAD_SCALE, site=branch.address):
                    scaled = editor.inline(torch.mul, heads, editor.parameter(f"{branch.address}.heads", scale))
                editor.redirect(heads, scaled)
            if "width" in detail:
                normed = self._norm(editor, f"{branch.address}.out", returned)
                editor.redirect(returned, normed, only=rest.__contains__)
            if inner is not None:
                reader, read = inner
                normed = self._norm(editor, f"{branch.address}.inner", read)
                editor.redirect(read, normed, only={reader}.__contains__)
            if "stream" in detail:
                self._scale_stream(editor, residual, branch.address, detail["stream"])

    def _norm(self, editor: Editor, name: str, node: fx.Node) -> fx.Node:
        val = traced(node)
        width, dtype, device = int(val.shape[-1]), precise(val), val.device
        gate = editor.parameter(f"{name}.gate", torch.full((width,), self.gate, dtype=dtype, device=device))
        gain = editor.parameter(f"{name}.weight", torch.ones(width, dtype=dtype, device=device))
        shift = editor.parameter(f"{name}.bias", torch.zeros(width, dtype=dtype, device=device))
        with editor.after(node, role=NORM):
            normed: fx.Node = editor.inline(gated_layer_norm, node, gate, gain, shift)
            return normed

    @staticmethod
    def _scale_stream(editor: Editor, residual: Residual, address: str, width: int) -> None:
        joint = _joint(residual)
        assert joint is not None  # the plan asked
        add, skip = joint
        val = traced(skip)
        scale = editor.parameter(f"{address}.residual", torch.ones(width, dtype=val.dtype, device=val.device))
        with editor.before(add, role=CARRY):
            scaled = editor.inline(torch.mul, skip, scale)
        editor.redirect(skip, scaled, only=lambda user: user is add)

    def preserves(self, program: Program, plan: PassPlan) -> Contract:
        """Bitwise behind closed gates; open ones change the function."""
        return Exact() if self.gate == 0 else Structural()

    def inert(self, name: str) -> str | None:
        """Gains and shifts of the norms."""
        if name.endswith((".weight", ".bias")) and self.gate == 0:
            return "behind a gate that starts at 0"
        return None


def _branches(sites: Sites) -> list[tuple[Residual, Branch]]:
    return [(r, b) for s in sites.stacks for block in s.blocks for r in block.residuals for b in r.branches]


def heads_of(branch: Branch) -> fx.Node | None:
    """What attention returns by head, ``[B, H, S, D]``, or None."""
    if branch.kind not in ATTENTION:
        return None
    for node in branch.body:
        found = None
        if "attention" in op_name(node):
            found = node
        elif op_name(node) in ("softmax", "_softmax"):
            reader: fx.Node | None = node
            while reader is not None and found is None:
                reader = next((u for u in reader.users if op_name(u) == "matmul" or is_identity(u)), None)
                found = reader if op_name(reader) == "matmul" else None
        if found is not None and (held := value(found)) is not None and held.dim() == 4:
            return found if isinstance(held.shape[1], int) else None
    return None


def inner_of(flow: Dataflow, residual: Residual, branch: Branch) -> tuple[fx.Node, fx.Node] | None:
    """The last matrix product of a branch and the activation it reads, where another matrix stands before; else None."""
    last = [n for n in branch.body if flow.carries_weight(n) and not flow.reaches_by_weight(n, resolve(branch.value))]
    if len(last) != 1 or op_name(last[0]) not in PRODUCTS:
        return None
    read = last[0].args[PRODUCTS[op_name(last[0])]]
    inside = isinstance(read, fx.Node) and not flow.is_static(read) and flow.reaches_by_weight(residual.skip, read)
    return (last[0], read) if isinstance(read, fx.Node) and inside and isinstance(traced(read).shape[-1], int) else None


def _joint(residual: Residual) -> tuple[fx.Node, fx.Node] | None:
    """The add that the stream enters as it is, and the operand that is the stream."""
    if len(residual.branches) > 1 or residual.skip_scaled or residual.projected:
        return None
    return next(
        ((a, o) for a in residual.adds for o in a.args[:2] if isinstance(o, fx.Node) and resolve(o) is residual.skip),
        None,
    )
