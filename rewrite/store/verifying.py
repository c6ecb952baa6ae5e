"""The checks of an artefact that was saved earlier."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from hcx.rewrite.check.decoding import check_decode
from hcx.rewrite.check.eager import check_source
from hcx.rewrite.check.invariants import check_grad_mode
from hcx.rewrite.check.liveness import check_live
from hcx.rewrite.check.measuring import outputs
from hcx.rewrite.check.report import Check
from hcx.rewrite.check.suite import Progress
from hcx.rewrite.check.vacuous import check_not_vacuous
from hcx.rewrite.ir.history import Entry, numbered, tensor_prefix
from hcx.rewrite.ir.program import Program
from hcx.rewrite.pipeline import contracts, registry, spec
from hcx.rewrite.pipeline.passbase import Pass
from hcx.rewrite.pipeline.plan import Plan
from hcx.rewrite.run.inputs import check_inputs
from hcx.rewrite.source import memory
from hcx.rewrite.tracing.reference import reference_for

from .loading import external_tensors, load
from .manifest import changed_files, read_manifest


def verify(path: str | os.PathLike[str], *, weights: str | os.PathLike[str] | None = None) -> list[Check]:
    """Run every check that an artefact allows: file hashes, its golden bitwise, and the contracts again.

    Args:
        weights: folder of the source model, for an artefact that refers to its weights. The checks that are owed are
            then run against that model, where memory allows.

    Returns:
        all checks, failed ones included.
    """
    changed = changed_files(path)
    manifest = read_manifest(Path(path))
    checks = [Check("files are as written", not changed, {"files": len(manifest["files"])}, ", ".join(changed))]
    external = external_tensors(manifest, Path(path), weights)
    if external:
        other = [n for n, place in external.items() if place.digest() != place.sha256]
        note = f"changed: {', '.join(other[:3])}" if other else ""
        checks.append(Check("source weights are as recorded", not other, {"tensors": len(external)}, note))
        short = None if other else memory.shortage(external.values())
        if other or short:
            return [*checks, *([Check("owed checks", True, short, "still owed: not enough memory")] if short else [])]
    program = load(path, weights=weights)
    owed = [e for e in program.history if e.owed]
    if owed and weights is not None:
        from hcx.rewrite.source.hf import load_model  # Transformers, where a source model is asked for

        model = load_model(Path(weights), trust=False, dtype=None)
        program.reference = reference_for(program, model)
    if program.golden.program:
        checks.append(program.golden.check(program))
        checks += program.golden.contracts(program)
    return checks + verify_again(program) + (verify_owed(program) if program.reference is not None else [])


def verify_again(program: Program, progress: Progress | None = None) -> list[Check]:
    """Run what can be run without the model before the rewrite: the checks of ``hcx verify`` on a loaded Program.

    Returns:
        every check, failed ones included.
    """
    say = progress or (lambda text: None)
    inputs = check_inputs(program, 3)
    say("running the program")
    got = outputs(program, inputs)
    checks: list[Check | None] = [check_grad_mode(program, inputs, got), check_decode(program, inputs[0])]
    if program.reference is not None:
        promised = [contracts.from_json(e.contract) for e in program.history]
        checks.append(check_source(program, contracts.combined(promised), inputs, got))
    return [c for c in checks if c is not None]


def verify_owed(program: Program) -> list[Check]:
    """The checks of single passes that a rewrite without values left out, on the Program as it is now.

    That the pipeline keeps its contracts is checked against the source model; see :func:`verify_again`.

    Returns:
        every check, failed ones included.
    """
    flat = check_inputs(program, 1)[0]
    checks: list[Check | None] = []
    for entry, number in numbered(program.history):
        if entry.owed:
            step = _step(entry)
            live = check_live(program, flat, tensor_prefix(step.name, number) + ".", step)
            if live is not None:  # dead parameters are listed, not refused, as in a rewrite
                live = dataclasses.replace(live, holds=True)
            checks += [check_not_vacuous(program, step, number, flat), live]
    return [c for c in checks if c is not None]


def _step(entry: Entry) -> Pass:
    planned = Plan.from_json(entry.plan).steps[0]
    return spec.build(registry.get(planned.name), planned.options)
