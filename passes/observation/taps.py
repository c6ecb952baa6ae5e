"""Which tap of a Program holds which units of which value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hcx.rewrite.errors import UsageError
from hcx.rewrite.program import Program

if TYPE_CHECKING:
    from .separation import Unit

NAME = "observe"


def observed(program: Program) -> dict[str, dict[str, Any]]:
    """Tap name -> ``{"site": address, **details of the plan}``, of every ``observe`` in the history."""
    found = {}
    for number, entry in enumerate(e for e in program.history if e["pass"] == NAME):
        prefix = NAME if number == 0 else f"{NAME}_{number}"
        for site in entry["plan"]["steps"][0]["sites"]:
            found[f"{prefix}.{site['address']}"] = {"site": site["address"], **site["detail"]}
    return {tap: about for tap, about in found.items() if tap in program.taps}


def columns(program: Program, units: Sequence[Unit]) -> list[tuple[str, int]]:
    """(tap, column of its last axis) of each unit.

    Raises:
        UsageError: a unit that no tap holds.
    """
    taps = observed(program)
    found = []
    for unit in units:
        holds = [
            (tap, unit.unit if about["units"] is None else about["units"].index(unit.unit))
            for tap, about in taps.items()
            if about["site"] == unit.site and (about["units"] is None or unit.unit in about["units"])
        ]
        if not holds:
            raise UsageError(f"no tap holds unit {unit.unit} of `{unit.site}`", where="observe",
                             hint=f"taps: {', '.join(list(taps)[:6]) or 'none'}; Separation.pipeline() observes them")  # fmt: skip
        found.append(holds[0])
    return found
