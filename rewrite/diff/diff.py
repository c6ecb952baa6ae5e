"""What differs between two Programs: call, tensors, and the graph block by block."""

from __future__ import annotations

import re
from typing import Any

import torch
from hcx.rewrite.check.report import Check
from hcx.rewrite.errors import ArtefactError
from hcx.rewrite.ir.fingerprint import base_fingerprint, fingerprint
from hcx.rewrite.ir.program import Program
from hcx.rewrite.pipeline import contracts
from torch import fx

from .graph import Layout, regions
from .report import Change, Report, Side
from .text import text_of


class Diff(Report):
    """What differs between two Programs; ``str`` of it is the text for a terminal."""

    def __str__(self) -> str:
        return text_of(self)


def diff(a: Program, b: Program) -> Diff:
    """Compare two Programs; neither is changed.

    Blocks are compared by address. Inside a block, nodes are aligned by operation and module, so names of
    nodes may differ; a node counts as changed where its operands, shape or dtype are others.

    Args:
        a: before.
        b: after.
    """
    one, other = Layout(a), Layout(b)
    before, after = _side(a), _side(b)
    tensors, values = _tensors(a, b)
    notes = [] if before.base == after.base else ["the two come from different models: blocks are paired by name alone"]
    return Diff(before, after, regions(one, other), _call(a, b, one, other), tensors, values, _rewrites(a, b), notes)


def _side(program: Program) -> Side:
    distinct = {id(p): p for p in program.parameters()}.values()
    return Side(
        program.signature.model,
        fingerprint(program),
        base_fingerprint(program),
        [str(e["pipeline"]) for e in program.history],
        sum(p.numel() for p in distinct),
        sum(p.numel() * p.element_size() for p in distinct),
        sum(p.numel() for p in program.new_parameters().values()),
        len(program.graph.nodes),
        str(program.dtype).removeprefix("torch."),
    )


def _call(a: Program, b: Program, one: Layout, other: Layout) -> list[Change]:
    changes: list[Change] = []
    for kind in ("input", "output", "tap"):
        changes += _changes(kind, _interface(a, kind, one.lines), _interface(b, kind, other.lines))
    return changes


def _interface(program: Program, kind: str, lines: dict[fx.Node, str]) -> dict[str, str]:
    if kind == "input":
        return {i.name: _form_of(i.dtype, i.shape) + (f", {i.fill}" if i.fill else "") for i in program.inputs}
    values = list(program.graph.output_node().args[0])
    count = len(program.output_names)
    named = (
        zip(program.output_names, values, strict=False)
        if kind == "output"
        else zip(program.taps, values[count:], strict=True)
    )
    return {n: (re.search(r" : (\w+\[[^]]*\])", lines[v]) or ["", ""])[1] for n, v in named if isinstance(v, fx.Node)}


def _form_of(dtype: torch.dtype, shape: Any) -> str:
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"


def _changes(kind: str, before: dict[str, str], after: dict[str, str]) -> list[Change]:
    names = list(dict.fromkeys([*before, *after]))
    return [Change(kind, n, before.get(n), after.get(n)) for n in names if before.get(n) != after.get(n)]


def _tensors(a: Program, b: Program) -> tuple[list[Change], list[str]]:
    one, other = dict(a.named_tensors()), dict(b.named_tensors())
    changes: list[Change] = []
    for kind in ("parameter", "buffer"):
        forms = [
            {
                n: _form_of(t.dtype, t.shape)
                for n, t in tensors.items()
                if isinstance(t, torch.nn.Parameter) == (kind == "parameter")
            }
            for tensors in (one, other)
        ]
        changes += _changes(kind, *forms)
    same = [n for n in one if n in other and one[n].shape == other[n].shape and one[n].dtype == other[n].dtype]
    return changes, [n for n in same if not _equal(one[n], other[n])]


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bitwise but for the payload of NaN; tensors without data are not compared."""
    if one is other or one.is_meta or other.is_meta:
        return True
    one, other = one.detach().cpu(), other.detach().cpu()
    return torch.equal(one, other) or torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))


def _rewrites(a: Program, b: Program) -> list[dict[str, Any]]:
    """Entries of both histories: the common beginning, then what each side did on its own."""
    try:
        return [{"in": where, **_entry(e)} for where, e in _histories(a.history, b.history)]
    except (KeyError, TypeError, AttributeError) as error:
        what = f"the history is damaged: {type(error).__name__}: {error}"
        raise ArtefactError(what, where="manifest.json") from error


def _histories(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    common = 0
    for x, y in zip(one, other, strict=False):
        if (x["pipeline"], x["plan"]) != (y["pipeline"], y["plan"]):
            break
        common += 1
    marked = [("both", e) for e in other[:common]]
    return marked + [("before", e) for e in one[common:]] + [("after", e) for e in other[common:]]


def _entry(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "pipeline": str(entry["pipeline"]),
        "contract": str(contracts.from_json(entry["contract"])),
        "counts": dict(entry.get("counts", {})),
        "checks": [Check(**c).to_json() for c in entry.get("checks", [])],
        "owed": bool(entry.get("owed", False)),
    }
