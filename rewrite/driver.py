"""Planning and applying a pipeline on a fork, checking it, and refusing what fails."""

from __future__ import annotations

from typing import Any, TypeVar

from .check.invariants import check_shapes
from .check.measuring import is_meta
from .check.suite import Checker, Progress, required
from .collection import young_only
from .edit.editor import Editor
from .errors import HcxError
from .ir.copies import copied
from .ir.fingerprint import fingerprint
from .ir.fork import fork
from .ir.history import Entry
from .ir.program import Program
from .pipeline import contracts
from .pipeline.passbase import Pass
from .pipeline.plan import PassPlan, Plan
from .pipeline.walk import require_match, walk
from .sites.subject import Subject

Kind = TypeVar("Kind", bound=Program)


def plan(program: Program, what: Any) -> Plan:
    """What a pipeline would do. The Program is not changed; later steps see what earlier ones would have done.

    Args:
        what: as for :func:`rewrite`.

    Raises:
        UsageError, PlanError: a pipeline that cannot be meant.
    """
    planned: list[PassPlan] = []
    subject = Subject.over(fork(program))
    walk(subject, what, lambda step, pass_plan, editor: planned.append(pass_plan), stop_before_last=True)
    return Plan(planned, fingerprint(program))


def rewrite(
    program: Kind, what: Any, *, check: bool = True, allow_partial: bool = False, progress: Progress | None = None
) -> Kind:
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
        new: Kind = _Rewriting(program, check, allow_partial, progress or (lambda text: None)).run(what)
        return new


class _Rewriting:
    """One pipeline on its way over one fork."""

    def __init__(self, program: Program, check: bool, allow_partial: bool, say: Progress):
        self.base, self.allow_partial, self.say = program, allow_partial, say
        self.new = Subject.over(fork(program))
        self.new.adopt(copied(self.new.tree))  # before any pass runs: none can reach the caller's tensors
        self.done: list[str] = []
        self.base_print = fingerprint(program)
        self.checker = Checker(program, self.new, say) if check and not is_meta(program) else None

    def run(self, what: Any) -> Any:
        """See :func:`rewrite`."""
        self.say("planning and applying")
        try:
            walk(self.new, what, self.seen)
        except HcxError as error:
            error.after = tuple(self.done)
            raise
        if self.checker is not None:
            self.say("checking the whole pipeline")
            promised = [contracts.from_json(e.contract) for e in self.new.history]
            self.new.history[-1].checks.extend(c.to_json() for c in self.checker.whole(self.new, promised))
        return type(self.base).over(self.new)

    def seen(self, step: Pass, pass_plan: PassPlan, editor: Editor | None) -> None:
        """After a pass was applied: complete its entry in the history, with its checks."""
        assert editor is not None  # only a walk that stops early plans without an editor
        require_match(step, pass_plan, self.allow_partial)
        contract = step.preserves(self.new, pass_plan)
        entry = self.new.history[-1] = Entry({
            "pass": step.name,
            "rank": step.order(),
            "pipeline": str(step),
            "plan": Plan([pass_plan], self.base_print).to_json(),
            "contract": contracts.to_json(contract),
            "counts": dict(editor.counts),
            "checks": [],
            "owed": self.checker is None,
        })  # fmt: skip
        if reason := step.approximates(pass_plan):
            entry["approximate_cache"] = reason
        if self.checker is not None:
            self.say(f"checking {step.name}")
            changes = step.changes(pass_plan)
            checks = self.checker.step(self.new, step, contract, editor.number, changes, editor.moved)
            entry["checks"] = [c.to_json() for c in checks]
        elif self.new.stored:
            self.say(f"checking the graph of {step.name}")
            entry["checks"] = [c.to_json() for c in required([check_shapes(self.new, self.base)])]
        self.done.append(str(step))
