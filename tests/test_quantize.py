"""Quantization against ONNX Runtime's own 4-bit product, a quantizer written out by hand, and eager models whose
weights are the dequantised ones."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from hcx.passes.quantization import Quantize, dequantised
from hcx.passes.quantization.packing import fields, pack, packed_size, unpack
from hcx.passes.quantization.rounding import Layout, dequantise, quantise
from hcx.rewrite import ContractError, NoMatchError, PlanError, UsageError, load, trace
from hcx.rewrite.testing import conformance
from torch import nn

from tests import zoo
from tests.conftest import tiny_llama, token_ids
from tests.test_lora import LLAMA, logits, peft_with, randomised, relative
from tests.test_weights import EveryKind

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
NEAR, FAR = 1e-4, 1e-3


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def read(parts: dict[str, torch.Tensor], layout: Layout) -> torch.Tensor:
    """What the codes stand for, in float32."""
    return dequantise(layout, torch.float32, parts["codes"], parts["scales"], parts.get("zeros"), fields(layout.bits))


def put_back(model, program):
    """A copy of the eager model that holds the dequantised weights; like buffers they take no gradient, for which
    matmul may choose another kernel."""
    changed = copy.deepcopy(model)
    names = dict(changed.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, weight in dequantised(program).items():
            assert not torch.equal(names[name], weight)
            names[name].copy_(weight).requires_grad_(False)
    return changed


# ---- codes in bytes


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("count", [1, 7, 8, 33])
def test_codes_take_exactly_their_bits_and_come_back(bits, count):
    codes = torch.randint(0, 2**bits, (3, 2, count), generator=torch.Generator().manual_seed(bits), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8 and packed.shape[-1] == packed_size(count, bits)
    assert packed.shape[-1] <= math.ceil(count * bits / 8) + bin(bits).count("1") - 1
    assert torch.equal(unpack(packed, bits, count, fields(bits)).to(torch.uint8), codes)
    if bits in (2, 4):  # low bits first, as numpy counts them
        low = np.unpackbits(codes.numpy()[..., None], axis=-1, bitorder="little")[..., :bits].reshape(3, 2, -1)
        expected = np.packbits(low, axis=-1, bitorder="little")
        assert np.array_equal(packed.numpy(), expected)


# ---- rounding


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (3, 16), (8, 0), (2, 7), (5, 1000)])
def test_codes_and_scales_are_those_of_a_quantizer_by_hand(bits, group, symmetric):
    weight = gaussian(5, 50) * 0.3
    weight[0], weight[1] = weight[0].abs() + 0.5, -weight[1].abs() - 0.5  # zero must be a code all the same
    layout = Layout((5, 50), (1,), bits, group, symmetric)
    got = read(quantise(weight, layout), layout)
    for row, result in zip(weight.double().numpy(), got.double().numpy(), strict=True):
        for start in range(0, 50, group or 50):
            part, back = (x[start : start + (group or 50)] for x in (row, result))
            low, high = min(part.min(), 0), max(part.max(), 0)
            scale = max(-low, high) / (2 ** (bits - 1) - 1) if symmetric else (high - low) / (2**bits - 1)
            stored = float(np.float16(scale))
            stored = stored if stored >= scale else float(np.nextafter(np.float16(scale), np.float16(np.inf)))
            zero = 2 ** (bits - 1) if symmetric else round(-low / stored)
            expected = [(min(max(round(w / stored) + zero, 0), 2**bits - 1) - zero) * stored for w in part]
            assert np.allclose(back, expected, rtol=1e-6, atol=0)
            assert (np.abs(back - part) <= stored / 2 * (1 + 1e-5)).all()


def test_a_short_last_group_has_a_scale_of_its_own_and_rows_do_not_mix():
    weight = torch.full((2, 33), 0.01)
    weight[0, :32], weight[1, 32] = 100.0, -7.0
    parts = quantise(weight, Layout((2, 33), (1,), 8, 32, True))
    assert torch.allclose(parts["scales"].float(), torch.tensor([[100, 0.01], [0.01, 7]]) / 127, rtol=2e-3)


def test_zero_and_tiny_rows_stay_finite():
    weight = gaussian(6, 32)
    weight[0], weight[1], weight[2, :16], weight[3] = 0, 1e-30, 0, 6e-8
    for bits, symmetric in [(2, True), (4, False), (8, True)]:
        layout = Layout((6, 32), (1,), bits, 16, symmetric)
        parts = quantise(weight, layout)
        back = read(parts, layout)
        scales = parts["scales"].half().float()
        assert scales.isfinite().all() and (scales > 0).all() and back.isfinite().all()
        assert not back[0].any() and not back[2, :16].any()
        assert ((back - weight).abs() <= scales.repeat_interleave(16, 1) / 2 * (1 + 1e-5)).all()


@pytest.mark.parametrize("size", [1e-9, 1e9])
def test_a_weight_outside_float16_gets_float32_scales(size):
    weight, layout = gaussian(4, 64) * size, Layout((4, 64), (1,), 4, 32, False)
    parts = quantise(weight, layout)
    assert parts["scales"].dtype == torch.float32 and relative(read(parts, layout), weight) < 0.3


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_bytes_are_those_of_matmulnbits(bits, symmetric):
    """ONNX Runtime multiplies with our codes, scales and zero points as they lie in memory."""
    onnxruntime, onnx = pytest.importorskip("onnxruntime"), pytest.importorskip("onnx")
    weight, x = gaussian(12, 96), gaussian(5, 96, seed=1)
    layout = Layout((12, 96), (1,), bits, 32, symmetric)
    parts = quantise(weight, layout)
    blobs = {"B": parts["codes"].reshape(12, 3, -1), "S": parts["scales"].float().flatten()}
    blobs |= {} if symmetric else {"Z": parts["zeros"].flatten()}
    float32, helper = onnx.TensorProto.FLOAT, onnx.helper
    sizes = {"K": 96, "N": 12, "bits": bits, "block_size": 32}
    node = helper.make_node("MatMulNBits", ["x", *blobs], ["y"], domain="com.microsoft", **sizes)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", float32, [5, 96])],
        [helper.make_tensor_value_info("y", float32, [5, 12])],
        [onnx.numpy_helper.from_array(t.numpy(), n) for n, t in blobs.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    file = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    (got,) = onnxruntime.InferenceSession(file).run(None, {"x": x.numpy()})
    assert relative(torch.from_numpy(got), x @ read(parts, layout).T) <= NEAR


# ---- in a Program


def traced(net: str):
    model, args, _, program = zoo.traced(net)
    return model, program, args


@pytest.mark.parametrize("text", ["quantize", "quantize{bits=3,group=16,symmetric=true}", "quantize{bits=8,group=0}"])
@pytest.mark.parametrize("net", ["llama", "gpt2", "vit", "moe_einsum", "plain_cnn"])
def test_it_is_bitwise_the_model_with_dequantised_weights(net, text):
    model, program, args = traced(net)
    new = program.rewrite(text, allow_partial=True)
    with torch.no_grad():
        got = logits(new, *args)
        assert torch.equal(got, logits(put_back(model, new), *args))
        assert relative(got, logits(model, *args)) > FAR
    gone = set(program.state_dict()) - set(new.state_dict())
    assert gone == set(dequantised(new)) and not gone & dict(new.named_parameters()).keys()


def test_every_kind_of_weight_is_quantized():
    torch.manual_seed(0)
    model, ids = EveryKind().eval(), torch.randint(0, 9, (2, 5))
    names = "linear,conv1d,transposed,left,packed,low,conv,up,experts,dense,loop,embed"
    program = trace(model, (ids,)).rewrite(f"quantize{{target=[{names}],bits=3,group=4}}", allow_partial=True)
    with torch.no_grad():
        assert torch.equal(program(ids), put_back(model, program)(ids))
    columns = {s["address"]: s["detail"]["columns"] for s in program.history[0]["plan"]["steps"][0]["sites"]}
    assert len(columns) == 12 and columns["conv1d"] == [0] and columns["up.weight"] == [0, 2]
    assert columns["experts"] == [2] and columns["dense"] == [1] and columns["embed.weight"] == [1]
    assert not {"embed.weight", "head.weight"} & set(program.state_dict())


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_tied_ends_are_quantized_once_and_read_the_same(target, tmp_path):
    model, ids = tiny_llama(2, tie_word_embeddings=True), token_ids(14).reshape(2, 7)
    program = trace(model, (ids,)).rewrite(f"quantize{{target=[{target}]}}")
    assert len([n for n in program.state_dict() if n.endswith(".codes")]) == 1
    assert not {"model.embed_tokens.weight", "lm_head.weight"} & set(program.state_dict())
    with torch.no_grad():
        assert torch.equal(program(ids).logits, put_back(model, program)(ids).logits)


def test_sixteen_bits_plan_sites_and_change_nothing(llama):
    program = llama.program.rewrite("quantize{bits=16}")
    assert [n.format_node() for n in program.graph.nodes] == [n.format_node() for n in llama.program.graph.nodes]
    assert program.state_dict().keys() == llama.program.state_dict().keys()
    assert program.history[0]["contract"]["contract"] == "Exact"
    assert torch.equal(program(llama.ids(2, 5)).logits, llama.model(llama.ids(2, 5)).logits)


def test_odd_widths_and_weights_that_would_not_get_smaller():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        widths = [nn.Linear(a, b) for a, b in [(50, 33), (33, 1), (1, 7), (7, 64), (64, 3)]]
    net, x = nn.Sequential(*widths[:1], nn.ReLU(), *widths[1:]), gaussian(4, 50)
    program = trace(net, (x,)).rewrite("quantize{bits=8}")
    step = program.history[0]["plan"]["steps"][0]
    assert [s["address"] for s in step["sites"]] == ["0.weight", "2.weight", "4.weight"]
    ((address, detail),) = [(s["address"], s["detail"]) for s in step["skips"]]
    assert address == "3.weight" and detail == "would not get smaller: 28 bytes packed, 28 as it is"
    assert relative(program(x), net(x)) < 0.05


def test_bytes_and_parameters_are_counted(llama, tmp_path):
    program = llama.program.rewrite("quantize")
    estimate = program.history[0]["plan"]["steps"][0]["estimate"]
    covered = sum(p.numel() for n, p in llama.model.named_parameters() if ".layers." in n and p.dim() == 2)
    everything = sum(p.numel() for p in llama.model.parameters())
    assert (estimate["parameters covered"], estimate["parameters not covered"]) == (covered, everything - covered)
    buffers = [t for n, t in program.state_dict().items() if n.startswith("hcx.")]
    kept = [p for n, p in llama.model.named_parameters() if n in dict(program.named_parameters())]
    assert estimate["bytes after"] == sum(t.nbytes for t in [*buffers, *kept])
    program.save(tmp_path / "a.hcx")
    assert (tmp_path / "a.hcx" / "weights.safetensors").stat().st_size < estimate["bytes after"] + 40_000


def test_weights_that_are_not_finite_are_refused_by_name():
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    net[0].weight.data[2, 3], net[0].weight.data[9, 0] = math.nan, math.inf
    with pytest.raises(PlanError, match=r"`0\.weight` holds 1 NaN and 1 Inf"):
        trace(net, (gaussian(2, 64),)).rewrite("quantize")


def test_a_bound_on_the_kl_is_a_contract(llama):
    kl = llama.program.rewrite("quantize").history[0]["checks"][0]["measured"]["kl"]
    assert kl > 1e-3
    bound = llama.program.rewrite(Quantize(max_kl=2 * kl)).history[0]["contract"]
    assert bound == {"contract": "Metric", "name": "kl", "bound": 2 * kl}
    with pytest.raises(ContractError, match="kl"):
        llama.program.rewrite(Quantize(max_kl=kl / 2))


@pytest.mark.parametrize("options", ["bits=7.5", "bits=9", "bits=1", "group=-1", "method=awq", "target=[nothing]"])
def test_options_that_cannot_be_are_refused(options, llama):
    with pytest.raises(UsageError):
        llama.program.rewrite(f"quantize{{{options}}}")


def test_a_second_time_finds_nothing(llama):
    with pytest.raises(NoMatchError):
        llama.program.rewrite("quantize,quantize", check=False)


# ---- after other passes


def test_adapters_over_quantized_weights_are_peft(llama, tmp_path, max_diff):
    program = randomised(llama.program.rewrite("lora,quantize"))
    reference = peft_with(put_back(llama.model, program), program, r=8, lora_alpha=8, target_modules=LLAMA)
    ids = llama.ids(2, 12)
    program.save(tmp_path / "a.hcx")
    with torch.no_grad():
        got, expected = program(ids).logits, reference(ids).logits
        assert max_diff(got, expected) <= NEAR < FAR < max_diff(got, llama.model(ids).logits)
        assert torch.equal(load(tmp_path / "a.hcx")(ids).logits, got)
    added = {n.rsplit(".", 1)[-1] for n in program.state_dict() if n.startswith("hcx.")}
    assert added == {"A", "B", "codes", "scales", "zeros"}


def test_exits_read_the_dequantised_head(llama, max_diff):
    program = llama.program.rewrite("exits{at=[3],threshold=-1.0},quantize{target=[lm_head,q_proj]}", check=False)
    changed, ids = put_back(llama.model, program), llama.ids(2, 12)
    with torch.no_grad():
        states = changed(ids, output_hidden_states=True).hidden_states[3]
        expected = changed.lm_head(changed.model.norm(states))
        assert max_diff(program(ids).logits, expected) <= NEAR < FAR < max_diff(expected, changed(ids).logits)
    assert len([n for n in program.graph.nodes if n.target == "hcx.quantize_0.lm_head.codes"]) == 1


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize("text", ["quantize{bits=3,group=8}", "quantize{target=[head,up],symmetric=true}"])
def test_conformance(text):
    conformance(text, subprocesses="target" in text)


def test_smollm2_at_four_bits(smollm2):
    program = smollm2.program.rewrite("quantize", check=False)
    estimate = program.history[0]["plan"]["steps"][0]["estimate"]
    assert estimate["bits a covered weight"] == 4.625 and estimate["parameters covered"] == 106_168_320
    ids = smollm2.ids(2, 128)
    with torch.no_grad():
        before, after = (p(ids).logits.double().log_softmax(-1) for p in (smollm2.model, program))
        kl = (before.exp() * (before - after)).sum(-1).mean().item()
        assert 0.2 < kl < 0.45  # 0.29 to 0.34 measured for other texts with this grid
        assert torch.equal(put_back(smollm2.model, program)(ids[:, :32]).logits, program(ids[:, :32]).logits)
