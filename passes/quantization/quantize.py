"""Weight-only quantization: packed codes take the place of weights, and the graph turns them back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal

import torch
from hcx.rewrite.edit.editor import Editor
from hcx.rewrite.errors import UsageError
from hcx.rewrite.ir.dataflow import value
from hcx.rewrite.ir.history import runs_of
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.tags import Part, Role, hcx_tag
from hcx.rewrite.ir.values import fake_mode_of
from hcx.rewrite.pipeline.contracts import Contract, Exact, Metric, Structural
from hcx.rewrite.pipeline.passbase import Pass
from hcx.rewrite.pipeline.plan import PassPlan, Reason, Site, Skip
from hcx.rewrite.sites.weight_targets import base_count, finite, require_finite, select
from hcx.rewrite.sites.weights import WeightUse, base_tensors, find_weights
from torch import fx

from .packing import fields
from .rounding import Layout, dequantise, dequantise_rows, quantise

USUAL = ("linear", "addmm", "matmul", "einsum", "conv", "experts")
_SPREADS = "each would take its whole group with it"
WIDTHS = (2, 3, 4, 5, 6, 7, 8, 16)


WEIGHT = Role("weight", Part.INSIDE)
"""Unpacks a weight."""


@dataclass(frozen=True)
class Quantize(Pass):
    """Store weights as ``bits``-bit codes with one scale for each group of inputs.

    The float weight leaves the Program; what reads it reads ``(code - zero) * scale``, computed once a parameter just
    before its first use (looped and shared weights, both ends of a tied matrix). A lookup reads only its own rows. What
    passes before it added (adapters, mixing scalars) stays in float. Not meant for training the weights themselves.

    Args:
        bits: 2 to 8, truly packed; 16 plans the sites and changes nothing.
        group: inputs that share a scale; 0: the whole row. Widths that are no multiple get a shorter last group.
        method: ``rtn``, round to nearest.
        symmetric: no zero points.
        target: ``auto``: all weights of two or more axes inside residual branches (experts and convolutions too), or
            all but the readout in a model without a stream. Else patterns of parameter names.
        max_kl: largest KL in nats from the outputs before, checked on the check inputs; None measures it only.
    """

    name: ClassVar[str] = "quantize"
    rank: ClassVar[int | None] = 70

    bits: int = 4
    group: int = 32
    method: Literal["rtn"] = "rtn"
    symmetric: bool = False
    target: Literal["auto"] | tuple[str, ...] = "auto"
    max_kl: float | None = None

    def __post_init__(self) -> None:
        if self.bits not in WIDTHS:
            raise UsageError(f"quantize{{bits={self.bits}}}", where="bits", hint=f"one of {WIDTHS}")
        if self.group < 0:
            raise UsageError(f"quantize{{group={self.group}}}", where="group", hint="1 or more, or 0 for whole rows")

    def plan(self, program: Program) -> PassPlan:
        """One site a parameter; weights that would not get smaller are skipped.

        Raises:
            PlanError: a chosen weight holds NaN or Inf.
        """
        plan = self.new_plan(sites=[])
        assert plan.sites is not None
        selection = select(program, self.target, USUAL)
        if not selection.chosen:
            plan.skips.append(Skip("model", Reason.NOT_SELECTED, "no weight inside a residual branch; give target"))
        require_finite(program, selection.chosen, _SPREADS)
        done: set[str] = set()
        for name, uses in selection.chosen.items():
            if name in done:
                continue
            done.update(uses[0].names)
            weight = program.tensor(name)
            layout = self._layout(weight, uses)
            if self.bits < 16 and layout.bytes() >= weight.nbytes:
                detail = f"{layout.bytes()} bytes packed, {weight.nbytes} as it is"
                plan.skips.append(Skip(name, Reason.UNSUPPORTED, f"would not get smaller: {detail}"))
                continue
            options = {"bits": self.bits, "group": self.group, "symmetric": self.symmetric}
            about: dict[str, Any] = {
                **options,
                "kind": uses[0].kind,
                "shape": list(layout.shape),
                "columns": list(layout.columns),
            }
            plan.sites.append(Site(name, "weight", about))
            others = [n for n in uses[0].names if n != name]
            if others:
                plan.notes.append(f"{name} is tied to {', '.join(others)}: quantized together")
        plan.notes += selection.notes()
        plan.estimate = _estimate(program, plan)
        return plan

    def _layout(self, weight: torch.Tensor, uses: list[WeightUse]) -> Layout:
        """Groups run along the inputs; along the features of a row where the weight is only looked up."""
        use = next((u for u in uses if u.kind != "embedding"), uses[0])
        columns = (use.out_axis,) if use.kind == "embedding" else use.in_axes
        return Layout(tuple(weight.shape), tuple(columns), self.bits, self.group, self.symmetric)

    def apply(self, program: Program, plan: PassPlan, editor: Editor) -> None:
        """Put codes in the place of weights."""
        uses = find_weights(program)
        constants: dict[int, list[fx.Node]] = {}
        for site in plan.sites or ():
            layout = _layout_of(site.detail)
            if layout.bits < 16:
                own = [u for u in uses if site.address in u.names]
                if layout.bits not in constants:
                    device = program.home(site.address)
                    constants[layout.bits] = [editor.constant("fields", t.to(device)) for t in fields(layout.bits)]
                _replace(program, editor, site.address, own, layout, constants[layout.bits])

    def changes(self, plan: PassPlan) -> bool:
        """16 bits leave everything as it is."""
        return any(s.detail["bits"] != 16 for s in plan.sites or ())

    def preserves(self, program: Program, plan: PassPlan) -> Contract:
        """A bound on the KL where one is given; exact where nothing changes."""
        if all(s.detail["bits"] == 16 for s in plan.sites or ()):
            return Exact()
        return Structural() if self.max_kl is None else Metric("kl", self.max_kl)

    def fold(self, program: Program, sites: list[Site], prefix: str, weights: dict[str, torch.Tensor]) -> str | None:
        """The weights that the codes stand for, in the dtype that they are used in."""
        found = dequantised(program)
        weights.update({s.address: found[s.address] for s in sites if s.address in found})
        return None

    def perturbed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Other codes; scales that are a tenth larger."""
        return tensor * 1.1 if tensor.is_floating_point() else tensor ^ 0xFF


