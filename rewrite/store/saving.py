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
from hcx.rewrite.check.invariants import Check
from hcx.rewrite.errors import ArtefactError, UsageError
from hcx.rewrite.ir import graph_text
from hcx.rewrite.ir.copies import VECTOR, phase, placed
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.signature import CallSignature
from hcx.rewrite.source import memory
from hcx.rewrite.tracing.normalize import set_tensor
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import fx

from .folders import replace_folder, sha256, staging

if TYPE_CHECKING:
    from hcx.rewrite.source.stored import Stored

FORMAT, SCHEMA_VERSION = "hcx-artefact", 1
GRAPH, WEIGHTS, GOLDEN, MANIFEST, SOURCE = (
    "graph.json",
    "weights.safetensors",
    "golden.safetensors",
    "manifest.json",
    "source",
)


def save(program: Program, path: str | os.PathLike, *, overwrite: bool = False) -> None:
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
            place = folder / SOURCE / _plain(name)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
        (folder / MANIFEST).write_text(json.dumps(_manifest(program, golden, tied, external, folder), indent=1))
        replace_folder(folder, target)


def _manifest(
    program: Program, golden: Golden, tied: dict[str, str], external: dict[str, Stored], folder: Path
) -> dict[str, Any]:
    from hcx.rewrite.pipeline.walk import fingerprint

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
        "pipeline": [e["pipeline"] for e in program.history],
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


def base_fingerprint(program: Program) -> str:
    """Fingerprint of the Program before its first rewrite."""
    from hcx.rewrite.pipeline.walk import fingerprint

    return program.history[0]["plan"]["fingerprint"] if program.history else fingerprint(program)


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


def load(path: str | os.PathLike, *, weights: str | os.PathLike | None = None, lazy: bool = False) -> Program:
    """Read an artefact back. Needs nothing but torch and safetensors, not the source of the model.

    Args:
        weights: folder with the original weights, for an artefact that refers to them instead of holding them. Files
            elsewhere are never read, whatever the manifest says.
        lazy: leave those weights in their files; see :mod:`hcx.rewrite.tracing.lazy`.

    Raises:
        ArtefactError: not an artefact, damaged, from a newer schema, or naming targets or files that are not allowed;
            or original weights that are not given, or are not what they were.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    external = external_tensors(manifest, folder, weights)
    kinds: dict[str, dict] = manifest["tensors"]
    root = torch.nn.Module()
    stored = _read_tensors(_file(folder, WEIGHTS), {n: _phase(n, k) for n, k in kinds.items()})
    made: dict[str, torch.Tensor] = {}
    for name, kind in kinds.items():
        source = manifest["tied"].get(name, name)
        if source in external and source not in made:
            stored[source] = _outside(external[source], lazy)
        if source not in stored:
            raise ArtefactError(f"the tensor `{source}` is missing", where=str(folder / WEIGHTS))
        if source not in made:
            is_parameter = kind["kind"] == "parameter"
            made[source] = (
                torch.nn.Parameter(stored[source], requires_grad=bool(kind["requires_grad"]))
                if is_parameter
                else stored[source]
            )
        _register(root, name, made[source], kind["kind"] != "transient")
    graph = graph_text.from_json(_read_json(_file(folder, GRAPH)), set(kinds))
    golden = Golden.read(_file(folder, GOLDEN), manifest["golden"])
    try:
        signature = CallSignature.from_json(manifest["signature"])
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise ArtefactError(f"the call signature is damaged: {error}", where=str(folder / MANIFEST)) from error
    _check_fit(graph, signature)
    program = Program._build(graph, root, signature, examples=golden.inputs, copy_tensors=False)
    companions = {
        str(PurePosixPath(n).relative_to(SOURCE)): _file(folder, n).read_bytes()
        for n in manifest["files"]
        if n.startswith(SOURCE + "/")
    }
    program.__dict__.update(
        history=manifest["history"],
        origin=dict(manifest["origin"]),
        trace_exact=manifest["trace_exact"],
        golden=golden,
        companions=companions,
        stored={n: external[s] for n in kinds if lazy and (s := manifest["tied"].get(n, n)) in external},
    )
    return program


def external_tensors(manifest: dict[str, Any], folder: Path, weights: str | os.PathLike | None) -> dict[str, Stored]:
    """The tensors that an artefact refers to, in the folder that the user allows; nothing of them is read.

    Raises:
        ArtefactError: no folder is given, or it does not hold them.
    """
    from hcx.rewrite.source.stored import from_manifest

    described = manifest.get("external", {})
    if described and weights is None:
        raise ArtefactError(
            f"{len(described)} tensors of {folder.name} are in the weight files of its source model",
            where=str(folder),
            hint="give the folder of the source model: weights=FOLDER (--weights FOLDER)",
        )
    headers: dict[str, Any] = {}
    return {n: from_manifest(n, data, Path(weights or ""), headers) for n, data in described.items()}


def _outside(place: Stored, lazy: bool) -> torch.Tensor:
    if not lazy:
        return place.read()
    return torch.empty(place.entry.shape, dtype=place.dtype, device="meta")


def _check_fit(graph: fx.Graph, signature: CallSignature) -> None:
    """A graph takes the inputs of its signature and gives its outputs and taps.

    Raises:
        ArtefactError: it does not.
    """
    nodes = list(graph.nodes)
    outputs = [n for n in nodes if n.op == "output"]
    if len(outputs) != 1 or nodes[-1] is not outputs[0]:
        raise ArtefactError("the graph file has not one output at its end", where=GRAPH)
    placeholders = sum(n.op == "placeholder" for n in nodes)
    results = outputs[0].args[0] if isinstance(outputs[0].args[0], tuple) else ()
    expected = len(signature.outputs.names) + len(outputs[0].meta.get("taps", ()))
    if placeholders != len(signature.inputs) or len(results) != expected:
        raise ArtefactError(
            f"the graph has {placeholders} inputs and {len(results)} results, its signature {len(signature.inputs)} and {expected}",
            where=GRAPH,
        )


def _register(root: torch.nn.Module, name: str, tensor: torch.Tensor, persistent: bool) -> None:
    if not all(part and part.isprintable() and not set(part) & set('"\\{}') for part in name.split(".")):
        raise ArtefactError(f"{name!r} is not a tensor name", where=MANIFEST)
    try:
        set_tensor(root, name, tensor, persistent=persistent)
    except KeyError as error:
        raise ArtefactError(f"`{name}` lies inside another tensor", where=MANIFEST) from error


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of an artefact, with its form and file names checked.

    Raises:
        ArtefactError: see :func:`load`.
    """
    if not folder.exists():
        raise ArtefactError(f"{folder} does not exist", where=str(folder))
    if not (folder / MANIFEST).is_file():
        raise ArtefactError(f"{folder} is not an hcx artefact: it has no {MANIFEST}", where=str(folder))
    manifest = _read_json(folder / MANIFEST)
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
        place = _file(folder, name)
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


