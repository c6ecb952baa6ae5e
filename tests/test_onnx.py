"""Programs as ONNX files, end to end: names, structure, weights once, checks that bite."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("onnxruntime")

import onnx
import onnx_ir as ir
from hcx.export import OnnxSession, preflight, producers, samples, to_onnx, verify
from hcx.rewrite import trace
from hcx.rewrite.errors import ExportError, UsageError
from hcx.rewrite.run.generation import greedy

Pair = namedtuple("Pair", ["b", "a"])


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, -1))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Tied(nn.Module):
    """A language model whose block runs several times and whose head is its embedding."""

    def __init__(self, times=4, vocab=37, width=16):
        super().__init__()
        self.embed, self.block, self.norm = nn.Embedding(vocab, width), Block(width), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight, self.times = self.embed.weight, times

    def forward(self, ids):
        x = self.embed(ids)
        for _ in range(self.times):
            x = self.block(x)
        return self.head(self.norm(x))


class Image(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.norm.running_mean.normal_()
        self.head = nn.Linear(4, 5)

    def forward(self, image):
        x = F.max_pool2d(F.relu(self.norm(self.conv(image))), 2)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(6, 6)

    def forward(self, x):
        y = self.f(x)
        return {"zeros": y * 0, "ones": torch.ones_like(y), "pair": Pair(b=y, a=x + y), "none": None, "n": 3}


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.g = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, y, *, scale=1.0):
        return self.f(x) - self.g(y) * scale


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x, mask):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :] & mask[:, None, :, None])
        return x + y.transpose(1, 2).flatten(2)


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.o = nn.Embedding(4096, 128), nn.Linear(128, 4096, bias=False)

    def forward(self, ids):
        return self.o(self.e(ids).mean(1))


class Calls(nn.Module):
    """A module of one function, for operators that are refused."""

    def __init__(self, function):
        super().__init__()
        self.function, self.f = function, nn.Linear(8, 8)

    def forward(self, x):
        return self.function(self.f(x))


def ids(*shape: int, vocab: int = 37) -> torch.Tensor:
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def tied():
    torch.manual_seed(0)
    return trace(Tied().eval(), (ids(2, 5),))


@pytest.fixture(scope="module")
def decoder():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    return model, trace(model, (), {"input_ids": ids(2, 6, vocab=97)})


def initializers(path: Path) -> dict[str, ir.TensorProtocol]:
    return {n: v.const_value for n, v in ir.load(path).graph.initializers.items()}


def contents(path: Path) -> list[tuple]:
    return [
        (str(t.dtype), tuple(t.shape), hashlib.sha256(t.numpy().tobytes()).hexdigest())
        for t in initializers(path).values()
    ]


def dims(value) -> list:
    return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]


def left_over(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


# ---- what is in the file


def test_decoder_with_cache(decoder, tmp_path):
    model, program = decoder
    report = to_onnx(program, tmp_path / "m.onnx")
    assert report.producer == "direct" and report.max_error < 1e-4
    assert {c.optimized for c in report.comparisons} == {True, False}
    assert {c.shapes["past_key_values.0.key"][2] > 0 for c in report.comparisons} == {True, False}
    proto = onnx.load(tmp_path / "m.onnx")
    assert [i.name for i in proto.graph.input] == [i.name for i in program.inputs]
    assert [o.name for o in proto.graph.output] == program.output_names
    assert dims(next(i for i in proto.graph.input if i.name == "past_key_values.1.value")) == ["batch", 2, "past", 8]
    assert dims(next(o for o in proto.graph.output if o.name == "present.1.key")) == ["batch", 2, "past+sequence", 8]
    kinds = [n.op_type for n in proto.graph.node]
    assert (
        kinds.count("RMSNormalization") == 5 and kinds.count("RotaryEmbedding") == 4 and kinds.count("Attention") == 2
    )
    session = OnnxSession(tmp_path / "m.onnx")
    for batch, length in ((1, 4), (3, 9)):
        given = ids(batch, length, vocab=97)
        with torch.no_grad():
            torch.testing.assert_close(
                session(input_ids=given).logits, model(input_ids=given).logits, atol=1e-5, rtol=0
            )
    assert torch.equal(session.greedy(ids(2, 6, vocab=97), 8), greedy(program, ids(2, 6, vocab=97), 8))


def test_left_padding_in_the_batch(decoder, tmp_path):
    model, program = decoder
    session = OnnxSession(to_onnx(program, tmp_path / "m.onnx", verify=False).path)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    with torch.no_grad():
        expected = model(input_ids=ids(2, 5, vocab=97), attention_mask=mask).logits
    got = session(input_ids=ids(2, 5, vocab=97), attention_mask=mask).logits
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], atol=1e-5, rtol=0)


@pytest.mark.parametrize("producer", ["direct", "torch"])
def test_weights_are_named_and_stored_once(tied, tmp_path, producer):
    """A tied head and a block that runs four times; torch.onnx alone would fold a transpose for every use."""
    report = to_onnx(tied, tmp_path / "m.onnx", producer=producer)
    stored = contents(tmp_path / "m.onnx")
    assert len(set(stored)) == len(stored)
    held = initializers(tmp_path / "m.onnx")
    for name, parameter in tied.named_parameters():
        home = report.aliases.get(name, name)
        assert held[home].numpy().shape == tuple(parameter.shape)
        assert torch.equal(torch.from_numpy(held[home].numpy().copy()), parameter)
    assert "head.weight" in held or "embed.weight" in held
    weights = sum(t.nbytes for t in held.values())
    assert weights <= 1.05 * sum(p.numel() * 4 for p in tied.parameters()) + 2048


def test_loop_adds_no_weights(tmp_path):
    once, often = (to_onnx(trace(Tied(times).eval(), (ids(2, 5),)), tmp_path / f"{times}.onnx") for times in (1, 6))
    sizes = [sum(t.nbytes for t in initializers(r.path).values()) for r in (once, often)]
    assert sizes[1] <= sizes[0] + 256


def test_metadata(tied, tmp_path):
    report = to_onnx(tied, tmp_path / "m.onnx")
    metadata = OnnxSession(report.path).metadata
    provenance = json.loads(metadata["hcx.provenance"])
    assert provenance["history"] == tied.history and provenance["opset"] == 23
    assert json.loads(metadata["hcx.signature"]) == json.loads(json.dumps(tied.signature.to_json()))
    assert json.loads(metadata["hcx.aliases"]) == report.aliases
    proto = onnx.load(report.path)
    assert not any(n.metadata_props or n.doc_string for n in proto.graph.node)
    assert any(n.name.startswith("block.qkv/") for n in proto.graph.node)
    json.dumps(report.to_json())
    assert "agrees" in str(report)


def test_image_network(tmp_path):
    model = Image().eval()
    program = trace(model, (torch.randn(2, 3, 8, 8),))
    session = OnnxSession(to_onnx(program, tmp_path / "m.onnx").path)
    image = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(session(image), model(image), atol=1e-5, rtol=1e-5)
    assert {"conv.weight", "norm.running_mean"} <= set(initializers(tmp_path / "m.onnx"))


def test_encoder(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    model = transformers.BertForMaskedLM(config).eval()
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    program = trace(model, (), {"input_ids": ids(2, 6, vocab=97), "attention_mask": mask})
    session = OnnxSession(to_onnx(program, tmp_path / "m.onnx").path)
    with torch.no_grad():
        expected = model(input_ids=ids(2, 6, vocab=97), attention_mask=mask).logits
    torch.testing.assert_close(
        session(input_ids=ids(2, 6, vocab=97), attention_mask=mask).logits, expected, atol=1e-5, rtol=0
    )


def test_nested_outputs(tmp_path):
    model = Named().eval()
    session = OnnxSession(to_onnx(trace(model, (torch.randn(2, 6),)), tmp_path / "m.onnx").path)
    x = torch.randn(4, 6)
    out, expected = session(x), model(x)
    assert session.output_names == ["zeros", "ones", "pair.b", "pair.a"]
    assert list(out) == list(expected) and out["none"] is None and out["n"] == 3
    assert bool((out["zeros"] == 0).all()) and bool((out["ones"] == 1).all())
    torch.testing.assert_close(out["pair"].a, expected["pair"].a)


def test_two_inputs_of_one_tensor(tmp_path):
    model, x = Two().eval(), torch.randn(2, 6)
    session = OnnxSession(to_onnx(trace(model, (x, x), {"scale": 0.5}), tmp_path / "m.onnx").path)
    a, b = torch.randn(3, 6), torch.randn(3, 6)
    assert session.input_names == ["x", "y"]
    torch.testing.assert_close(session(y=b, x=a, scale=0.5), model(a, b, scale=0.5))
    with pytest.raises(UsageError):
        session(a, b, scale=2.0)


@pytest.mark.parametrize("producer", ["direct", "torch"])
def test_input_that_is_an_output(tmp_path, producer):
    class Same(nn.Module):
        def forward(self, x):
            y = x * 2
            return {"x": x, "twice": y, "again": x * 2, "same": y}

    report = to_onnx(trace(Same().eval(), (torch.randn(2, 3),)), tmp_path / "m.onnx", producer=producer)
    assert any("x.out" in n for n in report.notes)
    out = OnnxSession(report.path)(torch.ones(4, 3))
    assert list(out) == ["x", "twice", "again", "same"]
    assert float(out["again"].sum()) == float(out["same"].sum()) == 24


# ---- masks, opsets, dtypes


@pytest.mark.parametrize("opset", [18, 20, 22, 23, 24, 26])
def test_rows_that_see_nothing(tmp_path, opset):
    model = Masked().eval()
    program = trace(model, (torch.randn(2, 4, 8), torch.tensor([[True, True, False, False], [True] * 4])))
    session = OnnxSession(to_onnx(program, tmp_path / "m.onnx", opset=opset).path)
    x, mask = torch.randn(1, 3, 8), torch.zeros(1, 3, dtype=torch.bool)
    torch.testing.assert_close(session(x, mask), model(x, mask), atol=1e-6, rtol=0)
    proto = onnx.load(tmp_path / "m.onnx")
    assert proto.graph.input[1].type.tensor_type.elem_type == onnx.TensorProto.BOOL
    assert {i.domain: i.version for i in proto.opset_import} == {"": opset}


def test_wrong_attention_of_torch_onnx_is_caught(tmp_path):
    """torch.onnx at opset 18 gives uniform attention to an empty row; the checks see it though the example has none."""
    program = trace(Masked().eval(), (torch.randn(2, 4, 8), torch.ones(2, 4, dtype=torch.bool)))
    with pytest.raises(ExportError, match="disagrees"):
        to_onnx(program, tmp_path / "m.onnx", opset=18, producer="torch")
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("opset", [11, 14, 17, 27, 99, "23", True])
def test_unusable_opset(tied, tmp_path, opset):
    with pytest.raises(ExportError, match="18 to 26"):
        to_onnx(tied, tmp_path / "m.onnx", opset=opset)
    assert left_over(tmp_path) == []


def test_bfloat16(tmp_path):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).bfloat16().eval()
    program = trace(model, (torch.randn(2, 8).bfloat16(),))
    with pytest.raises(ExportError, match="bfloat16"):
        to_onnx(program, tmp_path / "m.onnx")
    assert left_over(tmp_path) == []
    to_onnx(program, tmp_path / "m.onnx", upcast=True)
    assert {str(t.dtype) for t in initializers(tmp_path / "m.onnx").values()} == {"FLOAT"}


def test_complex_numbers_as_pairs(tmp_path):
    class Rope(nn.Module):
        def __init__(self):
            super().__init__()
            angles = torch.outer(torch.arange(16.0), torch.tensor([1.0, 0.1]))
            self.register_buffer("table", torch.polar(torch.ones_like(angles), angles), persistent=False)
            self.f = nn.Linear(4, 4)

        def forward(self, x):
            x = self.f(x)
            z = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * self.table[: x.shape[1]].unsqueeze(0)
            return torch.view_as_real(z).flatten(2)

    model = Rope().eval()
    session = OnnxSession(to_onnx(trace(model, (torch.randn(2, 5, 4),)), tmp_path / "m.onnx").path)
    x = torch.randn(1, 9, 4)
    torch.testing.assert_close(session(x), model(x))


def test_writes_through_views(tmp_path):
    class Writes(nn.Module):
        def forward(self, x):
            y = x * 1
            y[:, 0] = 1.0
            y[:, 1:].mul_(2)
            return y, y.view(x.shape[0], -1).sum(1)

    session = OnnxSession(to_onnx(trace(Writes().eval(), (torch.randn(2, 5),)), tmp_path / "m.onnx").path)
    x = torch.randn(3, 5)
    for got, expected in zip(session(x), Writes()(x), strict=True):
        torch.testing.assert_close(got, expected)


# ---- refusals leave nothing


def test_falls_back_to_torch_onnx(tmp_path):
    program = trace(Calls(lambda x: torch.atan2(x, x + 3)).eval(), (torch.randn(2, 8),))
    report = to_onnx(program, tmp_path / "m.onnx")
    assert report.producer == "torch" and "atan2" in report.notes[0]
    assert "f.weight" in initializers(report.path)
    with pytest.raises(ExportError, match="atan2"):
        to_onnx(program, tmp_path / "n.onnx", producer="direct")


def test_operator_that_nobody_has(tmp_path):
    program = trace(Calls(lambda x: torch.cummax(x, 1)[0]).eval(), (torch.randn(2, 8),))
    with pytest.raises(ExportError, match="cummax") as caught:
        to_onnx(program, tmp_path / "new" / "m.onnx")
    assert "test_onnx.py" in str(caught.value) and "18 to 26" in str(caught.value)
    assert left_over(tmp_path) == []


@pytest.mark.parametrize(
    "function", [lambda x: F.dropout(x, 0.5, training=True), lambda x: x + torch.rand_like(x)], ids=["dropout", "rand"]
)
def test_random_operators(tmp_path, function):
    with torch.no_grad():
        exported = torch.export.export(Calls(function).eval(), (torch.randn(2, 8),), strict=False)
    with pytest.raises(ExportError, match="eval"):
        preflight.check(exported.module(check_guards=False), upcast=False)


def test_weights_that_are_not_there():
    with torch.device("meta"), torch.no_grad():
        exported = torch.export.export(nn.Linear(8, 8), (torch.randn(2, 8),), strict=False)
    with pytest.raises(ExportError, match="meta"):
        preflight.check(exported.module(check_guards=False), upcast=False)


def _sabotaged(change):
    """The direct producer with a change to its model."""
    make = producers.PRODUCERS["direct"]

    def producer(job):
        model = make(job)
        change(model)
        return model

    return producer


def _wrong_weight(model):
    value = model.graph.initializers["block.down.weight"]
    array = value.const_value.numpy().copy()
    array[0, 0] += 0.5
    value.const_value = ir.tensor(array, name=value.name)


def _other_dtype(model):
    value = model.graph.initializers["block.down.weight"]
    value.const_value = ir.tensor(value.const_value.numpy().astype("float64"), name=value.name)


@pytest.mark.parametrize(
    "change, message", [(_wrong_weight, "disagrees"), (_other_dtype, "checker|load")], ids=["weight", "dtype"]
)
def test_sabotage(tied, tmp_path, monkeypatch, change, message):
    monkeypatch.setitem(producers.PRODUCERS, "direct", _sabotaged(change))
    with pytest.raises(ExportError, match=message):
        to_onnx(tied, tmp_path / "m.onnx", producer="direct")
    assert left_over(tmp_path) == []
    report = to_onnx(tied, tmp_path / "m.onnx")
    assert report.producer == "torch" and report.notes[0].startswith("direct producer")


def test_swapped_outputs_are_caught(tmp_path, monkeypatch):
    def swap(model):
        first, second = model.graph.outputs[0], model.graph.outputs[1]
        first.name, second.name = "tmp", first.name
        first.name = "ones"
        model.graph.outputs[0], model.graph.outputs[1] = second, first

    monkeypatch.setitem(producers.PRODUCERS, "direct", _sabotaged(swap))
    with pytest.raises(ExportError, match="zeros"):
        to_onnx(trace(Named().eval(), (torch.randn(2, 6),)), tmp_path / "m.onnx", producer="direct")


def test_comparison_bites():
    run = verify._Run(True, {"x": (2, 3)}, 1.0)
    reference = torch.tensor([[1.0, 2.0, 3.0]])
    assert run.difference("y", reference + 5e-4, reference) < 1e-3
    for wrong in (reference + 2e-3, reference[:, :2], torch.tensor([[1.0, float("nan"), 3.0]])):
        with pytest.raises(ExportError):
            run.difference("y", wrong, reference)
    with pytest.raises(ExportError):
        run.difference("y", torch.tensor([1, 2]), torch.tensor([1, 3]))
    assert run.difference("y", 1000 * reference + 0.05, 1000 * reference) > 0
    with pytest.raises(ExportError, match="another place"):
        run.top1(["y"], [torch.tensor([[3.0, 2.9996]])], [torch.tensor([[2.9996, 3.0]])])
    assert run.top1(["y"], [torch.tensor([[3.0, 3.0]])], [torch.tensor([[3.0, 3.0]])])


def test_samples_cover_caches_and_hidden_rows(decoder):
    _, program = decoder
    sets = samples.samples(program)
    names = [i.name for i in program.inputs]
    past = [s.flat[names.index("past_key_values.0.key")].shape[2] for s in sets]
    assert min(past) == 0 and max(past) > 0
    assert any(int(s.flat[names.index("attention_mask")].min()) == 0 for s in sets)


# ---- files


def test_external_data(tmp_path):
    first, second = Wide().eval(), Wide().eval()
    program = trace(first, (ids(2, 4, vocab=4096),))
    to_onnx(program, tmp_path / "m.onnx", external=True)
    report = to_onnx(trace(second, (ids(2, 4, vocab=4096),)), tmp_path / "m.onnx", external=True, overwrite=True)
    assert left_over(tmp_path) == ["m.onnx", "m.onnx.data"] and report.data == tmp_path / "m.onnx.data"
    assert report.data_bytes == 2 * 4096 * 128 * 4 == (tmp_path / "m.onnx.data").stat().st_size
    proto = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    places = {e.value for t in proto.graph.initializer for e in t.external_data if e.key == "location"}
    assert places == {"m.onnx.data"}
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in ("m.onnx", "m.onnx.data"):
        shutil.move(tmp_path / name, moved / name)
    given = ids(3, 2, vocab=4096)
    torch.testing.assert_close(OnnxSession(moved / "m.onnx")(given), second(given), atol=1e-5, rtol=0)
    to_onnx(program, moved / "m.onnx", overwrite=True)
    assert left_over(moved) == ["m.onnx"]


def test_existing_files(tied, tmp_path, monkeypatch):
    path = tmp_path / "m.onnx"
    path.write_text("mine")
    with pytest.raises(UsageError, match="exists"):
        to_onnx(tied, path)
    monkeypatch.setitem(producers.PRODUCERS, "direct", _sabotaged(_wrong_weight))
    with pytest.raises(ExportError):
        to_onnx(tied, path, overwrite=True, producer="direct")
    assert path.read_text() == "mine" and left_over(tmp_path) == ["m.onnx"]
    monkeypatch.undo()
    to_onnx(tied, path, overwrite=True)
    assert OnnxSession(path)(ids(1, 3)).shape == (1, 3, 37)


def test_interrupted_move_brings_the_old_files_back(tied, tmp_path, monkeypatch):
    to_onnx(tied, tmp_path / "m.onnx", external=True)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    replace = os.replace

    def failing(source, target):
        if Path(target) == tmp_path / "m.onnx" and ".old" not in str(source):
            raise OSError("no space left")
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="no space"):
        to_onnx(tied, tmp_path / "m.onnx", external=True, overwrite=True, verify=False)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_folder_with_companions(tied, tmp_path):
    tied.companions["tokenizer.json"] = b"{}"
    try:
        report = to_onnx(tied, tmp_path / "out")
    finally:
        tied.companions.clear()
    assert left_over(tmp_path / "out") == ["model.onnx", "tokenizer.json"] and left_over(tmp_path) == ["out"]
    assert report.companions == [tmp_path / "out" / "tokenizer.json"]
    assert OnnxSession(tmp_path / "out")(ids(2, 4)).shape == (2, 4, 37)


def test_same_program_gives_the_same_bytes(tied, tmp_path):
    files = [to_onnx(tied, tmp_path / f"{i}.onnx", verify=False).path.read_bytes() for i in range(2)]
    assert files[0] == files[1]


# ---- the session


def test_session_on_foreign_file(tmp_path):
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["n"]))
    node = ir.node("Neg", [x])
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = "y", x.type, x.shape
    ir.save(
        ir.Model(ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 23}, name="g"), ir_version=10),
        tmp_path / "f.onnx",
    )
    session = OnnxSession(tmp_path / "f.onnx")
    assert session(x=torch.ones(2))["y"].tolist() == [-1, -1] == session(torch.ones(2))["y"].tolist()
    for args, kwargs in (((), {}), ((), {"z": torch.ones(2)}), ((torch.ones(2), torch.ones(2)), {})):
        with pytest.raises(UsageError):
            session(*args, **kwargs)


def test_session_errors(tied, tmp_path):
    with pytest.raises(UsageError, match="no ONNX file"):
        OnnxSession(tmp_path / "none.onnx")
    (tmp_path / "bad.onnx").write_bytes(b"not a model")
    with pytest.raises(UsageError, match="cannot load"):
        OnnxSession(tmp_path / "bad.onnx")
    session = OnnxSession(to_onnx(tied, tmp_path / "m.onnx", verify=False).path)
    with pytest.raises(UsageError, match="refused"):
        session(ids(2, 3) + 1000)


def test_importing_is_light():
    heavy = ("onnx", "onnxruntime", "onnx_ir", "onnxscript", "torch")
    code = f"import sys, hcx.export; print([m for m in sys.modules if m.split('.')[0] in {heavy}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
