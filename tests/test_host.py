"""What any module can do, on every model of the zoo. Right values come from the eager model, treated alike."""

from __future__ import annotations

import copy

import pytest
import torch
from hcx.rewrite.errors import UsageError
from torch.utils._pytree import tree_leaves, tree_map

from tests.zoo import ZOO, available, traced

NAMES = [name for name in available(traceable=True) if not ZOO[name].assets]

NO_TRAIN_MODE = {
    **dict.fromkeys(
        ["resnet_hf", "resnet_tv", "mbconv_plain", "mbconv_projected", "plain_cnn", "densenet"], "BatchNorm"
    ),
    "swin": "random op",  # stochastic depth: the graph has no op for it
    "stoch_depth_mask": "random op",
    "stoch_depth_if": "skips layers at random",
    "wav2vec2": "another one in train mode",  # masks of time drawn by NumPy
    "hubert": "another one in train mode",
}
"""Model -> word of the reason; all others train as eager does."""

OWN_DTYPE = {
    "qwen3", "qwen3_moe", "gemma2", "gemma3", "gemma3_mixed", "olmo2", "wav2vec2", "deberta_v2",
    "t5gemma", "mamba", "mamba2", "jamba", "bamba", "lfm2", "qwen3_next",
}  # fmt: skip
"""These cast a value back to the dtype it came in, which autocast changes; the graph holds the dtype that was traced."""

NO_FLOAT64 = {"mixtral_grouped"}
"""torch has no grouped matmul in float64."""


ROUNDED = {"qwen3_next": 1e-5}
"""The chunked scan sums over a length of its own choice; relative to the rms. All others are bitwise."""

NO_BLOCKS = {"highway", "concat"}
IN_PLACE = {"inplace_add"}
"""Eager itself has no backward."""

SAMPLE = {
    "llama", "gpt2", "gemma3_mixed", "mixtral", "mixtral_grouped", "bert", "deberta_v2", "wav2vec2", "t5", "whisper",
    "vit", "swin", "resnet_hf", "mamba2", "qwen3_next", "stoch_depth_if", "stoch_depth_mask",
    "concat", "inplace_add",
}  # fmt: skip
"""One of each kind; the other models are in the full matrix."""

EACH = [
    pytest.param(name, marks=[pytest.mark.xdist_group(f"zoo-{name}"), *([] if name in SAMPLE else [pytest.mark.full])])
    for name in NAMES
]


@pytest.fixture(autouse=True, scope="module")
def plain_encoders():
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(fast)


def changed(value, change):
    return tree_map(lambda t: change(t) if isinstance(t, torch.Tensor) else t, value)


def run(model, args, kwargs, change=lambda t: t) -> list[torch.Tensor]:
    output = model(*changed(args, change), **changed(kwargs, change))
    return [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]


def distance(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """Largest difference over the outputs, relative to the rms of each; 0 only where bitwise equal."""
    worst = 0.0
    for one, other in zip(got, wanted, strict=True):
        assert one.shape == other.shape and one.device == other.device
        if not (one.is_meta or torch.equal(one, other.to(one.dtype))):
            size = other.double().square().mean().sqrt().item() or 1.0
            worst = max(worst, (one.double() - other.double()).abs().max().item() / size)
    return worst


def alike(name: str, got: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return [t.dtype for t in got] == [t.dtype for t in wanted] and distance(got, wanted) <= ROUNDED.get(name, 0.0)


@pytest.mark.parametrize("name", EACH)
def test_a_program_is_a_module_like_its_source(name):
    model, args, kwargs, program = traced(name)
    assert set(program.state_dict()) == set(model.state_dict())
    with torch.no_grad():
        wanted = run(model, args, kwargs)
        assert alike(name, run(copy.deepcopy(program), args, kwargs), wanted)
        meta = run(copy.deepcopy(program).to("meta"), args, kwargs, lambda t: t.to("meta"))
        assert alike(name, meta, [t.to("meta") for t in wanted])
        torch._dynamo.reset()
        assert alike(name, run(torch.compile(program, backend="aot_eager"), args, kwargs), wanted)


@pytest.mark.parametrize("name", EACH)
def test_other_dtypes_are_those_of_the_source(name):
    model, args, kwargs, program = traced(name)

    def half(t):
        return t.bfloat16() if t.is_floating_point() else t

    def double(t):
        return t.double() if t.is_floating_point() else t

    with torch.no_grad():
        eager = run(copy.deepcopy(model).bfloat16(), args, kwargs, half)
        assert alike(name, run(copy.deepcopy(program).to(torch.bfloat16), args, kwargs, half), eager)
        if name not in NO_FLOAT64:  # ours has no float32 left inside, eager may
            wide = run(copy.deepcopy(program).to(torch.float64), args, kwargs, double)
            assert all(t.dtype == torch.float64 for t in wide if t.is_floating_point())
            assert distance(wide, run(copy.deepcopy(model).double(), args, kwargs, double)) < 5e-6


@pytest.mark.parametrize("name", EACH)
def test_autocast_is_that_of_the_source(name):
    model, args, kwargs, program = traced(name)
    with torch.no_grad():
        plain = run(model, args, kwargs)
        with torch.autocast("cpu", torch.bfloat16):
            got, wanted = run(program, args, kwargs), run(model, args, kwargs)
    assert distance(wanted, plain) > 0
    if name in OWN_DTYPE:  # then at least as near to full precision
        assert 0 < distance(got, plain) <= 1.5 * distance(wanted, plain)
    else:
        assert alike(name, got, wanted)


@pytest.mark.parametrize("name", EACH)
def test_train_mode_is_that_of_the_source_or_refused(name):
    model, args, kwargs, program = traced(name)
    program, eager = copy.deepcopy(program), copy.deepcopy(model)
    if name in NO_TRAIN_MODE:
        with pytest.raises(UsageError, match=NO_TRAIN_MODE[name]):
            program.train()
    else:
        with torch.no_grad():
            torch.manual_seed(0)
            got = run(program.train(), args, kwargs)
            torch.manual_seed(0)
            assert alike(name, got, run(eager.train(), args, kwargs))
    with torch.no_grad():
        assert alike(name, run(program.eval(), args, kwargs), run(model, args, kwargs))


@pytest.mark.parametrize("name", EACH)
def test_gradients_through_checkpointed_blocks_are_those_of_the_source(name):
    model, args, kwargs, program = traced(name)
    if name in NO_BLOCKS:
        with pytest.raises(UsageError, match="no blocks"):
            program.as_module(checkpoint="blocks")
        return
    if name in IN_PLACE:
        with pytest.raises(RuntimeError, match="inplace"):
            sum(t.sum() for t in run(model, args, kwargs)).backward()
        return
    grads = []
    for net in (copy.deepcopy(program).as_module(checkpoint="blocks"), copy.deepcopy(model)):
        outputs = [t for t in run(net, args, kwargs) if t.is_floating_point() and t.requires_grad]
        sum(t.float().square().mean() for t in outputs).backward()
        grads.append({n: p.grad for n, p in net.named_parameters() if p.grad is not None})
    got, wanted = grads
    assert got.keys() == wanted.keys() and wanted
    for key in wanted:
        torch.testing.assert_close(got[key], wanted[key], rtol=1e-4, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}")