def verify(path: str | os.PathLike, *, weights: str | os.PathLike | None = None) -> list[Check]:
    """Run every check that an artefact allows: file hashes, its golden bitwise, and the contracts again.

    Args:
        weights: folder of the source model, for an artefact that refers to its weights. The checks that are owed are
            then run against that model, where memory allows.

    Returns:
        all checks, failed ones included.
    """
    from hcx.rewrite.driver import verify_again, verify_owed

    changed = changed_files(path)
    manifest = read_manifest(Path(path))
    checks = [Check("files are as written", not changed, {"files": len(manifest["files"])}, ", ".join(changed))]
    external = external_tensors(manifest, Path(path), weights)
    if external:
        other = [n for n, place in external.items() if place.digest() != place.sha256]
        note = f"changed: {', '.join(other[:3])}" if other else ""
        checks.append(Check("source weights are as recorded", not other, {"tensors": len(external)}, note))
        short = None if other else memory.shortage(external.values())
        if other or short:
            return [*checks, *([Check("owed checks", True, short, "still owed: not enough memory")] if short else [])]
    program = load(path, weights=weights)
    owed = [e for e in program.history if e.get("owed")]
    if owed and weights is not None:
        from hcx.rewrite.source.hf import load_model
        from hcx.rewrite.tracing.reference import reference_for

        model = load_model(Path(weights), trust=False, dtype=None)
        program.__dict__["reference"] = reference_for(program, model)
    if program.golden.program:
        checks.append(program.golden.check(program))
        checks += program.golden.contracts(program)
    return checks + verify_again(program) + (verify_owed(program) if program.reference is not None else [])


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


def changed_files(folder: str | os.PathLike) -> list[str]:
    """Files whose content is not what the manifest says (reads all of them)."""
    folder = Path(folder)
    return [n for n, e in read_manifest(folder)["files"].items() if sha256(_file(folder, n)) != e["sha256"]]


def _file(folder: Path, name: str) -> Path:
    place = folder / _plain(name)
    if not place.is_file():
        raise ArtefactError(f"{name} is missing", where=str(place))
    if not place.resolve().is_relative_to(folder.resolve()):
        raise ArtefactError(f"{name} lies outside the artefact", where=str(place))
    return place


def _plain(name: str) -> str:
    """A relative file name that stays inside its folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\\" in name:
        raise ArtefactError(f"{name!r} is not a file inside the artefact", where=name)
    return str(path)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ArtefactError(f"{path.name} is damaged or incomplete: {error}", where=str(path)) from error


def _phase(name: str, kind: dict) -> int:
    remainder = kind.get("phase", 0)
    if type(remainder) is not int or not 0 <= remainder < VECTOR:
        raise ArtefactError(f"the manifest is damaged at tensors: {name}", where=MANIFEST)
    return remainder


def _read_tensors(path: Path, phases: dict[str, int]) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, "pt") as file:
            # copied: addresses inside the file are others than when this was checked, and kernels then sum differently
            return {name: placed(file.get_tensor(name), phases.get(name, 0)) for name in file.keys()}
    except (SafetensorError, OSError, ValueError) as error:
        raise ArtefactError(f"{path.name} is damaged or incomplete: {error}", where=str(path)) from error
