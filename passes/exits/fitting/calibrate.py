"""Choose the thresholds of a Program's exits for a target, and measure what they lead to on other inputs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from hcx.passes.exits.applied import applied, with_values
from hcx.passes.exits.insert.inserted import NEVER
from hcx.passes.exits.insert.places import Place
from hcx.rewrite.errors import UsageError
from hcx.rewrite.ir.program import Program
from hcx.rewrite.pipeline.contracts import Exact, Structural, to_json

from .costs import exit_costs
from .rules import for_agreement, for_budget, learn_then_test
from .trials import Batches, Trials, measure

CONFIDENCE = 0.95
"""Of a risk, where none is given."""


@dataclass
class Calibration:
    """Thresholds and what they lead to.

    Attributes:
        target: ``budget`` (mean depth in blocks), ``agreement`` or ``risk``, and its value.
        thresholds: by number of blocks; None never leaves.
        calibration, held_out: figures of :meth:`Trials.figures`; ``net_flops`` is over the plain model's.
        ways: operations of leaving at each exit and, last, of never leaving, over the plain model's.
        useless: exits that less than 5 % of the held-out positions take.
        note: what to know about the figures.
    """

    target: dict[str, float]
    method: str
    thresholds: dict[str, float | None]
    calibration: dict[str, Any]
    held_out: dict[str, Any]
    ways: dict[str, float]
    useless: list[Place] = field(default_factory=list)
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def calibrate(
    program: Program,
    batches: Batches,
    held_out: Batches,
    *,
    budget: float | None = None,
    agreement: float | None = None,
    risk: float | None = None,
    method: Literal["eero", "quantile"] = "eero",
    confidence: float | None = None,
    skip: int = 0,
    labels: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None,
    blank: int | None = None,
) -> tuple[Program, Calibration]:
    """A new Program with thresholds for one target; the given one is not changed.

    Args:
        batches: calls to choose the thresholds on; ``held_out``: others, to measure them on.
        budget: mean depth in blocks.
        agreement: least share of positions with the model's own answer, on ``batches``.
        risk: largest share of positions with another answer, by Learn-then-Test with this ``confidence``, between 0 and
            1; None: 0.95. Other targets have none.
        method: where on the scores exits share the work: ``eero`` weighs them by their risk alone, ``quantile`` by
            their place.
        skip: leading positions of each row that are left out.
        labels: of ``batches`` and of ``held_out``, to report accuracies.
        blank: class of CTC's blank, where sequences leave as wholes: they agree where they are the same without repeats
            and blanks.

    Positions are sequences in all figures where the exits are ``per=sequence``.

    Raises:
        UsageError: not one target, one that cannot be met, a confidence that is none, no exits in select form, or
            ``rule=max``.
    """
    targets = {k: v for k, v in {"budget": budget, "agreement": agreement, "risk": risk}.items() if v is not None}
    confidence = _checked(targets, confidence)
    exits = applied(program)
    if exits.rule == "max":
        raise UsageError("rule=max computes every exit and the model, so thresholds save nothing", where="calibrate",
                         hint="rule=first, or measure(program).figures([-inf, ...])")  # fmt: skip
    mine, theirs = labels if labels is not None else (None, None)
    seen = measure(exits, batches, skip=skip, labels=mine, blank=blank)
    other = measure(exits, held_out, skip=skip, labels=theirs, blank=blank)
    thresholds, note = _chosen(seen, targets, confidence, method)
    if all(t == NEVER for t in thresholds) and budget != exits.depth:
        note += ("; " if note else "") + "no exit can leave within the target"
    costs = exit_costs(exits, batches[0])
    figures = other.figures(thresholds, costs)
    limits = {str(k): None if t == NEVER else t for k, t in zip(exits.places, thresholds, strict=True)}
    ways = dict(zip([*map(str, exits.places), str(exits.depth)], costs.relative(), strict=True))
    report = Calibration(
        targets, method, limits, seen.figures(thresholds, costs), figures, ways, figures["useless"], note
    )
    new = set_thresholds(program, dict(zip(exits.places, thresholds, strict=True)))
    applied(new).entry["calibration"] = report.to_json()
    return new, report


def _checked(targets: dict[str, float], confidence: float | None) -> float:
    """The confidence, of one target that can be asked for."""
    if len(targets) != 1:
        raise UsageError("give one target", where="calibrate", hint="one of budget, agreement and risk")
    for name in ("agreement", "risk"):
        if name in targets and not 0 < targets[name] < 1:
            raise UsageError(f"{name} is a share, not {targets[name]:g}", where=name, hint=f"0 < {name} < 1")
    if confidence is not None and "risk" not in targets:
        raise UsageError("confidence belongs to a risk", where="confidence", hint="with risk=..., or leave it out")
    confidence = CONFIDENCE if confidence is None else confidence
    if not 0 < confidence < 1:
        raise UsageError(f"confidence is a share, not {confidence:g}", where="confidence", hint="0 < confidence < 1")
    return confidence


def _chosen(
    seen: Trials, targets: dict[str, float], confidence: float, method: Literal["eero", "quantile"]
) -> tuple[list[float], str]:
    """Thresholds for the target, and what to know about them."""
    if "budget" in targets:
        return for_budget(seen, targets["budget"], method), ""
    if "agreement" in targets:
        return for_agreement(seen, targets["agreement"], method), ""
    thresholds, p = learn_then_test(seen, targets["risk"], confidence, method)
    passed = f"p = {p:.2g} for the last thresholds that passed" if p < 1 else "no thresholds passed"
    return thresholds, f"{passed}, confidence {confidence:g}; nominal within one text"


def set_thresholds(program: Program, thresholds: dict[Place, float]) -> Program:
    """A new Program whose exits leave from these scores on; infinity never leaves.

    The history then says what the Program promises: bitwise the model only while nothing can leave.

    Raises:
        UsageError: no exits in select form, none at one of the places, or a threshold that is no number.
    """
    exits = applied(program)
    wrong = [k for k in thresholds if k not in exits.places]
    if wrong:
        raise UsageError(f"there is no exit after {wrong[0]} blocks", where="thresholds", hint=f"exits: {exits.places}")
    if odd := [k for k, v in thresholds.items() if math.isnan(v)]:
        raise UsageError(f"the threshold after {odd[0]} blocks is nan: not a number", where="thresholds",
                         hint="infinity never leaves")  # fmt: skip
    new = with_values(program, {exits.tensor(k, "threshold"): torch.tensor([v]) for k, v in thresholds.items()})
    entry = applied(new).entry
    for site in entry.sites:
        if site["detail"]["at"] in thresholds:
            limit = thresholds[site["detail"]["at"]]
            site["detail"]["threshold"] = None if limit == NEVER else float(limit)
    silent = all(s["detail"]["threshold"] is None for s in entry.sites)
    entry["contract"] = to_json(Exact() if silent else Structural())
    return new
