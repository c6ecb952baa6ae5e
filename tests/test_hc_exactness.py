"""Every mixer at every start that claims to keep the function, on each kind of residual stream, and on one in float64."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from hcx.passes.hyper_connections.mixers import MIXERS
from hcx.rewrite import UsageError, trace
from torch import nn
from torch.nn import functional as F

from tests import zoo
from tests.test_composition import FAR, NEAR, causal, distance, randomise, same
from tests.test_hc import ByHand
from tests.test_hc_training import Net
from tests.zoo import build
from tests.zoo.base import images, seeded
from tests.zoo.decoders import causal_lm, decoder
from tests.zoo.vision_nets import stage

MANIFOLDS = ["jpmhc,manifold=bistochastic", "jpmhc,manifold=grassmann"]
EVERY = ["hc", "hc,dynamic=true", *[m for m in MIXERS if m != "hc"], *MANIFOLDS]
INITS = ["replicate", "rotate", "mean", "transport"]
AT_IDENTITY = {"hc", "hc,dynamic=true", "ihc", "ohc", "jpmhc", "ddl"}
QUICK = {"hc", "ohc"}
TOLERANCE = 2e-4
"""Of logits in float32, absolute."""


class Stage(nn.Module):
    """A stem and one stage of equal width, as a ResNet has four of."""

    def __init__(self):
        super().__init__()
        self.stem, self.layer, self.fc = nn.Conv2d(3, 8, 3, 2, 1), stage(8, 8, 3, 1), nn.Linear(8, 5)

    def forward(self, x):
        return self.fc(self.layer(F.relu(self.stem(x))).mean((2, 3)))


def resnet_stage():
    net = seeded(Stage)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.2, 0.2), nn.init.uniform_(module.running_var, 0.5, 2.0)
    return net.eval(), (images(),), {}


def convnext_stage():
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(num_stages=1, hidden_sizes=[16], depths=[3], image_size=32, layer_scale_init_value=0.5)

    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = ConvNextForImageClassification(config)

        def forward(self, x):
            return self.inner(x).logits

    return seeded(Logits).eval(), (images(),), {}


def stablelm_parallel():
    return decoder("", causal_lm("StableLm", use_parallel_residual=True), 29, parallel=True).build()


ROWS = {name: lambda name=name: build(name) for name in ("gpt_neox", "gemma2", "bert", "t5", "whisper", "vit", "opt")}
NETS = {**ROWS, "stablelm_parallel": stablelm_parallel, "convnext": convnext_stage, "resnet": resnet_stage}
PICTURES = {"convnext", "resnet"}
ROUNDED = {"stablelm_parallel", "convnext"}
"""Not bitwise with replicate: (x + a) + m becomes x + (a + m); convolutions sum by strides, and streams are contiguous."""
POST_NORM = {"bert", "resnet"}
"""A norm or a ReLU behind each add: only equal streams are exact."""


@cache
def traced(name: str, dtype: torch.dtype):
    if name in ROWS and dtype == torch.float32:
        model, args, kwargs, program = zoo.traced(name)
        with torch.no_grad():
            return args, program, model(*args, **kwargs)
    model, args, kwargs = NETS[name]()
    model = copy.deepcopy(model).to(dtype)
    args = tuple(a.to(dtype) if a.is_floating_point() else a for a in args)
    with torch.no_grad():
        return args, trace(model, args, kwargs), model(*args, **kwargs)


def inits_of(name: str, mixer: str) -> list[str]:
    wanted = INITS if mixer in AT_IDENTITY else INITS[:3]
    return wanted[:2] if name in POST_NORM else wanted


def quick(name: str, mixer: str) -> bool:
    """One mixer on every net; another one on parallel branches, a post-norm stream and two stacks."""
    return mixer == "hc" or (mixer in QUICK and name in ("gpt_neox", "bert", "t5"))


CASES = [
    pytest.param(name, mixer, marks=[] if quick(name, mixer) else [pytest.mark.slow, pytest.mark.full])
    for name in NETS
    for mixer in (["hc"] if name in PICTURES else EVERY)
]


@pytest.mark.parametrize(("name", "mixer"), CASES)
def test_every_start_keeps_the_function(name, mixer):
    args, program, eager = traced(name, torch.float32)
    for init in inits_of(name, mixer):
        new = program.rewrite(f"hc{{mixer={mixer},init={init}}}", check=False)
        promise = new.history[-1]["contract"]["contract"]
        with torch.no_grad():
            got = new(*args)
        assert (got - eager).abs().max() <= TOLERANCE, init
        assert promise == ("Exact" if init == "replicate" and name not in ROUNDED else "Rounding"), init
        assert promise == "Rounding" or torch.equal(got, eager), init


@pytest.mark.parametrize(("name", "mixer"), [c for c in CASES if c.values[1] != "mhc"])
def test_replicate_is_bitwise_in_bfloat16(name, mixer):
    args, program, eager = traced(name, torch.bfloat16)
    new = program.rewrite(f"hc{{mixer={mixer},init=replicate}}", check=False)
    with torch.no_grad():
        got = new(*args)
    if name in ROUNDED:
        assert distance(got, eager) <= new.history[-1]["contract"]["k"] * 2**-7
    else:
        assert torch.equal(got, eager)


def test_parallel_branches_added_in_turn_are_within_rounding_and_say_so():
    program = traced("stablelm_parallel", torch.float32)[1]
    (step,) = program.plan("hc{init=replicate}").steps
    assert all(s.detail["reordered"] for s in step.sites) and len(step.sites) == 4
    checks = program.rewrite("hc{init=replicate}").history[-1]["checks"]
    assert all(c["holds"] for c in checks)


# 3 rounds, 4 does not; 8 is three factors for kromhc and refused for mhc_lite
STREAMS = [
    pytest.param(m, n, marks=[] if n in (3, 4) or (n == 8 and m in ("kromhc", "mhc_lite")) else [pytest.mark.full])
    for m in EVERY
    for n in (2, 3, 4, 8)
]


@pytest.mark.parametrize(("mixer", "mult"), STREAMS)
def test_in_float64_the_function_is_kept_to_1e_13(mixer, mult):
    if mixer == "mhc_lite" and mult == 8:
        with pytest.raises(UsageError, match="made for"):
            double()[1].plan("hc{mixer=mhc_lite,mult=8}")
        return
    args, program, eager = double()
    for init in inits_of("", mixer):
        if init == "replicate" and mult == 3 and mixer not in ("hc", "hc,dynamic=true", "ddl"):
            continue  # 1/3 is rounded: refused
        new = program.rewrite(f"hc{{mixer={mixer},mult={mult},init={init}}}", check=False)
        with torch.no_grad():
            assert (new(*args) - eager).abs().max() <= 1e-13, init
            new.tensor("hcx.hc_0.0.expand")[0] += 1e-9  # what a start made in float32 would be off by
            assert (new(*args) - eager).abs().max() > 1e-13, init


@cache
def double():
    torch.manual_seed(0)
    model, x = Net().double().eval(), torch.randn(2, 5, 8, dtype=torch.float64)
    with torch.no_grad():
        return (x,), trace(model, (x,)), model(x)


# ---- rows in another arrangement


def opt(model, ids: torch.Tensor, run) -> torch.Tensor:
    """OPT taken apart; its MLP and that add work on ``[batch * seq, hidden]``."""
    inner = model.inner.model.decoder
    mask = torch.ones_like(ids)
    x = inner.embed_tokens(ids) + inner.embed_positions(mask, 0, position_ids=mask.cumsum(1) - 1)

    def attention(b):
        return lambda h: b.self_attn(b.self_attn_layer_norm(h), attention_mask=causal(ids.shape[1]))[0]

    def feed(b):
        return lambda h: b.fc2(b.activation_fn(b.fc1(b.final_layer_norm(h))))

    blocks = [[(attention(b), same), (feed(b), same)] for b in inner.layers]
    return run(blocks, x, lambda h: model.inner.lm_head(inner.final_layer_norm(h)))


@pytest.mark.parametrize("mixer", ["hc", "mhc"])
def test_streams_go_through_a_regrouping_of_rows(mixer):
    args, program, _ = traced("opt", torch.float32)
    new = program.rewrite(f"hc{{mixer={mixer}}}", check=False)
    randomise(new)
    model = build("opt")[0]
    for ids in (args[0], args[0][:1, :7]):
        with torch.no_grad():
            got, expected = new(ids), opt(model, ids, ByHand(new, mixer=mixer))
            assert distance(got, expected) <= NEAR and distance(got, model(ids)) > FAR


# ---- a trained model


@pytest.mark.slow
@pytest.mark.full
def test_smollm2_is_kept_by_every_mixer_and_start(smollm2, capsys):
    """The largest difference of logits of up to 32, over 60 residuals; bitwise is what `replicate` claims."""
    ids = smollm2.ids(1, 32)
    lines, failures = [], []
    with torch.no_grad():
        expected = smollm2.model(ids).logits
        for mixer in EVERY:
            figures = []
            for init in inits_of("", mixer):
                new = smollm2.program.rewrite(f"hc{{mixer={mixer},init={init}}}", check=False)
                got = new(ids).logits
                worst, promise = (got - expected).abs().max().item(), new.history[-1]["contract"]["contract"]
                figures.append(f"{init} {worst:.1e}")
                if worst > TOLERANCE or (promise == "Exact") != (init == "replicate"):
                    failures.append((mixer, init, worst, promise))
                if init == "replicate" and mixer in AT_IDENTITY and not torch.equal(got, expected):
                    failures.append((mixer, "not bitwise"))
            lines.append(f"{mixer}: {', '.join(figures)}")
    with capsys.disabled():
        print("\n" + "\n".join(lines))
    assert not failures


@pytest.mark.slow
@pytest.mark.full
def test_smollm2_in_bfloat16_is_bitwise_with_replicate(smollm2):
    ids = smollm2.ids(1, 32)
    model = copy.deepcopy(smollm2.model).to(torch.bfloat16)
    program = trace(model, (ids,))
    with torch.no_grad():
        expected = model(ids).logits
        for mixer in [m for m in EVERY if m in AT_IDENTITY]:
            assert torch.equal(
                program.rewrite(f"hc{{mixer={mixer},init=replicate}}", check=False)(ids).logits, expected
            ), mixer
