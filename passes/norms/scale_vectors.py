"""Scale vectors beside the matrices of the branches, or in the gains of norms.

Source: docs/sources.md, scale-vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any, ClassVar, Literal

import torch
from hcx.rewrite.edit.editor import Editor
from hcx.rewrite.errors import UsageError
from hcx.rewrite.ir.dataflow import op_name, resolve, value
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.traced import traced
from hcx.rewrite.ir.values import fake_mode_of
from hcx.rewrite.pipeline.contracts import Contract, Exact, Rounding
from hcx.rewrite.pipeline.passbase import Pass
from hcx.rewrite.pipeline.plan import PassPlan, Reason, Site, Skip
from hcx.rewrite.sites.weight_targets import select
from hcx.rewrite.sites.weights import WeightUse, find_weights
from torch import fx

from .roles import SCALE

MATRICES = ("linear", "addmm", "matmul")
NORMS = ("layer_norm", "native_layer_norm", "rms_norm")
ROUNDING_PER_SITE = 32
"""Unit roundoffs a root of sites, as for streams: a gain is rounded once more, and later branches amplify it."""


@dataclass(frozen=True)
class ScaleVectors(Pass):
    """Learned scales a feature that start at what the model has, and fold back into its weights.

    Args:
        form: ``dual``: ``u * (W h)`` behind each matrix, u = 1 (its bias, where it has one, is scaled along).
            ``consumers``: ``W (g * h)`` for matrices that read one value together (queries, keys, values; gate, up), a g
            each, 1: the norm's gain becomes one gain a consumer, kept as a ratio to the shared one so that the start is
            bitwise for every kind of norm. ``direction``: the gain of a norm as ``m d / |d|`` with the scalar m and d learned.
        target: of the first two: ``auto``, the matrices inside residual branches, or patterns of parameter names.
    """

    name: ClassVar[str] = "scale_vectors"

    form: Literal["dual", "consumers", "direction"] = "dual"
    target: Literal["auto"] | tuple[str, ...] = "auto"

    def __post_init__(self) -> None:
        if self.form == "direction" and self.target != "auto":
            raise UsageError("scale_vectors{form=direction} takes every norm with a gain, and no target", where="target",
                             hint="leave target out, or form=dual or consumers")  # fmt: skip

    def plan(self, program: Program) -> PassPlan:
        """One site a matrix, or a gain."""
        plan = self.new_plan(sites=[])
        assert plan.sites is not None
        if self.form == "direction":
            for node in gains(program):
                name = str(node.target)
                if name not in program.stored and not program.tensor(name).any():
                    plan.skips.append(Skip(name, Reason.UNSUPPORTED, "a gain of zeros has no direction"))
                else:
                    plan.sites.append(Site(name, "weight", {"size": int(traced(node).shape[0])}))
            return plan
        selection = select(program, self.target, MATRICES, axes=2)
        readers: dict[fx.Node, set[str]] = {}
        for name, uses in selection.chosen.items():
            for use in uses:
                readers.setdefault(resolve(use.input), set()).add(name)
        alone = []
        for name, uses in selection.chosen.items():
            if (problem := _problem(program, uses)) is not None:
                plan.skips.append(Skip(name, Reason.UNSUPPORTED, problem))
            elif self.form == "consumers" and all(len(readers[resolve(u.input)]) == 1 for u in uses):
                alone.append(name)
            else:
                axis, across = uses[0].out_axis, uses[0].in_axes[0]
                detail = {"out_axis": axis, "in_axis": across, "uses": len(uses), "biases": _biases(uses)}
                plan.sites.append(Site(name, "weight", detail))
        if alone and not plan.sites:
            plan.skips.append(Skip("model", Reason.NOT_SELECTED, "no other matrix reads what one of them reads"))
        elif alone:
            plan.notes.append(f"{len(alone)} matrices read a value alone and keep its gain, {alone[0]} among them")
        plan.notes += selection.notes()
        return plan

    def apply(self, program: Program, plan: PassPlan, editor: Editor) -> None:
        """Insert the products; the last use first, so that an op's result is scaled before others read it."""
        sites = {s.address: s.detail for s in plan.sites or ()}
        if self.form == "direction":
            for node in [n for n in gains(program) if n.target in sites]:
                self._direction(program, editor, node)
            return
        for use in reversed([u for u in find_weights(program) if u.name in sites]):
            weight = program.tensor(use.name)
            size = weight.shape[use.out_axis if self.form == "dual" else use.in_axes[0]]
            ones = torch.ones(int(size), dtype=weight.dtype, device=program.home(use.name))
            scale = editor.parameter(f"{use.name.removesuffix('.weight')}.scale", ones)
            if self.form == "dual":
                readers = set(use.node.users)
                with editor.after(use.node, role=SCALE, site=use.address):
                    scaled = editor.inline(torch.mul, use.node, scale)
                editor.redirect(use.node, scaled, only=readers.__contains__)
            else:
                with editor.before(use.node, role=SCALE, site=use.address):
                    scaled = editor.inline(torch.mul, use.input, scale)
                editor.redirect(use.input, scaled, only={use.node}.__contains__)

    @staticmethod
    def _direction(program: Program, editor: Editor, node: fx.Node) -> None:
        gain = program.read(str(node.target)).detach()
        wide = gain.to(program.home(str(node.target)), torch.float64 if gain.dtype == torch.float64 else torch.float32)
        size = editor.parameter(f"{node.target}.size", wide.double().norm().reshape(1).to(wide.dtype))
        direction = editor.parameter(f"{node.target}.direction", wide.clone())
        readers = set(node.users)
        with editor.after(max(node, size, direction), role=SCALE):
            made = editor.inline(_gain_as[gain.dtype], size, direction)
        editor.redirect(node, made, only=readers.__contains__)

    def preserves(self, program: Program, plan: PassPlan) -> Contract:
        """Products with 1 are exact; a gain made from its direction rounds."""
        return Rounding(ROUNDING_PER_SITE * sqrt(len(plan.sites or ()))) if self.form == "direction" else Exact()

    def fold(self, program: Program, sites: list[Site], prefix: str, weights: dict[str, torch.Tensor]) -> str | None:
        """``u W`` with ``u b``, ``W g``, or ``m d / |d|``, in float32 or wider, rounded once."""
        for site in sites:
            name, detail = site.address, site.detail
            if self.form == "direction":
                parts = (program.tensor(f"{prefix}.{name}.{n}").detach() for n in ("size", "direction"))
                weights[name] = direction_of(*parts).to(weights[name].dtype)
                continue
            scale = program.tensor(f"{prefix}.{name.removesuffix('.weight')}.scale").detach()
            axis = detail["out_axis" if self.form == "dual" else "in_axis"]
            weights[name] = _scaled(weights[name], scale, axis)
            for bias in detail["biases"] if self.form == "dual" else ():
                weights[bias] = _scaled(weights[bias], scale, 0)
        return None


