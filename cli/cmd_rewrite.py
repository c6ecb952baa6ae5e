"""``hcx rewrite``: open, trace, rewrite, check, save; with every figure that was measured on the way."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hcx.rewrite.errors import UsageError

from . import figures
from .cmd_plan import pipeline
from .opening import Opened, check_output, default_output, folder_bytes, open_program
from .result import Progress, Result, silent

if TYPE_CHECKING:
    from hcx.rewrite import Program


def rewrite(
    model: str,
    passes: str | list[str] | None = None,
    *,
    plan: str | None = None,
    output: str | None = None,
    overwrite: bool = False,
    allow_partial: bool = False,
    progress: Progress = silent,
    **source: Any,
) -> Result:
    """Apply passes to a model, check them, and write a ``.hcx`` folder.

    Args:
        model: a MODEL argument.
        passes: pipeline string, or several; or ``plan``, a file made by ``hcx plan --json``.
        output: folder to write; by default ``NAME.hcx`` in the working directory.
        allow_partial: accept passes that skip more sites than they change.
        source: options of :func:`hcx.cli.opening.open_program`.

    Raises:
        HcxError: nothing was written; its ``exit_code`` says of what kind.
    """
    started = time.perf_counter()
    what = pipeline(passes, plan)
    target = _target(model, output, overwrite)
    opened = open_program(model, progress=progress, **source)
    rewritten, seconds = _rewritten(opened, what, allow_partial, progress)
    data = _report(opened, rewritten, progress)
    progress(f"saving {target}")
    before = time.perf_counter()
    rewritten.save(target, overwrite=overwrite)
    ended = time.perf_counter()
    data["seconds"] = {
        **opened.seconds,
        "rewrite and checks": seconds,
        "save": ended - before,
        "total": ended - started,
    }
    data["output"] = target
    data["files"] = {
        str(p.relative_to(target)): p.stat().st_size for p in sorted(Path(target).rglob("*")) if p.is_file()
    }
    data["output_bytes"] = folder_bytes(Path(target))
    return Result(data, _text(data))


def _target(model: str, output: str | None, overwrite: bool) -> str:
    """The output folder, refused early where it could not be written."""
    if output is None and Path(model).suffix == ".hcx":
        raise UsageError("rewriting a .hcx folder needs a name for the result", where="-o", hint="-o NAME.hcx")
    target = output or default_output(model, ".hcx")
    if Path(target).suffix != ".hcx":
        raise UsageError(f"the output is a folder that ends in .hcx, not {target}", where="-o", hint=f"-o {target}.hcx")
    check_output(target, overwrite=overwrite, replaceable="manifest.json")
    return target


def _rewritten(opened: Opened, what: Any, allow_partial: bool, progress: Progress) -> tuple[Program, float]:
    start = time.perf_counter()
    program = opened.program.rewrite(what, allow_partial=allow_partial, progress=progress)
    return program, time.perf_counter() - start


def _report(opened: Opened, rewritten: Program, progress: Progress) -> dict[str, Any]:
    progress("counting operations")
    base = opened.program
    flat = base.check_inputs(1)[0]
    return {
        "model": opened.describe(),
        "passes": [_step(e) for e in rewritten.history[len(base.history) :]],
        "call": figures.call_shapes(base, flat),
        "before": {**figures.sizes(base), "flops": figures.flops(base, flat)},
        "after": {**figures.sizes(rewritten), "flops": figures.flops(rewritten, flat)},
        "taps": rewritten.taps,
    }


def _step(entry: dict[str, Any]) -> dict[str, Any]:
    """One pass of the history, with the sites of its plan at the top."""
    planned = entry["plan"]["steps"][0]
    kept = {k: entry[k] for k in ("pass", "pipeline", "contract", "counts", "checks", "owed") if k in entry}
    return {**kept, **{k: planned[k] for k in ("sites", "skips", "notes", "estimate")}}


def _text(data: dict[str, Any]) -> str:
    lines = [f"{data['output']}  ({data['model']['label']}, {data['model']['kind']})"]
    for step in data["passes"]:
        lines += ["", *_step_text(step)]
    before, after = data["before"], data["after"]
    shapes = ", ".join(f"{n} {s}" for n, s in data["call"].items())
    lines += [
        "",
        f"parameters  {figures.change(before['parameters'], after['parameters'])}",
        f"flops       {figures.change(before['flops'], after['flops'])}   one call with {shapes}",
        f"nodes       {figures.change(before['nodes'], after['nodes'])}",
        f"files       {figures.megabytes(data['model']['file_bytes'])} -> {figures.megabytes(data['output_bytes'])}"
        f"   weights {figures.megabytes(data['files'].get('weights.safetensors'))}, parameters take "
        f"{figures.megabytes(after['parameter_bytes'])} in {after['dtype']}",
        "seconds     " + ", ".join(f"{k} {v:.1f}" for k, v in data["seconds"].items()),
    ]
    lines += [f"taps        {', '.join(data['taps'])}"] if data["taps"] else []
    return "\n".join(lines)


def _step_text(step: dict[str, Any]) -> list[str]:
    contract = step["contract"]
    promise = contract["contract"].lower() + "".join(f" {k}={v}" for k, v in contract.items() if k != "contract")
    lines = [f"{step['pipeline']}  contract: {promise}"]
    lines += [f"  {s['kind']:8s} {s['address']}  {_pairs(s['detail'])}" for s in step["sites"]]
    lines += [
        f"  skip     {s['address']}: {s['reason']}{': ' + s['detail'] if s['detail'] else ''}" for s in step["skips"]
    ]
    lines += [f"  note     {n}" for n in step["notes"]]
    lines += check_lines(step["checks"])
    return lines + (["  the checks are owed: they were not run"] if step["owed"] else [])


def _pairs(detail: dict[str, Any]) -> str:
    return " ".join(f"{k}={v}" for k, v in detail.items())


def check_lines(checks: list[dict[str, Any]]) -> list[str]:
    """One line a check, with its measured values."""
    from hcx.rewrite.check.report import Check

    return [f"  {Check(**c)}" for c in checks]
