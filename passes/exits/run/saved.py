"""The pieces of a Program on disk: ``piece-0.hcx``, ``piece-1.hcx``, ..., and a file that says how they belong together."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from hcx.rewrite.errors import ContractError, UsageError
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.signature import Fill
from hcx.rewrite.run.inputs import check_inputs
from hcx.rewrite.run.reading import reader
from hcx.rewrite.store.folders import replace_folder, staging
from hcx.rewrite.store.loading import load
from hcx.rewrite.store.saving import save

from .split import Layout, layout_of, split

LIST = "pieces.json"
"""File that only folders written here have."""


def save_pieces(program: Program, path: str | os.PathLike[str], *, overwrite: bool = False) -> dict[str, Any]:
    """Cut a Program at its exits (:func:`hcx.passes.exits.run.split`), and write each piece as a ``.hcx`` folder.

    The pieces are loaded again and run one after the other: they must give the outputs of the whole with nothing leaving,
    and the score and logits of each exit, bitwise. The folder appears complete or not at all.

    Args:
        path: folder to make.
        overwrite: replace a folder that this function has written.

    Returns:
        what ``pieces.json`` holds: ``model``, ``depth`` in blocks, and ``pieces`` in order, each with its ``file``,
        what it ``takes`` and ``gives`` but for its cache, and, but for the last, the ``exit`` at its end (blocks before
        it) and the ``threshold`` that its score must reach; null never leaves.

    Raises:
        UsageError: no exits in select form that can be cut at, or a path that is not replaced.
        ContractError: the pieces compute something else.
    """
    target = Path(path)
    if target.exists() and not overwrite:
        raise UsageError(f"{target} exists", where=str(target), hint="choose another name, or pass overwrite=True")
    if target.exists() and not (target / LIST).is_file():
        raise UsageError(f"{target} exists and holds no pieces, so it is not replaced", where=str(target),
                         hint="choose another name")  # fmt: skip
    pieces, layout = split(program), layout_of(program)
    description: dict[str, Any] = {
        "format": "hcx-pieces",
        "model": program.signature.model,
        "depth": layout.depth,
        "pieces": [_described(n, piece, program, layout) for n, piece in enumerate(pieces)],
    }
    with staging(target) as folder:
        for entry, piece in zip(description["pieces"], pieces, strict=True):
            save(piece, folder / entry["file"])
        _check(program, layout, [load(folder / entry["file"]) for entry in description["pieces"]])
        (folder / LIST).write_text(json.dumps(description, indent=1))
        replace_folder(folder, target)
    return description


def _described(number: int, piece: Program, program: Program, layout: Layout) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "file": f"piece-{number}.hcx",
        "takes": [i.name for i in piece.inputs if i.fill != Fill.EMPTY],
        "gives": [n for n in piece.output_names if not n.startswith("present.")],
    }
    if number < len(layout.places):
        limit = float(program.tensor(layout.thresholds[layout.places[number]]))
        entry |= {"exit": layout.places[number], "threshold": None if limit == math.inf else limit}
    return entry


def _check(program: Program, layout: Layout, pieces: list[Program]) -> None:
    """What the pieces give one after the other, against the whole graph."""
    nodes = {name: node for stored in layout.stored for name, node in stored.items()}
    for k, (score, logits) in layout.heads.items():
        nodes |= {f"score.{k}": score, f"logits.{k}": logits}
    read = reader(program, layout.graph, list(nodes.values()))
    for flat in check_inputs(program):
        wanted = read([t.clone() for t in flat])
        known = dict(zip([i.name for i in program.inputs], flat, strict=True))
        for piece in pieces:
            with torch.no_grad():
                found = piece.run_flat(piece.signature.by_name(known))
            known |= dict(zip(piece.output_names, found, strict=True))
        for name, value in zip(nodes, wanted, strict=True):
            if not torch.equal(known[name], value):
                raise ContractError(f"the pieces give another `{name}` than the whole", where=program.signature.model,
                                    hint="nothing was written; please report it")  # fmt: skip
