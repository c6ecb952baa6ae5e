"""An artefact that hcx 0.1.0 saved before the code moved into rooms: it loads, and gives what it gave."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from hcx.rewrite import Program, load, verify
from hcx.rewrite.ir.tags import Part, hcx_tag

SAVED = Path(__file__).parent / "goldens" / "saved_by_0_1_0"


@pytest.fixture(scope="module")
def program() -> Program:
    return load(SAVED)


def test_it_verifies():
    """Bitwise on the kind of machine that wrote it; elsewhere kernels may sum in another order."""
    checks = {check.name: check for check in verify(SAVED)}
    assert checks["files are as written"].holds
    golden = checks.pop("golden reproduced").measured
    assert golden["bitwise"] or (golden["max_diff"] < 1e-4 and golden["argmax"] == 1)
    assert all(check.holds for check in checks.values()), checks


def test_its_history_and_sites(program):
    assert [entry.name for entry in program.history] == ["hc", "looped", "exits", "lora", "quantize"]
    assert [entry["pass"] for entry in program.history] == [entry.name for entry in program.history]
    stack = program.sites().main
    assert (stack.depth, [b.iteration for b in stack.blocks]) == (3, [1, 1, 2, 1])


def test_its_nodes_are_to_the_stream_what_they_were(program):
    """Files of that time hold a word for each role; what it is to the stream is filled in."""
    parts = {(t.of_pass, t.word): t.part for n in program.graph.nodes if (t := hcx_tag(n)).word}
    assert parts["looped", "mix"] is Part.CONTINUES and parts["hc", "write"] is Part.CONTINUES
    assert parts["exits", "head"] is Part.READS
    assert parts["exits", "select"] is Part.BESIDE and parts["lora", "lora"] is Part.INSIDE


def test_it_can_be_rewritten_and_saved_again(program, tmp_path):
    new = program.rewrite("observe{at=[1]}")
    new.save(tmp_path / "again.hcx")
    again = load(tmp_path / "again.hcx")
    ids = torch.arange(3, 15).reshape(2, 6)
    assert torch.equal(again(ids).logits, new(ids).logits)
    shutil.rmtree(tmp_path / "again.hcx")
