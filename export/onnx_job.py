"""One export: build, write, check, compare; another producer if that fails."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from hcx.rewrite.errors import ExportError, HcxError

from . import preflight
from .producers import PRODUCERS, Task
from .report import Comparison, OnnxReport
from .samples import Sample, samples

PROVENANCE, SIGNATURE, ALIASES = "hcx.provenance", "hcx.signature", "hcx.aliases"
INLINE_LIMIT = 1_500_000_000
"""Weight bytes up to which one file holds everything; a protobuf ends at 2 GiB."""


class Job:
    """A Program on its way into a file.

    Args:
        program: what is exported.
        opset, optimize, upcast, taps, external, verify: as in :func:`hcx.export.to_onnx`.

    Raises:
        ExportError: the graph cannot be written by any producer.
    """

    def __init__(
        self, program: Any, *, opset: int, optimize: bool, upcast: bool, taps: bool, external: bool | None, verify: bool
    ):
        self.program, self.taps, self.external, self.verify = program, taps, external, verify
        module = program.flat_module(taps=taps)
        preflight.check(module, upcast=upcast)
        names, self.notes = _distinct(program, taps)
        self.task = Task(program, module, names, opset, optimize, upcast, lambda: self.samples)
        self.seconds: dict[str, float] = {}

    @functools.cached_property
    def samples(self) -> list[Sample]:
        return samples(self.program)

    @functools.cached_property
    def expected(self) -> list[list[torch.Tensor]]:
        """What the Program gives on the samples."""
        from . import verify

        return verify.references(self.program, self.samples, self.taps)

    def run(self, path: Path, producers: list[str]) -> OnnxReport:
        """Try each producer until one file is right; the last error is raised with the earlier reasons."""
        failures: list[str] = []
        for number, producer in enumerate(producers):
            try:
                report = self._attempt(path, producer)
                report.notes = [*self.notes, *failures]
                return report
            except HcxError as error:
                _clear(path)
                if number + 1 == len(producers):
                    raise self._failed(error, failures) from error
                failures.append(f"{producer} producer: {error.what}" + (f" ({error.where})" if error.where else ""))
        raise AssertionError("at least one producer")

    def _failed(self, error: HcxError, earlier: list[str]) -> ExportError:
        hint = "; before that, ".join([error.hint or "nothing was written", *earlier])
        usable = f"opset {self.task.opset}; usable: {preflight.LOWEST} to {preflight.HIGHEST}"
        return ExportError(error.what, where=error.where, hint=f"{hint} ({usable})")

    def _attempt(self, path: Path, producer: str) -> OnnxReport:
        from . import onnx_file

        with self._timed("build"):
            model = PRODUCERS[producer](self.task)
        with self._timed("write"):
            aliases = self._finish(model, producer)
            weights = sum(v.const_value.nbytes for v in model.graph.initializers.values())
            external = weights > INLINE_LIMIT if self.external is None else self.external
            data = onnx_file.write(model, path, external=external)
        with self._timed("check"):
            _full_check(model, path, self.task.opset)
        with self._timed("verify"):
            comparisons = self._compare(path) if self.verify else []
        return OnnxReport(
            path=path,
            data=data,
            companions=[],
            producer=producer,
            opset=self.task.opset,
            nodes=sum(1 for _ in model.graph.all_nodes()),
            model_bytes=path.stat().st_size,
            data_bytes=data.stat().st_size if data else 0,
            parameter_bytes=sum(t.numel() * t.element_size() for t in self.program.parameters()),
            aliases=aliases,
            comparisons=comparisons,
            seconds=self.seconds,
        )

    def _finish(self, model: Any, producer: str) -> dict[str, str]:
        """Equal tensors once, and the metadata that makes the file self-describing; returns the aliases."""
        import onnx_ir as ir

        from . import dedup

        parameters = {n: p.detach() for n, p in self.program.named_parameters(remove_duplicate=False)}
        dedup.merge_equal(model.graph, list(parameters))
        readable = {n: ir.tensor(t.cpu().numpy()) for n, t in parameters.items() if t.dtype is not torch.bfloat16}
        aliases = dedup.aliases(model.graph, readable)
        model.producer_name, model.producer_version = "hcx", _version()
        model.graph.name = self.program.signature.model
        provenance = {
            "hcx": _version(),
            "torch": torch.__version__,
            "producer": producer,
            "opset": self.task.opset,
            "history": list(self.program.history),
        }
        model.metadata_props[PROVENANCE] = json.dumps(provenance, default=str)
        model.metadata_props[SIGNATURE] = json.dumps(self.program.signature.to_json())
        model.metadata_props[ALIASES] = json.dumps(aliases)
        return aliases

    def _compare(self, path: Path) -> list[Comparison]:
        from . import verify

        dtype = torch.bfloat16 if self.task.upcast else None
        return verify.compare(path, self.task.output_names, self.samples, self.expected, dtype=dtype)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = time.process_time()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.process_time() - start


def _distinct(program: Any, taps: bool) -> tuple[list[str], list[str]]:
    """Output names; one that is also an input's name steps aside, since ONNX names are unique."""
    names = list(program.output_names) + (list(program.taps) if taps else [])
    taken, notes = {i.name for i in program.inputs}, []
    for index, name in enumerate(names):
        if name in taken:
            names[index] = f"{name}.out"
            notes.append(f"output `{name}` is called `{names[index]}` in the file: the name is taken")
        taken.add(names[index])
    return names, notes


def _full_check(model: Any, path: Path, opset: int) -> None:
    """onnx's checker with strict shape inference, and the opset asked for."""
    import onnx

    from .session import first_line

    if model.opset_imports.get("") != opset:
        raise ExportError(
            f"the file has opset {model.opset_imports.get('')} instead of {opset}",
            where="opset",
            hint="try producer='direct'",
        )
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:  # any type: the checker of onnx
        raise ExportError(
            f"the ONNX checker refuses the file: {first_line(error)}", hint="try another opset or producer"
        ) from error


def _clear(path: Path) -> None:
    for file in path.parent.iterdir():
        file.unlink()


def _version() -> str:
    try:
        return version("hcx-rewrite")
    except PackageNotFoundError:
        return "0"