def dequantised(program: Program) -> dict[str, torch.Tensor]:
    """The weights that the codes of a Program stand for, by the parameters' own names; the Program is not changed.

    In the base model's place of these parameters they give the outputs of the quantized Program bitwise.
    """
    fake_mode_of(program)
    dtypes = {
        (tag.get("pass"), tag.get("site")): held.dtype
        for node in program.graph.nodes
        if (tag := hcx_tag(node)) and (held := value(node)) is not None
    }
    found: dict[str, torch.Tensor] = {}
    for number, entry in enumerate(runs_of(program.history, Quantize.name)):
        for site in (s for s in entry.sites if s["detail"]["bits"] < 16):
            stem = f"hcx.{Quantize.name}_{number}.{_stem(site['address'])}"
            layout, dtype = _layout_of(site["detail"]), dtypes[Quantize.name, site["address"]]
            parts = [program.tensor(f"{stem}.{p}") for p in _PARTS[: 2 if layout.symmetric else 3]]
            found[site["address"]] = _weight(layout, dtype)(
                *parts, *(t.to(parts[0].device) for t in fields(layout.bits))
            )
    return found


_PARTS = ("codes", "scales", "zeros")


def _stem(name: str) -> str:
    return name.removesuffix(".weight")


def _layout_of(detail: dict[str, Any]) -> Layout:
    return Layout(
        tuple(detail["shape"]), tuple(detail["columns"]), detail["bits"], detail["group"], detail["symmetric"]
    )


def _estimate(program: Program, plan: PassPlan) -> dict[str, Any]:
    """Parameters and bytes; scales are taken as float16."""
    base = [program.tensor(names[0]) for names in base_tensors(program)]
    before = sum(t.nbytes for t in base)
    covered = [(program.tensor(s.address), _layout_of(s.detail)) for s in plan.sites or ()]
    count = sum(t.numel() for t, _ in covered)
    packed = sum(t.nbytes if x.bits == 16 else x.bytes() for t, x in covered)
    return {
        "parameters covered": count,
        "parameters not covered": base_count(program) - count,
        "bytes before": before,
        "bytes after": before - sum(t.nbytes for t, _ in covered) + packed,
        "bits a covered weight": round(8 * packed / count, 3) if count else 0.0,
    }


def _split(layout: Layout, tensors: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    """Codes, scales, zero points or None, and constants."""
    return (*tensors[:2], None, tensors[2:]) if layout.symmetric else (*tensors[:3], tensors[3:])


@cache
def _weight(layout: Layout, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    return lambda *tensors: dequantise(layout, dtype, *_split(layout, tensors))


@cache
def _rows(layout: Layout, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """Only the rows that indices ask for."""

    def rows(ids: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        codes, scales, zeros, constants = _split(layout, tensors)
        codes, scales = (torch.nn.functional.embedding(ids, p) for p in (codes, scales))
        zeros = None if zeros is None else torch.nn.functional.embedding(ids, zeros)
        return dequantise_rows(layout, codes, scales, zeros, constants).to(dtype)

    return rows


def _replace(
    program: Program, editor: Editor, name: str, uses: list[WeightUse], layout: Layout, constants: list[fx.Node]
) -> None:
    """Redirect everything that reads a parameter, under any of its names, and drop it."""
    weight, names = program.read(name), uses[0].names
    finite(name, weight, _SPREADS)
    parts = [editor.buffer(f"{_stem(name)}.{k}", t) for k, t in quantise(weight, layout).items()]
    for use in uses:
        if use.kind == "embedding" and use.reader is use.node and layout.columns == (1,):
            with editor.before(use.node, role=WEIGHT, site=name):
                rows = editor.inline(_rows(layout, weight.dtype), use.input, *parts, *constants)
            editor.redirect(use.node, rows)
            program.graph.erase_node(use.node)
    sources = [n for n in program.graph.nodes if n.op == "get_attr" and n.target in names]
    readers = [u for s in sources for u in s.users]
    if readers:
        with editor.before(min(readers), role=WEIGHT, site=name):
            whole = editor.inline(_weight(layout, weight.dtype), *parts, *constants)
        for source in sources:
            editor.redirect(source, whole)
    for each in names:
        editor.drop_tensor(each)
