"""The figures of mixers for people: a table, and one page of pictures without any outside resource."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hcx.passes.hyper_connections.inspection import SiteFigures, StackFigures

COLUMNS = (
    ("sigma1", "s1"),
    ("sigma2", "s2"),
    ("det", "det"),
    ("row_error", "row err"),
    ("column_error", "col err"),
    ("cosine", "cosine"),
    ("spread", "spread"),
)
"""Figure and heading; means over positions, sums and s1 at the worst position."""
AT_WORST = ("sigma1", "row_error", "column_error")


def text_of(stacks: Sequence[StackFigures]) -> str:
    """One table a stack."""
    return "\n\n".join("\n".join(_table(s)) for s in stacks)


def _table(stack: StackFigures) -> Iterable[str]:
    at = f"{stack.positions:,} positions" if stack.positions > 1 else "static coefficients"
    yield f"mixers of stack {stack.label}: {len(stack.sites)} sites, {stack.streams} streams, {at}"
    width = max(len(s.address) for s in stack.sites)
    yield (
        f"  {'site':{width}s}  " + " ".join(f"{h:>9s}" for _, h in COLUMNS)
        + f" {'angles':>15s} | {'gain':>9s} {'back':>9s} {'s2 prod':>9s} {'left':>9s}"
    )  # fmt: skip
    for number, site in enumerate(stack.sites):
        figures = [(site.worst if k in AT_WORST else site.mean)[k] for k, _ in COLUMNS]
        over = [stack.depth[k][number] for k in ("forward_gain", "backward_gain", "sigma2_product", "difference_gain")]
        yield (
            f"  {site.address:{width}s}  " + " ".join(f"{_short(f):>9s}" for f in figures)
            + f" {_angles(site):>15s} | " + " ".join(f"{_short(f):>9s}" for f in over)
        )  # fmt: skip
    yield "  behind the bar: H_site .. H_1, largest row and column sum; product of s2; largest gain of a difference"
    reach = stack.effective_depth
    depth = f"1 % of a difference between streams is left after {reach:.3g} sites" if reach else "differences are kept"
    yield f"  homogeneity: {depth}" + (
        "; WARNING: streams differ in nothing at the end (product of s2 below 1e-3)" if stack.homogeneous else ""
    )
    j = stack.jacobian
    yield (
        f"  Jacobian (Monte Carlo): singular values {_short(j['min'])} .. {_short(j['median'])} .. {_short(j['max'])}, "
        f"log10 of the condition number {_short(j['log10_condition'])}"
    )


def _angles(site: SiteFigures) -> str:
    return " ".join("-" if a is None else f"{a:.2f}" for a in site.mean["angles"])


def _short(value: float) -> str:
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.1e}"


# ---- page

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>hcx mixers of {title}</title>
<style>
:root {{ color-scheme: light dark; --back: #fff; --text: #1c2330; --muted: #667085; --line: #d5d9e0;
  --c0: #2563a8; --c1: #b3541e; --c2: #1a7f45; --c3: #7a3fa0; --pos: 37,99,168; --neg: 179,38,30; }}
@media (prefers-color-scheme: dark) {{ :root {{ --back: #14171d; --text: #e4e8ef; --muted: #97a1b3; --line: #363d4a;
  --c0: #7db4f0; --c1: #f0a070; --c2: #5fce8b; --c3: #c79be8; --pos: 125,180,240; --neg: 255,141,133; }} }}
body {{ margin: 0 auto; padding: 20px 16px 60px; max-width: 1080px; background: var(--back); color: var(--text);
  font: 15px/1.45 system-ui, sans-serif; overflow-wrap: anywhere; }}
h1 {{ font-size: 21px; }} h2 {{ font-size: 17px; margin-top: 32px; }} h3 {{ font-size: 14px; margin: 18px 0 4px; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(320px, 1fr)); gap: 12px 24px; }}
.mixes {{ display: flex; flex-wrap: wrap; gap: 6px; }}
svg {{ width: 100%; height: auto; }} .mixes svg {{ width: 46px; }}
svg text {{ font: 10px system-ui, sans-serif; fill: var(--muted); }}
svg .axis {{ stroke: var(--line); }} svg .cell {{ stroke: var(--line); stroke-width: .3; }}
pre {{ overflow-x: auto; font-size: 11px; }} .muted {{ color: var(--muted); font-size: 13px; }}
.warn {{ padding: 8px 12px; border-left: 4px solid var(--c1); }}
</style></head><body>
<h1>Mixers of {title}</h1>
{body}
</body></html>
"""
LEAST_SPAN = 1e-3
"""Smallest relative range that fills a chart: rounding noise shows as a straight line, and ends of an axis read apart."""
CHARTS = (
    ("singular values of each mix", (("mean", "sigma1"), ("mean", "sigma2"), ("mean", "sigma_n")), False),
    ("row and column errors, worst position", (("worst", "row_error"), ("worst", "column_error")), True),
    ("cosine and spread of the streams", (("mean", "cosine"), ("mean", "spread")), False),
    ("composite gain over depth", (("depth", "forward_gain"), ("depth", "backward_gain")), True),
    ("difference left over depth", (("depth", "difference_gain"), ("depth", "sigma2_product")), True),
)


