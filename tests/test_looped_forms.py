"""Every mixing form on many architectures: bitwise at its exact setting, the loop by hand away from it."""

from __future__ import annotations

import pytest
import torch
from hcx.passes import Looped
from hcx.rewrite import UsageError, load

from tests import loops_by_hand, zoo

FORMS = ["input", "input_rms", "input_linear", "output", "output_vector", "damped"]

NETS = ["qwen3", "gpt2", "olmo2", "gemma2", "vit", "mamba2", "bamba"]
"""Besides the tiny Llama. Bamba: three state-space blocks and one of attention."""


@pytest.fixture(scope="module")
def traced():
    """(eager model, Program, inputs of two shapes) by name, made once."""
    made = {}

    def of(name: str):
        if name not in made:
            model, args, kwargs, program = zoo.traced(name)
            made[name] = (model, program, [(args, kwargs), zoo.ZOO[name].other()])
        return made[name]

    return of


def tensor_of(output) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


def gate_of(program) -> dict:
    """Tensors of the channel gate, enlarged so that its matrices matter."""
    gate = {n.rsplit(".", 1)[1]: p for n, p in program.new_parameters().items()}
    with torch.no_grad():
        gate["down"].mul_(3), gate["log_rate"].sub_(2)
    return gate


# every form on a decoder and on an encoder of pictures, a mix on each side of the block on all; the rest is full
CASES = [
    pytest.param(name, mix, marks=[] if name in ("qwen3", "vit") or mix in ("input", "output") else [pytest.mark.full])
    for name in NETS
    for mix in FORMS
]


@pytest.mark.parametrize(("name", "mix"), CASES)
def test_bitwise_at_the_exact_setting_and_the_loop_by_hand_away_from_it(traced, name, mix, max_diff):
    model, program, calls = traced(name)
    blocks, steps = loops_by_hand.blocks_of(model, 4), 4 if mix == "input" else 2
    start = 0 if name == "gemma2" else 1
    neutral = program.rewrite(Looped(start=start, end=start + 2, steps=steps, mix=mix), check=False)
    moved = program.rewrite(Looped(start=start, end=start + 2, steps=3, mix=mix, scalar=0.3), check=False)
    gate = gate_of(moved) if mix == "output_vector" else None
    for args, kwargs in calls:
        with torch.no_grad():
            original = tensor_of(model(*args, **kwargs))
            assert torch.equal(tensor_of(neutral(*args, **kwargs)), original)
            with loops_by_hand.looped(blocks, start, start + 2, 3, mix, 0.3, gate):
                expected = tensor_of(model(*args, **kwargs))
            got = tensor_of(moved(*args, **kwargs))
        assert max_diff(got, expected) <= 1e-4 * max(1, expected.abs().max().item())
        assert max_diff(got, original) > 1e-3


@pytest.mark.parametrize(
    ("steps", "mix"),
    [
        pytest.param(steps, mix, marks=[] if steps == 2 or mix == "input" else [pytest.mark.full])
        for steps in (1, 2, 4)
        for mix in FORMS
    ],
)
def test_smollm2_is_bitwise_itself(smollm2, mix, steps):
    program = smollm2.program.rewrite(Looped(start=12, end=16, steps=steps, mix=mix), check=False)
    ids = smollm2.ids(2, 33)
    with torch.no_grad():
        assert torch.equal(program(ids).logits, smollm2.model(ids).logits)


@pytest.mark.parametrize("mix", [*FORMS, "full"])
def test_tiny_llama_passes_every_check_of_a_rewrite(llama, mix, max_diff):
    steps = 1 if mix == "full" else 3
    program = llama.program.rewrite(Looped(start=0, end=6, steps=steps, mix=mix))
    checks = {c["name"]: c for c in program.history[0]["checks"]}
    assert checks["contract of looped"]["note"] == "contract exact" and checks["contract of looped"]["holds"]
    for shape in [(2, 12), (1, 1), (5, 30)]:
        with torch.no_grad():
            assert torch.equal(program(llama.ids(*shape)).logits, llama.model(llama.ids(*shape)).logits)


