"""From a MODEL argument to a Program, and the checks of paths that come before any long work."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hcx.rewrite.errors import SourceError, UsageError

from .result import Progress, silent

if TYPE_CHECKING:
    from hcx.rewrite import Program
    from hcx.rewrite.source import ModelSource


@dataclass
class Opened:
    """A Program and where it came from.

    Attributes:
        kind: one of ``hcx.rewrite.source.KINDS``.
        seconds: wall seconds of ``open`` and ``trace``.
        file_bytes: size of the file or of the folder's weight files; None for a factory.
    """

    program: Program
    kind: str
    label: str
    seconds: dict[str, float] = field(default_factory=dict)
    file_bytes: int | None = None

    def describe(self) -> dict[str, Any]:
        """What ``--json`` says about the source."""
        return {
            "label": self.label,
            "kind": self.kind,
            "class": self.program.signature.model,
            "file_bytes": self.file_bytes,
        }


def open_program(
    spec: str,
    *,
    trust: bool = False,
    arch: str | None = None,
    dtype: str | None = None,
    text: str | None = None,
    inputs: str | None = None,
    weights: str | None = None,
    lazy: bool = False,
    progress: Progress = silent,
) -> Opened:
    """Open and trace a model, or load a ``.hcx`` folder.

    Args:
        spec: a MODEL argument, see :func:`hcx.rewrite.source.open_model`.
        text: a file whose text makes the example call; the other options are those of ``open_model``.
        weights: the source model's folder, for a ``.hcx`` folder that refers to its weights.

    Raises:
        SourceError, UsageError: it cannot be opened.
        TraceError: it cannot be traced.
    """
    from hcx.rewrite.source import open_model

    progress(f"opening {spec}")
    start = time.perf_counter()
    source = open_model(spec, trust=trust, arch=arch, dtype=dtype, text=read_text(text), inputs=inputs, lazy=lazy)
    opened = time.perf_counter()
    if source.kind == "hcx":
        _refuse(spec, "a .hcx folder", arch=arch, dtype=dtype, text=text, inputs=inputs)
    else:
        _refuse(spec, "a model that is not a .hcx folder", weights=weights)
        _refuse(spec, "a torch.export archive", inputs=inputs if source.kind == "pt2" else None)
        progress(f"tracing {source.label}")
    program = _program(source, weights)
    seconds = {"open": opened - start, "trace": time.perf_counter() - opened}
    return Opened(program, source.kind, source.label, seconds, _size(source.path))


def program_of(spec: str, **options: Any) -> Program:
    """The Program of a MODEL argument; see :func:`open_program`."""
    return open_program(spec, **options).program


def _program(source: ModelSource, weights: str | None) -> Program:
    from hcx.rewrite.api import Program, load, trace

    if source.kind == "hcx":
        return load(str(source.path), weights=weights)
    if source.kind == "pt2":
        from hcx.rewrite.tracing.tracer import from_exported

        program = Program.over(from_exported(source.exported))
    elif source.stored:
        from hcx.rewrite.tracing.lazy import trace_lazily

        program = Program.over(trace_lazily(source.model, source.kwargs, source.stored))
    else:
        program = trace(source.model, source.args, source.kwargs)
    program.belongings.companions = dict(source.companions)
    return program


def _refuse(spec: str, kind: str, **options: str | None) -> None:
    for name, value in options.items():
        if value is not None:
            raise UsageError(f"--{name} has no effect on {kind}", where=spec, hint=f"leave out --{name}")


def read_text(path: str | None) -> str | None:
    """The content of a text file.

    Raises:
        SourceError: it is not there, or not UTF-8.
    """
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}", where=path, hint="give a text file") from error
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is not UTF-8 text", where=path, hint="give a text file") from error


def _size(path: str | None) -> int | None:
    if path is None:
        return None
    place = Path(path)
    if place.is_file():
        return place.stat().st_size
    if place.suffix == ".hcx":
        return folder_bytes(place)
    weights = [p for p in place.iterdir() if p.suffix in (".safetensors", ".bin", ".gguf")]
    return sum(p.stat().st_size for p in weights)


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def default_output(spec: str, suffix: str) -> str:
    """``model.pt`` -> ``model.hcx`` in the working directory; a factory gives its function's name."""
    path = Path(spec)
    if path.is_dir():
        name = path.resolve().name.removesuffix(".hcx")
    elif path.exists() or ":" not in spec:
        name = path.stem
    else:
        name = spec.rsplit(":", 1)[1]
    return name + suffix


def check_output(path: str, *, overwrite: bool, replaceable: str | None = None) -> None:
    """Refuse an output that could not be written, before the long work begins.

    Args:
        replaceable: file that a folder must hold to be overwritten.

    Raises:
        UsageError: it exists, is of another kind, or its folder cannot be written to.
    """
    target = Path(path)
    if target.exists() and not overwrite:
        raise UsageError(f"{path} exists", where=path, hint="choose another name with -o, or add --overwrite")
    if target.exists() and replaceable and not (target / replaceable).is_file():
        raise UsageError(
            f"{path} exists and was not written by hcx, so it is not replaced", where=path, hint="choose another name"
        )
    parent = target.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UsageError(
            f"{path} cannot be written: {parent} is no folder that can be written to",
            where=path,
            hint="choose another place with -o",
        )


def check_artefact(path: str) -> None:
    """Refuse a path that is no ``.hcx`` folder, with what it is instead.

    Raises:
        SourceError: it is not there, or is a file or another folder.
    """
    place = Path(path)
    if not place.exists():
        raise SourceError(f"there is no folder {path}", where=path, hint="hcx rewrite writes one")
    if not (place / "manifest.json").is_file():
        kind = "a folder without manifest.json" if place.is_dir() else "a file"
        raise SourceError(
            f"{path} is {kind}, not a folder written by hcx rewrite",
            where=path,
            hint="hcx rewrite MODEL --pass ... -o NAME.hcx",
        )
