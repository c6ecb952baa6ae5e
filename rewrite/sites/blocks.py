"""Grouping residuals into blocks, and blocks into runs of equal ones.

Module paths only align and label the groups; without any, the repetition of equal residuals decides.
"""

from __future__ import annotations

import re
from collections.abc import Set
from itertools import groupby
from typing import Any

import torch
from hcx.rewrite.ir.dataflow import Dataflow, is_identity, op_name, operand_at, private, resolve, value
from hcx.rewrite.ir.tags import hcx_tag
from torch import fx

from .views import Block, BlockRun, Residual


def iteration_of(residual: Residual) -> int:
    """Pass of a loop that a residual belongs to (1 outside loops)."""
    return hcx_tag(residual.add).iteration


def levels(node: fx.Node) -> list[tuple[str, str]]:
    """(pattern, call) of the numbered modules around a node, outermost first: ``layers.#`` and ``layers.3@1``."""
    found = []
    for key in node.meta.get("nn_module_stack") or {}:
        if key.startswith("hcx_"):  # a pass, not a module of the model
            continue
        call = key.removeprefix("L__self__")
        name = call.split("@")[0]
        if re.search(r"\d", name.rsplit(".", 1)[-1]):
            found.append((re.sub(r"\d+", "#", name), call))
    return found


def group(residuals: list[Residual], signatures: list[str]) -> list[tuple[str, list[Residual]]]:
    """Split the residuals of one stack into blocks: (address or empty, residuals)."""
    patterns = list(dict.fromkeys(p for r in residuals for p, _ in levels(r.add)))
    best, best_score = None, None
    for rank, pattern in enumerate(sorted(patterns, key=lambda p: p.count("."))):
        groups = _by_pattern(residuals, pattern)
        texts = ["|".join(signatures[residuals.index(r)] for r in members) for _, members in groups]
        score = (_covered(texts, groups, 1), _covered(texts, groups, None), -rank)
        if best_score is None or score > best_score:
            best, best_score = groups, score
    if best is not None and (len(best) > 1 or len(residuals) <= 2):
        return _units(best, signatures) if all(len(members) == 1 for _, members in best) else best
    return _by_period(residuals, signatures)


def _by_pattern(residuals: list[Residual], pattern: str) -> list[tuple[str, list[Residual]]]:
    def key(residual: Residual) -> tuple[str, int]:
        call = next((c for p, c in levels(residual.add) if p == pattern), None)
        return (call or f"?{residual.add.name}", iteration_of(residual))

    return [("" if k[0].startswith("?") else k[0], list(members)) for k, members in groupby(residuals, key)]


def _units(groups: list[tuple[str, list[Residual]]], signatures: list[str]) -> list[tuple[str, list[Residual]]]:
    """Join wrappers of one residual each that repeat in turns (attention, MLP, attention, ...) into blocks.

    Turns with the same residual twice (state space, attention, state space, ...) are layers of a hybrid, not one block.
    """
    joined, position = [], 0
    for start, end, period in repeats(signatures):
        if len(set(signatures[start : start + period])) < period:
            continue
        joined += groups[position:start]
        joined += [
            (groups[i][0], [r for _, members in groups[i : i + period] for r in members])
            for i in range(start, end, period)
        ]
        position = end
    return joined + groups[position:]


def _covered(texts: list[str], groups: list[tuple[str, list[Residual]]], period: int | None) -> int:
    return sum(len(groups[i][1]) for start, end, p in repeats(texts) if period in (None, p) for i in range(start, end))


def _by_period(residuals: list[Residual], signatures: list[str]) -> list[tuple[str, list[Residual]]]:
    groups: list[tuple[str, list[Residual]]] = []
    position = 0
    for start, end, period in repeats(signatures):
        groups += [("", [r]) for r in residuals[position:start]]
        groups += [("", residuals[i : i + period]) for i in range(start, end, period)]
        position = end
    return groups + [("", [r]) for r in residuals[position:]]


