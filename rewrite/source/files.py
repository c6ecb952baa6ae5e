"""What a file is, and whether all of it is there, read from headers alone.

Nothing in this file loads weights, imports torch or runs anything that a file contains. A header is believed only as
far as the file's size bears it out, so that a damaged one cannot ask for memory.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hcx.rewrite.errors import HcxError, SourceError, let_through

WEIGHT_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin")
SUPPORTED = "a Hugging Face folder, .gguf, .pt2, .pt, .pth, .safetensors, .hcx or pkg.mod:factory"
_FETCH_AGAIN = "fetch or save the file again and compare its size with the original's"


def damaged(path: Path, reason: str) -> SourceError:
    """The one wording for a file that is cut off or broken."""
    return SourceError(f"{path.name} is damaged or incomplete: {reason}", where=str(path), hint=_FETCH_AGAIN)


def first_line(error: BaseException) -> str:
    """The kind and first line of another library's message, short enough for one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


@contextmanager
def wrapped(what: str, where: str, hint: str) -> Iterator[None]:
    """Turn whatever another library raises into a SourceError that keeps its first line."""
    try:
        yield
    except Exception as error:  # a foreign library: any type may come, and the cause stays chained
        let_through(error)
        if isinstance(error, HcxError):
            raise
        raise SourceError(f"{what}: {first_line(error)}", where=where, hint=hint) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        SourceError: it is no JSON object.
    """
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"it is not JSON ({str(error)[:120]})") from error
    if not isinstance(value, dict):
        raise damaged(path, f"a JSON object was expected, not {type(value).__name__}")
    return value


def check_json(path: Path) -> None:
    """Raise SourceError unless the file parses as JSON of any kind."""
    try:
        json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"it is not JSON ({str(error)[:120]})") from error


def check_not_empty(path: Path) -> None:
    """Raise SourceError for a file of zero bytes."""
    if path.stat().st_size == 0:
        raise damaged(path, "it is empty")


def head(path: Path) -> bytes:
    """The first bytes of a file, enough to tell what it is."""
    with path.open("rb") as handle:
        return handle.read(256)


def looks_like_text(start: bytes) -> bool:
    """True when the first bytes are printable text, as of an error page saved under a model's name."""
    return bool(start) and all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in start)


def archive_names(path: Path) -> list[str] | None:
    """Member names of a zip file; None when the file does not start as one.

    Raises:
        SourceError: it starts as a zip file, but the index at its end is missing.
    """
    with path.open("rb") as handle:
        if handle.read(4) != b"PK\x03\x04":
            return None
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise damaged(path, "it starts as a zip archive, and the index at its end is missing or broken") from error


def archive_kind(names: list[str]) -> str:
    """Which tool wrote a zip file, from its member names: "pt2", "old pt2", "torchscript", "pickle" or "zip"."""
    inner = {name.split("/", 1)[1] for name in names if "/" in name}
    if "serialized_exported_program.json" in names:  # torch.export up to 2.7
        return "old pt2"
    if "archive_format" in inner:
        return "pt2"
    if "constants.pkl" in inner:
        return "torchscript"
    return "pickle" if "data.pkl" in inner else "zip"


def foreign_name(start: bytes) -> str | None:
    """What a file really is, when its first bytes say that it is another tool's."""
    if start.startswith(b"GGUF"):
        return "a GGUF file; rename it to .gguf"
    if start.startswith(b"\x89HDF\r\n"):
        return "an HDF5 file (Keras), not a PyTorch one"
    if start.startswith(b"\x1f\x8b"):
        return "a gzip file; unpack it first"
    if start[:4] in (b"lmgg", b"tjgg", b"ggml"):
        return "an old GGML file; convert it to GGUF first"
    name = start[6 : 6 + int.from_bytes(start[4:6], "little")]
    # CTranslate2: u32 version, u16 length, then the model class's name with a closing zero byte
    if name.endswith(b"\0") and len(name) > 4 and name[:-1].isalnum() and int.from_bytes(start[:4], "little") < 64:
        return f"a CTranslate2 model ({name[:-1].decode()}), whose weights are fused and have no PyTorch module"
    return None


def check_onnx(path: Path) -> None:
    """Raise SourceError when the outer protobuf fields of an ONNX file do not fit into the file."""
    check_not_empty(path)
    size, seen = path.stat().st_size, 0
    with path.open("rb") as handle:
        while handle.tell() < size:
            tag = _varint(handle, path)
            skip = {0: None, 1: 8, 5: 4}.get(tag & 7, -1)
            if tag & 7 == 2:
                skip = _varint(handle, path)
            if skip is None:
                _varint(handle, path)
            elif skip < 0 or handle.tell() + skip > size:
                raise damaged(path, "a field of the model runs past the end of the file")
            else:
                handle.seek(skip, 1)
            seen |= 1 << min(tag >> 3, 63)
    if not seen >> 7 & 1:
        raise damaged(path, "it holds no graph")


def _varint(handle, path: Path) -> int:
    """One protobuf variable-length integer."""
    value = 0
    for shift in range(0, 70, 7):
        byte = handle.read(1)
        if not byte:
            break
        value |= (byte[0] & 127) << shift
        if byte[0] < 128:
            return value
    raise damaged(path, "a field of the model is cut off")
