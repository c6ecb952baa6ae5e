"""Choosing parameters to change: by name, or the usual ones, with everything that is left alone and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import TYPE_CHECKING

import torch
from hcx.rewrite.errors import PlanError, UsageError

from .weights import (
    Uncovered,
    WeightUse,
    base_tensors,
    find_uncovered,
    find_weights,
    readout_weights,
    weights_in_branches,
)

if TYPE_CHECKING:
    from hcx.rewrite.ir.program import Program


@dataclass
class Selection:
    """Parameters that a pass was asked to change, with all their uses.

    Attributes:
        chosen: name -> uses, in order of first use.
        left: parameters of the base that are not chosen: name, entries and why; nothing is missing here.
    """

    chosen: dict[str, list[WeightUse]]
    left: list[Uncovered] = field(default_factory=list)

    def notes(self) -> list[str]:
        """One line for each reason why parameters are left alone."""
        by_reason: dict[str, list[Uncovered]] = {}
        for item in self.left:
            by_reason.setdefault(item.reason, []).append(item)
        return [
            f"not covered, {reason}: {len(items)} parameters with {sum(i.count for i in items):,} entries "
            f"({', '.join(i.name for i in items[:2])}{', ...' if len(items) > 2 else ''})"
            for reason, items in by_reason.items()
        ]


def select(program: Program, target: str | tuple[str, ...], kinds: Iterable[str], axes: int | None = None) -> Selection:
    """Choose parameters of the base by name, or the usual ones.

    ``auto`` takes the weights inside residual branches (of every stack, projections of another stream's output for
    cross-attention included), and where the model has no residual stream all weights but the readout, unless that
    is all it has; of these the ones of the given kinds. Patterns choose by name: a pattern fits a parameter's full
    name, the name without ``.weight``, or the last parts of that (``q_proj``, ``mlp.*``).

    Args:
        target: ``auto`` or fnmatch patterns.
        kinds: what ``auto`` takes.
        axes: number of axes that ``auto`` takes; None takes any.

    Raises:
        UsageError: a pattern that fits no weight.
    """
    uses = [u for u in find_weights(program) if u.name not in program.origin]
    by_name: dict[str, list[WeightUse]] = {}
    for use in uses:
        by_name.setdefault(use.name, []).append(use)
    if target == "auto":
        reasons = _usual(program, by_name, set(kinds), axes)
    else:
        patterns = (target,) if isinstance(target, str) else tuple(target)
        _check_patterns(patterns, by_name)
        reasons = {n: None if any(fits(n, p) for p in patterns) else "not in target" for n in by_name}
    chosen = {n: by_name[n] for n, reason in reasons.items() if reason is None}
    done = {n for us in chosen.values() for u in us for n in u.names}
    left: list[Uncovered] = []
    for name, reason in reasons.items():
        if reason is not None and name not in done:
            left.append(Uncovered(name, program.tensor(name).numel(), reason))
            done.update(by_name[name][0].names)
    return Selection(chosen, left + find_uncovered(program, uses))


def require_finite(program: Program, names: Iterable[str], because: str) -> None:
    """Refuse weights that hold NaN or Inf.

    Raises:
        PlanError: names the first such weight and counts its entries.
    """
    for name in names:
        finite(name, program.tensor(name), because)


def finite(name: str, weight: torch.Tensor, because: str) -> None:
    """Refuse one weight that holds NaN or Inf; without values nothing is known.

    Raises:
        PlanError: names the weight and counts its entries.
    """
    if not weight.is_meta and not torch.isfinite(weight).all():
        raise PlanError(
            f"`{name}` holds {int(weight.isnan().sum())} NaN and {int(weight.isinf().sum())} Inf: {because}",
            where=name,
            hint="mend the weight, or leave it out with target",
        )


def fits(name: str, pattern: str) -> bool:
    """Whether a pattern means a parameter.

    >>> [fits("model.layers.0.self_attn.q_proj.weight", p) for p in ("q_proj", "*.0.*", "proj", "self_attn.*")]
    [True, True, False, True]
    """
    stem = name.removesuffix(".weight")
    return fnmatch(name, pattern) or fnmatch(stem, pattern) or fnmatch(stem, f"*.{pattern}")


def base_count(program: Program) -> int:
    """Entries of the base's parameters, tied ones once."""
    return sum(program.tensor(names[0]).numel() for names in base_tensors(program))


def _check_patterns(patterns: tuple[str, ...], by_name: dict[str, list[WeightUse]]) -> None:
    for pattern in patterns:
        if not any(fits(n, pattern) for n in by_name):
            raise UsageError(
                f"no weight is called `{pattern}`",
                where="target",
                hint=f"weights of this model: {', '.join(list(by_name)[:6])}{', ...' if len(by_name) > 6 else ''}",
            )


def _usual(
    program: Program, by_name: dict[str, list[WeightUse]], kinds: set[str], axes: int | None
) -> dict[str, str | None]:
    """Name -> None if taken, else the reason."""
    inside = weights_in_branches(program, [u for us in by_name.values() for u in us])
    readouts = readout_weights(program)
    if all(u.node in readouts for us in by_name.values() for u in us if u.kind in kinds):
        readouts = set()
    reasons: dict[str, str | None] = {}
    for name, uses in by_name.items():
        if inside is not None and not any(u.node in inside for u in uses):
            reasons[name] = f"{uses[0].kind} outside the residual branches"
        elif inside is None and all(u.node in readouts for u in uses):
            reasons[name] = "the readout"
        elif uses[0].kind not in kinds:
            reasons[name] = f"{uses[0].kind} is not among the usual targets; name it in target"
        elif axes is not None and program.tensor(name).dim() != axes:
            reasons[name] = f"{program.tensor(name).dim()} axes; name it in target"
        else:
            reasons[name] = None
    return reasons
