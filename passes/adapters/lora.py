"""LoRA: a low-rank update beside each chosen weight, zero at the start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, ClassVar, Literal

import torch
from hcx.rewrite.edit.editor import Editor
from hcx.rewrite.errors import UsageError
from hcx.rewrite.ir.dataflow import value
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.tags import Part, Role, hcx_tag
from hcx.rewrite.pipeline.contracts import Contract, Exact
from hcx.rewrite.pipeline.passbase import Pass
from hcx.rewrite.pipeline.plan import PassPlan, Reason, Site, Skip
from hcx.rewrite.sites.weight_targets import Selection, base_count, require_finite, select
from hcx.rewrite.sites.weights import WeightUse, find_weights
from torch import fx

from . import lowrank

MATRICES = ("linear", "addmm", "matmul", "einsum")
OTHERS = ("conv", "experts")
BESIDE = ("linear", "addmm", "matmul", "embedding")

Window = tuple[int, int] | None
"""The part of an axis that an op reads, or None for all of it."""


ADAPTER = Role("lora", Part.INSIDE)
"""An adapter beside a weight."""


@dataclass(frozen=True)
class Lora(Pass):
    """Add ``s B A`` to weights, as ops beside theirs; ``B = 0`` at the start, so nothing changes before training.

    A parameter has one adapter, applied wherever the parameter is used (shared modules, the passes of a loop). Tied
    parameters are told apart by the module that uses them: an adapter on the head leaves the embedding alone. The
    base stays as it is; what to train is ``program.new_parameters()``.

    Args:
        rank: r.
        alpha: numerator of the scale ``alpha / r``; default: the rank.
        target: ``auto``: the matrices inside residual branches, or all but the readout in a model without a stream
            (where there are none: its convolutions and experts). Else patterns of parameter names (``q_proj``,
            ``*.mlp.*``, ``lm_head``); these also reach embeddings, convolutions and experts.
        init: how A is drawn, ``kaiming`` (uniform) or ``gaussian``; for an embedding A is zero and B normal.
        rslora: scale by ``alpha / sqrt(r)``.
        dropout: probability of dropping entries of what A reads, in train mode.
        per_iteration: every pass of a loop has adapters of its own beside the shared weights (relaxed recursion).
    """

    name: ClassVar[str] = "lora"

    rank: int = 8  # type: ignore[misc]  # an option here; `place()` stands in for the rank of the class
    alpha: float | None = None
    target: Literal["auto"] | tuple[str, ...] = "auto"
    init: Literal["kaiming", "gaussian"] = "kaiming"
    rslora: bool = False
    dropout: float = 0.0
    per_iteration: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UsageError(f"lora{{rank={self.rank}}}: at least 1 is needed", where="rank")
        if not 0 <= self.dropout < 1:
            raise UsageError(f"lora{{dropout={self.dropout}}} is not in [0, 1)", where="dropout")

    @classmethod
    def place(cls) -> int | None:
        """After exits, before quantization."""
        return 50

    def plan(self, program: Program) -> PassPlan:
        """One site a parameter, with what is left alone and why.

        Raises:
            PlanError: a chosen weight holds NaN or Inf.
            UsageError: adapters for each pass of a loop that there is not.
        """
        if self.per_iteration and not any(hcx_tag(n).iteration > 1 for n in program.graph.nodes):
            raise UsageError("lora{per_iteration=true}: nothing in this model is repeated by `looped`",
                             where="per_iteration", hint="leave it out, or put `looped` before lora")  # fmt: skip
        plan = self.new_plan(sites=[])
        assert plan.sites is not None
        selection = select(program, self.target, MATRICES, axes=2)
        if not selection.chosen:
            selection = select(program, self.target, OTHERS)
        require_finite(program, selection.chosen, "an adapter beside it would not be seen in the outputs")
        alpha = float(self.rank if self.alpha is None else self.alpha)
        scale = lowrank.scale_of(alpha, self.rank, self.rslora)
        groups = self._groups([u for uses in selection.chosen.values() for u in uses])
        for name, uses in groups.items():
            form = _form(uses)
            others = {u.reader for key, us in groups.items() if key != name for u in us}
            if form == "weight" and any(u.reader in others for u in uses):
                plan.skips.append(Skip(name, Reason.UNSUPPORTED, "the passes of the loop read one view of the weight"))
                continue
            if form == "weight" and self.dropout:
                why = f"dropout needs the activation, and {uses[0].kind} takes the update into the weight"
                plan.skips.append(Skip(name, Reason.UNSUPPORTED, why))
                continue
            a, b = _shapes(program, uses[0], self.rank)
            detail: dict[str, Any] = {
                "kind": uses[0].kind,
                "form": form,
                "rank": self.rank,
                "scale": scale,
                "uses": len(uses),
            }
            detail["axes"] = list(_order(uses[0]))
            plan.sites.append(Site(name, "weight", {**detail, "in": a[-1], "out": b[-2]}))
        self._describe(program, plan, selection, groups)
        return plan

    def _groups(self, uses: list[WeightUse]) -> dict[str, list[WeightUse]]:
        """Uses that share an adapter, by the address of the adapter: the parameter's name, ``~2`` for a second pass."""
        groups: dict[str, list[WeightUse]] = {}
        for use in uses:
            iteration = hcx_tag(use.node).iteration if self.per_iteration else 1
            groups.setdefault(use.name + (f"~{iteration}" if iteration > 1 else ""), []).append(use)
        return groups

    @staticmethod
    def _describe(program: Program, plan: PassPlan, selection: Selection, groups: dict[str, list[WeightUse]]) -> None:
        if not selection.chosen:
            plan.skips.append(Skip("model", Reason.NOT_SELECTED, "no matrix inside a residual branch; give target"))
        plan.notes += selection.notes()
        for site in plan.sites or ():
            uses = groups[site.address]
            if len(uses) > 1:
                plan.notes.append(f"{site.address} is used {len(uses)} times; one adapter serves all of them")
            others = [n for n in uses[0].names if n != uses[0].name]
            if others:
                plan.notes.append(f"{site.address} is tied to {', '.join(others)}, which the adapter leaves alone")
        done = {groups[s.address][0].names for s in plan.sites or ()}
        covered = sum(program.tensor(names[0]).numel() for names in done)
        plan.estimate = {
            "adapters": len(plan.sites or ()),
            "new parameters": sum(_count(program, groups[s.address][0], s.detail) for s in plan.sites or ()),
            "parameters covered": covered,
            "parameters not covered": base_count(program) - covered,
        }

    def apply(self, program: Program, plan: PassPlan, editor: Editor) -> None:
        """Insert the updates, last use first: what an op reads is then already what its adapter reads."""
        sites = {s.address: s.detail for s in plan.sites or ()}
        groups = {n: us for n, us in self._groups(find_weights(program)).items() if n in sites}
        factors = {n: self._factors(program, editor, groups[n][0], sites[n], n) for n in sites}
        beside = [(u, n) for n, us in groups.items() for u in us if sites[n]["form"] == "beside"]
        for use, name in sorted(beside, key=lambda pair: pair[0].node, reverse=True):
            self._beside(editor, use, *factors[name], sites[name]["scale"])
        for name, detail in sites.items():
            if detail["form"] == "weight":
                _inside(editor, groups[name], *factors[name], detail["scale"])

    def _factors(
        self, program: Program, editor: Editor, use: WeightUse, detail: dict[str, Any], site: str
    ) -> tuple[fx.Node, fx.Node]:
        weight = program.tensor(use.name)
        name, mark, iteration = site.partition("~")
        stem = name.removesuffix(".weight") + mark + iteration
        shapes = _shapes(program, use, detail["rank"])
        if use.kind == "embedding":
            a, b = torch.zeros(shapes[0]), lowrank.initial_embedding_b(shapes[1], use.name)
        else:
            a, b = lowrank.initial_a(shapes[0], self.init, use.name), torch.zeros(shapes[1])
        home = program.home(use.name)
        first = editor.parameter(f"{stem}.A", a.to(home, weight.dtype))
        return first, editor.parameter(f"{stem}.B", b.to(home, weight.dtype))

    def _beside(self, editor: Editor, use: WeightUse, a: fx.Node, b: fx.Node, scale: float) -> None:
        windows = use.window(use.in_axes[0]), use.window(use.out_axis)
        adapted = _adapted(use.kind == "embedding", use.left, scale * use.factor, self.dropout, *windows)
        readers = set(use.node.users)
        with editor.after(use.node, role=ADAPTER, site=use.address):
            new = editor.inline(adapted, use.node, use.input, a, b)
        editor.redirect(use.node, new, only=readers.__contains__)

    def preserves(self, program: Program, plan: PassPlan) -> Contract:
        """Exact: one of the two factors is zero at the start."""
        return Exact()

    def fold(self, program: Program, sites: list[Site], prefix: str, weights: dict[str, torch.Tensor]) -> str | None:
        """``W + s B A``, added in float32 or wider and rounded once."""
        for site in sites:
            if "~" in site.address:
                return f"its adapter {site.address} belongs to one pass of a loop"
            weight, stem = weights[site.address], site.address.removesuffix(".weight")
            wide = torch.promote_types(weight.dtype, torch.float32)
            a, b = (program.tensor(f"{prefix}.{stem}.{n}").detach().to(wide) for n in ("A", "B"))
            axes, scale = tuple(site.detail["axes"]), site.detail["scale"]
            weights[site.address] = lowrank.updated_weight(weight.to(wide), a, b, scale, axes).to(weight.dtype)
        return None

    def inert(self, name: str) -> str | None:
        """A learns once B has moved: its first gradient is as small as the first step of the optimiser."""
        return "its gradient is zero until B has moved" if name.endswith(".A") else None


