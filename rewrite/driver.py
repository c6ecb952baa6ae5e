"""Applying a pipeline, checking it, and refusing what fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from .check.invariants import (
    Check,
    check_base_untouched,
    check_changed,
    check_contract,
    check_decode,
    check_grad_mode,
    check_not_vacuous,
    check_shapes,
    check_source,
    is_meta,
    outputs,
    state_of,
)
from .check.liveness import check_live
from .collection import young_only
from .errors import ContractError
from .ir.copies import copied
from .ir.program import Program
from .pipeline import contracts, registry, spec
from .pipeline.contracts import Contract
from .pipeline.passbase import Pass
from .pipeline.plan import PassPlan, Plan
from .pipeline.walk import fingerprint, fork, require_match, walk

Progress = Callable[[str], None]


def rewrite(
    program: Program, what: Any, *, check: bool = True, allow_partial: bool = False, progress: Progress | None = None
) -> Program:
    """A new Program with the passes applied; the given one is not changed.

    Args:
        what: pipeline string, pass objects, or a :class:`~hcx.rewrite.pipeline.plan.Plan`.
        check: run the checks; without them the history says that they are owed.
        allow_partial: accept passes that skip more than half of their sites.
        progress: called with a line of text before each longer step.

    Raises:
        UsageError, PlanError: a pipeline that cannot be meant.
        NoMatchError: a pass found nothing, or too little.
        ContractError: a check failed; nothing is returned.
    """
    with young_only():
        return _rewrite(program, what, check, allow_partial, progress or (lambda text: None))


def _rewrite(program: Program, what: Any, check: bool, allow_partial: bool, say: Progress) -> Program:
    new = fork(program)
    new._adopt(copied(new._root))  # before any pass runs: none can reach the caller's tensors
    base_print = fingerprint(program)
    checker = _Checker(program, new, say) if check and not is_meta(program) else None
    entries: list[dict[str, Any]] = []

    def seen(step: Pass, plan: PassPlan, editor: Any) -> None:
        require_match(step, plan, allow_partial)
        contract = step.preserves(new, plan)
        number = f"{step.name}_{editor.number}"
        entry = {
            "pass": step.name,
            "rank": step.order(),
            "pipeline": str(step),
            "plan": Plan([plan], base_print).to_json(),
            "contract": contracts.to_json(contract),
            "counts": dict(editor.counts),
            "checks": [],
            "owed": checker is None,
        }
        if reason := step.approximates(plan):
            entry["approximate_cache"] = reason
        if checker is not None:
            say(f"checking {step.name}")
            entry["checks"] = [
                c.to_json() for c in checker.step(new, step, contract, number, step.changes(plan), editor.moved)
            ]
        elif new.stored:
            say(f"checking the graph of {step.name}")
            entry["checks"] = [c.to_json() for c in _required([check_shapes(new, program)])]
        new.history[-1] = entry
        entries.append(entry)

    say("planning and applying")
    walk(new, what, seen)
    if checker is not None:
        say("checking the whole pipeline")
        entries[-1]["checks"] += [
            c.to_json() for c in checker.whole(new, [contracts.from_json(e["contract"]) for e in new.history])
        ]
    return new


class _Checker:
    """Runs the checks of a pipeline over one set of inputs."""

    def __init__(self, base: Program, new: Program, say: Progress):
        self.base, self.say = base, say
        self.inputs = [flat for flat in base.check_inputs(3) if _eager_accepts(base, flat)]
        self.first = self.before = outputs(base, self.inputs)
        self.state = state_of(new)

    def step(
        self, program: Program, step: Pass, contract: Contract, number: str, sites: bool, moved: dict
    ) -> list[Check]:
        """After one pass: its contract against the program before it, not vacuous, live.

        Args:
            moved: names of outputs before -> now, of those that are left; empty where none was taken out.
        """
        if moved:
            self.before = [{moved[n]: t for n, t in named.items() if n in moved} for named in self.before]
        after = outputs(program, self.inputs)
        checks: list[Check | None] = [
            check_contract(contract, after, self.before, f"contract of {step.name}"),
            check_not_vacuous(program, step, number, self.inputs[0])
            or (check_changed(step, self.state, state_of(program)) if sites else None),
            check_live(program, self.inputs[0], f"hcx.{number}.", step),
        ]
        self.before, self.state = after, state_of(program)
        return _required(checks, may_fail={"live gradients"})

    def whole(self, program: Program, promised: list[Contract]) -> list[Check]:
        """After the pipeline: against eager, with gradients, through the cache, and the base tensors."""
        after = self.before
        weakest = contracts.combined(promised)
        checks = [
            check_source(program, weakest, self.inputs, after, self.first if self.base.history else None),
            check_grad_mode(program, self.inputs, after),
            check_decode(program, self.inputs[0]),
            check_base_untouched(program, self.base),
        ]
        return _required(checks)


def _eager_accepts(program: Program, flat: list[torch.Tensor]) -> bool:
    """Whether the source model runs on an input set that was made from the example."""
    if program.reference is None:
        return True
    structure = getattr(program.reference, "structure", None)
    try:
        program.reference([t.clone() for t in flat[: len(structure.names) if structure else None]])
    except (RuntimeError, ValueError, IndexError):
        return False
    return True


def _required(checks: list[Check | None], may_fail: frozenset | set = frozenset()) -> list[Check]:
    done = [c for c in checks if c is not None]
    for check in done:
        if not check.holds and check.name not in may_fail:
            raise ContractError(
                f"a check failed: {check}",
                hint="nothing was written; this is a bug of the pass or a model it does not fit",
            )
    return done


def verify_again(program: Program, progress: Progress | None = None) -> list[Check]:
    """Run what can be run without the model before the rewrite: the checks of ``hcx verify`` on a loaded Program.

    Returns:
        every check, failed ones included.
    """
    say = progress or (lambda text: None)
    inputs = program.check_inputs(3)
    say("running the program")
    got = outputs(program, inputs)
    checks: list[Check | None] = [check_grad_mode(program, inputs, got), check_decode(program, inputs[0])]
    if program.reference is not None:
        promised = [contracts.from_json(e["contract"]) for e in program.history]
        checks.append(check_source(program, contracts.combined(promised), inputs, got))
    return [c for c in checks if c is not None]


def verify_owed(program: Program) -> list[Check]:
    """The checks of single passes that a rewrite without values left out, on the Program as it is now.

    That the pipeline keeps its contracts is checked against the source model; see :func:`verify_again`.

    Returns:
        every check, failed ones included.
    """
    flat = program.check_inputs(1)[0]
    names = [e["pass"] for e in program.history]
    checks: list[Check | None] = []
    for index, entry in enumerate(program.history):
        if entry.get("owed"):
            step = _step(entry)
            number = f"{step.name}_{names[:index].count(step.name)}"
            live = check_live(program, flat, f"hcx.{number}.", step)
            if live is not None:  # dead parameters are listed, not refused, as in a rewrite
                live = dataclasses.replace(live, holds=True)
            checks += [check_not_vacuous(program, step, number, flat), live]
    return [c for c in checks if c is not None]


def _step(entry: dict[str, Any]) -> Pass:
    planned = Plan.from_json(entry["plan"]).steps[0]
    return spec.build(registry.get(planned.name), planned.options)
