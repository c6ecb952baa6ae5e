"""An example call given by the user: a .safetensors file of keyword arguments."""

from __future__ import annotations

import inspect
from pathlib import Path

import torch
from hcx.rewrite.errors import SourceError, UsageError

from .safetensors_file import check_safetensors

GIVE_INPUTS = "give an example with --inputs FILE.safetensors, whose tensors are the keyword arguments by name"


def from_file(path: Path, model: torch.nn.Module | None) -> dict[str, torch.Tensor]:
    """Keyword arguments from a .safetensors file; the keys are argument names.

    Raises:
        SourceError: the file is missing or damaged.
        UsageError: a key is no argument of the model's forward.
    """
    if not path.is_file():
        raise SourceError(f"there is no file {path.name}", where=str(path), hint=GIVE_INPUTS)
    check_safetensors(path)
    from safetensors.torch import load_file

    tensors = load_file(path)
    parameters = inspect.signature(model.forward).parameters if model is not None else {}
    if parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        unknown = [name for name in tensors if name not in parameters]
        if unknown:
            raise UsageError(
                f"{path.name} holds {', '.join(unknown)}, which the model's forward does not take",
                where=str(path),
                hint="its arguments are " + ", ".join(parameters),
            )
    return tensors
