"""Output files appear whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hcx.rewrite.errors import UsageError

DATA = ".data"


@dataclass(frozen=True)
class Destination:
    """Where an export goes.

    Attributes:
        folder: where the files go.
        model: bare name of the model file.
    """

    folder: Path
    model: str

    @property
    def path(self) -> Path:
        return self.folder / self.model


def destination(path: str | os.PathLike[str], companions: list[str], *, overwrite: bool) -> Destination:
    """``NAME.onnx`` is the file itself; any other path is a folder for ``model.onnx`` and the companions.

    Raises:
        UsageError: a file is there already and ``overwrite`` is off, or a folder is in the way.
    """
    path = Path(path)
    found = Destination(path.parent, path.name) if path.suffix == ".onnx" else Destination(path, "model.onnx")
    wanted = [found.path, found.folder / (found.model + DATA)] if path.suffix == ".onnx" else [found.path]
    wanted += [found.folder / name for name in companions]
    if found.folder.exists() and not found.folder.is_dir():
        raise UsageError(f"{found.folder} is a file", where=str(path), hint="name a folder, or a file ending in .onnx")
    if found.path.is_dir():
        raise UsageError(
            f"{found.path} is a folder", where=str(path), hint="name a file ending in .onnx, or remove the folder"
        )
    taken = [p for p in wanted if p.exists()]
    if taken and not overwrite:
        raise UsageError(f"{taken[0]} exists", where=str(path), hint="choose another path, or pass overwrite=True")
    return found


@contextmanager
def staging(target: Destination) -> Iterator[Path]:
    """A scratch folder on the same file system; gone afterwards, whatever happens."""
    parent = target.folder.absolute()
    while not parent.exists():
        parent = parent.parent
    scratch = Path(tempfile.mkdtemp(prefix=".hcx-onnx-", dir=parent))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def commit(scratch: Path, target: Destination) -> list[Path]:
    """Move every staged file into place; on an error the old files come back.

    The old model is taken away first and the new one comes last: no moment has a model beside foreign weights.
    """
    target.folder.mkdir(parents=True, exist_ok=True)
    names = sorted(p.name for p in scratch.iterdir())
    names.remove(target.model)
    old = [target.model, target.model + DATA, *names]
    backup = scratch / ".old"
    backup.mkdir()
    placed: list[Path] = []
    try:
        for name in dict.fromkeys(old):
            if (target.folder / name).exists():
                os.replace(target.folder / name, backup / name)
        for name in [*names, target.model]:
            os.replace(scratch / name, target.folder / name)
            placed.append(target.folder / name)
    except BaseException:
        for path in placed:
            path.unlink(missing_ok=True)
        for path in backup.iterdir():
            os.replace(path, target.folder / path.name)
        raise
    return placed
