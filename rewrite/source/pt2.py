"""Archives written by torch.export.save, under any file name."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any, NoReturn

import torch

from ..errors import SourceError
from .checkpoint import check_bytes
from .files import damaged, first_line
from .pt2_check import Unsafe, check_model


def load_archive(path: Path, *, trust: bool) -> torch.export.ExportedProgram:
    """Load a torch.export archive.

    Without ``trust`` the archive is first searched for everything that could run code; see ``pt2_check``.

    Raises:
        SourceError: damaged, made by another torch, or it needs code execution.
    """
    with path.open("rb") as handle:  # one handle for check and load: nobody can put another file in between
        if not trust:
            _check(path, handle)
            handle.seek(0)
        return _load(path, handle)


def _load(path: Path, handle: Any) -> torch.export.ExportedProgram:
    try:
        return torch.export.load(handle)
    except NotImplementedError as error:
        raise SourceError(
            f"{path.name} returns a type that is not registered: {first_line(error)}",
            where=str(path),
            hint="import the library that defines it, then open the file from Python",
        ) from error
    except Exception as error:  # torch's reader raises many types for one cause: the archive is not as it was saved
        raise damaged(
            path,
            f"torch.export cannot load it ({first_line(error)}); it may be from another torch "
            f"version than {torch.__version__}",
        ) from error


def _check(path: Path, handle: Any) -> None:
    """Refuse pickles, native code, foreign objects and any text that could become code."""
    from torch.export.pt2_archive._package import PT2ArchiveReader

    # the old layout keeps everything in pickles at the top, and torch falls back to it when the new one fails
    with zipfile.ZipFile(handle) as archive:
        if any("/" not in name for name in archive.namelist()):
            _refuse(path, "its old layout, which is made of pickles")
    handle.seek(0)
    try:
        reader = PT2ArchiveReader(handle)
        names = reader.get_file_names()
    except Exception as error:
        raise damaged(path, f"its index cannot be read ({first_line(error)})") from error
    for name in names:
        try:
            _check_member(path, reader, name)
        except Unsafe as reason:
            _refuse(path, str(reason))
        except (ValueError, RuntimeError, RecursionError) as error:
            raise damaged(path, f"its member {name} cannot be read ({first_line(error)})") from error
    _import_output_types(reader, names)


def _check_member(path: Path, reader: Any, name: str) -> None:
    """One file of the archive."""
    if name.startswith("data/aotinductor/"):
        raise Unsafe("compiled native code")
    if name.startswith("models/"):
        check_model(json.loads(reader.read_bytes(name)))
    elif name.endswith("_config.json"):
        _check_payloads(path, reader, name)
    elif name.endswith(".pt") and (data := reader.read_bytes(name)):
        check_bytes(data, path, name)


def _check_payloads(path: Path, reader: Any, name: str) -> None:
    """The table of weights or constants: raw tensors, or pickles that hold tensors alone."""
    folder = name.rsplit("/", 1)[0]
    for label, entry in json.loads(reader.read_bytes(name))["config"].items():
        file = entry["path_name"]
        if not file.startswith(("weight_", "tensor_")):
            raise Unsafe(f"the pickled object {label!r}")
        if entry["use_pickle"]:
            check_bytes(reader.read_bytes(f"{folder}/{file}"), path, f"{folder}/{file}")


def _import_output_types(reader: Any, names: list[str]) -> None:
    """Transformers registers its output classes with torch when they are imported, and an archive needs them."""
    if any(b"transformers." in reader.read_bytes(name) for name in names if name.startswith("models/")):
        try:
            import transformers.modeling_outputs  # noqa: F401
        except ImportError:
            return


def _refuse(path: Path, what: str) -> NoReturn:
    raise SourceError(
        f"{path.name} needs code execution to load: it holds {what}",
        where=str(path),
        hint="if you trust where the file comes from, add --trust (it may then run any code)",
    )


def example_call(exported: torch.export.ExportedProgram) -> tuple[tuple, dict] | None:
    """(args, kwargs) that the program was exported with; None when they were not kept."""
    if exported.example_inputs is None:
        return None
    args, kwargs = exported.example_inputs
    return tuple(args), dict(kwargs or {})
