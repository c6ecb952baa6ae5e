"""``hcx diff``: what differs between two models, as text, JSON, or one HTML page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hcx.rewrite.errors import UsageError

from . import figures
from .opening import Opened, check_output, open_program
from .result import Progress, Result, silent

if TYPE_CHECKING:
    from hcx.rewrite.diff.diff import Diff
    from hcx.rewrite.diff.graph import Line, Place, Region
    from hcx.rewrite.diff.report import Change

FOLD = 4
"""Unchanged neighbours that the page shows as one closed line; fewer stay open."""


def diff(
    before: str,
    after: str,
    *,
    nodes: bool = False,
    html: str | None = None,
    overwrite: bool = False,
    weights: str | None = None,
    progress: Progress = silent,
    **source: Any,
) -> Result:
    """Compare two models: call, tensors, rewrites with their checks, and the graph block by block.

    Args:
        before, after: MODEL arguments.
        nodes: text with a line for each node that differs.
        html: also write a page to this file; ``overwrite`` allows that it exists.
        weights: the source model's folder, for a ``.hcx`` folder that refers to its weights.
        source: options of :func:`hcx.cli.opening.open_program`; where one side is a ``.hcx`` folder, for the other.

    Raises:
        UsageError: a model cannot be opened, or the page not be written.
    """
    if html is not None:
        if not html.endswith((".html", ".htm")):
            raise UsageError(
                f"the page is a file that ends in .html, not {html}", where="--html", hint="--html FILE.html"
            )
        check_output(html, overwrite=overwrite)
    stored = [Path(m).suffix == ".hcx" for m in (before, after)]
    if weights is not None and not any(stored):
        raise UsageError("neither model is a .hcx folder", where="--weights", hint="leave it out")
    opened = [
        open_program(model, progress=progress, weights=weights if is_stored else None,
                     **({} if is_stored and not all(stored) else source))
        for model, is_stored in zip((before, after), stored, strict=True)
    ]  # fmt: skip
    from hcx.rewrite.diff.diff import diff as compare
    from hcx.rewrite.diff.text import text_of

    progress("comparing")
    found = compare(opened[0].program, opened[1].program)
    data = {"before": opened[0].describe(), "after": opened[1].describe(), "diff": found.to_json(), "html": html}
    text = text_of(found, nodes=nodes)
    if html is not None:
        progress(f"writing {html}")
        write_page(html, page(found, opened[0], opened[1]))
        text += f"\n\npage: {html}"
    return Result(data, text)


def write_page(path: str, content: str) -> None:
    """Write a file so that it is complete or as it was."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    partial.write_text(content, encoding="utf-8")
    partial.replace(target)


def page(found: Diff, before: Opened, after: Opened) -> str:
    """The difference as one HTML page without any outside resource; whatever a file says is escaped."""
    import jinja2

    source = Path(__file__).with_name("diff.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    rows = [Row(number, region) for number, region in enumerate(found.regions)]
    return environment.from_string(source).render(
        diff=found,
        labels=(before.label, after.label),
        figures=list(_figures(found, before, after)),
        rewrites=found.rewrites,
        measured=_measured,
        changes=[("call", list(_grouped(found.call))), ("tensors", list(_grouped(found.tensors)))],
        values=_names(found.values),
        columns=rows,
        folds=list(_folds(rows)),
        counts={s: len(found.blocks(s)) for s in ("added", "removed", "changed", "unchanged")},
    )


def _figures(found: Diff, before: Opened, after: Opened) -> Iterator[tuple[str, str, str]]:
    one, other = found.before, found.after
    yield "parameters", figures.big(one.parameters), figures.big(other.parameters)
    yield "added by passes", figures.big(one.added_parameters), figures.big(other.added_parameters)
    yield "parameter bytes", figures.megabytes(one.parameter_bytes), figures.megabytes(other.parameter_bytes)
    if before.file_bytes or after.file_bytes:
        yield "files", figures.megabytes(before.file_bytes), figures.megabytes(after.file_bytes)
    yield "graph nodes", figures.big(one.nodes), figures.big(other.nodes)
    yield "dtype", one.dtype, other.dtype
    yield "fingerprint", one.fingerprint, other.fingerprint
    yield "fingerprint of the base", one.base, other.base


def _measured(values: dict[str, Any]) -> list[tuple[str, str]]:
    return [(str(k), f"{v:.3g}" if isinstance(v, float) else str(v)) for k, v in values.items()]


def _grouped(changes: list[Change]) -> Iterator[tuple[Change, str, str]]:
    """(first change, name, form) of changes that differ in the numbers of their names only."""
    from hcx.rewrite.diff.text import form, grouped, grouped_name

    for group in grouped(changes):
        yield group[0], grouped_name([c.name for c in group]), form(group[0])


def _names(names: list[str]) -> list[str]:
    from hcx.rewrite.diff.text import grouped_name, pattern

    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(pattern(name), []).append(name)
    return [grouped_name(group) for group in groups.values()]


@dataclass
class Row:
    """One block or boundary of the page."""

    number: int
    region: Region
    sides: tuple[Place | None, Place | None] = field(init=False)

    def __post_init__(self) -> None:
        self.sides = (self.region.before, self.region.after)

    @property
    def status(self) -> str:
        return self.region.status

    @property
    def short(self) -> str:
        """What fits into a small box: the block's number, else three letters."""
        name = self.region.address.split("~")[0]
        numbers = re.findall(r"\d+", name.rsplit(".", 1)[-1]) or re.findall(r"\d+", name)
        return numbers[-1] if numbers else name[:3]

    @property
    def title(self) -> str:
        """The address in words."""
        stack, at, index = self.region.address.partition("@")
        if self.region.is_block:
            return self.region.address.split("~")[0]
        return f"{stack}, after {index.split('~')[0]} block{'s' * (index != '1')}" if at else "before the blocks"

    @property
    def counts(self) -> list[tuple[str, str, int]]:
        """(status, sign, number of nodes) of the statuses that occur."""
        signs = {"added": "+", "removed": "−", "changed": "~"}
        return [(s, sign, n) for s, sign in signs.items() if (n := self.region.count(s))]

    @property
    def nodes(self) -> Iterator[tuple[str, str, str, str]]:
        """(status, sign, call, module) of each line to show; a changed node has two."""
        for line in self.region.lines:
            for sign, text in _shown(line):
                call, _, rest = text.partition("  @")
                yield line.status, sign, call.partition("  #")[0], rest.partition("  #")[0]


def _shown(line: Line) -> list[tuple[str, str]]:
    if line.status == "unchanged":
        return [(" ", line.after or "")]
    return [(sign, text) for sign, text in (("−", line.before), ("+", line.after)) if text is not None]


def _folds(rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    """(title, rows) of what stands together: many unchanged neighbours under a title, all others without."""
    for unchanged, members in groupby(rows, lambda r: r.status == "unchanged"):
        group = list(members)
        blocks = [r for r in group if r.region.is_block]
        if unchanged and len(blocks) >= FOLD:
            yield f"{blocks[0].title} … {blocks[-1].title}: {len(blocks)} blocks unchanged", group
        else:
            yield "", group
