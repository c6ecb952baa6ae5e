"""The manifest of an artefact, and the files that it names."""

from __future__ import annotations

import json
import os
from pathlib import Path, PurePosixPath
from typing import Any

from hcx.rewrite.errors import ArtefactError

from .folders import sha256

FORMAT, SCHEMA_VERSION = "hcx-artefact", 1


GRAPH, WEIGHTS, GOLDEN, MANIFEST, SOURCE = (
    "graph.json",
    "weights.safetensors",
    "golden.safetensors",
    "manifest.json",
    "source",
)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of an artefact, with its form and file names checked.

    Raises:
        ArtefactError: see :func:`load`.
    """
    if not folder.exists():
        raise ArtefactError(f"{folder} does not exist", where=str(folder))
    if not (folder / MANIFEST).is_file():
        raise ArtefactError(f"{folder} is not an hcx artefact: it has no {MANIFEST}", where=str(folder))
    manifest = read_json(folder / MANIFEST)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ArtefactError("this manifest is not one of hcx", where=str(folder / MANIFEST))
    if manifest.get("schema_version") != SCHEMA_VERSION:
        raise ArtefactError(
            f"the artefact has schema version {manifest.get('schema_version')}, this hcx reads {SCHEMA_VERSION}",
            where=str(folder),
            hint="load it with the hcx that wrote it: " + str(manifest.get("versions")),
        )
    manifest.setdefault("external", {})
    expected = {
        "files": dict,
        "external": dict,
        "tensors": dict,
        "tied": dict,
        "history": list,
        "signature": dict,
        "origin": dict,
        "golden": dict,
    }
    for key, kind in expected.items():
        if not isinstance(manifest.get(key), kind):
            raise ArtefactError(
                f"the manifest is damaged: `{key}` is missing or of the wrong kind", where=str(folder / MANIFEST)
            )
    _check_entries(manifest, folder)
    for name, entry in manifest["files"].items():
        place = file_of(folder, name)
        if place.stat().st_size != entry.get("bytes"):
            raise ArtefactError(
                f"{name} is damaged or incomplete: {place.stat().st_size} bytes, the manifest says {entry.get('bytes')}",
                where=str(place),
            )
        if name not in (WEIGHTS, GOLDEN) and sha256(place) != entry.get("sha256"):
            raise ArtefactError(
                f"{name} was changed after it was written", where=str(place), hint="rewrite the model again"
            )
    return manifest


def _check_entries(manifest: dict[str, Any], folder: Path) -> None:
    """The parts of a manifest that are used without further checks have the form that :func:`save` gives them."""
    required = {"files": ("sha256", "bytes"), "tensors": ("kind", "requires_grad")}
    bad = [f"{key}: {name}" for key, fields in required.items() for name, entry in manifest[key].items()
           if not isinstance(entry, dict) or any(f not in entry for f in fields)
           or entry.get("kind", "buffer") not in ("parameter", "buffer", "transient")]  # fmt: skip
    bad += [f"history: entry {i}" for i, entry in enumerate(manifest["history"])
            if not isinstance(entry, dict) or any(f not in entry for f in ("pass", "pipeline", "plan", "contract", "checks"))]  # fmt: skip
    bad += [
        f"{key}: {name}"
        for key in ("tied", "origin")
        for name, other in manifest[key].items()
        if not isinstance(other, str)
    ]
    if bad:
        raise ArtefactError(f"the manifest is damaged at {bad[0]}", where=str(folder / MANIFEST))


def changed_files(folder: str | os.PathLike[str]) -> list[str]:
    """Files whose content is not what the manifest says (reads all of them)."""
    folder = Path(folder)
    return [n for n, e in read_manifest(folder)["files"].items() if sha256(file_of(folder, n)) != e["sha256"]]


def file_of(folder: Path, name: str) -> Path:
    """A file of an artefact.

    Raises:
        ArtefactError: it is missing, or lies outside the folder.
    """
    place = folder / plain(name)
    if not place.is_file():
        raise ArtefactError(f"{name} is missing", where=str(place))
    if not place.resolve().is_relative_to(folder.resolve()):
        raise ArtefactError(f"{name} lies outside the artefact", where=str(place))
    return place


def plain(name: str) -> str:
    """A relative file name that stays inside its folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\\" in name:
        raise ArtefactError(f"{name!r} is not a file inside the artefact", where=name)
    return str(path)


def read_json(path: Path) -> Any:
    """Raises ArtefactError where the file is no JSON."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ArtefactError(f"{path.name} is damaged or incomplete: {error}", where=str(path)) from error
