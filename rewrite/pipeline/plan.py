"""Plans: what a pipeline would do, as data that can be printed, edited, stored and replayed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from hcx.rewrite.errors import PlanError

SCHEMA_VERSION = 1


class Reason(StrEnum):
    """Why a pass leaves a site alone; documented in docs/skips.md."""

    NO_STREAM = "no-residual-stream"
    NO_BLOCKS = "no-blocks"
    OUT_OF_RANGE = "out-of-range"
    WIDTH_CHANGES = "width-changes"
    LEAK = "value-used-outside"
    SHARED = "already-shared"
    ALREADY = "already-rewritten"
    NOT_ROWWISE = "stream-op-not-row-wise"
    DIFFERENT = "blocks-differ"
    HEAD_SHAPE = "head-does-not-fit"
    NO_READOUT = "no-readout"
    NOT_SELECTED = "not-selected"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True)
class Site:
    """One place that a pass will change.

    Attributes:
        address: block or boundary name, stable across shapes, dtypes and reloads.
        kind: what it is (``window``, ``exit``, ``branch``, ``weight``).
        detail: what the pass needs to know, as JSON values.
    """

    address: str
    kind: str
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Skip:
    """One place that a pass leaves alone, and why."""

    address: str
    reason: Reason
    detail: str = ""


@dataclass
class PassPlan:
    """One step of a plan. ``sites=None`` makes it a recipe: sites are looked for when it is applied."""

    name: str
    options: dict[str, Any]
    sites: list[Site] | None = None
    skips: list[Skip] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    estimate: dict[str, Any] = field(default_factory=dict)


@dataclass
class Plan:
    """What a pipeline would do to one model.

    Attributes:
        fingerprint: of the Program it was made for; None for a recipe that fits any model.
    """

    steps: list[PassPlan]
    fingerprint: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; :meth:`from_json` is the inverse."""
        return {
            "schema_version": SCHEMA_VERSION,
            "fingerprint": self.fingerprint,
            "steps": [asdict(s) for s in self.steps],
        }

    @staticmethod
    def from_json(data: dict[str, Any] | str) -> Plan:
        """Read a plan.

        Raises:
            PlanError: not a plan, or of another schema version.
        """
        try:
            data = json.loads(data) if isinstance(data, str) else data
            if data["schema_version"] != SCHEMA_VERSION:
                raise PlanError(
                    f"the plan has schema version {data['schema_version']}, this hcx reads {SCHEMA_VERSION}"
                )
            steps = [
                PassPlan(
                    s["name"],
                    dict(s.get("options", {})),
                    None if s.get("sites") is None else [Site(**x) for x in s["sites"]],
                    [Skip(x["address"], Reason(x["reason"]), x.get("detail", "")) for x in s.get("skips", [])],
                    list(s.get("notes", [])),
                    dict(s.get("estimate", {})),
                )
                for s in data["steps"]
            ]
        except PlanError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(
                f"this is not a plan: {f'the field {error} is missing' if isinstance(error, KeyError) else error}",
                hint="make one with `hcx plan MODEL --pass ... --json`",
            ) from error
        return Plan(steps, data.get("fingerprint"))

    def __str__(self) -> str:
        lines = []
        for step in self.steps:
            options = ", ".join(f"{k}={v}" for k, v in step.options.items())
            lines.append(f"{step.name}{{{options}}}")
            for site in step.sites or ():
                detail = " ".join(f"{k}={v}" for k, v in site.detail.items())
                lines.append(f"  {site.kind:8s} {site.address}  {detail}".rstrip())
            lines += [
                f"  skip     {s.address}: {s.reason.value}{': ' + s.detail if s.detail else ''}" for s in step.skips
            ]
            lines += [f"  note     {n}" for n in step.notes]
            if step.estimate:
                lines.append("  estimate " + ", ".join(f"{k} {v}" for k, v in step.estimate.items()))
        return "\n".join(lines)
