"""``hcx plan``: what a pipeline would do."""

from __future__ import annotations

from typing import Any

from hcx.rewrite.errors import UsageError

from .opening import open_program, read_text
from .result import Progress, Result, silent


def plan(model: str, passes: str | list[str] | None, *, progress: Progress = silent, **source: Any) -> Result:
    """The plan of a pipeline for a model; nothing is changed.

    Args:
        model: a MODEL argument.
        passes: pipeline string, or several of them.
        source: options of :func:`hcx.cli.opening.open_program`.

    Returns:
        the plan as JSON data (what ``Plan.from_json`` and ``hcx rewrite --plan`` read) and as text.
    """
    what = pipeline(passes)
    program = open_program(model, progress=progress, **source).program
    progress("planning")
    made = program.plan(what)
    return Result(made.to_json(), str(made))


def pipeline(passes: str | list[str] | None, plan_file: str | None = None) -> Any:
    """What is to be applied: a pipeline string whose passes and options exist, or a plan from a file.

    Raises:
        UsageError: neither or both are given, or an unknown pass or option.
        PlanError: the file is not a plan.
    """
    if plan_file is not None:
        if passes:
            raise UsageError(
                "--pass and --plan exclude each other", where="--pass, --plan", hint="a plan names its passes itself"
            )
        return _plan_from(plan_file)
    text = passes if isinstance(passes, str) else ",".join(passes or ())
    if not text:
        raise UsageError("no pass is given", where="--pass", hint="e.g. --pass looped,exits; `hcx passes` lists them")
    from hcx.rewrite import registry

    registry.passes(text)
    return text


def _plan_from(path: str) -> Any:
    from hcx.rewrite import Plan, PlanError, registry, spec

    try:
        found = Plan.from_json(read_text(path) or "")
    except PlanError as error:
        error.where = error.where or path
        raise
    for step in found.steps:
        spec.build(registry.get(step.name), step.options)
    return found
