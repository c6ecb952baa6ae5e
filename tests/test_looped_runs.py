"""Several windows in one pass: every run of equal blocks looped by itself, against loops written by hand."""

from __future__ import annotations

import pytest
import torch
from hcx.passes import Looped
from hcx.rewrite import UsageError, load, trace
from hcx.rewrite.pipeline.registry import passes
from hcx.rewrite.run.generation import decode
from torch import nn

from tests import loops_by_hand
from tests.test_caches import SIZES, full_forward, ids, transformers


class Stages(nn.Module):
    """Three blocks of width 8, then four of width 12."""

    def __init__(self):
        super().__init__()
        self.narrow = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.widen = nn.Linear(8, 12)
        self.wide = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.head = nn.Linear(12, 5)

    def forward(self, x, loop=lambda run, x, number: run(x)):
        def stage(blocks):
            def run(x):
                for block in blocks:
                    x = x + torch.tanh(block(x))
                return x

            return run

        x = stage(self.wide[:1])(self.widen(loop(stage(self.narrow), x, 0)))
        return self.head(loop(stage(self.wide[1:]), x, 1))


@pytest.fixture(scope="module")
def stages():
    torch.manual_seed(0)
    model = Stages().eval()
    return model, trace(model, (torch.randn(2, 7, 8),))


@pytest.mark.parametrize("mix", ["input", "output"])
def test_every_stage_has_a_loop_and_a_scalar_of_its_own(stages, mix, max_diff, tmp_path):
    model, base = stages
    program = base.rewrite(f"looped{{start=runs,steps=3,mix={mix}}}")
    windows = [(s["detail"]["start"], s["detail"]["end"]) for s in program.history[0]["plan"]["steps"][0]["sites"]]
    assert windows == [(0, 3), (4, 7)], "the block that brings the new width is left out"
    assert program.history[0]["plan"]["steps"][0]["estimate"] == {
        "extra block applications": 2 * sum(b - a for a, b in windows), "new parameters": 2
    }  # fmt: skip
    x, scalars = (
        torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1)),
        list(program.new_parameters().values()),
    )
    with torch.no_grad():
        assert torch.equal(program(x), model(x))
        for scalar, value in zip(scalars, (0.4, -0.3), strict=True):
            scalar.fill_(value)

        def loop(run, x, number):
            return loops_by_hand.combine(mix, run, x, run(x), 3, (0.4, -0.3)[number])

        expected = model(x, loop)
        assert max_diff(program(x), expected) <= 1e-5 and max_diff(expected, model(x)) > 1e-2
        program.save(tmp_path / "a.hcx")
        assert torch.equal(load(tmp_path / "a.hcx")(x), program(x))
    separate = program.rewrite("unloop")
    with torch.no_grad():
        assert torch.equal(separate(x), program(x))
        scalars[0].fill_(0.0)
    first = program.plan("unloop{separate=false}").steps[0]
    assert [s.detail["action"] for s in first.sites] == ["remove"] and len(first.skips) == 1


def test_two_runs_of_a_hybrid_decode_through_caches_of_their_own(max_diff):
    """Two short convolutions, then two blocks of attention: states in one window, keys in the other."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kinds = ["conv", "conv", "full_attention", "full_attention"]
        model = transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**{**SIZES, "layer_types": kinds})).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0, 0.2)
    base = trace(model, (ids(2, 11),), cache=True)
    program = base.rewrite("looped{start=runs,scalar=0.3}", check=False)
    assert {s.name.split(".")[1] for s in program.inputs if s.fill == "empty"} == {str(n) for n in range(8)}
    tokens, got = decode(program.signature, program.run_flat, program.output_names, ids(2, 6), 16)
    blocks, mask = model.model.layers, torch.ones_like(tokens)
    with loops_by_hand.looped(blocks, 0, 2, 2, "input", 0.3), loops_by_hand.looped(blocks, 2, 4, 2, "input", 0.3):
        expected = full_forward(model, program.signature, tokens, mask, {"use_cache": False})[:, 5:-1]
    got, scale = torch.stack(got, 1), expected.double().square().mean().sqrt().item()
    assert max_diff(got, expected) <= 1e-4 * scale and torch.equal(got.argmax(-1), expected.argmax(-1))
    with torch.no_grad():
        assert max_diff(full_forward(model, program.signature, tokens, mask, {})[:, 5:-1], expected) > 0.1 * scale


def test_options_by_the_names_of_transformers_configs():
    theirs = "looped{loop_layer_index_start=12,loop_layer_index_end=16,loop_num_passes=3}"
    config = transformers.models.inkling2_loop.Inkling2LoopTextConfig()
    assert all(hasattr(config, name) for name in Looped.aliases)
    (step,) = passes(theirs)
    assert step == Looped(start=12, end=16, steps=3)


@pytest.mark.parametrize("options", [{"runtime": True}, {"readout": "steps"}, {"gate": "ouro"}])
def test_what_is_of_one_window_is_refused_for_several(options):
    with pytest.raises(UsageError) as caught:
        Looped(start="runs", **options)
    assert caught.value.where == "start"
