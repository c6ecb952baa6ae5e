"""Models larger than memory: their weights stay in their files, and the result is that of an ordinary rewrite."""

from __future__ import annotations

import hashlib
import json
import shutil

import pytest
import torch
from hcx.cli.main import main
from hcx.cli.opening import open_program
from hcx.rewrite import ArtefactError, SourceError, load, trace, verify
from hcx.rewrite.source import memory, open_model
from hcx.rewrite.source.stored import Stored
from safetensors.torch import load_file, save_file

from tests.conftest import tiny_llama, token_ids
from tests.test_lora import randomised

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
PIPELINE = "looped{start=2,end=3,scalar=0.3},exits{at=[3],threshold=0.02},lora{rank=4}"


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=128, n_embd=32, n_layer=4, n_head=4, n_positions=64, initializer_range=0.2
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.GPT2LMHeadModel(config).eval()


MODELS = {"llama": lambda: tiny_llama(4), "gpt2 with a tied head": gpt2}


@pytest.fixture(scope="module")
def ids(tmp_path_factory):
    path = tmp_path_factory.mktemp("inputs") / "ids.safetensors"
    save_file({"input_ids": token_ids(24).reshape(2, 12)}, path)
    return path


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded") / "model"
    tiny_llama(4).save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2 and (folder / "model.safetensors.index.json").is_file()
    return folder


@pytest.fixture(scope="module")
def lazy(sharded, ids):
    return open_program(str(sharded), inputs=str(ids), lazy=True).program


@pytest.fixture(scope="module")
def plain(ids):
    return trace(tiny_llama(4), (), load_file(ids))


@pytest.fixture(scope="module")
def artefact(sharded, ids, tmp_path_factory):
    path = tmp_path_factory.mktemp("lazy") / "m.hcx"
    call = ["rewrite", str(sharded), "--lazy", "--pass", PIPELINE, "--inputs", str(ids), "-o", str(path)]
    assert main(call) == 0
    return path


@pytest.fixture
def no_reading(monkeypatch):
    read = []
    real = Stored.read
    monkeypatch.setattr(Stored, "read", lambda self: read.append(self.key) or real(self))
    return read


def gap(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).abs().max() / other.square().mean().sqrt()).item()


@pytest.mark.parametrize("case", MODELS)
def test_it_is_the_ordinary_rewrite(case, ids, tmp_path, no_reading):
    model, example = MODELS[case](), load_file(ids)
    model.save_pretrained(tmp_path / "model", max_shard_size="60KB")
    plain = trace(model, (), example)
    lazy = open_program(str(tmp_path / "model"), inputs=str(ids), lazy=True).program
    assert [i.name for i in lazy.inputs] == [i.name for i in plain.inputs], "mask, positions and cache included"
    assert [(i.shape, i.dtype, i.fill) for i in lazy.inputs] == [(i.shape, i.dtype, i.fill) for i in plain.inputs]
    assert all(t.is_meta for t in lazy.parameters()) and lazy.tied_groups() == plain.tied_groups()
    rewritten = lazy.rewrite(PIPELINE)
    ordinary = plain.rewrite(PIPELINE, check=False)
    assert [e["plan"]["steps"] for e in rewritten.history] == [e["plan"]["steps"] for e in ordinary.history]
    assert all(
        e["owed"] and [c["name"] for c in e["checks"]] == ["graph in shapes and dtypes"] for e in rewritten.history
    )
    randomised(rewritten, 0.1), randomised(ordinary, 0.1)
    rewritten.save(tmp_path / "m.hcx")
    assert no_reading == [], "no weight of the base is read"
    loaded = load(tmp_path / "m.hcx", weights=tmp_path / "model")
    tokens = token_ids(27, seed=5).reshape(3, 9)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    got, expected = (p(input_ids=tokens, attention_mask=mask).logits for p in (loaded, ordinary))
    assert gap(got, expected) < 1e-5
    assert gap(expected, model(tokens, attention_mask=mask).logits) > 1e-2