def _form(uses: list[WeightUse]) -> str:
    """``beside`` the op where every use is a plain matrix product or lookup the same way round, else inside the
    ``weight``."""
    plain = all(u.kind in BESIDE and len(u.dims) == 2 and _dims(u.operand) == 2 for u in uses)
    return "beside" if plain and len({(u.out_axis, u.in_axes) for u in uses}) == 1 else "weight"


def _dims(node: fx.Node) -> int | None:
    found = value(node)
    return None if found is None else found.dim()


def _order(use: WeightUse) -> tuple[int, ...]:
    """Axes of the parameter as experts, output, inputs."""
    return (*(() if use.batch_axis is None else (use.batch_axis,)), use.out_axis, *use.in_axes)


def _shapes(program: Program, use: WeightUse, rank: int) -> tuple[list[int], list[int]]:
    """Shapes of A and B."""
    sizes = program.tensor(use.name).shape
    batch = [] if use.batch_axis is None else [int(sizes[use.batch_axis])]
    return [*batch, rank, prod(sizes[i] for i in use.in_axes)], [*batch, int(sizes[use.out_axis]), rank]


def _count(program: Program, use: WeightUse, detail: dict[str, Any]) -> int:
    return sum(prod(s) for s in _shapes(program, use, detail["rank"]))


