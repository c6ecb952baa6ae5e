"""Archives written by torch.export.save, under any file name."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch
from hcx.rewrite.errors import SourceError, let_through

from .checkpoint import check_bytes
from .files import damaged, first_line
from .pt2_check import UnsafeError, check_model


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
        programs = _load(path, handle)
    if not programs:
        raise damaged(path, "it holds no exported program")
    return programs.get("model") or next(iter(programs.values()))


def _load(path: Path, handle: Any) -> dict[str, torch.export.ExportedProgram]:
    """The archive's programs, after importing the transformers modules whose output classes they return.

    torch.export.load hides what went wrong and then tries its old layout, which is all pickles; load_pt2 does neither.
    """
    from torch.export.pt2_archive._package import load_pt2

    try:
        return load_pt2(handle).exported_programs
    except NotImplementedError as error:
        if not _import_output_type(str(error)):
            raise SourceError(
                f"{path.name} returns a type that is not registered: {first_line(error)}",
                where=str(path),
                hint="import the library that defines it, then open the file from Python",
            ) from error
    except Exception as error:  # torch's reader raises many types for one cause: the archive is not as it was saved
        let_through(error)
        raise damaged(
            path,
            f"torch.export cannot load it ({first_line(error)}); it may be from another torch "
            f"version than {torch.__version__}",
        ) from error
    handle.seek(0)
    return _load(path, handle)


def _import_output_type(message: str) -> bool:
    """Import a module of transformers that torch's message names; its output classes are registered thereby."""
    found = re.search(r"Deserializing (transformers(?:\.\w+)*)\.\w+ in pytree", message)
    if found is None or found[1] in sys.modules:
        return False
    try:
        importlib.import_module(found[1])
    except ImportError:
        return False
    return True


def _check(path: Path, handle: Any) -> None:
    """Refuse pickles, native code, foreign objects and any text that could become code."""
    from torch.export.pt2_archive._package import PT2ArchiveReader

    try:
        reader = PT2ArchiveReader(handle)
        names = reader.get_file_names()
    except Exception as error:  # torch's reader, as above
        raise damaged(path, f"its index cannot be read ({first_line(error)})") from error
    for name in names:
        try:
            _check_member(path, reader, name)
        except UnsafeError as reason:
            _refuse(path, str(reason))
        except (ValueError, RuntimeError, RecursionError) as error:
            raise damaged(path, f"its member {name} cannot be read ({first_line(error)})") from error


def _check_member(path: Path, reader: Any, name: str) -> None:
    """One file of the archive."""
    if name.startswith("data/aotinductor/"):
        raise UnsafeError("compiled native code")
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
            raise UnsafeError(f"the pickled object {label!r}")
        if entry["use_pickle"]:
            check_bytes(reader.read_bytes(f"{folder}/{file}"), path, f"{folder}/{file}")


def _refuse(path: Path, what: str) -> NoReturn:
    raise SourceError(
        f"{path.name} needs code execution to load: it holds {what}",
        where=str(path),
        hint="if you trust where the file comes from, add --trust (it may then run any code)",
    )


def example_call(exported: torch.export.ExportedProgram) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """(args, kwargs) that the program was exported with; None when they were not kept."""
    if exported.example_inputs is None:
        return None
    args, kwargs = exported.example_inputs
    return tuple(args), dict(kwargs or {})
