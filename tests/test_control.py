"""Branches and loops in the graph: what runs, what is stored, and what everything that walks a graph makes of them."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from hcx.rewrite import ArtefactError, PlanError, load, trace
from hcx.rewrite.edit.editor import Editor
from hcx.rewrite.edit.regions import Region
from hcx.rewrite.ir import graph_text
from hcx.rewrite.ir.control import Control, every_node
from hcx.rewrite.ir.fingerprint import fingerprint
from hcx.rewrite.ir.fork import fork
from hcx.rewrite.ir.moving import move
from hcx.rewrite.pipeline.walk import _tidy
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode


class Net(nn.Module):
    """Three blocks ``x + W2 drop(tanh(W1 x))``; ``[B, 8] -> [B, 8]``."""

    def __init__(self):
        super().__init__()
        self.up, self.down = (nn.ModuleList([nn.Linear(8, 8) for _ in range(3)]) for _ in range(2))

    def block(self, x: torch.Tensor, index: int) -> torch.Tensor:
        inner = nn.functional.dropout(torch.tanh(self.up[index](x)), 0.5, self.training)
        return x + self.down[index](inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(3):
            x = self.block(x, index)
        return x


@pytest.fixture(scope="module")
def net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = Net().eval(), torch.randn(2, 8)
        return model, trace(model, (x,)), x


def adds(program) -> list:
    return [n for n in program.graph.nodes if n.target is torch.ops.aten.add.Tensor]


def block(program, index: int) -> tuple[object, list, object]:
    """Stream before a block, the block's nodes, stream after it."""
    stream = [next(n for n in program.graph.nodes if n.op == "placeholder"), *adds(program)]
    nodes = [n for n in program.graph.nodes if stream[index] < n <= stream[index + 1] and n.op == "call_function"]
    return stream[index], nodes, stream[index + 1]


def branched(program):
    """Block 1 runs only where the input's sum is not positive; else the stream is halved."""
    new = fork(program)
    editor = Editor(new, "toy", 0)
    before, nodes, after = block(new, 1)
    with editor.after(before):
        decision = editor.inline(lambda x: x.sum() > 0, next(n for n in new.graph.nodes if n.op == "placeholder"))
        half = editor.inline(lambda x: x * 0.5, before)
    (result,) = editor.cond(decision, Region([half], [half]), Region(nodes, [after]))
    _tidy(new)
    assert result in new.graph.nodes
    return new


def by_hand(model: Net, x: torch.Tensor) -> torch.Tensor:
    x = model.block(x0 := x, 0)
    return model.block(x * 0.5 if x0.sum() > 0 else model.block(x, 1), 2)


def looped(program, steps: int):
    """Block 1 as often as a buffer says."""
    new = fork(program)
    editor = Editor(new, "toy", 0)
    before, nodes, after = block(new, 1)
    with editor.after(before):
        steps = editor.inline(lambda x, s: s.sum(), before, editor.buffer("steps", torch.tensor([steps])))
    editor.repeat(steps, Region(nodes, [after]), [before])
    _tidy(new)
    return new


SIDES = {"then": torch.ones(3, 8), "otherwise": -torch.ones(3, 8) + 0.1 * torch.arange(8)}


@pytest.mark.parametrize("side", SIDES)
def test_a_branch_computes_what_its_side_says(net, side):
    model, program, _ = net
    new, x = branched(program), SIDES[side]
    with torch.no_grad():
        assert torch.equal(new(x), by_hand(model, x))
        assert not torch.equal(new(x), model(x)) or side == "otherwise"
    assert torch.equal(program(x), model(x)), "the Program that was forked has changed"


class Count(TorchDispatchMode):
    """Counts products of matrices."""

    def __init__(self):
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.products += func.overloadpacket in (torch.ops.aten.addmm, torch.ops.aten.mm)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("side", "products"), [("then", 4), ("otherwise", 6)])
def test_the_other_side_is_not_computed(net, side, products):
    new = branched(net[1])
    with torch.no_grad(), Count() as count:
        new(SIDES[side])
    assert count.products == products


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_a_loop_runs_as_often_as_its_tensor_says(net, steps):
    model, program, x = net
    new = looped(program, steps)
    with torch.no_grad(), Count() as count:
        got = new(x)
    with torch.no_grad():
        expected = model.block(x, 0)
        for _ in range(steps):
            expected = model.block(expected, 1)
        assert torch.equal(got, model.block(expected, 2))
    assert count.products == 4 + 2 * steps


