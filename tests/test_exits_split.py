"""Programs cut at exits: run one after the other they are the whole, each with what it needs and no more."""

from __future__ import annotations

import json

import pytest
import torch
from hcx.cli.main import main
from hcx.export import OnnxSession, to_onnx
from hcx.passes import Exits
from hcx.passes.exits import save_pieces, set_thresholds, split
from hcx.rewrite import ContractError, PlanError, UsageError, load, trace
from hcx.rewrite.run.pieces import cut
from hcx.rewrite.testing import tiny_decoder
from torch import nn

from tests.conftest import tiny_llama, token_ids

PLACES = (2, 4)


def chained(pieces, given: dict[str, torch.Tensor], runs=None) -> dict[str, torch.Tensor]:
    """All flat outputs of pieces that run one after the other."""
    known = dict(given)
    for number, piece in enumerate(pieces):
        run = piece.run_flat if runs is None else runs[number]
        with torch.no_grad():
            found = run(piece.signature.by_name(known))
        known |= dict(zip(piece.output_names, found, strict=True))
    return known


@pytest.fixture(scope="module")
def exits(llama):
    program = llama.program.rewrite(Exits(at=PLACES, head="affine", score="gate"), check=False)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for parameter in program.new_parameters().values():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return program


@pytest.fixture(scope="module")
def pieces(exits):
    return split(exits)


@pytest.fixture(scope="module")
def halves(llama):
    return split(llama.program, at=3)


@pytest.fixture(scope="module")
def shallow():
    """Three blocks, for what is cut in the same way however many there are."""
    model = tiny_llama(3)
    return trace(model, (token_ids(24).reshape(2, 12),))


def test_pieces_in_a_row_are_the_whole_bitwise_with_and_without_a_past(llama, exits, pieces):
    past: dict[str, torch.Tensor] = {}
    for shape in [(2, 12), (2, 1), (2, 5)]:
        ids = llama.ids(*shape)
        mask = torch.ones(2, shape[1] + (past["past_key_values.0.key"].shape[2] if past else 0), dtype=torch.int64)
        mask[0, :3] = 0
        given = {"input_ids": ids, "attention_mask": mask, **past}
        with torch.no_grad():
            flat = exits.signature.by_name(given)
            expected = dict(zip([*exits.output_names, *exits.taps], exits.run_flat(flat, taps=True), strict=True))
        found = chained(pieces, given)
        for k in PLACES:
            for what in ("score", "logits"):
                assert torch.equal(found[f"{what}.{k}"], expected[f"exits.{k}.{what}"]), (shape, k, what)
        for name in exits.output_names:
            assert torch.equal(found[name], expected[name]), (shape, name)
        past = {
            "past_key_values" + n.removeprefix("present"): expected[n] for n in exits.output_names if "present" in n
        }


def test_a_piece_has_its_own_tensors_inputs_and_cache_slots_only(exits, pieces):
    layers = [{n.split(".")[2] for n, _ in p.named_tensors() if n.startswith("model.layers")} for p in pieces]
    assert layers == [{"0", "1"}, {"2", "3"}, {"4", "5"}]
    slots = [{i.name.split(".")[1] for i in p.inputs if i.fill == "empty"} for p in pieces]
    assert slots == layers
    names = [{i.name for i in p.inputs if i.fill != "empty"} for p in pieces]
    positions = {"attention_mask", "position_ids"}
    assert names == [{"input_ids", *positions}, {"stream.2", "score.2", *positions}, {"stream.4", *positions}]
    whole = dict(exits.named_parameters())
    assert all(p is whole[n] for piece in pieces for n, p in piece.named_parameters()), "tensors are shared"


def test_called_with_names_a_piece_gives_a_dict_and_a_cache_of_the_models_kind(llama, halves):
    first, rest = halves
    ids = llama.ids(2, 9)
    with torch.no_grad():
        early = first(ids)
        late = rest(early["stream.3"])
        expected = llama.model(ids)
    assert torch.equal(late["logits"], expected.logits)
    for half, offset in ((early, 0), (late, 3)):
        layers = next(v for v in half.values() if not isinstance(v, torch.Tensor)).layers
        assert len(layers) == 3
        assert all(torch.equal(a.keys, expected.past_key_values.layers[offset + i].keys) for i, a in enumerate(layers))


