"""A Program as a ``torch.export`` archive that has been loaded again and run."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from hcx.rewrite.check.measuring import is_meta
from hcx.rewrite.errors import ExportError, UsageError, let_through
from hcx.rewrite.host.dormant import without_dormant
from hcx.rewrite.store.folders import staging

from .agreement import SAME, agree
from .handed_on import HandedOn
from .samples import samples


def to_pt2(program: Any, path: str | os.PathLike[str], *, taps: bool = False, overwrite: bool = False) -> HandedOn:
    """Write a Program as a ``.pt2``, load the file, compare it at several shapes, and only then put it in place.

    ``torch.export.load(path).module()`` takes the flat inputs as keyword arguments (dots in their names become
    underscores) and returns a dict of the named outputs. Dimensions that are dynamic in the Program stay dynamic.

    Args:
        program: a :class:`hcx.rewrite.Program`.
        path: ``NAME.pt2``.
        taps: also return the auxiliary outputs.
        overwrite: replace an existing file.

    Raises:
        ExportError: torch.export fails, fixes a dimension, or the file gives something else; nothing was written.
        UsageError: unusable path.
    """
    target = Path(path)
    if target.suffix != ".pt2" or target.is_dir():
        raise UsageError(f"{target} is not a file name that ends in .pt2", where=str(path), hint="-o NAME.pt2")
    if target.exists() and not overwrite:
        raise UsageError(f"{target} exists", where=str(target), hint="choose another path, or pass overwrite=True")
    if is_meta(program):
        raise ExportError("the weights are not in memory", where=program.signature.model, hint="load them first")
    program, notes = (program, []) if taps else without_dormant(program)
    sets = [s.flat for s in samples(program)]
    named = _Named(program, taps)
    with torch.no_grad():
        expected = [dict(zip(named.outputs, program.run_flat([t.clone() for t in f], taps=taps), strict=True))
                    for f in sets]  # fmt: skip
    exported = _export(program, named, _example(program, sets))
    _require_dynamic(program, exported)
    with staging(target) as folder:
        file = folder / target.name
        with warnings.catch_warnings():  # it wonders about tensors that are part of a larger storage
            warnings.simplefilter("ignore")
            torch.export.save(exported, file)
        loaded = torch.export.load(file).module()
        with torch.no_grad():
            got = [loaded(**named.named([t.clone() for t in flat])) for flat in sets]
        measured = agree(got, expected, SAME[program.dtype])
        with open(file, "rb") as handle:
            os.fsync(handle.fileno())
        os.replace(file, target)
    if any(n.op == "call_function" and str(n.target).startswith("hcx.") for n in exported.graph.nodes):
        notes.append("it has operators of hcx: import hcx.kernels before torch.export.load")
    return HandedOn(target, {target.name: target.stat().st_size}, measured, "torch.export.load", notes)


class _Named:
    """The flat graph with inputs and outputs by name, over the same tensors under the same names."""

    def __init__(self, program: Any, taps: bool):
        self.module = program.flat_module(taps=taps)
        graph = self.module.graph
        self.inputs = [i.name.replace(".", "_") for i in program.inputs]
        if len(set(self.inputs)) == len(self.inputs):
            for node, name in zip([n for n in graph.nodes if n.op == "placeholder"], self.inputs, strict=True):
                node.target = name
        self.inputs = [n.target for n in graph.nodes if n.op == "placeholder"]
        self.outputs = [*program.output_names, *(program.taps if taps else ())]
        graph.output_node().args = (dict(zip(self.outputs, graph.output_node().args[0], strict=True)),)
        self.module.recompile()

    def named(self, flat: list[Any]) -> dict[str, Any]:
        return dict(zip(self.inputs, flat, strict=True))


def _example(program: Any, sets: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Inputs whose open sizes are all 2 or more, which torch.export needs to leave them open; a loaded Program's own
    example starts with an empty cache."""
    own = list(program.signature.complete(program.examples[0]))
    axes = [[axis for axis, dim in enumerate(s.shape) if isinstance(dim, str)] for s in program.inputs]
    large = (
        f for f in (own, *sets) if all(t.shape[a] > 1 for t, open_axes in zip(f, axes, strict=True) for a in open_axes)
    )
    return next(large, own)


def _export(program: Any, named: _Named, example: list[torch.Tensor]) -> torch.export.ExportedProgram:
    auto = torch.export.Dim.AUTO
    dynamic = [{axis: auto for axis, dim in enumerate(s.shape) if isinstance(dim, str)} for s in program.inputs]
    example = [t.detach().clone() for t in example]
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.export(
                named.module, (), named.named(example), dynamic_shapes=named.named(dynamic), strict=False
            )
    except Exception as error:  # whatever torch.export raises, it is about this graph
        let_through(error)
        text = next(iter(str(error).strip().splitlines()), "")
        raise ExportError(
            f"torch.export refuses the graph: {type(error).__name__}: {text}",
            where=program.signature.model,
            hint="nothing was written; --to onnx may work",
        ) from error


def _require_dynamic(program: Any, exported: torch.export.ExportedProgram) -> None:
    """Refuse an archive with a size fixed that the Program leaves open."""
    shapes = [n.meta["val"].shape for n in exported.graph.nodes if n.name in set(exported.graph_signature.user_inputs)]
    for spec, shape in zip(program.inputs, shapes, strict=True):
        for axis, dim in enumerate(spec.shape):
            if isinstance(dim, str) and isinstance(shape[axis], int):
                raise ExportError(
                    f"dimension {axis} of `{spec.name}` ({dim}) became {shape[axis]}",
                    where=spec.name,
                    hint="trace the model with sizes of 2 or more",
                )
