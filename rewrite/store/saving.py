"""Saving and loading: a folder ``NAME.hcx`` with the graph, the tensors, a golden and a manifest. No pickle."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import torch
from hcx.rewrite.check.golden import Golden
from hcx.rewrite.errors import UsageError
from hcx.rewrite.ir import graph_text
from hcx.rewrite.ir.copies import phase
from hcx.rewrite.ir.fingerprint import base_fingerprint, fingerprint
from hcx.rewrite.ir.program import Program
from safetensors.torch import save_file

from .folders import replace_folder, sha256, staging
from .manifest import (
    FORMAT,
    GOLDEN,
    GRAPH,
    MANIFEST,
    SCHEMA_VERSION,
    SOURCE,
    WEIGHTS,
    plain,
)

if TYPE_CHECKING:
    from hcx.rewrite.source.stored import Stored


def save(program: Program, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a Program as a folder; complete, or not at all.

    Args:
        path: folder to make; by convention it ends in ``.hcx``.
        overwrite: replace an existing ``.hcx`` folder, which stays intact until the new one is complete.

    Raises:
        UsageError: the path exists (or is not an artefact and so is never replaced).
    """
    target = Path(path)
    if target.exists() and not overwrite:
        raise UsageError(
            f"{target} exists", where=str(target), hint="choose another name, or pass overwrite=True (--overwrite)"
        )
    if target.exists() and not (target / MANIFEST).is_file():
        raise UsageError(
            f"{target} exists and is not an hcx artefact, so it is not replaced",
            where=str(target),
            hint="choose another name",
        )
    if program.training:  # stored as a Program is loaded: in eval mode
        program.eval()
        try:
            return save(program, path, overwrite=overwrite)
        finally:
            program.train()
    golden = (
        program.golden if program.golden is not None and not program.golden.stale(program) else Golden.record(program)
    )
    with staging(target) as folder:
        tensors, tied = _unique_tensors(program)
        own = {n: t.detach().contiguous() for n, t in tensors.items() if not (t.is_meta and n in program.stored)}
        save_file(own, folder / WEIGHTS, metadata={"format": "pt"})
        external = {n: program.stored[n] for n in tensors if n not in own}
        golden.write(folder / GOLDEN)
        (folder / GRAPH).write_text(json.dumps(graph_text.to_json(program.graph), separators=(",", ":")))
        for name, content in program.companions.items():
            place = folder / SOURCE / plain(name)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
        (folder / MANIFEST).write_text(json.dumps(_manifest(program, golden, tied, external, folder), indent=1))
        replace_folder(folder, target)


def _manifest(
    program: Program, golden: Golden, tied: dict[str, str], external: dict[str, Stored], folder: Path
) -> dict[str, Any]:
    files = {
        str(PurePosixPath(p.relative_to(folder))): {"sha256": sha256(p), "bytes": p.stat().st_size}
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }
    persistent = set(program.state_dict())
    kinds = {
        n: {
            "kind": "parameter" if isinstance(t, torch.nn.Parameter) else "buffer" if n in persistent else "transient",
            "requires_grad": t.requires_grad,
            **({"phase": phase(t)} if phase(t) else {}),
        }
        for n, t in program.named_tensors()
    }
    return {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "versions": versions(),
        "model": program.signature.model,
        "fingerprint": fingerprint(program),
        "base_fingerprint": base_fingerprint(program),
        "pipeline": [e.pipeline for e in program.history],
        "history": program.history,
        "signature": program.signature.to_json(),
        "tensors": kinds,
        "tied": tied,
        "origin": program.origin,
        "trace_exact": program.trace_exact,
        "golden": golden.describe(),
        "files": files,
    } | ({"external": {n: s.to_json() for n, s in external.items()}} if external else {})


def versions() -> dict[str, str]:
    """Versions that an artefact was written with."""
    try:
        own = version("hcx-rewrite")
    except PackageNotFoundError:
        own = "unknown"
    return {"hcx": own, "torch": torch.__version__, "python": ".".join(map(str, sys.version_info[:3]))}


def _unique_tensors(program: Program) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Each tensor once under its first name, and other names -> first name."""
    first: dict[int, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    for name, tensor in program.named_tensors():
        if id(tensor) in first:
            tied[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
            tensors[name] = tensor
    return tensors, tied