def by_hand(model, stream, positions, layers):
    """Some layers over some tokens of a row, which see one another in order."""
    inner = model.model
    angles = inner.rotary_emb(stream, positions)
    mask = torch.full((stream.shape[1], stream.shape[1]), -torch.inf).triu(1)[None, None]
    for layer in layers:
        stream = layer(stream, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        stream = stream[0] if isinstance(stream, tuple) else stream
    return stream


def test_the_caches_of_two_pieces_may_differ_in_length(llama, halves, max_diff):
    """The rest has seen tokens 0, 1, 2 and 5 only; positions are given."""
    first, rest = halves
    seen = torch.tensor([0, 1, 2, 5])
    with torch.no_grad():
        stream = first(llama.ids(1, 6))["stream.3"]
        expected = llama.model.lm_head(
            llama.model.model.norm(by_hand(llama.model, stream[:, seen], seen[None], llama.model.model.layers[3:]))
        )
        start = chained([rest], {"stream.3": stream[:, :3]})
        past = {"past_key_values" + n.removeprefix("present"): t for n, t in start.items() if "present" in n}
        step = chained([rest], {"stream.3": stream[:, 5:], "position_ids": torch.tensor([[5]]), **past})
        shifted = chained([rest], {"stream.3": stream[:, 5:], "position_ids": torch.tensor([[3]]), **past})
    assert step["present.3.key"].shape[2] == 4
    assert max_diff(step["logits"], expected[:, 3:]) <= 1e-5 < 1e-3 < max_diff(shifted["logits"], expected[:, 3:])


@pytest.mark.parametrize("options", [
    {"score": "max_prob"}, {"score": "patience"}, {"score": "jei"}, {"score": "cosine"}, {"head": "norm"},
    {"head": "mlp"}, {"head": "block"}, {"candidates": 16},
], ids=str)  # fmt: skip
def test_every_head_and_score_is_cut(shallow, options):
    places = (1, 2)
    program = shallow.rewrite(Exits(at=places, **options), check=False)
    ids = token_ids(14).reshape(2, 7)
    with torch.no_grad():
        expected, taps = program(ids, taps=True)
    found = chained(split(program), {"input_ids": ids})
    assert torch.equal(found["logits"], expected.logits)
    for k in places:
        assert torch.equal(found[f"score.{k}"], taps[f"exits.{k}.score"])
        assert torch.equal(found[f"logits.{k}"], taps[f"exits.{k}.logits"])


def test_streams_are_cut_as_they_are_carried():
    model, ids = tiny_decoder()
    program = trace(model, (ids,)).rewrite("hc{mult=2},exits{at=[2]}", check=False)
    pieces = split(program)
    found = chained(pieces, {"input_ids": ids})
    with torch.no_grad():
        assert torch.equal(found["logits"], program(ids)["logits"])
    assert found["stream.2"].dim() == 4


class Guided(nn.Module):
    """Blocks that all read something that an encoder makes of a second input."""

    def __init__(self):
        super().__init__()
        self.encoder, self.embed, self.head = nn.Linear(6, 8), nn.Embedding(20, 8), nn.Linear(8, 20)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4)])

    def forward(self, input_ids, guide):
        hint = self.encoder(guide).tanh()
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x * hint)
        return self.head(x)


def test_what_all_blocks_read_is_handed_on_and_made_once():
    torch.manual_seed(0)
    model = Guided().eval()
    args = (torch.randint(0, 20, (2, 5)), torch.randn(2, 5, 6))
    first, rest = split(trace(model, args), at=2)
    assert not [n for n, _ in rest.named_tensors() if n.startswith("encoder")]
    (extra,) = [i for i in rest.inputs if i.name.startswith("value.")]
    assert extra.shape == ("batch", "sequence", 8) and extra.name in first.output_names
    found = chained([first, rest], {"input_ids": args[0], "guide": args[1]})
    with torch.no_grad():
        assert torch.equal(found[rest.output_names[0]], model(*args))


def test_pieces_are_saved_and_exported(exits, pieces, llama, tmp_path, max_diff):
    ids = llama.ids(2, 9)
    expected = chained(pieces, {"input_ids": ids})
    loaded, sessions = [], []
    for number, piece in enumerate(pieces):
        piece.save(tmp_path / f"{number}.hcx")
        loaded.append(load(tmp_path / f"{number}.hcx"))
        report = to_onnx(piece, str(tmp_path / f"{number}.onnx"))
        assert report.verified and report.max_error <= 1e-4
        sessions.append(OnnxSession(str(tmp_path / f"{number}.onnx")))
    again = chained(loaded, {"input_ids": ids})
    assert all(torch.equal(again[n], t) for n, t in expected.items())
    there = chained(pieces, {"input_ids": ids}, [s.run_flat for s in sessions])
    assert max_diff(there["logits"], expected["logits"]) <= 1e-4
    sizes = [sum(t.numel() for _, t in p.named_parameters()) for p in loaded]
    whole = sum(p.numel() for p in exits.parameters())
    assert max(sizes) < 0.6 * whole


# ---- on disk


