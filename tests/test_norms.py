"""NormFormer, SiameseNorm and scale vectors away from neutral, against eager models with hooks or written out by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from hcx.passes.norms import NormFormer
from hcx.rewrite import HcxError, NoMatchError, load, trace
from hcx.rewrite.edit.inserting import _spelled
from hcx.rewrite.testing import tiny_decoder
from torch import nn
from torch.nn import functional as F

from tests.test_composition import FAR, NEAR, causal, distance, randomise, traced

FORMS = ["normformer", "normformer{scale_residual=true}", "siamese", "scale_vectors", "scale_vectors{form=direction}"]
TIGHT = 1e-12


def moved(program, pipeline: str):
    """The rewritten Program with random values, and these by name without the prefix of the pass."""
    new = program.rewrite(pipeline, check=False)
    randomise(new)
    prefix = f"hcx.{pipeline.partition('{')[0]}_0."
    return new, {n.removeprefix(prefix): p.detach() for n, p in new.new_parameters().items()}


# ---- the decoder of the kit, written out in float64


class Decoder:
    """Blocks of :class:`TinyDecoder`, with a place for each thing that the passes add."""

    def __init__(self):
        model, self.ids = tiny_decoder()
        self.model = model.double()
        self.program = trace(self.model, (self.ids,))

    def __call__(self, attend=None, feed=None, **places: Callable) -> torch.Tensor:
        m, x = self.model, self.model.embed(self.ids)
        place = {k: places.get(k, lambda i, v: v) for k in ("heads", "out", "inner", "stream", "qkv", "up", "down")}
        for i, b in enumerate(m.layers):
            q, k, v = place["qkv"](i, b.qkv(b.norm_1(x))).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind(0)
            scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~causal(q.shape[2]), -math.inf)
            heads = place["heads"](i, torch.softmax(scores, -1) @ v)
            x = x + place["out"](i, b.out(heads.transpose(1, 2).flatten(2)))
            inner = place["inner"](i, F.gelu(place["up"](i, b.up(b.norm_2(x)))))
            x = place["stream"](i, x) + place["down"](i, b.down(inner))
        return m.head(m.norm(x))


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder()


def normed(values: dict, stem: str, a: torch.Tensor) -> torch.Tensor:
    gate, gain, shift = (values[f"{stem}.{k}"].double() for k in ("gate", "weight", "bias"))
    z = (a - a.mean(-1, keepdim=True)) / (a.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    return (1 - gate) * a + gate * (z * gain + shift)


def far_from_the_model(decoder: Decoder, got: torch.Tensor) -> bool:
    return distance(got, decoder.model(decoder.ids)["logits"]) > FAR


@torch.no_grad()
def test_normformer_by_hand(decoder):
    new, v = moved(decoder.program, "normformer{scale_residual=true}")
    got = new(decoder.ids)["logits"]
    expected = decoder(
        heads=lambda i, h: torch.stack([c * x for c, x in zip(v[f"layers.{i}_attn.heads"].flatten(), h.unbind(1), strict=True)], 1),
        out=lambda i, a: normed(v, f"layers.{i}_attn.out", a),
        inner=lambda i, a: normed(v, f"layers.{i}_mlp.inner", a),
        stream=lambda i, x: v[f"layers.{i}_mlp.residual"] * x,
    )  # fmt: skip
    assert len(v) == 4 * (1 + 3 + 3 + 1)
    assert distance(got, expected) <= TIGHT and far_from_the_model(decoder, got)


@torch.no_grad()
def test_siamese_by_hand(decoder):
    new, v = moved(decoder.program, "siamese")
    m = decoder.model
    x = y = m.embed(decoder.ids)

    def rms(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * gain

    def attention(b, h):
        q, k, v = b.qkv(h).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return b.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    for i, b in enumerate(m.layers):
        branches = ((b.norm_1, attention), (b.norm_2, lambda b, h: b.down(F.gelu(b.up(h)))))
        for number, (norm, branch) in enumerate(branches, 2 * i):
            x = rms(x, v[f"0.{number}.norm"])
            z = branch(b, norm(y) + v[f"0.{number}.gate"] * x)
            x, y = x + z / math.sqrt(2 * (i + 1)), y + z
    expected = m.head(m.norm(y) + v["0.gate"] * rms(x, v["0.norm"]))
    got = new(decoder.ids)["logits"]
    assert distance(got, expected) <= TIGHT and far_from_the_model(decoder, got)


@torch.no_grad()
def test_dual_scales_by_hand(decoder):
    new, v = moved(decoder.program, "scale_vectors")
    places = {"qkv": "qkv", "out": "out", "up": "up", "down": "down"}
    got = new(decoder.ids)["logits"]
    expected = decoder(**{k: lambda i, y, n=n: v[f"layers.{i}.{n}.scale"] * y for k, n in places.items()})
    assert distance(got, expected) <= TIGHT and far_from_the_model(decoder, got)


@torch.no_grad()
def test_directions_by_hand(decoder):
    new, v = moved(decoder.program, "scale_vectors{form=direction}")
    got = new(decoder.ids)["logits"]
    model = copy.deepcopy(decoder.model)
    for name, parameter in model.named_parameters():
        if f"{name}.size" in v:
            parameter.copy_(v[f"{name}.size"] * F.normalize(v[f"{name}.direction"], dim=0))
    assert len(v) == 2 * 9
    assert distance(got, model(decoder.ids)["logits"]) <= TIGHT and far_from_the_model(decoder, got)


# ---- models of Transformers, with hooks


def outputs_of(model, name: str) -> tuple[list[nn.Module], list[nn.Module]]:
    """Last matrices of the attentions and of the MLPs, in order."""
    inner = model.inner
    if name == "llama":
        return [b.self_attn.o_proj for b in inner.model.layers], [b.mlp.down_proj for b in inner.model.layers]
    if name == "gpt_neox":
        return [b.attention.dense for b in inner.gpt_neox.layers], [b.mlp.dense_4h_to_h for b in inner.gpt_neox.layers]
    parts = [layer for s in (inner.encoder, inner.decoder) for b in s.block for layer in b.layer]
    attentions = [getattr(p, n).o for p in parts for n in ("SelfAttention", "EncDecAttention") if hasattr(p, n)]
    return attentions, [p.DenseReluDense.wo for p in parts if hasattr(p, "DenseReluDense")]


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "t5"])
@torch.no_grad()
def test_normformer_with_hooks(name):
    model, args, program = traced(name)
    new, v = moved(program, "normformer")
    hooked = copy.deepcopy(model)
    sites = program.plan("normformer").steps[0].sites
    attentions, feeds = outputs_of(hooked, name)
    addresses = {
        k: [_spelled(s.address) for s in sites if (s.detail["kind"] == "mlp") == (k == "mlp")] for k in ("attn", "mlp")
    }
    for module, site in zip(attentions, addresses["attn"], strict=True):
        scale = v[f"{site}.heads"].flatten()
        repeat = module.in_features // len(scale)
        module.register_forward_pre_hook(lambda _, x, s=scale, r=repeat: (x[0] * s.repeat_interleave(r),))
        module.register_forward_hook(lambda _, x, y, s=site: normed(v, f"{s}.out", y.double()).float())
    for module, site in zip(feeds, addresses["mlp"], strict=True):
        module.register_forward_pre_hook(lambda _, x, s=site: (normed(v, f"{s}.inner", x[0].double()).float(),))
    assert distance(new(*args), hooked(*args)) <= NEAR and distance(new(*args), model(*args)) > FAR


@pytest.mark.parametrize("form", ["dual", "consumers"])
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "t5"])
@torch.no_grad()
def test_scale_vectors_with_hooks(name, form):
    model, args, program = traced(name)
    if name == "gpt_neox" and form == "consumers":  # one matrix for queries, keys and values
        with pytest.raises(NoMatchError, match="no other matrix reads"):
            program.rewrite("scale_vectors{form=consumers}")
        return
    new, v = moved(program, f"scale_vectors{{form={form}}}")
    hooked = copy.deepcopy(model)
    for stem, scale in v.items():
        module = hooked.get_submodule(stem.removesuffix(".scale"))
        if form == "dual":
            module.register_forward_hook(lambda _, x, y, s=scale: y * s)
        else:
            module.register_forward_pre_hook(lambda _, x, s=scale: (x[0] * s,))
    layers = len([m for m in model.modules() if isinstance(m, nn.Linear)]) - 1  # without the head
    assert len(v) == layers if form == "dual" else 0 < len(v) < layers
    assert distance(new(*args), hooked(*args)) <= NEAR and distance(new(*args), model(*args)) > FAR


@pytest.mark.parametrize("pipeline", [*FORMS[:3], "scale_vectors"])
@pytest.mark.parametrize("name", ["gpt_neox", "t5", "vit"])
def test_the_start_is_bitwise_and_every_check_holds(name, pipeline):
    model, args, program = traced(name)
    new = program.rewrite(pipeline)
    assert new.history[-1]["contract"]["contract"] == "Exact" and all(c["holds"] for c in new.history[-1]["checks"])
    with torch.no_grad():
        assert torch.equal(new(*args), model(*args))


# ---- published forms that change a trained model


def test_open_gates_are_said_to_change_the_function_and_cannot_pass_for_exact(decoder, monkeypatch):
    new = decoder.program.rewrite("normformer{gate=1}")
    entry = new.history[-1]
    measured = next(c for c in entry["checks"] if "max_diff" in c.get("measured", c))
    assert entry["contract"]["contract"] == "Structural" and measured.get("measured", measured)["max_diff"] > 0.1
    from hcx.rewrite import Exact

    monkeypatch.setattr(NormFormer, "preserves", lambda *_: Exact())
    with pytest.raises(HcxError, match="exact"):
        decoder.program.rewrite("normformer{gate=1}")


@pytest.mark.parametrize(
    ("name", "pipeline", "why"), [("bert", "siamese", "post-norm"), ("resnet", "normformer", "last dimension")]
)
def test_places_that_cannot_be_are_refused_with_the_reason(name, pipeline, why):
    from tests.test_hc_exactness import traced as other

    with pytest.raises(NoMatchError, match=why):
        other(name, torch.float32)[1].rewrite(pipeline)


def test_a_second_siamese_and_one_over_streams_are_refused(decoder):
    for first in ("siamese", "hc"):
        with pytest.raises(HcxError):
            decoder.program.rewrite(first, check=False).rewrite("siamese")


# ---- with other passes, in files


@pytest.mark.parametrize(
    "pipeline", ["hc{init=replicate},normformer", "siamese,normformer,scale_vectors", "siamese,exits{at=[2]}"]
)
def test_together_they_are_bitwise_at_the_start(decoder, pipeline):
    new = decoder.program.rewrite(pipeline)
    with torch.no_grad():
        assert torch.equal(new(decoder.ids)["logits"], decoder.model(decoder.ids)["logits"])


@pytest.mark.parametrize("pipeline", [*FORMS, "hc{mult=2},normformer{scale_residual=true}"])
@torch.no_grad()
def test_they_go_through_a_file_and_onnx(pipeline, tmp_path):
    from hcx.export import OnnxSession, to_onnx

    model, ids = tiny_decoder()
    new = trace(model, (ids,)).rewrite(pipeline, check=False)
    randomise(new)
    new.save(tmp_path / "a.hcx")
    back = load(tmp_path / "a.hcx")
    ids = torch.cat([ids, ids.flip(0)])[:3, :5]
    expected = new(ids)["logits"]
    assert torch.equal(back(ids)["logits"], expected)
    to_onnx(back, tmp_path / "a.onnx")
    torch.testing.assert_close(OnnxSession(tmp_path / "a.onnx")(ids)["logits"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["dual", "consumers", "direction"])
@torch.no_grad()
def test_scale_vectors_fold_into_the_weights(form, llama, tmp_path):
    transformers = pytest.importorskip("transformers")
    from hcx.export import to_hf

    new, _ = moved(llama.program, f"scale_vectors{{form={form}}}")
    to_hf(new, tmp_path / "out")
    folded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = llama.ids(3, 9)
    assert not any("hcx" in name for name in folded.state_dict())
    assert (
        distance(folded(ids).logits, new(ids).logits)
        <= NEAR
        < FAR
        < distance(folded(ids).logits, llama.model(ids).logits)
    )


@torch.no_grad()
def test_biases_and_transposed_matrices_fold_too(tmp_path):
    transformers = pytest.importorskip("transformers")
    from hcx.export import to_hf

    from tests.conftest import token_ids

    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2
    )
    model, ids = transformers.GPT2LMHeadModel(config).eval(), token_ids(20, 64).reshape(2, 10)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(generator=torch.Generator().manual_seed(0))
    new, v = moved(trace(model, (ids,)), "scale_vectors")
    to_hf(new, tmp_path / "out")
    folded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert len(v) == 8
    assert distance(folded(ids).logits, new(ids).logits) <= NEAR < FAR < distance(folded(ids).logits, model(ids).logits)
