"""What the documentation says is true: its examples run, what it names exists, and its tables are complete."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from hcx.rewrite import Reason, trace
from hcx.rewrite.pipeline.walk import registry
from hcx.rewrite.testing import conformance, tiny_decoder

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(p.name for p in DOCS.glob("*.md"))
BUILT_IN = "hcx.passes."


def code_blocks(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.S | re.M)


@pytest.fixture
def plug_in(tmp_path, monkeypatch):
    """The pass of docs/first_pass.md as an installed package: a module and its ``.dist-info``."""
    code, *tests = code_blocks("first_pass.md")
    points = tomllib.loads(code_blocks("first_pass.md", "toml")[0])["project"]["entry-points"]
    (tmp_path / "branch_scale.py").write_text(code)
    (tmp_path / "test_branch_scale.py").write_text("\n\n".join(tests))
    info = tmp_path / "branch_scale-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: branch-scale\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "".join(f"[{group}]\n" + "".join(f"{n} = {v}\n" for n, v in p.items()) for group, p in points.items())
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    )
    importlib.invalidate_caches()
    registry.homes.cache_clear()
    yield tmp_path
    registry.homes.cache_clear()
    for name in ("branch_scale", "test_branch_scale"):
        sys.modules.pop(name, None)


def test_first_pass_is_short():
    code = code_blocks("first_pass.md")[0]
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 20, f"{len(lines)} lines"
    assert all(len(line) <= 120 for line in lines)


def test_first_pass_conforms(plug_in):
    importlib.import_module("test_branch_scale").test_branch_scale()


def test_first_pass_away_from_its_start(plug_in):
    importlib.import_module("test_branch_scale").test_branch_scale_by_hand()


def test_addresses_that_differ_in_numbers_only_have_tensors_of_their_own(plug_in):
    """Calls, loop iterations and second branches of one kind."""

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([TwoMLPs()])

        def forward(self, x):
            for _ in range(3):
                x = self.layers[0](x)
            return x

    class TwoMLPs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = (torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)) for _ in range(2))

        def forward(self, x):
            x = x + torch.tanh(self.one(x))
            return x + torch.tanh(self.two(x))

    program = trace(Twice().eval(), (torch.randn(2, 4, 8),))
    scaled = program.rewrite("looped{start=0,end=2,steps=2,mix=output,scalar=0.5},branch_scale")
    assert len(scaled.new_parameters()) == 1 + len(scaled.sites().branches()) == 1 + 2 * (3 + 2)


def test_first_pass_composes(plug_in):
    """Behind a loop and before exits its branches are found, and all checks hold."""
    model, ids = tiny_decoder()
    program = trace(model, (ids,)).rewrite("looped{start=1,end=3,scalar=0.5},branch_scale,exits{at=[3]}")
    assert len(program.new_parameters()) == 1 + 2 * (4 + 2)
    assert all(c["holds"] for entry in program.history for c in entry["checks"])


def test_kit_finds_a_wrong_pass(plug_in):
    """Sabotage: a start other than 1 breaks the promise, and the kit says so."""
    broken = plug_in / "branch_scale.py"
    broken.write_text(broken.read_text().replace("torch.ones(1,", "2 * torch.ones(1,"))
    sys.modules.pop("branch_scale", None)
    importlib.invalidate_caches()
    with pytest.raises(Exception, match="contract of branch_scale"):
        conformance("branch_scale", subprocesses=False)


def test_first_pass_on_the_command_line(plug_in):
    model, ids = tiny_decoder()
    trace(model, (ids,)).save(plug_in / "model.hcx")
    arguments = ["rewrite", "model.hcx", "--pass", "branch_scale,looped", "-o", "scaled.hcx"]
    run = f"import sys; from hcx.cli.main import main; sys.exit(main({arguments!r}))"
    command = [sys.executable, "-c", run]
    done = subprocess.run(command, cwd=plug_in, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "branch_scale  contract: exact" in done.stdout
    assert (plug_in / "scaled.hcx" / "manifest.json").is_file()


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    examples = [b for b in code_blocks(page) if b.lstrip().startswith(">>>")]
    test = doctest.DocTestParser().get_doctest("\n".join(examples), {}, page, page, 0)
    report: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    assert not result.failed, "".join(report)


@pytest.mark.parametrize("page", PAGES)
def test_what_it_names_exists(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    for name in re.findall(r"`((?:rewrite|passes|kernels|cli|export|tests|docs)/[\w/.]*)`", text):
        assert (ROOT / name).exists(), f"{page} names {name}"
    for file, name in re.findall(r"`([\w/]+\.py)::(\w+)`", text):
        source = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^\s*(def|class) {name}\b", source, re.M), f"{page} names {file}::{name}"
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert (DOCS / target).is_file(), f"{page} links to {target}"


def test_every_skip_reason_is_documented():
    rows = re.findall(r"^\| `([\w-]+)` \|", (DOCS / "skips.md").read_text(encoding="utf-8"), re.M)
    assert sorted(rows) == sorted(r.value for r in Reason)


def test_every_option_is_documented():
    text = (DOCS / "names.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w, ]+) \| ((?:`\w+`(?:, )?)+) \|", text, re.M)
    told = {
        (p.strip(), o) for passes, options in rows for p in passes.split(",") for o in re.findall(r"`(\w+)`", options)
    }
    own = [p for p in entry_points(group=registry.GROUP) if p.value.startswith(BUILT_IN)]
    real = {(p.name, f.name) for p in own for f in dataclasses.fields(registry.get(p.name))}
    real |= {(p.name, alias) for p in own for alias in registry.get(p.name).aliases}
    assert real - told == set(), "options without a line in docs/names.md"
    assert told - real == set(), "docs/names.md names options that no pass has"


# ---- sources of equations

CITING = ("rewrite", "kernels", "passes", "export", "cli", "tests", "bench", "examples")
NO_SOURCE = re.compile(r"methods[\s_]+note|methods\s+\d+\.\d", re.I)
"""A text outside the repository, which readers do not have."""


def cited(text: str) -> tuple[set[str], set[str], int]:
    """Entries and sections of docs/sources.md that a source file names, and how often it names the page."""
    page = r"docs/sources\.md"
    entries = re.findall(page + r",\s+(?:#\s*)?([\w-]+)", text)
    sections = re.findall(page + r"\s+\(([^)]+)\)", text)
    return set(entries), {" ".join(s.split()) for s in sections}, len(re.findall(page, text)) - len(entries + sections)


def test_citations_are_read_right():
    page = "docs/" + "sources.md"
    assert cited(f"Sources: {page}, a-b; {page},\nc. See {page} (D e).") == ({"a-b", "c"}, {"D e"}, 0)
    assert cited(f"See {page}.") == (set(), set(), 1)
    assert NO_SOURCE.search("Source: methods\nnote, 1.2") and NO_SOURCE.search("as in methods 2.1")


def test_sources_that_are_cited_have_an_entry_and_entries_are_cited():
    text = (DOCS / "sources.md").read_text(encoding="utf-8")
    entries, sections = (re.findall(rf"^{mark} (.+)$", text, re.M) for mark in ("###", "##"))
    assert len(set(entries)) == len(entries)
    found: set[str] = set()
    files = {f for folder in CITING for f in (ROOT / folder).rglob("*.py")} - {Path(__file__).resolve()}
    for file in sorted(files):
        where, source = file.relative_to(ROOT), file.read_text(encoding="utf-8")
        names, parts, others = cited(source)
        assert names <= set(entries), f"{where} cites {names - set(entries)}, no entry of docs/sources.md"
        assert parts <= set(sections), f"{where} cites {parts - set(sections)}, no section of it"
        assert not others, f"{where} cites docs/sources.md without an entry or a section"
        assert not NO_SOURCE.search(source), f"{where} cites a text that is not in the repository"
        found |= names
    assert set(entries) == found, "entries of docs/sources.md that no source file cites"
    pages = [ROOT / "README.md", *(DOCS / page for page in PAGES)]
    assert not [p.name for p in pages if NO_SOURCE.search(p.read_text(encoding="utf-8"))]
