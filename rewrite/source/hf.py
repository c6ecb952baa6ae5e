"""Hugging Face folders: config.json, weights, tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..errors import SourceError
from .checkpoint import load_file
from .files import foreign_name, head, read_json, wrapped
from .safetensors_file import check_safetensors, shards

_log = logging.getLogger("hcx")
_INSTALL = "pip install 'hcx-rewrite[hf]'"


def transformers() -> Any:
    """The transformers package, imported when a model of its kind is opened.

    Raises:
        SourceError: it is not installed.
    """
    try:
        import transformers as package
    except ImportError as error:
        raise SourceError(
            "this model needs the transformers package", where="import transformers", hint=_INSTALL
        ) from error
    return package


@contextmanager
def quiet() -> Iterator[None]:
    """Hold back transformers' progress bars and advice; what matters of it is raised or logged by hcx itself."""
    log = transformers().utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()


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


def _refuse_code(folder: Path, raw: dict, trust: bool) -> None:
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
    state: Mapping,
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
        with wrapped("no model class can be chosen", str(where), "name the class in config.json: architectures"):
            with torch.device("meta"):
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


def check_fit(model: torch.nn.Module, info: dict, where: Path, *, strict: bool) -> None:
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
    return _foreign_weights(folder) or SourceError(
        f"{folder.name} has no model.safetensors", where=str(folder), hint=f"it holds: {names}"
    )


def _not_transformers(folder: Path) -> SourceError:
    """config.json without model_type: usually another tool's, and its weight file says whose."""
    return _foreign_weights(folder) or SourceError(
        f"{folder.name}/config.json names no model_type, so it is not a transformers model",
        where=str(folder / "config.json"),
        hint="open a folder saved by save_pretrained",
    )


def _foreign_weights(folder: Path) -> SourceError | None:
    """The error for weights of another tool, such as CTranslate2's model.bin."""
    for path in sorted(folder.glob("*.bin")):
        if other := foreign_name(head(path)):
            return SourceError(
                f"{path.name} is {other}",
                where=str(path),
                hint="open the Hugging Face folder that it was converted from",
            )
    return None
