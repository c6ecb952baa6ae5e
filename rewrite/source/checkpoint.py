"""Files written by torch.save; the only place in hcx that unpickles.

A pickle can run any code while it is read. Here it is read with ``weights_only=True``, which knows tensors and plain
containers, unless the caller trusts the file.
"""

from __future__ import annotations

import io
import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from hcx.rewrite.errors import SourceError

from . import files
from .files import check_not_empty, damaged, first_line

NESTED_KEYS = ("model", "model_state", "model_state_dict", "state_dict")
_WRAPPERS = ("module.", "_orig_mod.")  # put before every key by DataParallel and torch.compile


def load_file(path: Path, *, trust: bool) -> Any:
    """What a torch.save file holds, on the CPU.

    Raises:
        SourceError: damaged, not a torch file, or it needs code execution and ``trust`` is False.
    """
    check_not_empty(path)
    _check_head(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice to torch's developers about pickle protocols
            return torch.load(path, map_location="cpu", weights_only=not trust)
    except Exception as error:  # noqa: BLE001  torch's reader raises a dozen types; each is one of the cases below
        _explain(path, error, trust)


def check_bytes(data: bytes, path: Path, member: str) -> None:
    """Check that a torch.save blob inside an archive needs no code, by loading it under ``weights_only=True``."""
    try:
        torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch's reader, as above
        names = _disallowed(io.BytesIO(data), error)
        if names:
            _refuse_code(path, names, f"its member {member}", error)
        raise damaged(path, f"its member {member} cannot be read ({first_line(error)})") from error


def _check_head(path: Path) -> None:
    """Refuse what plainly is another kind of file, before the unpickler gives it a misleading name."""
    head = files.head(path)
    if other := files.foreign_name(head):
        raise SourceError(
            f"{path.name} is {other}",
            where=str(path),
            hint="open a Hugging Face folder, a GGUF file or a file written by torch.save",
        )
    if files.looks_like_text(head):
        start = head.split(b"\n")[0][:40].decode()
        raise damaged(path, f"it is text, starting {start!r}, not a file written by torch.save")
    if not head.startswith((b"PK", b"\x80")):
        raise damaged(path, f"it starts with the bytes {head[:4].hex(' ')}, which torch.save never writes")


def _explain(path: Path, error: Exception, trust: bool) -> NoReturn:
    """Say why torch.load failed."""
    if trust and isinstance(error, (AttributeError, ImportError)):
        raise SourceError(
            f"{path.name} is pickled with a class that cannot be imported here: {first_line(error)}",
            where=str(path),
            hint="run where the class's module can be imported",
        ) from error
    names = [] if trust else _disallowed(path, error)
    if names:
        _refuse_code(path, names, "its pickle", error)
    reason = first_line(error)
    if isinstance(error, pickle.UnpicklingError) and "WeightsUnpickler error" in str(error):
        reason = "its pickle cannot be read as weights"
    raise damaged(path, reason) from error


def _disallowed(source: Path | io.BytesIO, error: Exception) -> list[str]:
    """The classes and functions a pickle asks for beyond tensors and containers; [] when that is not what is wrong."""
    try:
        if isinstance(source, io.BytesIO):
            source.seek(0)
        names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(source))
    except Exception:  # noqa: BLE001  not a zip, or not a whole one: the message is all there is
        names = []
    if not names:
        names = re.findall(r"GLOBAL ([\w.]+)", str(error)) if isinstance(error, pickle.UnpicklingError) else []
    return names


def _refuse_code(path: Path, names: list[str], place: str, error: Exception) -> NoReturn:
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    raise SourceError(
        f"{path.name} needs code execution to load: {place} calls {shown}, which is not allowed",
        where=str(path),
        hint="if you trust where the file comes from, add --trust (it may then run any code); "
        "or have it saved again as weights alone: torch.save(model.state_dict(), ...)",
    ) from error


def find_module(value: Any) -> torch.nn.Module | None:
    """A pickled module, at the top or under one of the usual keys of a training checkpoint."""
    if isinstance(value, torch.nn.Module):
        return value
    nested = [value[key] for key in NESTED_KEYS if isinstance(value, Mapping) and key in value]
    modules = [item for item in nested if isinstance(item, torch.nn.Module)]
    return modules[0] if modules else None


def find_state_dict(value: Any, path: Path) -> dict[str, torch.Tensor]:
    """The state dict at the top of a checkpoint or under ``model``, ``model_state`` or ``state_dict``.

    A prefix that DataParallel or torch.compile put before every key is taken off.

    Raises:
        SourceError: there is none, or more than one.
    """
    if isinstance(value, Mapping) and _is_state_dict(value):
        return _unwrap(value)
    found = {
        key: value[key]
        for key in NESTED_KEYS
        if isinstance(value, Mapping) and isinstance(value.get(key), Mapping) and _is_state_dict(value[key])
    }
    if len(found) == 1:
        return _unwrap(next(iter(found.values())))
    if found:
        raise SourceError(
            f"{path.name} holds {len(found)} state dicts: {', '.join(found)}",
            where=str(path),
            hint="save the one you mean in a file of its own",
        )
    raise SourceError(
        f"{path.name} holds {_describe(value)} and neither a module nor a state dict",
        where=str(path),
        hint="a state dict lies at the top or under one of " + ", ".join(NESTED_KEYS),
    )


def _is_state_dict(value: Mapping[str, Any]) -> bool:
    """True for a mapping of names to tensors; ``_extra_state`` entries may be anything."""
    tensors = [key for key, item in value.items() if isinstance(item, torch.Tensor)]
    return (
        bool(tensors)
        and all(isinstance(key, str) for key in value)
        and all(isinstance(item, torch.Tensor) or key.endswith("_extra_state") for key, item in value.items())
    )


def _unwrap(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    names = dict(state)
    for prefix in _WRAPPERS:
        if all(key.startswith(prefix) for key in names):
            names = {key[len(prefix) :]: item for key, item in names.items()}
    return names


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict with the keys {', '.join(map(str, list(value)[:6])) or '(none)'}"
    return f"an object of type {type(value).__name__}"
