"""From pipeline strings, passes and plans to planned steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hcx.rewrite.edit.editor import Editor
from hcx.rewrite.errors import NoMatchError, PlanError
from hcx.rewrite.ir.fingerprint import fingerprint
from hcx.rewrite.ir.graphs import is_impure, sort_graph
from hcx.rewrite.ir.history import Entry, runs_of
from hcx.rewrite.ir.mutation import check_hazards
from hcx.rewrite.ir.program import Program

from . import registry, spec
from .passbase import Pass
from .plan import PassPlan, Plan


def steps_of(program: Program, what: Any) -> list[tuple[Pass, PassPlan | None]]:
    """Passes in order, with their plan where one is given.

    Raises:
        PlanError: a plan made for another model.
    """
    if isinstance(what, Plan):
        if what.fingerprint is not None and what.fingerprint != fingerprint(program):
            raise PlanError(
                f"this plan was made for another program ({what.fingerprint}, not {fingerprint(program)})",
                hint="make a plan for this model, or remove `fingerprint` and `sites` to use it as a recipe",
            )
        return [(spec.build(registry.get(s.name), s.options), s if s.sites is not None else None) for s in what.steps]
    return [(p, None) for p in registry.passes(what)]


def check_order(program: Program, steps: list[Pass]) -> None:
    """Refuse orders that cannot mean what was asked.

    Raises:
        PlanError: a pass after one that must come later, with both named.
    """
    done = [(e.name, e.rank) for e in program.history]
    for step in steps:
        for name, rank in done:
            if rank is not None and (place := step.order()) is not None and place < rank:
                raise PlanError(
                    f"`{step.name}` cannot follow `{name}`",
                    where="pipeline order",
                    hint=f"put {step.name} before {name}: {_why(name, step.name, place)}",
                )
        done.append((step.name, step.order()))


def _why(before: str, after: str, place: Any) -> str:
    usual = registry.get(before).place() if before in registry.homes() else None
    if usual is not None and usual <= place:
        return f"with these options {before} moves blocks to where later passes do not find them"
    return f"{before} reads what {after} changes"


def _apply(step: Pass, program: Program, pass_plan: PassPlan, editor: Editor, edited: bool) -> None:
    """Apply a step; what goes wrong in a plan that was given is put down to the plan."""
    if edited:
        for site in pass_plan.sites or ():
            if wrong := step.misfit(program, site.detail):
                raise PlanError(f"the plan's site `{site.address}` does not fit: {wrong}", where=step.name)
    try:
        step.apply(program, pass_plan, editor)
    except (KeyError, IndexError, TypeError) as error:
        if not edited:
            raise
        raise PlanError(
            f"the plan does not fit `{step.name}`: {type(error).__name__}: {error}",
            where=step.name,
            hint="change a plan's details to values that the pass itself could have planned",
        ) from error


def walk(
    program: Program,
    what: Any,
    seen: Callable[[Pass, PassPlan, Editor | None], None],
    *,
    stop_before_last: bool = False,
) -> None:
    """Plan and apply each step on ``program`` itself; ``seen`` is called after each."""
    steps = steps_of(program, what)
    check_order(program, [p for p, _ in steps])
    for number, (step, given) in enumerate(steps):
        pass_plan = given if given is not None else step.plan(program)
        if given is not None:
            _check_sites(step, program, given)
        if stop_before_last and number == len(steps) - 1:
            seen(step, pass_plan, None)
            return
        editor = Editor(program, step.name, len(runs_of(program.history, step.name)))
        if pass_plan.sites:
            _apply(step, program, pass_plan, editor, given is not None)
            _tidy(program)
            check_hazards(program.graph, step.name)
        program.history.append(Entry.of(step.name, step.order()))
        seen(step, pass_plan, editor)


def _tidy(program: Program) -> None:
    sort_graph(program.graph)
    program.graph.eliminate_dead_code(is_impure_node=is_impure)
    program.graph.lint()
    program.forget_compiled()


def _check_sites(step: Pass, program: Program, given: PassPlan) -> None:
    """Every site of an edited plan must be one that the pass itself would find."""
    known = {s.address: s.detail for s in step.plan(program).sites or ()}
    for site in given.sites or ():
        if site.address in known and not _same_form(site.detail, known[site.address]):
            raise PlanError(
                f"the details of site `{site.address}` are not those of `{step.name}`",
                where=site.address,
                hint=f"it takes {known[site.address]}",
            )
        if site.address not in known:
            raise PlanError(
                f"`{step.name}` has no site `{site.address}` here",
                where=site.address,
                hint="sites can be taken out of a plan or have their details changed; known: "
                + ", ".join(sorted(known)[:8]),
            )


def _same_form(edited: dict[str, Any], planned: dict[str, Any]) -> bool:
    """The same entries with values of the same kinds (a number may take the place of None)."""
    if not isinstance(edited, dict) or edited.keys() != planned.keys():
        return False
    number = (int, float, type(None))
    return all(
        type(value) is type(planned[key])
        or (isinstance(value, number) and isinstance(planned[key], number) and not isinstance(value, bool))
        for key, value in edited.items()
    )


def require_match(step: Pass, pass_plan: PassPlan, allow_partial: bool) -> None:
    """Refuse a pass that found nothing, or too little.

    Raises:
        NoMatchError: no site, or more than half skipped without ``allow_partial``.
    """
    sites, skips = pass_plan.sites or [], pass_plan.skips
    reasons = "; ".join(f"{s.address}: {s.reason.value}{' (' + s.detail + ')' if s.detail else ''}" for s in skips[:5])
    if not sites:
        raise NoMatchError(
            f"pass `{step.name}` found nothing to change",
            where=reasons or "no sites",
            hint="`hcx inspect MODEL --why` shows what was found; `hcx plan` shows every skip",
        )
    if len(skips) > len(sites) and not allow_partial:
        raise NoMatchError(
            f"pass `{step.name}` would skip {len(skips)} of {len(skips) + len(sites)} sites",
            where=reasons,
            hint="--allow-partial accepts this",
        )