def test_only_what_a_pass_looks_at_is_read(lazy, plain, no_reading):
    rewritten = lazy.rewrite("lora,quantize{bits=3,target=[*.1.*.q_proj,down_proj]}")
    wanted = {n for n in lazy.stored if n.endswith("down_proj.weight")} | {"model.layers.1.self_attn.q_proj.weight"}
    assert sorted(no_reading) == sorted(wanted) and not wanted & set(rewritten.stored)
    ordinary = plain.rewrite(str(rewritten.history[1]["pipeline"]), check=False)
    theirs = dict(ordinary.named_tensors())
    codes = {n: t for n, t in rewritten.named_tensors() if n.startswith("hcx.quantize_0")}
    assert codes and all(torch.equal(t, theirs[n]) for n, t in codes.items())


def test_the_artefact_holds_no_weight_of_the_base_and_says_where_each_is(sharded, artefact):
    stored = load_file(artefact / "weights.safetensors")
    assert stored and all(n.startswith(("hcx.", "model.rotary_emb.")) for n in stored)
    external = json.loads((artefact / "manifest.json").read_text())["external"]
    index = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(external) == set(index)
    for name in ("model.norm.weight", "model.layers.3.mlp.up_proj.weight"):
        content = load_file(sharded / index[name])[name].numpy().tobytes()
        assert external[name]["file"] == index[name] and external[name]["key"] == name
        assert external[name]["sha256"] == hashlib.sha256(content).hexdigest()


def test_verify_pays_what_is_owed(sharded, artefact, capsys):
    assert main(["verify", str(artefact), "--weights", str(sharded), "--json"]) == 0
    checks = {c["name"]: c for c in json.loads(capsys.readouterr().out)["checks"]}
    assert {"source weights are as recorded", "against the source model in eager", "not vacuous: looped",
            "not vacuous: lora", "live gradients", "cached decoding equals the full forward"} <= set(checks)  # fmt: skip
    assert (
        checks["live gradients"]["measured"]["parameters"] > 50 and checks["not vacuous: lora"]["measured"]["moved"] > 0
    )


def test_owed_checks_of_a_model_whose_own_cache_keeps_windows(tmp_path, capsys):
    torch.manual_seed(0)
    config = transformers.MistralConfig(vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
                                        num_attention_heads=4, num_key_value_heads=2, sliding_window=4)  # fmt: skip
    transformers.MistralForCausalLM(config).eval().save_pretrained(tmp_path / "model")
    save_file({"input_ids": token_ids(24).reshape(2, 12)}, tmp_path / "ids.safetensors")
    call = ["--lazy", "--pass", "lora{rank=2}", "--inputs", str(tmp_path / "ids.safetensors")]
    assert main(["rewrite", str(tmp_path / "model"), *call, "-o", str(tmp_path / "a.hcx")]) == 0
    assert main(["verify", str(tmp_path / "a.hcx"), "--weights", str(tmp_path / "model"), "--json"]) == 0
    assert "against the source model in eager" in capsys.readouterr().out


def test_a_promise_that_was_not_kept_is_found(sharded, lazy, tmp_path):
    lazy = lazy.rewrite("looped{start=2,end=3},lora")
    lazy.save(tmp_path / "good.hcx")
    assert all(c.holds for c in verify(tmp_path / "good.hcx", weights=sharded))
    with torch.no_grad():
        lazy.tensor("hcx.looped_0.scalar").fill_(0.2)
    lazy.save(tmp_path / "bad.hcx")
    failed = [c.name for c in verify(tmp_path / "bad.hcx", weights=sharded) if not c.holds]
    assert failed == ["against the source model in eager"]


