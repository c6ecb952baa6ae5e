"""A single weight file: an archive, a state dict with its architecture, or a pickled module."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from hcx.rewrite.errors import SourceError

from .checkpoint import find_module, find_state_dict, load_file
from .factory import allow_local_imports, build
from .files import archive_kind, archive_names, check_not_empty, read_json
from .safetensors_file import check_safetensors

GIVE_ARCH = (
    "give the architecture with --arch pkg.mod:factory, a function that returns the module, "
    "or put the model's config.json beside the file"
)


def content(path: Path, *, trust: bool) -> tuple[str, Any]:
    """What a weight file holds: ("pt2", None), ("pickle", module) or ("state_dict", names to tensors).

    Raises:
        SourceError: damaged, TorchScript, needs code execution, or something else altogether.
    """
    check_not_empty(path)
    if path.suffix == ".safetensors":
        check_safetensors(path)
        from safetensors.torch import load_file as load_safetensors

        return "state_dict", load_safetensors(path)
    names = archive_names(path)
    kind = archive_kind(names) if names is not None else "pickle"
    if kind == "pt2":
        return kind, None
    if kind == "old pt2":
        raise SourceError(
            f"{path.name} is a torch.export archive in the layout of torch 2.7 and before, which is made of pickles",
            where=str(path),
            hint="load it with that torch and save it again with a newer one",
        )
    if kind == "torchscript":
        raise SourceError(
            f"{path.name} is a TorchScript archive, which holds compiled code and no module",
            where=str(path),
            hint="export the original module with torch.export and save that",
        )
    if kind == "zip":
        raise SourceError(
            f"{path.name} is a zip archive that torch did not write",
            where=str(path),
            hint="unpack it and open what is inside",
        )
    if trust:
        allow_local_imports()
    value = load_file(path, trust=trust)
    module = find_module(value)
    return ("pickle", module) if module is not None else ("state_dict", find_state_dict(value, path))


def with_architecture(
    path: Path, state: Mapping[str, torch.Tensor], arch: str | None, *, trust: bool
) -> tuple[torch.nn.Module, tuple[Any, ...] | None, dict[str, Any], bool]:
    """Build the module that a state dict belongs to and load it strictly.

    Returns:
        (module, args, kwargs, whether it came from config.json); args is None when there is no example yet.

    Raises:
        SourceError: no architecture is given, or the tensors do not fit it.
    """
    if arch is not None:
        model, args, kwargs = build(arch)
        _load_strictly(model, state, path, arch)
        return model, args, kwargs, False
    config_file = path.parent / "config.json"
    if config_file.is_file() and "model_type" in read_json(config_file):
        from .hf import from_state_dict
        from .hf_config import read_config

        config = read_config(path.parent, trust=trust)
        return from_state_dict(config, state, path, strict=True), None, {}, True
    numbers = sum(item.numel() for item in state.values() if isinstance(item, torch.Tensor))
    raise SourceError(
        f"{path.name} holds a state dict of {len(state)} tensors ({numbers:,} numbers) and no model",
        where=str(path),
        hint=GIVE_ARCH,
    )


def _load_strictly(model: torch.nn.Module, state: Mapping[str, torch.Tensor], path: Path, arch: str) -> None:
    """load_state_dict(strict=True) with the differences in one line."""
    try:
        model.load_state_dict(state, strict=True)
    except RuntimeError as error:
        own = model.state_dict()
        missing, unused = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        shapes = [
            f"{key} is {tuple(state[key].shape)}, not {tuple(own[key].shape)}"
            for key in sorted(own)
            if key in state and getattr(state[key], "shape", None) != getattr(own[key], "shape", None)
        ]
        found = ((missing, "missing"), (unused, "not wanted"), (shapes, "of another shape"))
        parts = [f"{len(names)} {what} ({names[0]})" for names, what in found if names] or [str(error)[:200]]
        raise SourceError(
            f"{path.name} does not fit {arch}: tensors {', '.join(parts)}",
            where=str(path),
            hint="the factory must build the module whose state dict was saved",
        ) from error