@cache
def _adapted(
    lookup: bool, left: bool, scale: float, dropout: float, read: Window, written: Window
) -> Callable[..., torch.Tensor]:
    """The equation of one use as a function of the op's result, its input and the factors."""

    def adapted(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a, b = _narrowed(a, 1, read), _narrowed(b, 0, written)
        if lookup:
            return y + lowrank.beside_embedding(x, a, b, scale)
        return y + (lowrank.beside_left if left else lowrank.beside_linear)(x, a, b, scale, dropout)

    return adapted


def _narrowed(tensor: torch.Tensor, axis: int, window: Window) -> torch.Tensor:
    """The rows or columns of a factor that belong to the part of the weight that is used."""
    if window is None or window == (0, tensor.shape[axis]):
        return tensor
    return tensor.narrow(axis, window[0], window[1] - window[0])


@cache
def _updated(scale: float, order: tuple[int, ...]) -> Callable[..., torch.Tensor]:
    return lambda w, a, b: lowrank.updated_weight(w, a, b, scale, order)


def _inside(editor: Editor, uses: list[WeightUse], a: fx.Node, b: fx.Node, scale: float) -> None:
    """Let the readers of a weight read the updated one."""
    for source in dict.fromkeys(u.source for u in uses):
        readers = {u.reader for u in uses if u.source is source}
        with editor.before(min(readers), role=ADAPTER, site=uses[0].address):
            new = editor.inline(_updated(scale, _order(uses[0])), source, a, b)
        editor.redirect(source, new, only=readers.__contains__)
