"""The weight files of a Hugging Face folder, found and checked before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import torch
from hcx.rewrite.errors import SourceError

from .checkpoint import load_file
from .files import foreign_name, head
from .safetensors_file import check_safetensors, shards


def find_weights(folder: Path, *, trust: bool) -> dict[str, torch.Tensor] | None:
    """Check a folder's weight files; a state dict when they are pickles, None for transformers to read safetensors.

    Raises:
        SourceError: no weights that can be read, or damaged ones.
    """
    for name, suffix in (("model", ".safetensors"), ("pytorch_model", ".bin")):
        single, index = folder / f"{name}{suffix}", folder / f"{name}{suffix}.index.json"
        files = [single] if single.is_file() else shards(index) if index.is_file() else []
        if files and suffix == ".safetensors":
            for path in files:
                check_safetensors(path)
            return None
        if files:
            return {key: value for path in files for key, value in load_file(path, trust=trust).items()}
    raise _no_weights(folder)


def _no_weights(folder: Path) -> SourceError:
    """A folder with a config and nothing beside it that holds its weights."""
    for path in sorted(folder.glob("*.safetensors")):
        check_safetensors(path)
    names = ", ".join(sorted(path.name for path in folder.iterdir())[:8])
    return foreign_weights(folder) or SourceError(
        f"{folder.name} has no model.safetensors", where=str(folder), hint=f"it holds: {names}"
    )


def foreign_weights(folder: Path) -> SourceError | None:
    """The error for weights of another tool, such as CTranslate2's model.bin."""
    for path in sorted(folder.glob("*.bin")):
        if other := foreign_name(head(path)):
            return SourceError(
                f"{path.name} is {other}",
                where=str(path),
                hint="open the Hugging Face folder that it was converted from",
            )
    return None
