"""A difference of two Programs as text for a terminal."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from hcx.rewrite.check.report import Check

from .graph import Line, Region, Status
from .report import Change, Report

MARKS: dict[Status, str] = {"added": "+", "removed": "-", "changed": "~", "unchanged": "="}
WHERE = {"both": "in both", "before": "only before", "after": "only after"}


def text_of(diff: Report, *, nodes: bool = False) -> str:
    """All sections; with ``nodes`` each node that differs has a line."""
    sections = [_head(diff), _rewrites(diff), _changes("call", diff.call), _tensors(diff), _graph(diff, nodes)]
    return printable("\n\n".join("\n".join(lines) for lines in sections if lines))


def printable(text: str) -> str:
    """Text without control characters: names come from files and must not steer a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def _head(diff: Report) -> list[str]:
    before, after = diff.before, diff.after
    lines = [
        f"before  {before.model}  {', '.join(before.pipeline) or 'no rewrite'}",
        f"after   {after.model}  {', '.join(after.pipeline) or 'no rewrite'}",
    ]
    lines += [f"note    {note}" for note in diff.notes]
    if not diff:
        return [*lines, "no difference"]
    added = f", {after.added_parameters:,} of them added by passes" if after.added_parameters else ""
    dtype = before.dtype if before.dtype == after.dtype else f"{before.dtype} -> {after.dtype}"
    return [
        *lines,
        "",
        f"parameters  {before.parameters:,} -> {after.parameters:,}{added}",
        f"bytes       {before.parameter_bytes:,} -> {after.parameter_bytes:,} in parameters, {dtype}",
        f"nodes       {before.nodes:,} -> {after.nodes:,}",
    ]


def _rewrites(diff: Report) -> list[str]:
    lines: list[str] = []
    for entry in diff.rewrites:
        lines.append(f"rewrite {entry['pipeline']} ({WHERE[entry['in']]})  contract: {entry['contract']}")
        lines += [f"  {Check(**c)}" for c in entry["checks"]]
        lines += ["  the checks are owed: they were not run"] if entry["owed"] else []
    return lines


def _changes(title: str, changes: list[Change]) -> list[str]:
    """One line for changes that differ in numbers only: ``present.*.key (x4)``."""
    lines = []
    for group in grouped(changes):
        first, name = group[0], grouped_name([c.name for c in group])
        lines.append(f"  {MARKS[first.status]} {first.kind:9s} {name}  {form(first)}".rstrip())
    return [title, *lines] if lines else []


def grouped(changes: list[Change]) -> list[list[Change]]:
    """Changes that differ in the numbers of their names only, together."""
    groups: dict[tuple[Any, ...], list[Change]] = {}
    for change in changes:
        groups.setdefault((change.status, change.kind, pattern(change.name), form(change)), []).append(change)
    return list(groups.values())


def grouped_name(names: list[str]) -> str:
    """``layers.3.up.weight``, or ``layers.*.up.weight (x4)`` for several."""
    return names[0] if len(names) == 1 else f"{pattern(names[0])} (x{len(names)})"


def pattern(name: str) -> str:
    """A dotted name with the numbers inside replaced: ``layers.*.up.weight``."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def form(change: Change) -> str:
    """Shape and dtype, before and after where both sides have it."""
    return f"{change.before} -> {change.after}" if change.status == "changed" else change.before or change.after or ""


def _tensors(diff: Report) -> list[str]:
    lines = _changes("tensors", diff.tensors)
    if diff.values:
        groups: dict[str, list[str]] = {}
        for name in diff.values:
            groups.setdefault(pattern(name), []).append(name)
        names = [grouped_name(group) for group in groups.values()]
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        lines = lines or ["tensors"]
        lines.append(f"  ~ values    {', '.join(names[:8])}{more}")
    return lines


def _graph(diff: Report, nodes: bool) -> list[str]:
    if all(r.status == "unchanged" for r in diff.regions):
        return []
    totals = {status: len(diff.blocks(status)) for status in MARKS}
    between = sum(r.status != "unchanged" for r in diff.regions if not r.is_block)
    lines = ["blocks: " + ", ".join(f"{count} {status}" for status, count in totals.items() if count)]
    lines[0] += f"; changes between blocks in {between} place{'s' * (between > 1)}" if between else ""
    lines.append("  (+ added, - removed, ~ same operation on other values, = same)")
    quiet: list[Region] = []
    width = max(len(r.address) for r in diff.regions)
    for region in diff.regions:
        if region.status == "unchanged":
            quiet += [region] if region.is_block else []
            continue
        lines += _unchanged(quiet)
        quiet = []
        lines.append(_row(region, width))
        if nodes:
            lines += [f"      {line}" for line in _node_lines(region)]
    return lines + _unchanged(quiet)


def _unchanged(regions: list[Region]) -> list[str]:
    if not regions:
        return []
    name = regions[0].address if len(regions) == 1 else f"{regions[0].address} .. {regions[-1].address}"
    return [f"  = {name}" + (f" ({len(regions)} blocks)" if len(regions) > 1 else "")]


def _row(region: Region, width: int) -> str:
    place = region.after or region.before
    what = " + ".join(place.branches) if place else ""
    marks = [f"{place.streams} streams"] if place and place.streams > 1 else []
    marks += [f"pass {place.number} of {place.passes}"] if place and place.passes > 1 and region.is_block else []
    marks += [f"tap {t}" for t in place.taps] if place else []
    counts = []
    for status in ("added", "removed", "changed"):
        if ops := op_counts(region.lines, status):
            named = [f"{op} x{n}" if n > 1 else op for op, n in ops.items()]
            more = f" and {len(named) - 4} more" if len(named) > 4 else ""
            count = sum(ops.values())
            counts.append(f"{MARKS[status]}{count} node{'s' * (count > 1)} ({', '.join(named[:4])}{more})")
    parts = [x for x in (what, ", ".join(marks), "  ".join(counts)) if x]
    return f"  {MARKS[region.status]} {region.address:{width}s}  {'  '.join(parts)}".rstrip()


def _node_lines(region: Region) -> list[str]:
    lines: list[str] = []
    for line in region.lines:
        if line.status == "unchanged":
            continue
        lines += [f"- {line.before}"] if line.before is not None else []
        lines += [f"+ {line.after}"] if line.after is not None else []
    return lines


def op_counts(lines: list[Line], status: Status) -> dict[str, int]:
    """Operations of the nodes of a status, most frequent first: ``{"aten.mul": 2, ...}``."""
    texts = [x.after or x.before or "" for x in lines if x.status == status]
    ops = Counter(".".join(t.partition(" = ")[2].partition("(")[0].split(".")[:2]) for t in texts)
    return dict(ops.most_common())
