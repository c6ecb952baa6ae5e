"""Graphs before and after each pass as text, compared with the files in ``tests/goldens``.

``HCX_UPDATE_GOLDENS=1 python -m pytest tests/test_goldens.py`` rewrites the files; look at what git says they became.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest
from hcx.rewrite import load, trace
from hcx.rewrite.diff.diff import diff
from hcx.rewrite.diff.graph import Layout, Line, Region
from hcx.rewrite.diff.report import Report
from hcx.rewrite.diff.text import MARKS, form, grouped, grouped_name
from hcx.rewrite.pipeline.registry import homes
from hcx.rewrite.pipeline.spec import parse
from hcx.rewrite.testing import tiny_decoder

GOLDENS = Path(__file__).parent / "goldens"
UPDATE = os.environ.get("HCX_UPDATE_GOLDENS") == "1"
HOW = "if the change is meant: HCX_UPDATE_GOLDENS=1 python -m pytest tests/test_goldens.py, and review the files"
CASES = {
    "hc": "hc{mult=2}",
    "hc_ihc": "hc{mixer=ihc,mult=2}",
    "looped": "looped{start=0,end=1,steps=2}",
    "looped_output": "looped{start=0,end=1,steps=2,mix=output}",
    "exits": "exits{at=[1]}",
    "exits_affine": "exits{at=[1],head=affine,score=margin}",
    "hc_looped_exits": "hc{mult=2},looped{start=0,end=1,steps=2},exits{at=[1]}",
    "lora": "lora{rank=2}",
    "quantize": "quantize{group=16}",
}
CONTEXT = 1
"""Unchanged nodes that are shown around a change."""


def known(pipeline: str) -> bool:
    return all(name in homes() for name, _ in parse(pipeline))


def two_blocks(sequence: int = 7):
    """The decoder of the kit, cut to two blocks so that the files stay short."""
    model, ids = tiny_decoder()
    model.layers = model.layers[:2]
    return trace(model, (ids[:, :sequence],))


@pytest.fixture(scope="module")
def decoder():
    return two_blocks()


def graph_text(program) -> str:
    """The whole graph, by block."""
    layout = Layout(program)
    lines = []
    for address, nodes in layout.nodes.items():
        if nodes:
            lines += [f"@@ {address}  {' + '.join(layout.places[address].branches)}".rstrip()]
            lines += [layout.lines[n] for n in nodes]
    return "\n".join(lines) + "\n"


def diff_text(found: Report, pipeline: str) -> str:
    """What a pipeline changed: call, tensors, and the blocks that differ with a little of what is around."""
    lines = [f"{pipeline}", *(f"contract of {e['pipeline']}: {e['contract']}" for e in found.rewrites), ""]
    for group in grouped([*found.call, *found.tensors]):
        first, name = group[0], grouped_name([c.name for c in group])
        lines.append(f"{MARKS[first.status]} {first.kind} {name}  {form(first)}")
    for region in found.regions:
        if region.status != "unchanged":
            lines += ["", heading(region), *body(region.lines)]
    return "\n".join(lines) + "\n"


def heading(region: Region) -> str:
    place = region.after or region.before
    parts = [region.address, " + ".join(place.branches)]
    parts += [f"{place.streams} streams"] if place.streams > 1 else []
    return f"@@ {'  '.join(x for x in parts if x)}  ({region.status})"


def body(lines: list[Line]) -> list[str]:
    changed = [i for i, line in enumerate(lines) if line.status != "unchanged"]
    shown = {j for i in changed for j in range(i - CONTEXT, i + CONTEXT + 1)}
    text: list[str] = []
    for number, line in enumerate(lines):
        if number not in shown:
            text += ["  ..."] if not text or text[-1] != "  ..." else []
        elif line.status == "unchanged":
            text.append(f"  {line.after}")
        else:
            text += [f"- {line.before}"] if line.before is not None else []
            text += [f"+ {line.after}"] if line.after is not None else []
    return text


def compare(name: str, text: str) -> None:
    """Assert that a golden says the same, or rewrite it."""
    path = GOLDENS / f"{name}.txt"
    if UPDATE:
        path.write_text(text, encoding="utf-8")
    assert path.is_file(), f"there is no golden {path.name}; {HOW}"
    stored = path.read_text(encoding="utf-8")
    if text != stored:
        lines = difflib.unified_diff(stored.splitlines(), text.splitlines(), path.name, "now", lineterm="", n=1)
        raise AssertionError("\n".join([f"{path.name} differs; {HOW}", *list(lines)[:80]]))


def test_graph_before(decoder):
    compare("tiny_decoder", graph_text(decoder))


@pytest.mark.parametrize("name", CASES)
def test_graph_after(decoder, name):
    if not known(CASES[name]):
        pytest.skip(f"no pass for {CASES[name]}")
    compare(name, diff_text(diff(decoder, decoder.rewrite(CASES[name], check=False)), CASES[name]))


def test_text_does_not_depend_on_the_example(decoder):
    assert graph_text(two_blocks(5)) == graph_text(decoder)


def test_text_survives_a_file(decoder, tmp_path):
    """The symbols that a file or a loaded graph comes with do not show."""
    rewritten = decoder.rewrite("exits{at=[1]}")
    rewritten.save(tmp_path / "a.hcx")
    assert graph_text(load(tmp_path / "a.hcx")) == graph_text(rewritten)


def test_every_golden_has_a_case():
    assert {p.stem for p in GOLDENS.glob("*.txt")} <= {"tiny_decoder", *CASES}
