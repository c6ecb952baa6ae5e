"""The description of a model as text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from . import figures
from .cmd_rewrite import check_lines

FILLS = {"ones": "all ones", "positions": "counted", "empty": "empty"}


def text_of(data: dict[str, Any], *, why: bool) -> str:
    """All sections."""
    sections = [_head(data), _call(data), *(_stack(s, why) for s in data["stacks"])]
    if not data["stacks"]:
        sections.append(["no stack: neither a residual stream nor stages between cut vertices"])
    if why:
        sections.append(_other_adds(data["other_adds"]))
    sections += [_history(data), data.get("plan_text", "").splitlines()]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _head(data: dict[str, Any]) -> list[str]:
    model, size = data["model"], data["figures"]
    weights = f"{size['parameters']:,} parameters, {figures.megabytes(size['parameter_bytes'])} in {size['dtype']}"
    lines = [f"{model['label']}  ({model['kind']}, {model['class']})", f"  {weights}; {size['nodes']:,} graph nodes"]
    exact = {True: "bitwise what eager gives", False: "equal to eager up to rounding", None: "not run"}[
        data["trace_exact"]
    ]
    lines.append(f"  the traced graph is {exact}")
    lines += [f"  tied: {' = '.join(names)}" for names in data["tied"]]
    return lines + [f"  note: {n}" for n in data["notes"]]


def _call(data: dict[str, Any]) -> list[str]:
    rows: Counter[str] = Counter()
    for spec in data["inputs"]:
        omitted = f"  may be omitted: {FILLS.get(spec['fill'], spec['fill'])}" if spec["fill"] else ""
        shape = "[" + ", ".join(map(str, spec["shape"])) + "]"
        rows[(_pattern(spec["name"]), f"{spec['dtype']:9s}{shape}{omitted}")] += 1
    lines = ["call"]
    lines += [f"  in   {name}{_times(count)}  {rest}" for (name, rest), count in rows.items()]
    lines += [f"  out  {name}{_times(count)}" for name, count in Counter(map(_pattern, data["outputs"])).items()]
    lines += [f"  tap  {name}" for name in data["taps"]]
    if data["other_arguments"]:
        lines.append("  not traced: " + ", ".join(data["other_arguments"]))
    return lines


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) if name.count(".") > 1 else name


def _times(count: int) -> str:
    return f" (x{count})" if count > 1 else ""


def _stack(stack: dict[str, Any], why: bool) -> list[str]:
    what = "blocks on one residual stream" if stack["residual"] else "stages between cut vertices, no residual stream"
    lines = [f"stack {stack['label']}: {stack['depth']} {what}{', read by the first output' if stack['main'] else ''}"]
    blocks = stack["blocks"]
    covered: set[int] = set()
    for run in stack["runs"]:
        covered.update(range(run["start"], run["end"]))
    for start, end, text in sorted(_rows(stack, covered)):
        lines.append(f"  {_range(blocks, start, end):14s} {text}")
    for count, text in _merged([_boundary_text(b) for b in stack["boundaries"]]):
        lines.append(f"  {count} boundaries {text}")
    return lines + (_details(stack) if why else [])


def _rows(stack: dict[str, Any], covered: set[int]) -> Iterator[Any]:
    """(start, end, text) of runs and of single blocks between them."""
    blocks = stack["blocks"]
    for run in stack["runs"]:
        unit = ", ".join(_branches(blocks[i]) for i in range(run["start"], run["start"] + run["period"]))
        roles = ", ".join(f"{name}{_times(count)}" for name, count in Counter(run["roles"]).items())
        equal = "equal blocks" if run["period"] == 1 else f"blocks in equal groups of {run['period']}"
        yield (
            run["start"],
            run["end"],
            f"{run['end'] - run['start']} {equal}: {unit}" + (f"; from outside: {roles}" if roles else ""),
        )
    for position, block in enumerate(blocks):
        if position not in covered:
            yield position, position + 1, _branches(block)


def _range(blocks: list[dict[str, Any]], start: int, end: int) -> str:
    first, last = blocks[start], blocks[end - 1]
    loop = f" pass {first['iteration']}" if first["iteration"] > 1 else ""
    return (f"{first['index']}" if end - start == 1 else f"{first['index']}..{last['index']}") + loop


def _branches(block: dict[str, Any]) -> str:
    kinds = [b["kind"] + ("*" if b["scaled"] else "") for b in block["branches"]]
    parallel = any(b["parallel"] for b in block["branches"])
    return (" || " if parallel else " + ").join(kinds) or "no residual"


def _boundary_text(boundary: dict[str, Any]) -> str:
    return f"[{', '.join(map(str, boundary['shape']))}] {boundary['dtype']}, {boundary['carrier']}"


def _merged(texts: list[str]) -> list[tuple[int, str]]:
    return [(count, text) for text, count in Counter(texts).items()]


def _details(stack: dict[str, Any]) -> list[str]:
    lines = [
        f"  block {b['index']:3d} {b['address']}: {', '.join(x['address'] for x in b['branches'])}"
        for b in stack["blocks"]
    ]
    return lines + [
        f"  boundary {b['index']:3d} {b['node']}  {b['module']}  {b['source']}".rstrip() for b in stack["boundaries"]
    ]


def _other_adds(adds: list[dict[str, Any]]) -> list[str]:
    if not adds:
        return ["every add of two full tensors is a residual"]
    return [f"adds that are no residual: {len(adds)}"] + [
        f"  {a['node']}  {a['module']}  {a['source']}".rstrip() + f": {a['rule']}" for a in adds
    ]


def _history(data: dict[str, Any]) -> list[str]:
    lines = [f"written by {', '.join(f'{k} {v}' for k, v in data['versions'].items())}"] if data.get("versions") else []
    for number, entry in enumerate(data["history"], 1):
        lines.append(f"rewrite {number}: {entry['pipeline']}")
        lines += check_lines(entry.get("checks", []))
    return lines