def page(title: str, stacks: Sequence[StackFigures]) -> str:
    """One HTML page; whatever a file says is escaped."""
    return PAGE.format(title=escape(title), body="\n".join(_section(s) for s in stacks))


def _section(stack: StackFigures) -> str:
    parts = [f"<h2>Stack {escape(stack.label)}: {len(stack.sites)} sites, {stack.streams} streams</h2>"]
    if stack.homogeneous:
        parts.append('<p class="warn">The product of the second singular values is below 1e-3: what the streams differ '
                     "in at the start does not reach the end.</p>")  # fmt: skip
    charts = []
    for name, series, logarithmic in CHARTS:
        lines = {
            key: stack.depth[key] if where == "depth" else [getattr(s, where)[key] for s in stack.sites]
            for where, key in series
        }
        charts.append(f"<div><h3>{name}</h3>{line_chart(lines, logarithmic=logarithmic)}</div>")
    angles = zip(*(s.mean["angles"] for s in stack.sites), strict=True)
    lines = {f"angle {i + 1}": list(turns) for i, turns in enumerate(angles)}
    charts.append(f"<div><h3>rotation angles in degrees</h3>{line_chart(lines)}</div>")
    values = {"singular values": stack.jacobian["values"]}
    charts.append(
        f"<div><h3>Jacobian of the stack, Monte Carlo</h3>{line_chart(values, logarithmic=True, axis='number')}</div>"
    )
    parts.append(f'<div class="charts">{"".join(charts)}</div>')
    parts.append('<h3>mixes, mean over positions</h3><p class="muted">row: to stream, column: from stream; blue positive, '
                 "red negative</p>")  # fmt: skip
    parts.append(f'<div class="mixes">{"".join(heat_map(s.mix, s.address) for s in stack.sites)}</div>')
    parts.append(f"<h3>table</h3><pre>{escape(chr(10).join(_table(stack)))}</pre>")
    return "\n".join(parts)


def heat_map(matrix: Sequence[Sequence[float]], title: str) -> str:
    """One matrix as squares, full colour at 1."""
    n, cells = len(matrix), []
    for i, row in enumerate(matrix):
        for j, x in enumerate(row):
            shade = min(abs(x), 1.0)
            colour = f"rgba(var(--{'pos' if x >= 0 else 'neg'}),{shade:.3f})"
            cells.append(f'<rect class="cell" x="{j}" y="{i}" width="1" height="1" style="fill:{colour}"/>')
    return (
        f'<svg viewBox="-.05 -.05 {n + 0.1} {n + 0.1}" role="img"><title>{escape(title)}</title>{"".join(cells)}</svg>'
    )


def line_chart(
    series: dict[str, Sequence[float | None]], *, logarithmic: bool = False, axis: str = "site", floor: float = 1e-12
) -> str:
    """Lines over their index as one SVG; missing values leave gaps, a logarithmic axis cuts at ``floor``."""

    def scaled(x: float | None) -> float | None:
        if x is None or not math.isfinite(x):
            return None
        return math.log10(max(x, floor)) if logarithmic else x

    rows = {name: [scaled(x) for x in values] for name, values in series.items()}
    known = [y for values in rows.values() for y in values if y is not None] or [0.0]
    low, high = min(known), max(known)
    flat = high - low < LEAST_SPAN * max(1.0, abs(high))
    pad = 0.5 if flat else 0.05 * (high - low)
    low, high = (0.0 if not logarithmic and 0 <= low < pad else low - pad), high + pad
    left, right, top, bottom = 52, 390, 8, 150
    count = max(len(v) for v in rows.values())

    def place(index: int, y: float) -> str:
        return f"{left + (right - left) * index / max(count - 1, 1):.1f},{bottom - (bottom - top) * (y - low) / (high - low):.1f}"

    parts = [f'<line class="axis" x1="{left}" y1="{y}" x2="{right}" y2="{y}"/>' for y in (top, bottom)]
    for value, y in ((high, top), (low, bottom)):
        label = _short(10**value) if logarithmic else _short(value)
        parts.append(f'<text x="{left - 4}" y="{y + 3}" text-anchor="end">{label}</text>')
    parts.append(f'<text x="{left}" y="164">0</text><text x="{right}" y="164" text-anchor="end">{axis} {count - 1}</text>')  # fmt: skip
    for number, (name, values) in enumerate(rows.items()):
        colour = f"var(--c{number % 4})"
        run: list[str] = []
        for index, y in enumerate([*values, None]):
            if y is not None:
                run.append(place(index, y))
            elif run:
                points = run if len(run) > 1 else run * 2
                parts.append(f'<polyline points="{" ".join(points)}" style="fill:none;stroke:{colour};stroke-width:1.6" '
                             'stroke-linecap="round"/>')  # fmt: skip
                run = []
        parts.append(
            f'<text x="{left + 84 * number}" y="178" style="fill:{colour}">{escape(name.replace("_", " "))}</text>'
        )
    return f'<svg viewBox="0 0 400 184" role="img"><title>{escape(", ".join(rows))}</title>{"".join(parts)}</svg>'