def direction_of(size: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    """``m d / |d|``: ``[1]`` and ``[C]``."""
    return size * direction * torch.rsqrt(direction.square().sum())


_gain_as = {
    dtype: lambda size, direction, dtype=dtype: direction_of(size, direction).to(dtype)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}
"""One function object a dtype, which the editor caches by."""


def _scaled(tensor: torch.Tensor, scale: torch.Tensor, axis: int) -> torch.Tensor:
    wide = torch.promote_types(tensor.dtype, torch.float32)
    form = [-1 if i == axis else 1 for i in range(tensor.dim())]
    return (tensor.to(wide) * scale.to(wide).reshape(form)).to(tensor.dtype)


def _problem(program: Program, uses: list[WeightUse]) -> str | None:
    if any(u.kind not in MATRICES or u.left or program.tensor(u.name).dim() != 2 for u in uses):
        return f"{uses[0].kind} does not give features in the last dimension"
    if any(u.window(a) not in (None, (0, program.tensor(u.name).shape[a])) for u in uses for a in (0, 1)):
        return "a part of it is used alone"
    if _biases(uses) is None:
        return "its bias is no parameter"
    return None


def _biases(uses: list[WeightUse]) -> list[str] | None:
    """Names of the biases added by the ops themselves; None where one is something else."""
    found: dict[str, None] = {}
    for use in uses:
        place = {"linear": 2, "addmm": 0}.get(op_name(use.node))
        bias: Any = use.node.args[place] if place is not None and len(use.node.args) > place else None
        if bias is not None and (bias.op != "get_attr" or traced(bias).dim() != 1):
            return None
        if bias is not None:
            found[bias.target] = None
    return list(found)


def gains(program: Program) -> list[fx.Node]:
    """The nodes that fetch gains of norms: weights of norm ops, and vectors multiplied with a value over its rms."""
    fake_mode_of(program)  # values of a loaded graph
    found = []
    names = {n for n, _ in program.named_parameters(remove_duplicate=False)} - set(program.origin)
    for node in program.graph.nodes:
        if node.op != "get_attr" or node.target not in names:
            continue
        held = value(node)
        if held is None or held.dim() != 1 or held.shape[0] <= 1:
            continue
        if any(_norms_with(node, user) for user in node.users):
            found.append(node)
    return found


def _norms_with(gain: fx.Node, user: fx.Node) -> bool:
    if op_name(user) in ("to", "_to_copy"):
        return any(_norms_with(user, u) for u in user.users)
    if op_name(user) in NORMS:
        return len(user.args) > 2 and user.args[2] is gain
    if op_name(user) != "mul":
        return False
    other = next((a for a in user.args[:2] if a is not gain), None)
    while isinstance(other, fx.Node) and op_name(other) in ("to", "_to_copy"):
        other = other.args[0]
    if not isinstance(other, fx.Node) or op_name(other) != "mul":
        return False
    return any(op_name(a) == "rsqrt" for a in other.args[:2])