def repeats(texts: list[str], longest: int = 8) -> list[tuple[int, int, int]]:
    """Maximal repetitions as (start, end, period), not overlapping, in order; at least two units each."""
    found, position = [], 0
    while position < len(texts):
        best = None
        for period in range(1, min(longest, (len(texts) - position) // 2) + 1):
            end = position + period
            while end < len(texts) and texts[end] == texts[end - period]:
                end += 1
            units = (end - position) // period
            if units >= 2 and (best is None or units * period > best[1] - best[0]):
                best = (position, position + units * period, period)
        if best is None:
            position += 1
        else:
            found.append(best)
            position = best[1]
    return found


def canonical(body: list[fx.Node], entry: fx.Node) -> tuple[str, list[fx.Node]]:
    """Text that is equal for equal computations over other weights, and the outside values used.

    Symbolic sizes are written as expressions and the nodes that compute them left out: shared sizes are computed in
    whichever layer comes first.
    """
    names: dict[fx.Node, str] = {entry: "E", resolve(entry): "E"}
    outside: dict[fx.Node, None] = {}
    lines: list[str] = []
    symbols: dict[str, str] = {}

    def symbolic(size: object) -> str:  # symbols are numbered by first use: each cache has a length symbol of its own
        named = re.sub(r"\b[su]\d+\b", lambda m: symbols.setdefault(m[0], f"d{len(symbols)}"), str(size))
        return " + ".join(sorted(named.split(" + ")))

    def text(argument: object) -> str:
        if isinstance(argument, fx.Node):
            val = argument.meta.get("val")
            if isinstance(val, torch.SymInt | torch.SymFloat | torch.SymBool | int):
                return f"<{symbolic(val)}>" if re.search(r"[su]\d", str(val)) else str(val)
            if argument in names:
                return names[argument]
            if argument.op == "get_attr":
                return f"P{tuple(val.shape) if val is not None else argument.target}"
            outside[argument] = None
            names[argument] = f"O{len(outside) - 1}"
            return names[argument]
        if isinstance(argument, list | tuple):
            return "[" + ",".join(text(a) for a in argument) + "]"
        if isinstance(argument, dict):
            return "{" + ",".join(f"{k}={text(v)}" for k, v in argument.items()) + "}"
        return repr(argument)

    own = private(body, entry)
    for node in [*own, *body]:
        if _picks_entry(node, own):  # every block reads its own entry of a shared table: equal code
            text(node)
            continue
        if value(node) is None and not isinstance(node.meta.get("val"), list | tuple):
            continue
        if is_identity(node) and "dropout" not in op_name(node):
            names[node] = text(node.args[0])
            continue
        arguments = text(_with_defaults(node)) + text(node.kwargs)
        names[node] = f"n{len(lines)}"
        lines.append(f"{node.target}{arguments}")
    return "\n".join(lines), list(outside)


def _with_defaults(node: fx.Node) -> tuple[Any, ...]:
    """Arguments of a node; those of a slice that say "from the start" in one way or another are 0."""
    if op_name(node) != "slice":
        return node.args
    return tuple(0 if i == 2 and a is None else a for i, a in enumerate(node.args))


def _picks_entry(node: fx.Node, own: list[fx.Node]) -> bool:
    """Whether a private node takes one entry, by a fixed number, from a value that others read too."""
    if node not in own or op_name(node) not in ("select", "getitem") or not isinstance(node.args[-1], int):
        return False
    return resolve(operand_at(node)) not in own


def residual_signature(flow: Dataflow, residual: Residual) -> str:
    """Canonical text of one residual, for grouping without module names."""
    return canonical(flow.between(residual.skip, residual.add), residual.skip)[0]


def find_runs(blocks: list[Block], caches: Set[fx.Node]) -> list[BlockRun]:
    """Maximal runs of equal blocks within one pass over them, with the role of each outside value."""
    texts = [f"{b.iteration}\n{b.key}" for b in blocks]
    return [
        BlockRun(start, end, period, _roles(blocks[start:end], period, caches)) for start, end, period in repeats(texts)
    ]


def _roles(blocks: list[Block], period: int, caches: Set[fx.Node]) -> list[str]:
    roles = []
    for values in zip(*[b.outside for b in blocks], strict=False) if period == 1 else ():
        if all(v is values[0] for v in values):
            roles.append("invariant")
        elif all(v in caches for v in values):
            roles.append("cache")
        else:
            cycle = next(
                (
                    p
                    for p in range(2, len(values) // 2 + 1)
                    if all(values[i] is values[i - p] for i in range(p, len(values)))
                ),
                None,
            )
            roles.append(f"periodic({cycle})" if cycle else "varying")
    return roles
