"""``diff``: what it finds between two Programs, as data, as text, and as a page."""

from __future__ import annotations

import copy
import html.parser
import json

import pytest
import torch
from hcx.cli import diff as command
from hcx.cli.main import main
from hcx.rewrite import ArtefactError, load, trace
from hcx.rewrite.diff.diff import diff
from hcx.rewrite.diff.graph import Layout, node_lines
from hcx.rewrite.diff.text import text_of
from hcx.rewrite.testing import tiny_decoder

from tests.conftest import tiny_llama, token_ids

EVIL = "<script>alert('\"&\x1b[31m</script>"


@pytest.fixture(scope="module")
def base():
    model, ids = tiny_decoder()
    return trace(model, (ids,))


@pytest.fixture(scope="module")
def looped(base):
    return base.rewrite("looped{start=1,end=3}")


def statuses(found) -> dict[str, str]:
    return {r.address: r.status for r in found.regions}


def test_equal_programs_do_not_differ(base):
    found = diff(base, copy.deepcopy(base))
    assert not found and "no difference" in str(found)
    assert set(statuses(found).values()) == {"unchanged"}


def test_another_trace_and_a_file_do_not_differ(base, tmp_path):
    """Another example's sizes, symbols and names of a stored graph are no difference."""
    model, ids = tiny_decoder()
    assert not diff(base, trace(model, (torch.cat([ids, ids])[:3, :5],)))
    base.save(tmp_path / "a.hcx")
    assert not diff(base, load(tmp_path / "a.hcx"))


def test_a_cached_decoder_and_its_file_do_not_differ(llama, tmp_path):
    rewritten = llama.program.rewrite("looped{start=2,end=3}", check=False)
    rewritten.save(tmp_path / "a.hcx")
    assert not diff(rewritten, load(tmp_path / "a.hcx"))


def test_neither_side_is_changed(base, looped):
    before = [[n.name for n in p.graph.nodes] for p in (base, looped)]
    diff(base, looped)
    assert [[n.name for n in p.graph.nodes] for p in (base, looped)] == before


def test_loop(base, looped):
    found = diff(base, looped)
    assert statuses(found) == {
        "start": "unchanged",
        "layers.0": "unchanged",
        "layers.1": "unchanged",
        "layers.2": "unchanged",
        "layers@3~1": "added",
        "layers.1~2": "added",
        "layers.2~2": "added",
        "layers.3": "changed",
        "layers@4": "unchanged",
    }
    assert [c.name for c in found.tensors] == ["hcx.looped_0.scalar"] and not found.call and not found.values
    copied = next(r for r in found.regions if r.address == "layers.2~2")
    assert (copied.after.number, copied.after.passes, copied.before) == (2, 2, None)
    assert found.after.parameters == found.before.parameters + 1
    entry = found.rewrites[0]
    assert (entry["in"], entry["contract"]) == ("after", "exact") and all(c["holds"] for c in entry["checks"])


def test_the_other_way_round(base, looped):
    forth, back = diff(base, looped), diff(looped, base)
    swap = {"added": "removed", "removed": "added"}
    assert statuses(back) == {k: swap.get(v, v) for k, v in statuses(forth).items()}
    assert [r.address for r in back.regions] == [r.address for r in forth.regions]
    assert back.rewrites[0]["in"] == "before"


def test_every_node_is_in_one_region(looped):
    layout = Layout(looped)
    placed = [n for nodes in layout.nodes.values() for n in nodes]
    wanted = [n for n in looped.graph.nodes if n.op in ("call_function", "output")]
    assert len(placed) == len(wanted) and set(placed) == set(wanted)


def test_exit(base):
    found = diff(base, base.rewrite("exits{at=[2]}", check=False))
    assert {a for a, s in statuses(found).items() if s != "unchanged"} == {"layers@2", "layers@4"}
    head = next(r for r in found.regions if r.address == "layers@2")
    assert head.after.leaves and head.after.taps == ["exits.2.logits", "exits.2.score", "exits.depth"]
    assert "exits head" in head.after.roles
    assert [(c.kind, c.name, c.status) for c in found.call] == [
        ("tap", "exits.2.logits", "added"),
        ("tap", "exits.2.score", "added"),
        ("tap", "exits.depth", "added"),
    ]
    assert found.rewrites[0]["owed"] and "owed" in str(found)


def test_streams(base):
    found = diff(base, base.rewrite("hc{mult=2}", check=False))
    block = next(r for r in found.regions if r.address == "layers.0")
    assert (block.before.streams, block.after.streams) == (1, 2)
    assert (block.count("added"), block.count("removed"), block.count("changed")) == (4, 2, 2)


def test_cache_slots(llama):
    """A loop's own cache slots are inputs and outputs, and a table that the copies share has only moved."""
    found = diff(llama.program, llama.program.rewrite("looped{start=2,end=3}", check=False))
    assert [(c.kind, c.name) for c in found.call] == [
        ("input", "past_key_values.6.key"),
        ("input", "past_key_values.6.value"),
        ("output", "present.6.key"),
        ("output", "present.6.value"),
    ]
    assert statuses(found)["model.layers.2"] == "unchanged" and statuses(found)["start"] == "unchanged"


def test_values(base):
    other = copy.deepcopy(base)
    with torch.no_grad():
        other.tensor("layers.2.up.weight").add_(1.0)
    found = diff(base, other)
    assert found.values == ["layers.2.up.weight"] and "layers.2.up.weight" in str(found)
    assert set(statuses(found).values()) == {"unchanged"}


