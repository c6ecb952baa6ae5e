"""A Program as the ordinary Transformers folder that computes the same."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from hcx.rewrite.check.measuring import is_meta, outputs
from hcx.rewrite.errors import ExportError, HcxError, UsageError, let_through
from hcx.rewrite.host.pretrained import config_of
from hcx.rewrite.ir.history import numbered, tensor_prefix
from hcx.rewrite.pipeline import registry, spec
from hcx.rewrite.pipeline.plan import Plan
from hcx.rewrite.run.inputs import check_inputs
from hcx.rewrite.source.library import quiet, transformers
from hcx.rewrite.store.folders import replace_folder, staging
from hcx.rewrite.tracing.reference import reference_for

from .agreement import MERGED, SAME, agree
from .handed_on import HandedOn

MARKER = "hcx.json"
"""Where the folder came from; only a folder that holds it is ever replaced."""


def to_hf(program: Any, path: str | os.PathLike[str], *, overwrite: bool = False) -> HandedOn:
    """Write a Program as a Transformers folder, load it with Transformers, compare, and only then put it in place.

    What the passes did must be expressible in the source architecture: adapters are added to their weights, quantized
    weights are written as what their codes stand for, loops and exits that change nothing are left out.

    Args:
        program: a :class:`hcx.rewrite.Program` of a Transformers model.
        path: folder to make.
        overwrite: replace a folder that this function wrote.

    Raises:
        ExportError: a pass changed the architecture (the message names it), or the folder computes something else.
        UsageError: unusable path, or no Transformers model.
    """
    target = Path(path)
    _check_target(target, overwrite)
    if is_meta(program):
        raise ExportError("the weights are not in memory", where=program.signature.model, hint="load them first")
    cls, config = _class(program), config_of(program)
    weights, notes = folded(program)
    model = _model(cls, config, weights, program)
    with staging(target) as folder:
        with _explained(program, "Transformers cannot save the model"):
            model.save_pretrained(folder)
        del model
        for name, content in program.companions.items():
            if name != "config.json" and Path(name).name == name:
                (folder / name).write_bytes(content)
        (folder / MARKER).write_text(json.dumps({"format": "hcx-export", "history": program.history}, default=str))
        loader, loaded = _loaded(cls, config, folder, program)
        measured = _compared(program, loaded)
        files = {p.name: p.stat().st_size for p in sorted(folder.iterdir())}
        replace_folder(folder, target)
    return HandedOn(target, files, measured, f"{loader}.from_pretrained", notes)


def _compared(program: Any, loaded: torch.nn.Module) -> dict[str, Any]:
    """The loaded model against the Program; in float64 too where half precision blurs a merged adapter.

    Raises:
        ExportError: they differ.
    """
    if not program.new_parameters():
        return _agreement(program, loaded, SAME[program.dtype])
    limit = MERGED[program.dtype]
    try:
        return _agreement(program, loaded, limit)
    except ExportError:
        if program.dtype in (torch.float32, torch.float64):
            raise
        return _agreement(copy.deepcopy(program).to(torch.float64), loaded.double(), limit)


def _agreement(program: Any, loaded: torch.nn.Module, limit: float) -> dict[str, Any]:
    inputs = check_inputs(program, 3)
    expected = [{n: t for n, t in o.items() if not n.startswith("present.")} for o in outputs(program, inputs)]
    reference = reference_for(program, loaded)
    own = [reference.named([t.clone() for t in flat]) for flat in inputs]
    got = [{n: named[n] for n in one} for named, one in zip(own, expected, strict=True)]
    return agree(got, expected, limit)


def _check_target(target: Path, overwrite: bool) -> None:
    if target.exists() and not overwrite:
        raise UsageError(f"{target} exists", where=str(target), hint="choose another path, or pass overwrite=True")
    if target.exists() and not (target / MARKER).is_file():
        raise UsageError(
            f"{target} exists and was not written by hcx, so it is not replaced",
            where=str(target),
            hint="choose another path",
        )


def folded(program: Any) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Tensors of the base by name that compute what the Program computes, and what was left out.

    Raises:
        ExportError: a pass that cannot be expressed in them.
    """
    weights = {n: t.detach() for n, t in program.state_dict(keep_vars=True).items() if n not in program.origin}
    notes = []
    for entry, number in reversed(list(numbered(program.history))):
        step = Plan.from_json(entry.plan).steps[0]
        name, prefix, before = entry.name, tensor_prefix(entry.name, number), dict(weights)
        try:
            reason = spec.build(registry.get(name), step.options).fold(program, step.sites or [], prefix, weights)
        except (HcxError, KeyError) as error:
            reason = f"its plan cannot be read here: {error}"
        if reason is not None:
            raise ExportError(
                f"pass `{name}` prevents a Transformers folder: {reason}",
                where=entry.pipeline,
                hint="--to pt2 and --to onnx take every Program",
            )
        if all(before.get(n) is t for n, t in weights.items()):
            notes.append(f"what `{name}` added changes nothing at present and is left out")
    return weights, notes