@pytest.mark.parametrize("make", [branched, lambda p: looped(p, 3)], ids=["cond", "while_loop"])
def test_it_survives_copies_files_casts_and_exporters(net, make, tmp_path):
    model, program, _ = net
    new = make(program)
    new.examples = [[x] for x in SIDES.values()]
    new.save(tmp_path / "net.hcx")
    loaded = load(tmp_path / "net.hcx")
    assert fingerprint(loaded) == fingerprint(new) != fingerprint(program)
    assert set(new.state_dict()) == set(loaded.state_dict()) >= set(model.state_dict())
    wide = copy.deepcopy(loaded).to(torch.float64)
    module = new.as_module()
    exported = torch.export.export(new.flat_module(), (torch.randn(2, 8),), strict=False).module()
    compiled = torch.compile(loaded, backend="eager")
    for x in SIDES.values():
        expected = new(x)
        for other in (loaded, copy.deepcopy(loaded), module, compiled):
            assert torch.equal(other(x), expected)
        assert (wide(x.double()) - expected.double()).abs().max() < 1e-6 and wide(x.double()).dtype == torch.float64
    for x in (SIDES["then"][:2], SIDES["otherwise"][:2]):
        assert torch.equal(exported(x)[0], new(x))
    assert all("val" in n.meta for n in every_node(make(loaded).graph) if n.op != "output")


def test_only_what_ran_gets_gradients(net):
    new = copy.deepcopy(branched(net[1]))
    for side in SIDES:
        new.zero_grad()
        new(SIDES[side]).square().sum().backward()
        assert (new.tensor("up.1.weight").grad is None) == (side == "then"), side
        assert bool(new.tensor("up.2.weight").grad.any())


def test_train_mode_reaches_the_bodies(net):
    new, x = copy.deepcopy(branched(net[1])), SIDES["otherwise"]
    quiet = new(x)
    for node in [n for n in new.graph.nodes if "dropout" in str(n.target)]:
        node.args = (node.args[0], 0.0, *node.args[2:])  # leaves the dropout in the body alone
    new.train()
    assert not torch.equal(new(x), quiet)
    new.eval()
    assert torch.equal(new(x), quiet)


def test_device_constants_in_bodies_move_too(net):
    new = copy.deepcopy(branched(net[1]))
    body = next(n.target for n in new.graph.nodes if isinstance(n.target, Control))

    def add_constant(graph) -> None:
        with graph.inserting_before(graph.output_node()):
            made = graph.call_function(torch.ops.aten.zeros.default, ([8],), {"device": torch.device("cpu")})
            total = graph.call_function(torch.ops.aten.add.Tensor, (graph.output_node().args[0][0], made))
        graph.output_node().args = ((total,),)

    for node in new.graph.nodes:
        node.target = body.changed(add_constant) if node.target is body else node.target
    move(new, "meta")
    devices = {n.kwargs["device"] for n in every_node(new.graph) if "device" in n.kwargs}
    assert devices == {torch.device("meta")}
    assert new(SIDES["then"].to("meta")).shape == (3, 8)


def test_texts_and_fingerprints_tell_bodies_apart(net):
    one, other = branched(net[1]), branched(net[1])
    assert graph_text.text(one.graph) == graph_text.text(other.graph) and fingerprint(one) == fingerprint(other)

    def more(graph) -> None:
        for node in graph.nodes:
            node.args = tuple(0.25 if a == 0.5 else a for a in node.args)

    for node in other.graph.nodes:
        if isinstance(node.target, Control):
            node.target = node.target.changed(more)
    assert graph_text.text(one.graph) != graph_text.text(other.graph) and fingerprint(one) != fingerprint(other)
    assert "    %mul = aten.mul.Tensor(%add, 0.5)" in graph_text.text(one.graph)
    assert len(graph_text.node_lines(one.graph)) == len(one.graph.nodes)


WRONG = {
    "in both branches": lambda e, b, n, a, h, d: e.cond(d, Region([h, *n], [h]), Region(n, [a])),
    "decides about itself": lambda e, b, n, a, h, d: e.cond(d, Region([d, h], [h]), Region(n, [a])),
    "1 values stand against 2": lambda e, b, n, a, h, d: e.cond(d, Region([h], [h]), Region(n, [a, a])),
    "cannot stand for": lambda e, b, n, a, h, d: e.cond(d, Region([], [d]), Region(n, [a])),
    "moved into a branch": lambda e, b, n, a, h, d: e.cond(d, Region([h], [h]), Region(n, [n[0]])),
    "of the other": lambda e, b, n, a, h, d: e.cond(d, Region([], [n[0]]), Region(n, [a])),
}


