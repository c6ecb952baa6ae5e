"""Transformers folders and torch.export archives, against the models and formulas they must be equal to."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from hcx.cli import export as export_command
from hcx.cli.main import main
from hcx.export import to_hf, to_pt2
from hcx.passes.quantization import dequantised
from hcx.rewrite import ExportError, UsageError, load, trace
from hcx.rewrite.testing import tiny_decoder

from tests.conftest import tiny_llama, token_ids
from tests.test_lora import LLAMA, peft_with, randomised

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def auto(path):
    return transformers.AutoModelForCausalLM.from_pretrained(path).eval()


def gap(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).abs().max() / other.square().mean().sqrt()).item()


# ---- Transformers folders


def test_adapters_are_merged_as_peft_merges_them(llama, tmp_path):
    program = randomised(llama.program.rewrite("lora{rank=4,alpha=6}", check=False))
    report = to_hf(program, tmp_path / "out")
    merged = peft_with(llama.model, program, target_modules=LLAMA, r=4, lora_alpha=6).merge_and_unload()
    loaded, ids = auto(tmp_path / "out"), llama.ids(3, 9)
    assert gap(loaded(ids).logits, merged(ids).logits) < 1e-5 < 1e-2 < gap(loaded(ids).logits, llama.model(ids).logits)
    weight = "model.layers.2.mlp.down_proj.weight"
    assert torch.allclose(loaded.get_parameter(weight), merged.get_parameter(weight), atol=1e-6)
    assert not any("hcx" in name for name in loaded.state_dict()) and report.measured["sets"] == 3


def test_a_model_with_windows_whose_own_cache_has_other_tensors(tmp_path):
    torch.manual_seed(3)
    config = transformers.MistralConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
                                        num_attention_heads=4, num_key_value_heads=2, sliding_window=4)  # fmt: skip
    model, ids = transformers.MistralForCausalLM(config).eval(), token_ids(20, 64).reshape(2, 10)
    program = randomised(trace(model, (ids,)).rewrite("lora{rank=2}", check=False))
    to_hf(program, tmp_path / "out")
    assert (
        gap(auto(tmp_path / "out")(ids).logits, program(ids).logits)
        < 1e-4
        < gap(model(ids).logits, program(ids).logits)
    )


def test_conv1d_weights_and_embeddings_lie_the_other_way(tmp_path):
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2
    )
    model, ids = transformers.GPT2LMHeadModel(config).eval(), token_ids(20, 64).reshape(2, 10)
    program = randomised(trace(model, (ids,)).rewrite("lora{rank=3,alpha=5,target=[c_attn,c_fc,wpe]}", check=False))
    to_hf(program, tmp_path / "out")
    assert gap(auto(tmp_path / "out")(ids).logits, program(ids).logits) < 1e-4
    assert gap(model(ids).logits, program(ids).logits) > 1e-2


def test_quantised_weights_are_written_as_what_they_stand_for(llama, tmp_path):
    program = llama.program.rewrite("lora,quantize{bits=3}", check=False)
    program = randomised(program)
    to_hf(program, tmp_path / "out")
    loaded, weights = auto(tmp_path / "out"), dequantised(program)
    name = "model.layers.1.self_attn.q_proj.weight"
    a, b = (program.tensor(f"hcx.lora_0.{name.removesuffix('.weight')}.{n}") for n in "AB")
    assert torch.allclose(loaded.get_parameter(name), weights[name] + b @ a, atol=1e-6)
    assert gap(loaded(llama.ids(2, 9)).logits, program(llama.ids(2, 9)).logits) < 1e-4


def test_a_tied_matrix_that_was_quantised_stays_tied_and_one_with_an_adapter_does_not(tmp_path):
    model, ids = tiny_llama(2, tie_word_embeddings=True), token_ids(20).reshape(2, 10)
    program = trace(model, (ids,))
    for pipeline, tied in (("quantize{target=[embed_tokens]}", True), ("lora{target=[lm_head]}", False)):
        rewritten = randomised(program.rewrite(pipeline, check=False))
        to_hf(rewritten, tmp_path / pipeline[:4])
        loaded = auto(tmp_path / pipeline[:4])
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
        assert gap(loaded(ids).logits, rewritten(ids).logits) < 1e-4 < gap(model(ids).logits, rewritten(ids).logits)


def test_a_neutral_loop_and_silent_exits_are_left_out_and_others_refused(llama, tmp_path):
    program = llama.program.rewrite("looped{start=2,end=4},exits{at=[3]}", check=False)
    report = to_hf(program, tmp_path / "out")
    assert report.measured["bitwise"] and len(report.notes) == 2
    assert torch.equal(auto(tmp_path / "out")(llama.ids(2, 9)).logits, llama.model(llama.ids(2, 9)).logits)
    program.tensor("hcx.looped_0.scalar").data.fill_(0.3)
    with pytest.raises(ExportError, match=r"pass `looped` prevents .*scalar of 0\.3"):
        to_hf(program, tmp_path / "other")
    for pipeline, name in (
        ("exits{at=[3],threshold=0.1}", "exits"),
        ("hc", "hc"),
        ("looped{scalar=0.2},lora", "looped"),
    ):
        with pytest.raises(ExportError, match=f"pass `{name}` prevents"):
            to_hf(llama.program.rewrite(pipeline, check=False), tmp_path / "other")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_computes_something_else_is_not_left_there(llama, tmp_path, monkeypatch):
    program = randomised(llama.program.rewrite("lora", check=False))
    from hcx.passes.adapters import lowrank

    real = lowrank.updated_weight
    monkeypatch.setattr(lowrank, "updated_weight", lambda w, a, b, s, axes: real(w, a, b, 1.01 * s, axes))
    with pytest.raises(ExportError, match="output `logits` differs on input set 0"):
        to_hf(program, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_from_an_artefact_with_its_tokenizer_and_dtype(tmp_path, capsys):
    model, ids = tiny_llama(3).to(torch.bfloat16), token_ids(20).reshape(2, 10)
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    torch_inputs = tmp_path / "ids.safetensors"
    from safetensors.torch import save_file

    save_file({"input_ids": ids}, torch_inputs)
    out, artefact = tmp_path / "out", tmp_path / "m.hcx"
    call = ["rewrite", str(tmp_path / "model"), "--pass", "lora", "--inputs", str(torch_inputs), "-o", str(artefact)]
    assert main(call) == 0
    program = randomised(load(artefact), 0.05)
    program.save(artefact, overwrite=True)
    assert main(["export", str(artefact), "--to", "hf", "-o", str(out)]) == 0
    assert main(["export", str(artefact), "--to", "hf", "-o", str(out), "--overwrite", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out.split("\n", 8)[-1].partition("{")[2].join(["{", ""]))
    assert printed["verified"] and set(printed["files"]) >= {
        "config.json",
        "model.safetensors",
        "special_tokens_map.json",
    }
    stem = "model.layers.1.mlp.up_proj"
    a, b = (program.tensor(f"hcx.lora_0.{stem}.{n}").float() for n in "AB")
    expected = (model.get_parameter(f"{stem}.weight").float() + b @ a).bfloat16()
    assert torch.equal(auto(out).get_parameter(f"{stem}.weight"), expected)
    (out / "hcx.json").unlink()
    assert main(["export", str(artefact), "--to", "hf", "-o", str(out), "--overwrite"]) == 2


def test_what_is_no_transformers_model_and_options_without_effect(tmp_path):
    model, ids = tiny_decoder()
    with pytest.raises(UsageError, match="TinyDecoder is not a model class of Transformers"):
        to_hf(trace(model, (ids,)), tmp_path / "out")
    for options in ({"to": "hf", "taps": True}, {"to": "pt2", "opset": 20}, {"to": "pt2", "upcast": True}):
        with pytest.raises(UsageError, match="has no effect"):
            export_command("x.hcx", **options)


# ---- torch.export archives


def test_an_archive_runs_without_hcx_at_other_sizes(llama, tmp_path):
    program = llama.program.rewrite("looped{start=2,end=4,scalar=0.3},exits{at=[3],threshold=0.02},lora", check=False)
    program = randomised(program)
    report = to_pt2(program, tmp_path / "x.pt2", taps=True)
    ids = llama.ids(3, 17)
    flat = program.signature.bind((), {"input_ids": ids})
    names = [i.name.replace(".", "_") for i in program.inputs]
    torch.save(dict(zip(names, flat, strict=True)), tmp_path / "inputs.pt")
    code = ("import torch, sys; m = torch.export.load('x.pt2').module(); out = m(**torch.load('inputs.pt'));"
            "torch.save(dict(out), 'out.pt'); assert not any(n.startswith('hcx') for n in sys.modules)")  # fmt: skip
    subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, check=True)
    out = torch.load(tmp_path / "out.pt")
    expected, taps = program(ids, taps=True)
    assert gap(out["logits"], expected.logits) < 1e-5 and torch.equal(out["exits.depth"], taps["exits.depth"])
    assert gap(expected.logits, llama.model(ids).logits) > 1e-2 and "present.7.key" in out and not report.notes
    assert report.measured["sets"] >= 3, "several sizes, and a filled cache"


def test_a_loaded_decoder_is_written_with_its_sizes_open(llama, tmp_path):
    llama.program.rewrite("looped{start=2,end=4,scalar=0.3}").save(tmp_path / "a.hcx")
    program = load(tmp_path / "a.hcx")
    assert any(0 in t.shape for t in program.signature.complete(program.examples[0])), "its example has an empty cache"
    to_pt2(program, tmp_path / "x.pt2")
    ids = llama.ids(3, 17)
    flat = dict(zip([i.name.replace(".", "_") for i in program.inputs],
                    program.signature.bind((), {"input_ids": ids}), strict=True))  # fmt: skip
    out = torch.export.load(tmp_path / "x.pt2").module()(**flat)
    assert gap(out["logits"], program(ids).logits) < 1e-5


def test_hcx_reads_the_archive_back(tmp_path):
    model, ids = tiny_decoder()
    program = trace(model, (ids,)).rewrite("hc", check=False)
    report = to_pt2(program, tmp_path / "x.pt2")
    assert "import hcx.kernels" in report.notes[0]
    from hcx.cli.opening import program_of

    again = program_of(str(tmp_path / "x.pt2"))
    assert again.inputs[0].shape == ("batch", "sequence")
    assert torch.equal(again(input_ids=ids[:1])["logits"], program(ids[:1])["logits"])


def test_a_bad_archive_is_not_left_there(llama, tmp_path, monkeypatch):
    real = torch.export.load

    def wrong(path):
        exported = real(path)
        exported.state_dict["model.norm.weight"].data.mul_(1.001)
        return exported

    monkeypatch.setattr(torch.export, "load", wrong)
    with pytest.raises(ExportError, match="output `logits` differs"):
        to_pt2(llama.program, tmp_path / "x.pt2")
    (tmp_path / "y.pt2").write_text("")
    for path in ("y.pt2", "x.onnx"):
        with pytest.raises(UsageError):
            to_pt2(llama.program, tmp_path / path)
    assert [p.name for p in tmp_path.iterdir()] == ["y.pt2"]


def test_an_archive_with_a_fixed_size_is_refused(llama, tmp_path, monkeypatch):
    from hcx.export import pt2_export

    real = torch.export.export

    def fixed(*args, dynamic_shapes, **options):
        return real(*args, **options)

    monkeypatch.setattr(pt2_export.torch.export, "export", fixed)
    with pytest.raises(ExportError, match=r"dimension 0 of `input_ids` \(batch\) became 2"):
        to_pt2(llama.program, tmp_path / "x.pt2")
