"""A Program as an ONNX file that ONNX Runtime has been seen to run rightly."""

from __future__ import annotations

import os
from typing import Any

from hcx.rewrite.errors import UsageError
from hcx.rewrite.host.dormant import without_dormant

from . import preflight, staging
from .onnx_job import Job
from .report import OnnxReport


def to_onnx(
    program: Any,
    path: str | os.PathLike[str],
    *,
    opset: int | None = None,
    verify: bool = True,
    optimize: bool = True,
    overwrite: bool = False,
    external: bool | None = None,
    producer: str | None = None,
    upcast: bool = False,
    taps: bool = False,
) -> OnnxReport:
    """Write a Program as ONNX, run the file in ONNX Runtime, and only then put it in place.

    Inputs and outputs carry the Program's names, dynamic dimensions theirs; initializers are called like the parameters
    and keep their layout; equal tensors (tied, or used in every iteration of a loop) are stored once.

    Args:
        program: a :class:`hcx.rewrite.Program`.
        path: ``NAME.onnx``, or a folder that gets ``model.onnx`` and the model's companion files.
        opset: version of the default domain; 18 to 26, by default 23.
        verify: compare with the Program in ONNX Runtime, on inputs of two or more shapes, with graph optimisations off
            and on: absolute error 1e-3 at values up to 30 (proportionally more above), and the same top-1.
        optimize: use operators that stand for several ATen nodes: RMSNormalization, RotaryEmbedding, Attention with
            grouped queries.
        overwrite: replace existing files.
        external: weights in ``NAME.onnx.data`` beside the model; by default only above 1.5 GB.
        producer: ``direct`` (own emitter) or ``torch`` (torch.onnx); by default direct, and torch where that fails.
        upcast: write bfloat16 weights and arithmetic as float32.
        taps: also write the auxiliary outputs.

    Raises:
        ExportError: nothing was written; the message names the operator or output, the reason, and the usable opsets.
        UsageError: unusable path or producer.
    """
    opset = preflight.checked_opset(opset)
    companions = {} if str(path).endswith(".onnx") else dict(getattr(program, "companions", None) or {})
    target = staging.destination(path, list(companions), overwrite=overwrite)
    program, left_out = (program, []) if taps or not hasattr(program, "history") else without_dormant(program)
    job = Job(program, opset=opset, optimize=optimize, upcast=upcast, taps=taps, external=external, verify=verify)
    with staging.staging(target) as scratch:
        report = job.run(scratch / target.model, _producers(producer, upcast))
        for name, content in companions.items():
            (scratch / name).write_bytes(content)
        placed = staging.commit(scratch, target)
    report.path = target.path
    report.notes += left_out
    report.data = target.folder / report.data.name if report.data else None
    report.companions = [p for p in placed if p not in (report.path, report.data)]
    return report


def _producers(producer: str | None, upcast: bool) -> list[str]:
    if producer not in (None, "direct", "torch"):
        raise UsageError(
            f"no ONNX producer `{producer}`", where="producer", hint="use 'direct', 'torch' or leave it out"
        )
    if upcast and producer == "torch":
        raise UsageError(
            "upcast needs the direct emitter", where="producer", hint="convert the model with .float() before tracing"
        )
    return [producer] if producer else ["direct"] if upcast else ["direct", "torch"]