@pytest.mark.parametrize("message", WRONG)
def test_regions_that_cannot_be_meant_are_refused(net, message):
    new = fork(net[1])
    editor = Editor(new, "toy", 0)
    before, nodes, after = block(new, 1)
    with editor.after(before):
        decision, half = editor.inline(lambda x: (x.sum() > 0, x * 0.5), before)
    with pytest.raises(PlanError, match=message):
        WRONG[message](editor, before, nodes, after, half, decision)


def test_writes_in_place_do_not_move_into_branches(net):
    new = fork(net[1])
    editor = Editor(new, "toy", 0)
    before, nodes, after = block(new, 1)
    with editor.after(before):
        decision = editor.inline(lambda x: x.sum() > 0, before)
    with editor.after(nodes[0]):
        nodes.append(editor.call(torch.ops.aten.add_.Tensor, nodes[0], 1))
    with pytest.raises(PlanError, match="cannot run in a branch"):
        editor.cond(decision, Region([], [before]), Region(nodes, [after]))


def test_results_that_nobody_reads_are_not_computed(net):
    """Taps of a branch cost nothing where taps are not asked for."""
    new = fork(net[1])
    editor = Editor(new, "toy", 0)
    before, nodes, after = block(new, 1)
    with editor.after(after):
        decision = editor.inline(lambda x: x.sum() > 0, before)
        known = set(new.graph.nodes)
        extra = editor.inline(lambda x: x @ x.t() @ x, after)
        nodes += set(new.graph.nodes) - known
    editor.tap("extra", extra)
    editor.cond(decision, Region([], [before, before]), Region(nodes, [after, extra]))
    _tidy(new)
    x = SIDES["otherwise"]
    with torch.no_grad(), Count() as plain:
        new(x)
    with torch.no_grad(), Count() as tapped:
        taps = new(x, taps=True)[1]
    assert plain.products < tapped.products and taps["extra"].shape == (3, 8)


def tampered(folder, change) -> None:
    """Change the graph file of an artefact and its entry in the manifest."""
    from hashlib import sha256

    data = json.loads((folder / "graph.json").read_text())
    change(next(n for n in data["nodes"] if "bodies" in n))
    (folder / "graph.json").write_text(json.dumps(data))
    manifest = json.loads((folder / "manifest.json").read_text())
    content = (folder / "graph.json").read_bytes()
    manifest["files"]["graph.json"] = {"sha256": sha256(content).hexdigest(), "bytes": len(content)}
    (folder / "manifest.json").write_text(json.dumps(manifest))


DAMAGE = {
    "which is not a stored tensor": lambda n: n["bodies"][0]["nodes"].insert(
        0, {"name": "w", "op": "get_attr", "target": "up.0.weight"}
    ),
    "takes": lambda n: n["args"].pop(),
    "2 bodies|3 bodies": lambda n: n["bodies"].append(n["bodies"][0]),
    "no results at its end": lambda n: n["bodies"][1]["nodes"].pop(),
    "give .* results": lambda n: n["bodies"][0]["nodes"][-1]["args"][0]["tuple"].clear(),
    "not an allowed target": lambda n: n["bodies"][0]["nodes"][-2].update(target="os.system"),
    "graph file": lambda n: n.update(bodies=3),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damaged_bodies_in_a_file_are_refused(net, message, tmp_path):
    new = branched(net[1])
    new.save(tmp_path / "net.hcx")
    tampered(tmp_path / "net.hcx", DAMAGE[message])
    with pytest.raises(ArtefactError, match=message):
        load(tmp_path / "net.hcx")


class Own(nn.Module):
    """A model that branches by itself: ``[B, 4] -> [B, 4]``."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda v: self.a(v), lambda v: v * 2, (x,)) + 1


def test_a_models_own_branches_are_traced(tmp_path):
    model = Own().eval()
    program = trace(model, (torch.ones(2, 4),))
    program.save(tmp_path / "own.hcx")
    for x in (torch.ones(3, 4), -torch.ones(3, 4)):
        expected = (model.a(x) if x.sum() > 0 else x * 2) + 1
        with torch.no_grad():
            assert torch.equal(program(x), expected) and torch.equal(load(tmp_path / "own.hcx")(x), expected)


def test_infinities_keep_their_signs_in_a_file():
    graph = fx.Graph()
    x = graph.placeholder("x")
    values = (-float("inf"), float("inf"))
    graph.output((graph.call_function(torch.ops.aten.clamp.default, (x, *values)),))
    data = json.loads(json.dumps(graph_text.to_json(graph)))
    again = graph_text.from_json(data, set())
    (node,) = again.find_nodes(op="call_function", target=torch.ops.aten.clamp.default)
    assert node.args[1:] == values
