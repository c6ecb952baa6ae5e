"""``hcx export``: lower a Program to another format."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from hcx.rewrite.errors import UsageError

from .opening import check_output, default_output, open_program
from .result import Progress, Result, silent

FORMATS = ("onnx",)


def export(
    model: str,
    *,
    to: str = "onnx",
    output: str | None = None,
    opset: int | None = None,
    taps: bool = False,
    upcast: bool = False,
    overwrite: bool = False,
    progress: Progress = silent,
    **source: Any,
) -> Result:
    """Write a model or a ``.hcx`` folder as ONNX, checked in ONNX Runtime before it is put in place.

    Args:
        model: a MODEL argument.
        output: ``NAME.onnx``, or a folder that also gets the companion files; by default ``NAME.onnx`` here.
        opset, taps, upcast: see :func:`hcx.export.to_onnx`.
        source: options of :func:`hcx.cli.opening.open_program`.

    Raises:
        ExportError: it cannot be written, or ONNX Runtime disagrees; nothing was written.
    """
    if to not in FORMATS:
        raise UsageError(f"there is no format {to!r}", where="--to", hint="formats: " + ", ".join(FORMATS))
    need_onnx("onnx", "onnx_ir", "onnxruntime")
    target = output or default_output(model, ".onnx")
    if target.endswith(".onnx"):
        check_output(target, overwrite=overwrite)
    program = open_program(model, progress=progress, **source).program
    from hcx.export import to_onnx

    progress(f"writing {target} and running it in ONNX Runtime")
    report = to_onnx(program, target, opset=opset, overwrite=overwrite, upcast=upcast, taps=taps)
    return Result({"output": target, **report.to_json()}, str(report))


def need_onnx(*modules: str) -> None:
    """Raise UsageError where a package of the ``onnx`` extra is missing."""
    missing = [m for m in modules if find_spec(m) is None]
    if missing:
        raise UsageError(
            f"ONNX needs the package {missing[0].replace('_', '-')}",
            where="import " + missing[0],
            hint="pip install 'hcx-rewrite[onnx]'",
        )