def _class(program: Any) -> type:
    """The Transformers class that was traced."""
    cls = getattr(transformers(), program.signature.model, None)
    if not (isinstance(cls, type) and issubclass(cls, transformers().PreTrainedModel)):
        raise UsageError(
            f"{program.signature.model} is not a model class of Transformers",
            where=program.signature.model,
            hint="--to pt2 and --to onnx take every Program",
        )
    return cls


def _model(cls: type, config: Any, weights: dict[str, torch.Tensor], program: Any) -> torch.nn.Module:
    """The architecture around the tensors; ties that the passes broke are broken in its config too."""
    config = type(config).from_dict(config.to_dict())
    groups = [[n for n in names if n in weights] for names in program.tied_groups()]
    if any(weights[n].data_ptr() != weights[g[0]].data_ptr() for g in groups for n in g[1:]):
        config.tie_word_embeddings = False
    with _explained(program, f"{cls.__name__} does not fit the tensors"), torch.device("meta"):
        model = cls(config)
    state = dict(weights)
    tensors = dict(model.named_parameters(remove_duplicate=False))
    for name in set(tensors) - set(state):  # another name of a tensor that a pass replaced under one
        same = next((n for n, t in tensors.items() if t is tensors[name] and n in state), None)
        if same is not None:
            state[name] = state[same]
    with _explained(program, f"{cls.__name__} does not fit the tensors"):
        model.load_state_dict(state, strict=True, assign=True)
        model.tie_weights()
    return model.eval()


def _loaded(cls: type, config: Any, folder: Path, program: Any) -> tuple[str, torch.nn.Module]:
    """The folder as users load it: through the AutoModel class that finds this class."""
    names = sorted(n for n in dir(transformers()) if n.startswith("AutoModel"))
    autos = [getattr(transformers(), n) for n in names]
    known = [a for a in autos if type(config) in (getattr(a, "_model_mapping", None) or ())]
    loader = next((a for a in known if _maps_to(a._model_mapping[type(config)], cls)), cls)
    with _explained(program, f"{loader.__name__} cannot load the folder"):
        model, info = loader.from_pretrained(folder, local_files_only=True, dtype="auto", output_loading_info=True)
    wrong = {k: sorted(map(str, v))[:3] for k, v in info.items() if v}
    if wrong or type(model) is not cls:
        raise ExportError(
            f"{loader.__name__} loads the folder as {type(model).__name__}: {wrong}",
            where=program.signature.model,
            hint="nothing was written; please report this",
        )
    return loader.__name__, model.eval()


def _maps_to(found: Any, cls: type) -> bool:
    return cls in found if isinstance(found, tuple | list) else found is cls


@contextmanager
def _explained(program: Any, what: str) -> Iterator[None]:
    """Errors of Transformers' as ours."""
    try:
        with quiet():
            yield
    except Exception as error:  # any type: Transformers
        let_through(error)
        if isinstance(error, HcxError):
            raise
        text = next(iter(str(error).strip().splitlines()), "")
        raise ExportError(
            f"{what}: {type(error).__name__}: {text}",
            where=program.signature.model,
            hint="nothing was written; --to pt2 and --to onnx take every Program",
        ) from error
