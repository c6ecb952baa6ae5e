"""``hcx export``: lower a Program to another format."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from hcx.rewrite.errors import UsageError

from .opening import check_output, default_output, open_program
from .result import Progress, Result, silent

FORMATS = {"onnx": ".onnx", "hf": "-hf", "pt2": ".pt2"}
"""Format -> what the name of the output ends in by default."""


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
    """Write a model or a ``.hcx`` folder in another format, loaded and run before it is put in place.

    Args:
        model: a MODEL argument.
        to: ``onnx``, ``hf`` (a Transformers folder) or ``pt2`` (a torch.export archive).
        output: ``NAME.onnx``, or a folder that also gets the companion files; ``NAME.pt2``; a folder for ``hf``. By
            default ``NAME.onnx``, ``NAME.pt2`` or ``NAME-hf`` here.
        opset, upcast: see :func:`hcx.export.to_onnx`.
        taps: also write the auxiliary outputs; not for ``hf``.
        source: options of :func:`hcx.cli.opening.open_program`.

    Raises:
        ExportError: it cannot be written, or what was written disagrees; nothing is left of it.
    """
    if to not in FORMATS:
        raise UsageError(f"there is no format {to!r}", where="--to", hint="formats: " + ", ".join(FORMATS))
    _refuse(to, opset=opset if to != "onnx" else None, upcast=upcast and to != "onnx", taps=taps and to == "hf")
    if to == "onnx":
        need_onnx("onnx", "onnx_ir", "onnxruntime")
    target = output or default_output(model, FORMATS[to])
    if to == "hf":
        check_output(target, overwrite=overwrite, replaceable="hcx.json")
    elif to == "pt2" or target.endswith(".onnx"):
        check_output(target, overwrite=overwrite)
    program = open_program(model, progress=progress, **source).program
    from hcx.export import to_hf, to_onnx, to_pt2

    progress(f"writing {target} and running it")
    report: Any
    if to == "hf":
        report = to_hf(program, target, overwrite=overwrite)
    elif to == "pt2":
        report = to_pt2(program, target, overwrite=overwrite, taps=taps)
    else:
        report = to_onnx(program, target, opset=opset, overwrite=overwrite, upcast=upcast, taps=taps)
    return Result({"output": target, **report.to_json()}, str(report))


def _refuse(to: str, **options: Any) -> None:
    for name, value in options.items():
        if value:
            raise UsageError(f"--{name} has no effect on {to}", where=f"--to {to}", hint=f"leave out --{name}")


def need_onnx(*modules: str) -> None:
    """Raise UsageError where a package of the ``onnx`` extra is missing."""
    missing = [m for m in modules if find_spec(m) is None]
    if missing:
        raise UsageError(
            f"ONNX needs the package {missing[0].replace('_', '-')}",
            where="import " + missing[0],
            hint="pip install 'hcx-rewrite[onnx]'",
        )