def test_where_memory_is_short_the_checks_stay_owed(sharded, artefact, tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text("MemTotal: 4 kB\nMemAvailable: 100 kB\n")
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    checks = verify(artefact, weights=sharded)
    assert [c.name for c in checks] == ["files are as written", "source weights are as recorded", "owed checks"]
    assert checks[-1].measured["needed GB"] > checks[-1].measured["available GB"] and "memory" in checks[-1].note


def test_other_weights_are_refused(sharded, artefact, tmp_path, capsys):
    with pytest.raises(ArtefactError, match="are in the weight files") as error:
        load(artefact)
    assert "--weights" in error.value.hint
    changed = shutil.copytree(sharded, tmp_path / "changed")
    index = json.loads((changed / "model.safetensors.index.json").read_text())["weight_map"]
    shard = changed / index["model.norm.weight"]
    tensors = load_file(shard)
    tensors["model.norm.weight"][3] += 1e-3
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(ArtefactError, match=r"`model\.norm\.weight` .* is not what it was"):
        load(artefact, weights=changed)
    load(artefact, weights=changed, lazy=True).read("model.embed_tokens.weight")
    with pytest.raises(ArtefactError, match="is not what it was"):
        load(artefact, weights=changed, lazy=True).read("model.norm.weight")
    assert main(["verify", str(artefact), "--weights", str(changed)]) == 1
    assert "source weights are as recorded" in capsys.readouterr().err
    with pytest.raises(ArtefactError, match="is not in"):
        load(artefact, weights=tmp_path)


@pytest.mark.parametrize("entry", [
    {"file": "../model/secret.safetensors"}, {"file": "/etc/x.safetensors"}, {"file": "config.json"}, {"key": "lm_head.weight"},
    {"dtype": "F16"}, {"shape": [3]}, {"sha256": 3}, {"sha256": "0" * 64},
])  # fmt: skip
def test_a_manifest_cannot_ask_for_other_files_or_tensors(sharded, artefact, tmp_path, entry):
    copied = shutil.copytree(artefact, tmp_path / "m.hcx")
    manifest = json.loads((copied / "manifest.json").read_text())
    manifest["external"]["model.norm.weight"].update(entry)
    (copied / "manifest.json").write_text(json.dumps(manifest))
    shutil.copytree(sharded, tmp_path / "model")
    save_file({"model.norm.weight": torch.ones(32)}, tmp_path / "model" / "secret.safetensors")
    with pytest.raises(ArtefactError):
        load(copied, weights=tmp_path / "model")


def test_a_lazy_artefact_is_rewritten_and_saved_again(sharded, artefact, tmp_path, no_reading):
    again = load(artefact, weights=sharded, lazy=True).rewrite("quantize{bits=4,target=[up_proj]}")
    again.save(tmp_path / "again.hcx")
    assert {n.rsplit(".", 2)[1] for n in no_reading} == {"up_proj"} and len(no_reading) == 4
    direct = load(artefact, weights=sharded).rewrite("quantize{bits=4,target=[up_proj]}", check=False)
    tokens = token_ids(18).reshape(2, 9)
    assert torch.equal(load(tmp_path / "again.hcx", weights=sharded)(tokens).logits, direct(tokens).logits)
    direct.save(tmp_path / "whole.hcx")
    assert torch.equal(load(tmp_path / "whole.hcx")(tokens).logits, direct(tokens).logits), "it holds everything"


def test_a_diff_reads_the_weights_that_an_artefact_refers_to(sharded, artefact, ids, capsys):
    assert main(["diff", str(sharded), str(artefact), "--inputs", str(ids), "--weights", str(sharded), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["diff"]["tensors"]
    assert found and all("hcx." in json.dumps(change) for change in found), "no tensor of the model's own"
    assert main(["diff", str(sharded), str(artefact), "--inputs", str(ids)]) == 2
    assert "--weights" in capsys.readouterr().err
    assert main(["diff", str(sharded), str(sharded), "--inputs", str(ids), "--weights", str(sharded)]) == 2


def test_folders_that_cannot_be_read_lazily(sharded, tmp_path):
    other = shutil.copytree(sharded, tmp_path / "dtype")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16", "torch_dtype": "bfloat16"}))
    with pytest.raises(SourceError, match="is stored as F32"):
        open_model(str(other), lazy=True)
    (other / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 6}))
    with pytest.raises(SourceError, match=r"lacks `model.layers."):
        open_model(str(other), lazy=True)
    save_file({"x": torch.ones(2)}, tmp_path / "x.safetensors")
    for arguments in (["plan", str(tmp_path / "x.safetensors"), "--lazy"], ["plan", str(sharded), "--weights", "x"]):
        assert main([*arguments, "--pass", "lora"]) == 2


def test_a_detached_constant_is_not_taken_for_a_write():
    """On ``meta`` torch.export lifts the empty start of a cache and detaches it in place."""
    with torch.device("meta"):
        model, tokens = tiny_llama(1), torch.zeros(2, 12, dtype=torch.int64)
    program = trace(model, (tokens,), cache=False)
    assert "aten.detach_.default" not in {str(n.target) for n in program.graph.nodes}