def test_a_rewired_value_is_found(base):
    """Sabotage: one operand read from elsewhere is one changed node."""
    other = copy.deepcopy(base)
    nodes = {n.name: n for n in other.graph.nodes}
    nodes["linear_5"].replace_input_with(nodes["layers_1_out_weight"], nodes["layers_0_out_weight"])
    found = diff(base, other)
    changed = [line for r in found.regions for line in r.lines if line.status != "unchanged"]
    assert [(c.status, "%layers_0_out_weight" in c.after) for c in changed] == [("changed", True)]
    output = other.graph.output_node()
    output.args = ((nodes["add"],),)
    changed = [line.after for r in diff(base, other).regions for line in r.lines if line.status == "changed"]
    assert "%output = output([%add])" in changed


def test_other_models(base):
    other = trace(tiny_llama(2), (token_ids(24).reshape(2, 12),))
    found = diff(base, other)
    assert found.notes and "different models" in str(found)
    assert {r.status for r in found.regions if r.is_block} == {"added", "removed"}


def test_text(base, looped):
    text = str(diff(base, looped))
    assert "+ layers.1~2  attn + mlp  pass 2 of 2  +18 nodes" in text
    assert "  = layers.0 .. layers.2 (3 blocks)" in text
    assert "%rsub" not in text and "+ %rsub = aten.rsub.Scalar" in text_of(diff(base, looped), nodes=True)


def test_json(base, looped):
    data = json.loads(json.dumps(diff(base, looped).to_json()))
    assert data["differ"] and data["tensors"][0]["status"] == "added"
    region = next(r for r in data["regions"] if r["address"] == "layers.3")
    assert region["status"] == "changed" and len(region["lines"]) == 2


def test_sizes_have_names(base):
    assert "float32[batch, sequence, 40]" in next(t for n, t in node_lines(base).items() if n.name == "linear_16")


# ---- the command and its page


@pytest.fixture(scope="module")
def folders(base, looped, tmp_path_factory):
    place = tmp_path_factory.mktemp("diff")
    base.save(place / "a.hcx")
    looped.rewrite("exits{at=[3]}").save(place / "b.hcx")
    return place


class Page(html.parser.HTMLParser):
    """Tags and attributes of a page; fails where an element is not closed."""

    EMPTY = frozenset({"meta", "br", "line", "rect", "path"})

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page(folders, capsys):
    target = folders / "page.html"
    arguments = ["diff", str(folders / "a.hcx"), str(folders / "b.hcx"), "--html", str(target)]
    assert main(arguments) == 0
    assert f"page: {target}" in capsys.readouterr().out
    text = target.read_text()
    page = Page(text)
    assert "script" not in page.tags and "img" not in page.tags and "link" not in page.tags
    links = [v for k, v in page.attributes if k in ("href", "src")]
    ids = [v for k, v in page.attributes if k == "id"]
    assert links and all(v.startswith("#") and v[1:] in ids for v in links)
    assert not any(k.startswith("on") for k, _ in page.attributes)
    assert "http" not in text.replace("http-equiv", "")
    for wanted in ("layers.1</span>", "pass 2 of 2", "exits.3.logits", "looped mix", "max_diff"):
        assert wanted in text
    assert main(arguments) == 2  # it exists
    assert main([*arguments, "--overwrite"]) == 0


def test_page_escapes_what_files_say(folders, tmp_path):
    evil = tmp_path / "evil.hcx"
    load(folders / "b.hcx").save(evil)
    manifest = json.loads((evil / "manifest.json").read_text())
    manifest["signature"]["model"] = EVIL
    manifest["signature"]["outputs"]["names"][0] = EVIL
    manifest["history"][0]["pipeline"] = EVIL
    manifest["history"][0]["checks"][0]["note"] = EVIL
    manifest["history"][0]["checks"][0]["measured"][EVIL] = EVIL
    (evil / "manifest.json").write_text(json.dumps(manifest))
    graph = json.loads((evil / "graph.json").read_text())
    for node in graph["nodes"]:
        if "hcx" in node:
            node["hcx"]["role"] = EVIL
        if "taps" in node:
            node["taps"][0] = EVIL
    (evil / "graph.json").write_text(json.dumps(graph))
    manifest["files"]["graph.json"] = stated(evil / "graph.json")
    (evil / "manifest.json").write_text(json.dumps(manifest))
    result = command(str(folders / "a.hcx"), str(evil), html=str(tmp_path / "page.html"))
    text = (tmp_path / "page.html").read_text()
    assert "<script" not in text and "&lt;script&gt;" in text
    assert "script" not in Page(text).tags
    assert "\x1b" not in result.text


def stated(path) -> dict:
    from hcx.rewrite.store.folders import sha256

    return {"sha256": sha256(path), "bytes": path.stat().st_size}


def test_damaged_history(folders, tmp_path):
    broken = tmp_path / "broken.hcx"
    load(folders / "b.hcx").save(broken)
    manifest = json.loads((broken / "manifest.json").read_text())
    del manifest["history"][0]["contract"]
    (broken / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ArtefactError, match="damaged at history"):
        diff(load(folders / "a.hcx"), load(broken))


def test_command_line(folders, capsys, tmp_path):
    one, other = str(folders / "a.hcx"), str(folders / "b.hcx")
    assert main(["diff", one, other, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["command"] == "diff" and data["diff"]["differ"] and data["before"]["kind"] == "hcx"
    assert main(["diff", one, one]) == 0
    assert "no difference" in capsys.readouterr().out
    assert main(["diff", one, str(tmp_path / "none.hcx")]) == 2
    assert main(["diff", one, other, "--html", str(tmp_path / "page.txt")]) == 2
    assert "ends in .html" in capsys.readouterr().err
