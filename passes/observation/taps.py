"""Which tap of a Program holds which units of which value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hcx.rewrite.errors import UsageError
from hcx.rewrite.ir.dataflow import shape
from hcx.rewrite.ir.history import runs_of
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.traced import results
from hcx.rewrite.ir.values import fake_mode_of
from hcx.rewrite.pipeline.passbase import tap_prefix

from .arguments import whole

NAME = "observe"


def observed(program: Program) -> dict[str, dict[str, Any]]:
    """Tap name -> ``{"site": address, **details of the plan}``, of every ``observe`` in the history."""
    found = {}
    for number, entry in enumerate(runs_of(program.history, NAME)):
        prefix = tap_prefix(NAME, number)
        for site in entry.sites:
            found[f"{prefix}.{site['address']}"] = {"site": site["address"], **site["detail"]}
    return {tap: about for tap, about in found.items() if tap in program.taps}


def widths(program: Program) -> dict[str, int]:
    """Tap name -> units, of those taps of ``observe`` that are ``[batch, position, units]`` at the positions of the
    program's tokens, or at the last one.

    Others have the same number of axes at best by chance: heads of an attention, tokens of all rows in one axis, the
    positions of an encoder.
    """
    if program.signature.tokens is None:
        return {}
    fake_mode_of(program)  # a graph that was read from a file has no shapes yet
    names = [i.name for i in program.inputs]
    tokens = shape(program.graph.find_nodes(op="placeholder")[names.index(program.signature.tokens)])
    nodes = results(program.graph)[len(program.output_names) :]
    found = {}
    for tap, about in observed(program).items():
        own = shape(nodes[program.taps.index(tap)]) or ()
        position = "1" if about["last"] else tokens[1]
        if len(own) == 3 and own[:2] == (tokens[0], position) and own[2].isdigit():
            found[tap] = int(own[2])
    return found


def columns(program: Program, units: Sequence[Unit]) -> list[tuple[str, int]]:
    """(tap, column of its last axis) of each unit.

    Raises:
        UsageError: a unit that no tap holds, or holds at other places than the tokens'.
    """
    taps, readable = observed(program), widths(program)
    found = []
    for unit in units:
        number = whole(unit.unit, "unit", 0)
        of_site = [tap for tap, about in taps.items() if about["site"] == unit.site]
        holds = [
            (tap, number if taps[tap]["units"] is None else taps[tap]["units"].index(number))
            for tap in of_site
            if tap in readable and number in (taps[tap]["units"] or range(readable[tap]))
        ]
        if not holds and of_site and not any(tap in readable for tap in of_site):
            raise UsageError(f"unit {number} of tap `{of_site[0]}` cannot be read: it is not [batch, position, units] "
                             "at the positions of the tokens", where="observe",
                             hint="take a value of the decoder's stream or MLP")  # fmt: skip
        if not holds:
            known = of_site or list(taps)
            raise UsageError(f"no tap holds unit {number} of `{unit.site}`", where="observe",
                             hint=f"taps: {', '.join(f'{t} {_held(t, taps, readable)}' for t in known[:6]) or 'none'}; "
                                  "Separation.pipeline() observes them")  # fmt: skip
        found.append(holds[0])
    return found


def _held(tap: str, taps: dict[str, dict[str, Any]], readable: dict[str, int]) -> str:
    """The units of a tap, in words."""
    if taps[tap]["units"] is not None:
        return f"(units {', '.join(map(str, taps[tap]['units'][:8]))}{', ...' if taps[tap]['units'][8:] else ''})"
    return f"(units 0 to {readable[tap] - 1})" if tap in readable else "(not by position)"


@dataclass(frozen=True)
class Unit:
    """One number of an observed value that separates.

    Attributes:
        site: address of the value, such as ``model.layers.3.mlp.down_proj.input``.
        unit: number on its last axis.
        threshold: the event is expected at or beyond it; ``above`` or, where False, below.
        fit, held_out: on positions it was chosen on and on others: ``auroc`` of expecting the event in its direction,
            ``hits`` and ``false_alarms``, the shares of positions with and without the event beyond the threshold.
        difference: d on the positions it was chosen on.
    """

    site: str
    unit: int
    threshold: float
    above: bool
    difference: float = 0.0
    fit: dict[str, float] = field(default_factory=dict)
    held_out: dict[str, float] = field(default_factory=dict)
