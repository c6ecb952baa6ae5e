"""Reading an artefact back."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from hcx.rewrite.check.golden import Golden
from hcx.rewrite.errors import ArtefactError
from hcx.rewrite.ir import graph_text
from hcx.rewrite.ir.belongings import Belongings
from hcx.rewrite.ir.copies import VECTOR, placed
from hcx.rewrite.ir.history import Entry
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.signature import CallSignature
from hcx.rewrite.ir.tensors import set_tensor
from hcx.rewrite.source.stored import Stored, from_manifest
from safetensors import SafetensorError, safe_open
from torch import fx

from .manifest import GOLDEN, GRAPH, MANIFEST, SOURCE, WEIGHTS, file_of, read_json, read_manifest


def load(path: str | os.PathLike[str], *, weights: str | os.PathLike[str] | None = None, lazy: bool = False) -> Program:
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
    kinds: dict[str, dict[str, Any]] = manifest["tensors"]
    root = _tensor_tree(folder, manifest, external, lazy)
    graph = graph_text.from_json(read_json(file_of(folder, GRAPH)), set(kinds))
    golden = Golden.read(file_of(folder, GOLDEN), manifest["golden"])
    try:
        signature = CallSignature.from_json(manifest["signature"])
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise ArtefactError(f"the call signature is damaged: {error}", where=str(folder / MANIFEST)) from error
    _check_fit(graph, signature)
    belongings = Belongings(
        history=[Entry(e) for e in manifest["history"]],
        origin=dict(manifest["origin"]),
        companions=_companions(folder, manifest),
        stored={n: external[s] for n in kinds if lazy and (s := manifest["tied"].get(n, n)) in external},
        trace_exact=manifest["trace_exact"],
        golden=golden,
    )
    return Program.build(graph, root, signature, examples=golden.inputs, belongings=belongings)


def _tensor_tree(folder: Path, manifest: dict[str, Any], external: dict[str, Stored], lazy: bool) -> torch.nn.Module:
    kinds: dict[str, dict[str, Any]] = manifest["tensors"]
    root = torch.nn.Module()
    stored = _read_tensors(file_of(folder, WEIGHTS), {n: _phase(n, k) for n, k in kinds.items()})
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
    return root


def _companions(folder: Path, manifest: dict[str, Any]) -> dict[str, bytes]:
    return {
        str(PurePosixPath(n).relative_to(SOURCE)): file_of(folder, n).read_bytes()
        for n in manifest["files"]
        if n.startswith(SOURCE + "/")
    }


def external_tensors(
    manifest: dict[str, Any], folder: Path, weights: str | os.PathLike[str] | None
) -> dict[str, Stored]:
    """The tensors that an artefact refers to, in the folder that the user allows; nothing of them is read.

    Raises:
        ArtefactError: no folder is given, or it does not hold them.
    """
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


def _phase(name: str, kind: dict[str, Any]) -> int:
    remainder = kind.get("phase", 0)
    if type(remainder) is not int or not 0 <= remainder < VECTOR:
        raise ArtefactError(f"the manifest is damaged at tensors: {name}", where=MANIFEST)
    return remainder


def _read_tensors(path: Path, phases: dict[str, int]) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, "pt") as file:
            # copied: addresses inside the file are others than when this was checked, and kernels then sum differently
            return {name: placed(file.get_tensor(name), phases.get(name, 0)) for name in file.keys()}  # noqa: SIM118  no mapping
    except (SafetensorError, OSError, ValueError) as error:
        raise ArtefactError(f"{path.name} is damaged or incomplete: {error}", where=str(path)) from error
