"""``hcx plan``: what a pipeline would do."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from hcx.rewrite.errors import UsageError

from .opening import open_program, read_text
from .result import Progress, Result, silent


def plan(
    model: str,
    passes: str | list[str] | None,
    *,
    sweep: str | None = None,
    tokens: int = 512,
    progress: Progress = silent,
    **source: Any,
) -> Result:
    """The plan of a pipeline for a model; nothing is changed.

    ``looped{start=auto}`` measures candidate windows on the text of ``--text`` first, and is planned with the one that
    loses least.

    Args:
        model: a MODEL argument.
        passes: pipeline string, or several of them.
        sweep: file that keeps the measurements, so that an interrupted run goes on.
        tokens: most tokens of the text to measure on.
        source: options of :func:`hcx.cli.opening.open_program`.

    Returns:
        the plan as JSON data (what ``Plan.from_json`` and ``hcx rewrite --plan`` read) and as text.
    """
    what = pipeline(passes)
    program = open_program(model, progress=progress, **source).program
    what, rows = _with_windows(program, what, source.get("text"), tokens, sweep, progress)
    progress("planning")
    made = program.plan(what)
    if not rows:
        return Result(made.to_json(), str(made))
    from hcx.passes.looped.sweep import table, to_json

    return Result({**made.to_json(), "windows": to_json(rows)}, f"{table(rows)}\n\n{made}")


def _with_windows(
    program: Any, text: str, file: str | None, tokens: int, notes: str | None, progress: Progress
) -> tuple[Any, Any]:
    """The passes with ``start=auto`` replaced by the best window, and what was measured.

    Raises:
        UsageError: ``--sweep`` without anything to measure.
    """
    from hcx.passes.looped.sweep import best, example_text, sweep
    from hcx.rewrite.pipeline import registry

    steps, rows = registry.passes(text), []
    for number, step in enumerate(steps):
        if step.name != "looped" or step.start != "auto":
            continue
        ids = _tokens(program, file)[:tokens] if file is not None else example_text(program)
        before = program.rewrite(steps[:number], check=False) if number else program
        place = Path(notes) if notes is not None else None
        rows = sweep(before, step, ids, notes=place, progress=progress)
        start, end = best(rows)
        steps[number] = dataclasses.replace(step, start=start, end=end)
    if notes is not None and not rows:
        raise UsageError(
            "--sweep keeps what looped{start=auto} measures", where="--sweep", hint='--pass "looped{start=auto}"'
        )
    return (steps if rows else text), rows


def _tokens(program: Any, file: str) -> Any:
    """Token ids of a text file."""
    import torch
    from hcx.rewrite.source import tokenizer_from

    words = tokenizer_from(program.companions)
    return torch.tensor(words.encode(read_text(file), add_special_tokens=False))


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
    from hcx.rewrite.pipeline import registry

    registry.passes(text)
    return text


def _plan_from(path: str) -> Any:
    from hcx.rewrite import Plan, PlanError
    from hcx.rewrite.pipeline import registry, spec

    try:
        found = Plan.from_json(read_text(path) or "")
    except PlanError as error:
        error.where = error.where or path
        raise
    for step in found.steps:
        spec.build(registry.get(step.name), step.options)
    return found
