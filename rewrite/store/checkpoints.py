"""Weights that a training run wrote, back into the Program: a file, a Trainer's folder, or a sharded folder of torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
from hcx.rewrite.errors import SourceError
from hcx.rewrite.ir.program import Program
from hcx.rewrite.source.checkpoint import find_state_dict, load_file
from hcx.rewrite.source.files import wrapped
from hcx.rewrite.source.hf_weights import find_weights
from hcx.rewrite.source.safetensors_file import check_safetensors, shards
from safetensors.torch import load_file as load_safetensors

SHARDED = ".metadata"
"""File by which a folder of torch.distributed.checkpoint is known."""


def load_checkpoint(program: Program, path: str | os.PathLike[str], *, trust: bool = False) -> None:
    """Copy weights into the Program in place, all of them or none; tied tensors stay tied.

    Args:
        program: whose names the checkpoint has: one trained through itself, ``as_module()`` or ``as_pretrained()``.
        path: ``.safetensors``, or a file of torch.save with a state dict at the top or under ``model`` and the like; a
            folder that Trainer or ``save_pretrained`` wrote (of several ``checkpoint-N`` in it, the last); an artefact;
            a folder of torch.distributed.checkpoint.
        trust: also read what may run code while it is read: full pickles, and the index of a sharded folder.

    Raises:
        SourceError: no weights, damaged ones, ones that need ``trust``, or of another model.
    """
    place = Path(path)
    if not place.exists():
        raise SourceError(f"{place} does not exist", where=str(place))
    in_shards = place.is_dir() and (place / SHARDED).is_file()
    state = _sharded(program, place, trust) if in_shards else _whole(place, trust)
    _copy(program, state, place)


def _whole(place: Path, trust: bool) -> dict[str, torch.Tensor]:
    if place.is_dir():
        folders = [p for p in place.iterdir() if re.fullmatch(r"checkpoint-\d+", p.name) and p.is_dir()]
        named = ("model.safetensors", "model.safetensors.index.json", "weights.safetensors")
        files = [place / n for n in named if (place / n).is_file()]
        if folders and not files and not (place / "pytorch_model.bin").is_file():
            return _whole(max(folders, key=lambda p: int(p.name.partition("-")[2])), trust)
        if not files:
            return find_weights(place, trust=trust) or {}
        files = shards(files[0]) if files[0].suffix == ".json" else files[:1]
    elif place.suffix == ".safetensors":
        files = [place]
    else:
        return find_state_dict(load_file(place, trust=trust), place)
    state: dict[str, torch.Tensor] = {}
    for file in files:
        check_safetensors(file)
        state |= load_safetensors(file)
    return state


def _sharded(program: Program, place: Path, trust: bool) -> dict[str, torch.Tensor]:
    """The program's tensors from a sharded folder, whose index is a pickle."""
    import torch.distributed.checkpoint as dcp

    if not trust:
        raise SourceError(
            f"{place.name} needs code execution to load: the index of a sharded checkpoint is a pickle",
            where=str(place),
            hint="if you trust where the folder comes from, pass trust=True",
        )
    with wrapped("this sharded checkpoint cannot be read", str(place), "write it again"):
        stored = dcp.FileSystemReader(place).read_metadata().state_dict_metadata
        own = program.state_dict()
        prefix = max(("", "model.", "app.model."), key=lambda p: sum(p + n in stored for n in own))
        state = {prefix + n: torch.empty_like(t) for n, t in own.items() if prefix + n in stored}
        dcp.load(state, checkpoint_id=place, no_dist=True)
    return {n.removeprefix(prefix): t for n, t in state.items()}


def _copy(program: Program, state: dict[str, torch.Tensor], place: Path) -> None:
    own = program.state_dict(keep_vars=True)
    transient = {n for n, _ in program.named_tensors()} - set(own)  # an artefact holds these too
    stored: dict[int, str] = {}  # tensor of the program -> a name that it is stored under
    for name, tensor in own.items():
        if name in state:
            stored.setdefault(id(tensor), name)
    missing = [n for n, t in own.items() if id(t) not in stored]
    foreign = [n for n in state if n not in own and n not in transient]
    shapes = [n for n, t in own.items() if n in state and state[n].shape != t.shape]
    for names, what in ((missing, "lacks"), (foreign, "has besides"), (shapes, "has in another shape")):
        if names:
            shown = ", ".join(f"`{n}`" for n in names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            raise SourceError(
                f"{place.name} is of another model: it {what} {shown}",
                where=str(place),
                hint="load it into the Program that was trained: the same model with the same rewrites",
            )
    for group in program.tied_groups():
        values = [state[n] for n in group if n in state]
        if any(not torch.equal(v, values[0]) for v in values[1:]):
            raise SourceError(f"{place.name} has {len(values)} values for one tied tensor", where=", ".join(group),
                              hint="train it through as_module() or as_pretrained(), which keep the tie")  # fmt: skip
    with torch.no_grad():
        for name in stored.values():
            own[name].copy_(state[name])
