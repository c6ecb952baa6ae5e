"""config.json of a Hugging Face folder: what it asks for, and the model class that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hcx.rewrite.errors import SourceError

from .files import read_json, wrapped
from .hf_weights import foreign_weights
from .library import quiet, transformers


def read_config(folder: Path, *, trust: bool) -> Any:
    """The transformers config of a folder, after a look for anything that would fetch or run code.

    Raises:
        SourceError: damaged, not a transformers config, or it needs code of the folder's own.
    """
    raw = read_json(folder / "config.json")
    if "model_type" not in raw and not (trust and "auto_map" in raw):
        raise _not_transformers(folder)
    _refuse_code(folder, raw, trust)
    with (
        quiet(),
        wrapped(
            f"{folder.name}/config.json cannot be used",
            str(folder / "config.json"),
            f"its transformers version is {raw.get('transformers_version', 'not stated')}, installed is "
            f"{transformers().__version__}",
        ),
    ):
        return transformers().AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)


def _refuse_code(folder: Path, raw: dict[str, Any], trust: bool) -> None:
    """Custom classes beside the weights and attention kernels from elsewhere run code."""
    fetching = ("attn_implementation", "_attn_implementation", "experts_implementation")
    asked = [f"{key} = {raw[key]!r}" for key in fetching if "/" in str(raw.get(key, ""))]
    known = any(_class_named(name) for name in raw.get("architectures") or [])
    if "auto_map" in raw and not known:
        asked.append("auto_map, Python files of the folder's own")
    if asked and not trust:
        raise SourceError(
            f"{folder.name} needs code execution to load: its config.json has {asked[0]}",
            where=str(folder / "config.json"),
            hint="if you trust where the folder comes from, add --trust (it may then run any code)",
        )


def _class_named(name: Any) -> type | None:
    """The transformers model class of that name."""
    found = getattr(transformers(), name, None) if isinstance(name, str) else None
    known = isinstance(found, type) and issubclass(found, transformers().PreTrainedModel)
    return found if known else None


def model_class(config: Any, *, trust: bool) -> tuple[Any, bool]:
    """The class to load, and whether the config names it; else transformers' own choice of a bare model."""
    for name in getattr(config, "architectures", None) or []:
        if found := _class_named(name):
            return found, True
    custom = getattr(config, "auto_map", None) or {}
    for name in custom if trust else ():
        if name.startswith("AutoModel") and hasattr(transformers(), name):
            return getattr(transformers(), name), True
    return transformers().AutoModel, False


def _not_transformers(folder: Path) -> SourceError:
    """config.json without model_type: usually another tool's, and its weight file says whose."""
    return foreign_weights(folder) or SourceError(
        f"{folder.name}/config.json names no model_type, so it is not a transformers model",
        where=str(folder / "config.json"),
        hint="open a folder saved by save_pretrained",
    )
