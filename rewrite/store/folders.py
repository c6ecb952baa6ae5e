"""Writing folders so that a reader finds the old one or the new one, never half of one."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextlib.contextmanager
def staging(target: Path) -> Iterator[Path]:
    """A temporary folder beside the target; removed unless it has been renamed into place."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    try:
        yield folder
    finally:
        if folder.exists():
            shutil.rmtree(folder, ignore_errors=True)


def replace_folder(new: Path, target: Path) -> None:
    """Put ``new`` in the place of ``target``, in one step where the system can exchange two names."""
    new.chmod(0o755)
    for path in new.rglob("*"):
        if path.is_file():
            path.chmod(0o644)
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    if not target.exists():
        os.rename(new, target)
    elif _exchange(new, target):
        shutil.rmtree(new)
    else:
        old = target.with_name(f".{target.name}.old")
        os.rename(target, old)
        os.rename(new, target)
        shutil.rmtree(old)


def _exchange(one: Path, other: Path) -> bool:
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0


def sha256(path: Path) -> str:
    """Hash of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
