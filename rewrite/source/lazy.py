"""A Hugging Face folder without its weights: the model on ``meta``, and where each tensor lies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from hcx.rewrite.errors import SourceError

from .files import wrapped
from .hf_config import model_class, read_config
from .library import INSTALL, quiet, transformers
from .safetensors_file import check_safetensors, entries, shards

if TYPE_CHECKING:
    from .stored import Stored

_HINT = "leave out --lazy"


def lazy_model(folder: Path, *, trust: bool) -> tuple[torch.nn.Module, dict[str, Stored]]:
    """The config's model with parameters on ``meta`` and real buffers, and the place of every parameter by its name.

    Only headers are read, and buffers that the files hold.

    Raises:
        SourceError: the files do not hold every parameter under its own name, in its own shape and dtype.
    """
    found = _tensors(folder)
    config = read_config(folder, trust=trust)
    dtype = getattr(config, "dtype", None) or next(s.dtype for s in found.values())
    model = _skeleton(config, folder, dtype, trust=trust)
    stored: dict[str, Stored] = {}
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    for names in groups.values():
        place = next((found[n] for n in names if n in found), None)
        parameter = model.get_parameter(names[0])
        if place is None:
            raise SourceError(
                f"{folder.name} lacks `{names[0]}`, or stores it under another name", where=str(folder), hint=_HINT
            )
        if place.dtype != parameter.dtype or tuple(place.entry.shape) != tuple(parameter.shape):
            raise SourceError(
                f"`{place.key}` is stored as {place.entry.dtype} {list(place.entry.shape)}, the model takes "
                f"{parameter.dtype} {list(parameter.shape)}",
                where=str(place.file),
                hint=_HINT,
            )
        stored.update(dict.fromkeys(names, place))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in found:
                buffer.copy_(found[name].read())
    return model.eval(), stored


def _tensors(folder: Path) -> dict[str, Stored]:
    from .stored import Stored

    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    files = [single] if single.is_file() else shards(index) if index.is_file() else []
    if not files:
        raise SourceError(f"{folder.name} has no model.safetensors to read from", where=str(folder), hint=_HINT)
    for file in files:
        check_safetensors(file)
    return {key: Stored(file, key, entry) for file in files for key, entry in entries(file).items()}


def _skeleton(config: Any, folder: Path, dtype: torch.dtype, *, trust: bool) -> torch.nn.Module:
    try:
        from accelerate import init_empty_weights
    except ImportError as error:
        raise SourceError("--lazy needs the accelerate package", where="import accelerate", hint=INSTALL) from error
    cls, _ = model_class(config, trust=trust)
    with quiet(), wrapped(f"{folder.name} cannot be built without its weights", str(folder), _HINT):
        with init_empty_weights(include_buffers=False):
            build = cls.from_config if cls is transformers().AutoModel else cls._from_config
            model = build(config, dtype=dtype)
        model.tie_weights()  # accelerate makes a tensor of its own for each name
    return model
