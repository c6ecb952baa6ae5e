"""Leaving out what passes added and what changes nothing at present, for files that are run and not trained."""

from __future__ import annotations

from typing import Any

from hcx.rewrite.errors import HcxError
from hcx.rewrite.ir.program import Program
from hcx.rewrite.pipeline import registry, spec
from hcx.rewrite.pipeline.plan import Plan


def without_dormant(program: Program) -> tuple[Program, list[str]]:
    """A Program that computes the same, bitwise, without the loops and the like that do nothing, and what was left out.

    The given one is not changed; it is returned itself where there is nothing to leave out.
    """
    names, notes = [entry["pass"] for entry in program.history], []
    for index in reversed(range(len(names))):
        undo = _undo(program, names[index], f"hcx.{names[index]}_{names[:index].count(names[index])}", index)
        if undo is not None and undo.plan(program).sites:
            program = program.rewrite(undo, check=False)
            notes.append(f"what `{names[index]}` added changes nothing at present and is left out")
    return program, notes


def _undo(program: Program, name: str, prefix: str, index: int) -> Any:
    try:
        step = Plan.from_json(program.history[index]["plan"]).steps[0]
        return spec.build(registry.get(name), step.options).undo(program, step.sites or [], prefix)
    except (HcxError, KeyError):  # a pass that is not installed here, or whose tensors are gone
        return None
