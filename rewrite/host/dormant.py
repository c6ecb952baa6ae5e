"""Leaving out what passes added and what changes nothing at present, for files that are run and not trained."""

from __future__ import annotations

from hcx.rewrite.driver import rewrite
from hcx.rewrite.errors import HcxError
from hcx.rewrite.ir.history import Entry, numbered, tensor_prefix
from hcx.rewrite.ir.program import Program
from hcx.rewrite.pipeline import registry, spec
from hcx.rewrite.pipeline.passbase import Pass
from hcx.rewrite.pipeline.plan import Plan


def without_dormant(program: Program) -> tuple[Program, list[str]]:
    """A Program that computes the same, bitwise, without the loops and the like that do nothing, and what was left out.

    The given one is not changed; it is returned itself where there is nothing to leave out.
    """
    notes = []
    for entry, number in reversed(list(numbered(program.history))):
        undo = _undo(program, entry, tensor_prefix(entry.name, number))
        if undo is not None and undo.plan(program).sites:
            program = rewrite(program, undo, check=False)
            notes.append(f"what `{entry.name}` added changes nothing at present and is left out")
    return program, notes


def _undo(program: Program, entry: Entry, prefix: str) -> Pass | None:
    try:
        step = Plan.from_json(entry.plan).steps[0]
        return spec.build(registry.get(entry.name), step.options).undo(program, step.sites or [], prefix)
    except (HcxError, KeyError):  # a pass that is not installed here, or whose tensors are gone
        return None