def test_published_gate_of_loopus_is_the_scalar_at_one(llama, max_diff):
    """``A F(h) + (1 - A) h`` without any scalar."""
    program = llama.program.rewrite("looped{start=2,end=4,steps=3,mix=output_vector,scalar=1}", check=False)
    gate, ids = gate_of(program), llama.ids(2, 9)
    assert sum(p.numel() for p in program.new_parameters().values()) == 1 + 2 * 2 * 32 + 2 * 32
    steps = torch.nn.functional.softplus(gate["bias"])
    assert 1e-3 <= steps.min() < 3e-3 and 3e-2 < steps.max() <= 0.1
    with torch.no_grad(), loops_by_hand.looped(llama.model.model.layers, 2, 4, 3, "output_vector", 1.0, gate):
        assert max_diff(program(ids).logits, llama.model(ids, use_cache=False).logits) <= 1e-4


def test_linear_mix_reads_the_state_first(llama, max_diff):
    """Any matrix ``W[d, 2d]`` on ``[h; e]``."""
    program = llama.program.rewrite("looped{start=2,end=4,mix=input_linear,scalar=0.3}", check=False)
    (weight,) = program.new_parameters().values()
    assert weight.shape == (32, 64)
    generator, ids = torch.Generator().manual_seed(5), llama.ids(2, 9)
    layers, calls = llama.model.model.layers, {}
    with torch.no_grad():
        weight.add_(0.1 * torch.randn(32, 64, generator=generator))
        handles = [
            layers[n].register_forward_pre_hook(lambda m, a, k, n=n: calls.update({n: (a, k)}), with_kwargs=True)
            for n in (2, 3)
        ]

        def finish(module, args, kwargs, output):
            x = output @ weight[:, :32].T + calls[2][0][0] @ weight[:, 32:].T
            for n in (2, 3):
                x = layers[n].forward(x, **calls[n][1])
            return x

        handles.append(layers[3].register_forward_hook(finish, with_kwargs=True))
        expected = llama.model(ids, use_cache=False).logits
        for handle in handles:  # alone: the model has hooks of Transformers' own
            handle.remove()
    assert max_diff(program(ids).logits, expected) <= 1e-4


@pytest.mark.parametrize("name", ["llama", "gpt2", "olmo2", "vit"])
def test_full_feeds_the_normed_state_back(traced, llama, name, max_diff):
    """Ouro: every pass ends with the final norm, and the next one begins from it."""
    if name == "llama":
        model, program, calls = llama.model, llama.program, [((llama.ids(2, 9),), {"use_cache": False})]
        blocks, norm = model.model.layers, model.model.norm
    else:
        model, program, calls = traced(name)
        blocks = loops_by_hand.blocks_of(model, 4)
        norm = next(m for n, m in model.named_modules() if n.rsplit(".", 1)[-1] in ("norm", "ln_f", "layernorm"))
    looped = program.rewrite("looped{mix=full,steps=3}", check=False)
    assert not looped.new_parameters()
    for args, kwargs in calls:
        with torch.no_grad():
            with loops_by_hand.looped(blocks, 0, len(blocks), 3, "full", 0.0, norm=norm):
                expected = tensor_of(model(*args, **kwargs))
            assert max_diff(tensor_of(looped(*args)), expected) <= 1e-4


def test_full_takes_no_window_and_no_scalar(llama):
    for options in ("scalar=0.1", "start=1,end=3"):
        with pytest.raises(UsageError, match="full") as caught:
            llama.program.plan(f"looped{{mix=full,{options}}}")
        assert caught.value.where and caught.value.hint


@pytest.mark.parametrize("mix", ["input_linear", "output_vector", "damped", "full"])
def test_saved_and_loaded(llama, mix, tmp_path):
    options = "" if mix == "full" else ",start=2,end=4,scalar=0.2"
    program = llama.program.rewrite(f"looped{{mix={mix}{options}}}")
    program.save(tmp_path / "looped.hcx")
    with torch.no_grad():
        got, expected = (p(llama.ids(2, 9)).logits for p in (load(tmp_path / "looped.hcx"), program))
    assert torch.equal(got, expected)
