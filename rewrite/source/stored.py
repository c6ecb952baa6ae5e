"""Tensors that stay in a ``.safetensors`` file until someone reads them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hcx.rewrite.errors import ArtefactError
from safetensors import SafetensorError, safe_open

from .safetensors_file import Entry, entries

_CHUNK = 1 << 22
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies.

    Attributes:
        file: a ``.safetensors`` file.
        key: the tensor's name in it.
        entry: dtype, shape and byte range, from the header.
        sha256: what its bytes must hash to when they are read; None where that is not known yet.
    """

    file: Path
    key: str
    entry: Entry
    sha256: str | None = None

    @property
    def dtype(self) -> torch.dtype | None:
        """None for a dtype that torch has no counterpart of here."""
        return _DTYPES.get(self.entry.dtype)

    def read(self) -> torch.Tensor:
        """The tensor in memory, and nothing else of the file.

        Raises:
            ArtefactError: the file is not what it was.
        """
        self.check()
        try:
            with safe_open(self.file, "pt") as file:
                return file.get_tensor(self.key).clone()  # cloned: aligned, and the mapping goes
        except (SafetensorError, OSError) as error:
            raise ArtefactError(f"`{self.key}` cannot be read: {error}", where=str(self.file)) from error

    def check(self) -> None:
        """Compare the bytes with the hash, where there is one.

        Raises:
            ArtefactError: they differ.
        """
        if self.sha256 is not None and self.digest() != self.sha256:
            raise ArtefactError(
                f"`{self.key}` in {self.file.name} is not what it was when the model was rewritten",
                where=str(self.file),
                hint="give the folder with the original weights, or rewrite the model again",
            )

    def digest(self) -> str:
        """SHA-256 of the tensor's bytes, read in pieces."""
        digest, left = hashlib.sha256(), self.entry.stop - self.entry.start
        with open(self.file, "rb") as file:
            file.seek(self.entry.start)
            while left > 0 and (piece := file.read(min(_CHUNK, left))):
                digest.update(piece)
                left -= len(piece)
        return digest.hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The entry of a manifest; the folder is kept apart."""
        return {"file": self.file.name, "key": self.key, "sha256": self.sha256 or self.digest(),
                "dtype": self.entry.dtype, "shape": list(self.entry.shape)}  # fmt: skip


def from_manifest(name: str, data: Any, folder: Path, headers: dict[str, dict[str, Entry]]) -> Stored:
    """A tensor that a manifest refers to, in the folder that the user allows and nowhere else.

    Args:
        headers: of files that were read already; extended.

    Raises:
        ArtefactError: a file outside the folder, one that is not there, or a tensor of another dtype or shape.
    """
    fields = {"file": str, "key": str, "sha256": str, "dtype": str, "shape": list}
    if not isinstance(data, dict) or any(not isinstance(data.get(k), t) for k, t in fields.items()):
        raise ArtefactError(f"the manifest is damaged at external: {name}", where="manifest.json")
    file = data["file"]
    if Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
        raise ArtefactError(f"`{name}` refers to {file!r}, which is not a file of the folder", where=name)
    if not (folder / file).is_file():
        raise ArtefactError(
            f"{file} is not in {folder}", where=str(folder), hint="give the folder with the original weights"
        )
    if file not in headers:
        headers[file] = entries(folder / file)
    entry = headers[file].get(data["key"])
    if (
        entry is None
        or entry.dtype not in _DTYPES
        or entry.dtype != data["dtype"]
        or list(entry.shape) != data["shape"]
    ):
        raise ArtefactError(
            f"{file} holds no `{data['key']}` of shape {data['shape']} and dtype {data['dtype']}",
            where=str(folder / file),
            hint="give the folder with the original weights",
        )
    return Stored(folder / file, data["key"], entry, data["sha256"])
