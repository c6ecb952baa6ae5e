"""Hugging Face folders and state dicts: loading into the class that the config names."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from hcx.rewrite.errors import SourceError

from .files import wrapped
from .hf_config import model_class, read_config
from .hf_weights import find_weights
from .library import quiet, transformers

_log = logging.getLogger("hcx")


def load_model(folder: Path, *, trust: bool, dtype: torch.dtype | None) -> torch.nn.Module:
    """Load a folder's model in eval mode, in its checkpoint's dtype unless another is given.

    Raises:
        SourceError: no weights, damaged weights, weights that do not fit the class or would be left random.
    """
    config = read_config(folder, trust=trust)
    state = find_weights(folder, trust=trust)
    if state is not None:
        return from_state_dict(config, state, folder, dtype=dtype, trust=trust)
    cls, named = model_class(config, trust=trust)
    options = {"trust_remote_code": True} if trust and cls.__name__.startswith("AutoModel") else {}
    with (
        quiet(),
        wrapped(
            f"{folder.name} cannot be loaded as {cls.__name__}",
            str(folder),
            "check that weights and config.json belong together",
        ),
    ):
        model, info = cls.from_pretrained(
            folder,
            dtype=dtype or "auto",
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    check_fit(model, info, folder, strict=not named)
    return model.eval()


def from_state_dict(
    config: Any,
    state: Mapping[str, Any],
    where: Path,
    *,
    dtype: torch.dtype | None = None,
    trust: bool = False,
    strict: bool = False,
) -> torch.nn.Module:
    """Build the config's class around a state dict in memory.

    Raises:
        SourceError: missing tensors, unused ones (with ``strict``), or other shapes.
    """
    cls, named = model_class(config, trust=trust)
    if cls is transformers().AutoModel:
        with (
            wrapped("no model class can be chosen", str(where), "name the class in config.json: architectures"),
            torch.device("meta"),
        ):
            cls = type(cls.from_config(config))
    with (
        quiet(),
        wrapped(
            f"{where.name} does not fit {cls.__name__}",
            str(where),
            "check that weights and config.json belong together",
        ),
    ):
        model, info = cls.from_pretrained(
            None, config=config, state_dict=dict(state), dtype=dtype or "auto", output_loading_info=True
        )
    check_fit(model, info, where, strict=strict or not named)
    return model.eval()


def check_fit(model: torch.nn.Module, info: dict[str, Any], where: Path, *, strict: bool) -> None:
    """Refuse a model with weights left at random values; report tensors of the file that it has no place for."""
    missing, unused = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    name = type(model).__name__
    if missing:
        raise SourceError(
            f"{where.name} lacks {len(missing)} tensors of {name}: {_some(missing)}",
            where=str(where),
            hint="they would be left at random values; name the class that was saved in config.json",
        )
    if unused and strict:
        raise SourceError(
            f"{where.name} holds {len(unused)} tensors that {name} has no place for: {_some(unused)}",
            where=str(where),
            hint="name the class that was saved in config.json: architectures",
        )
    if unused:
        _log.warning("%s: %d tensors are not used by %s: %s", where.name, len(unused), name, _some(unused))


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
