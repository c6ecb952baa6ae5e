"""Tokenizers from companion files, and real text cut into windows of token ids."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from hcx.rewrite.errors import SourceError

from .files import check_json, wrapped

COMPANION_LIMIT = 20_000_000
_COMPANIONS = (
    "*config.json",
    "tokenizer*",
    "*vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "normalizer.json",
)
_VOCABULARIES = ("tokenizer.json", "tokenizer_config.json", "*vocab*", "*.model", "*.tiktoken", "tekken.json")


def read_companions(folder: Path) -> dict[str, bytes]:
    """The small files of a model folder by name: configs, tokenizer, chat template; each under 20 MB.

    Raises:
        SourceError: a JSON file among them is damaged.
    """
    companions = {}
    for path in sorted(folder.iterdir()):
        wanted = path.is_file() and any(fnmatch(path.name, pattern) for pattern in _COMPANIONS)
        if wanted and path.stat().st_size < COMPANION_LIMIT:
            if path.suffix == ".json":
                check_json(path)
            companions[path.name] = path.read_bytes()
    return companions


def has_tokenizer(names) -> bool:
    """True when a folder listing or the companions contain a vocabulary or a tokenizer's own configuration."""
    return any(fnmatch(name, pattern) for name in names for pattern in _VOCABULARIES)


def load_tokenizer(folder: Path, *, trust: bool = False) -> Any:
    """The transformers tokenizer of a folder.

    Raises:
        SourceError: it cannot be built from the folder's files alone.
    """
    with wrapped(
        f"the tokenizer of {folder.name} cannot be built",
        str(folder),
        "repair or remove the tokenizer files, or give the example inputs with --inputs FILE.safetensors",
    ):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)


def tokenizer_from(companions: Mapping[str, bytes]) -> Any:
    """Rebuild a transformers tokenizer from companion files, in a folder that is gone afterwards.

    Raises:
        SourceError: there are no tokenizer files among them, a name leads out of the folder, or they do not load.
    """
    if not has_tokenizer(companions):
        raise SourceError(
            "the model came without tokenizer files",
            where="tokenizer",
            hint="open it from a folder that has tokenizer.json or a vocabulary",
        )
    with tempfile.TemporaryDirectory(prefix="hcx-tokenizer-") as folder:
        for name, content in companions.items():
            if Path(name).name != name:
                raise SourceError(
                    f"companion file name {name!r} leads out of its folder",
                    where="companions",
                    hint="names are plain file names",
                )
            (Path(folder) / name).write_bytes(content)
        return load_tokenizer(Path(folder))


def text_windows(tokenizer: Any, text: str, length: int, count: int) -> torch.Tensor:
    """Token ids of ``count`` stretches of a text, spread evenly from its start to its end.

    Args:
        tokenizer: a transformers tokenizer, a folder with its files, or the companions of a ModelSource.
        text: the text; no special tokens are added to it.
        length: tokens a window.
        count: number of windows. They do not overlap when the text has at least ``length * count`` tokens.

    Returns:
        int64 tensor [count, length].

    Raises:
        SourceError: the text has too few tokens for windows that all differ.
    """
    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(Path(tokenizer))
    elif isinstance(tokenizer, Mapping):
        tokenizer = tokenizer_from(tokenizer)
    # verbose=False: the text may be longer than the model's limit, the windows are not
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    spare = len(ids) - length
    if length < 1 or count < 1 or spare < count - 1:
        raise SourceError(
            f"the text has {len(ids)} tokens, too few for {count} windows of {length}",
            where="text",
            hint=f"give a text of at least {max(length, 1) * max(count, 1)} tokens",
        )
    starts = [round(index * spare / max(count - 1, 1)) for index in range(count)]
    return torch.tensor([ids[start : start + length] for start in starts], dtype=torch.int64)