@pytest.fixture(scope="module")
def ready(exits, tmp_path_factory):
    """A folder with the whole; one of its exits leaves from a score on, the other one never."""
    place = tmp_path_factory.mktemp("pieces") / "ready.hcx"
    set_thresholds(exits, {2: 0.25}).save(place)
    return place


def test_the_command_writes_pieces_that_verify_and_make_the_whole(ready, llama, tmp_path, capsys):
    capsys.readouterr()
    assert main(["exits", "split", str(ready), "-o", str(tmp_path / "pieces"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [p["file"] for p in data["pieces"]] == ["piece-0.hcx", "piece-1.hcx", "piece-2.hcx"] and data["depth"] == 6
    assert [(p.get("exit"), p.get("threshold")) for p in data["pieces"]] == [(2, 0.25), (4, None), (None, None)]
    listed = json.loads((tmp_path / "pieces" / "pieces.json").read_text())
    assert [p["takes"] for p in listed["pieces"]] == [p["takes"] for p in data["pieces"]]
    assert listed["pieces"][1]["takes"][0] == "stream.2" and "score.4" in listed["pieces"][1]["gives"]
    pieces = [load(tmp_path / "pieces" / p["file"]) for p in data["pieces"]]
    ids = llama.ids(2, 9)
    found = chained(pieces, {"input_ids": ids})
    with torch.no_grad():
        assert torch.equal(found["logits"], llama.model(ids).logits), "the rest knows of no exits"
    assert main(["verify", str(tmp_path / "pieces" / "piece-1.hcx")]) == 0
    capsys.readouterr()
    assert main(["exits", "split", str(ready), "-o", str(tmp_path / "pieces"), "--overwrite"]) == 0
    out = capsys.readouterr().out
    assert "leaves from 0.25" in out and "never leaves" in out and "the rest" in out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["pieces"], "no partial folder is left"


def test_the_command_refuses(ready, llama, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    llama.program.rewrite("looped{start=1,end=3}", check=False).save(tmp_path / "plain.hcx")
    for source, target, options, said in (
        (ready, tmp_path / "mine", [], "exists"),
        (ready, tmp_path / "mine", ["--overwrite"], "was not written by hcx"),
        (tmp_path / "mine", tmp_path / "new", [], "not a folder written by hcx rewrite"),
        (tmp_path / "plain.hcx", tmp_path / "new", [], "not said where to cut"),
    ):
        capsys.readouterr()
        code = main(["exits", "split", str(source), "-o", str(target), *options, "--json"])
        data = json.loads(capsys.readouterr().out)
        assert code == 2 and said in data["what"] and data["try"], data
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "plain.hcx"]


def test_pieces_that_compute_something_else_are_not_written(exits, tmp_path, monkeypatch):
    from hcx.passes.exits.run import saved

    def changed(path):
        piece = load(path)
        for name, tensor in piece.named_tensors():
            if name.endswith("layers.4.mlp.down_proj.weight"):
                tensor.data.mul_(1.001)
        return piece

    monkeypatch.setattr(saved, "load", changed)
    with pytest.raises(ContractError, match="another `"):
        save_pieces(exits, tmp_path / "pieces")
    assert not list(tmp_path.iterdir())
    (tmp_path / "pieces").mkdir()
    for options, said in (({}, "exists"), ({"overwrite": True}, "holds no pieces")):
        with pytest.raises(UsageError, match=said):
            save_pieces(exits, tmp_path / "pieces", **options)


def test_refusals(llama, exits):
    with pytest.raises(UsageError, match="not said where"):
        split(llama.program)
    for at in (0, 6, [2, 9]):
        with pytest.raises(UsageError, match="cannot cut"):
            split(llama.program, at)
    cond = llama.program.rewrite(Exits(at=PLACES, form="cond", kv="propagate"), check=False)
    with pytest.raises(UsageError, match="cond form"):
        split(cond)

    class Writes(nn.Module):
        def forward(self, x):
            y = x * 2
            z = y[:, 0]
            z.add_(1)
            return y + 1

    program = trace(Writes(), (torch.randn(2, 3),))
    with pytest.raises(PlanError, match="in place"):
        cut(program, program.graph, [{"y": program.graph.output_node().args[0][0].name}])


def test_smollm2_is_cut_bitwise(smollm2):
    first, rest = split(smollm2.program, at=20)
    ids = smollm2.ids(2, 12)
    found = chained([first, rest], {"input_ids": ids})
    with torch.no_grad():
        assert torch.equal(found["logits"], smollm2.model(ids).logits)


def test_a_model_without_a_cache_is_cut():
    model = tiny_llama(4)
    ids = token_ids(24).reshape(2, 12)
    pieces = split(trace(model, (ids,), {"use_cache": False}), at=[1, 3])
    with torch.no_grad():
        assert torch.equal(chained(pieces, {"input_ids": ids})["logits"], model(ids, use_cache=False).logits)
