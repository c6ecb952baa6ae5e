"""Tracing: bitwise what eager gives, and the model is left as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from hcx.rewrite import TraceError, UsageError, load, trace
from torch import nn

from tests.conftest import SHAPES, tiny_llama, token_ids


def equal(one, other) -> bool:
    return torch.equal(one, other) and one.dtype == other.dtype


class Scratch(nn.Module):
    """Makes a tensor in its forward, and overwrites another one with a row of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        seen = torch.empty_like(y)
        seen.copy_(row * 2)
        return torch.cat([torch.tensor([], device=x.device), (y * seen).flatten()])


def test_a_model_on_meta_may_make_tensors_in_its_forward():
    """As Transformers' caches do; on meta the trace ends in ``detach_``, which writes nothing."""
    with torch.device("meta"):
        program = trace(Scratch(), (torch.zeros(3, 4), torch.zeros(4)))
    assert [tuple(p.shape) for p in program.parameters()] == [(4, 4), (4,)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_overwritten_tensor_keeps_its_gradient(dtype):
    model, x = Scratch(), torch.randn(3, 4)
    row, twin = (torch.arange(4, dtype=dtype).requires_grad_() for _ in range(2))
    program = trace(model, (x, row.detach()))
    assert not any(n.target in (torch.ops.aten.copy.default, torch.ops.aten.copy_.default) for n in program.graph.nodes)
    got, expected = program(x, row), model(x, twin)
    got.square().sum().backward(), expected.square().sum().backward()
    assert equal(got, expected) and row.grad.abs().sum() > 1
    torch.testing.assert_close(row.grad, twin.grad, rtol=1e-6, atol=0)  # the sum over rows may go in another order


# ---- bitwise


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("net", ["llama", "smollm2"])
def test_logits_and_cache_are_bitwise_eager(net, shape, request):
    traced = request.getfixturevalue(net)
    ids = traced.ids(*shape)
    with torch.no_grad():
        got, expected = traced.program(ids), traced.model(ids)
    assert equal(got.logits, expected.logits)
    for mine, theirs in zip(got.past_key_values.layers, expected.past_key_values.layers, strict=True):
        assert equal(mine.keys, theirs.keys) and equal(mine.values, theirs.values)


def test_decoding_with_a_given_cache_is_bitwise_eager(llama):
    ids = llama.ids(3, 11)
    with torch.no_grad():
        first, eager_first = llama.program(ids[:, :7]), llama.model(ids[:, :7])
        positions = torch.arange(7, 11)[None].expand(3, 4).contiguous()
        given = {"position_ids": positions, "attention_mask": torch.ones(3, 11, dtype=torch.int64)}
        got = llama.program(ids[:, 7:], past_key_values=first.past_key_values, **given)
        expected = llama.model(ids[:, 7:], past_key_values=eager_first.past_key_values, **given)
    assert equal(got.logits, expected.logits)


def test_a_model_whose_weights_lie_at_odd_addresses_is_bitwise_eager_too(llama):
    """As after loading from safetensors, whose tensors begin where the header ends. It depends on the CPU who cares."""
    model = tiny_llama(2)
    for parameter in model.parameters():
        room = torch.empty(parameter.numel() + 14)
        parameter.data = room[14:].view(parameter.shape).copy_(parameter.data)
    program = trace(model, (llama.ids(2, 12),))
    with torch.no_grad():
        for shape in SHAPES[:3]:
            assert equal(program(llama.ids(*shape)).logits, model(llama.ids(*shape)).logits), shape
    assert program.rewrite("looped{start=0,end=1},exits{at=[1]}").history


def test_left_padding_is_bitwise_eager(llama):
    ids, mask = llama.ids(3, 9), torch.ones(3, 9, dtype=torch.int64)
    mask[0, :4], mask[2, :1] = 0, 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        got = llama.program(ids, attention_mask=mask, position_ids=positions).logits
        expected = llama.model(ids, attention_mask=mask, position_ids=positions).logits
        plain = llama.program(ids).logits
    assert equal(got, expected) and not equal(got[0], plain[0])


def test_an_example_of_one_row_and_one_token_gives_a_graph_for_every_shape(llama):
    model = tiny_llama(1)
    program = trace(model, (llama.ids(1, 1),))
    with torch.no_grad():
        for shape in SHAPES:
            assert equal(program(llama.ids(*shape)).logits, model(llama.ids(*shape)).logits)


def test_gradients_equal_eager(llama):
    def gradients(module):
        module = copy.deepcopy(module)
        module(llama.ids(2, 9)).logits.square().mean().backward()
        return {name: parameter.grad for name, parameter in module.named_parameters()}

    got, expected = gradients(llama.program), gradients(llama.model)
    assert set(got) == set(expected)
    for name, gradient in expected.items():
        assert torch.allclose(got[name], gradient, rtol=0, atol=1e-6 * gradient.abs().max().item()), name


# ---- the model is not touched


def snapshot(model: nn.Module) -> dict:
    return {
        name: (
            sorted(set(module.__dict__) - {"_parameters", "_buffers", "_modules"}),
            [(n, id(t), t._version, t.requires_grad, t.grad) for n, t in module._parameters.items() if t is not None],
            [(n, id(t), t._version) for n, t in module._buffers.items() if t is not None],
            module.training,
            {k: len(v) for k, v in vars(module).items() if k.endswith("_hooks")},
        )
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("mode", ["train", "eval", "mixed"])
def test_the_model_is_left_as_it_was(mode):
    model = tiny_llama(2, attention_dropout=0.1)
    model.train(mode != "eval")
    if mode == "mixed":
        model.model.layers[0].eval()
    model.lm_head.weight.requires_grad_(False)
    before, config = snapshot(model), model.config.to_dict()
    ids = token_ids(18).reshape(2, 9)
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    program = trace(model, (ids,))
    rewritten = program.rewrite("looped{start=0,end=1},exits{at=[1],threshold=0.5}")
    rewritten(ids).logits.sum().backward()
    assert snapshot(model) == before and model.config.to_dict() == config
    assert torch.equal(torch.random.get_rng_state(), state), "the global random state moved"
    assert not program.training
    with torch.no_grad():
        assert equal(program(ids).logits, copy.deepcopy(model).eval()(ids).logits)


def test_training_a_program_does_not_reach_the_model_or_other_programs(llama):
    before = {n: t.clone() for n, t in llama.model.state_dict().items()}
    traced = copy.deepcopy(llama.program)
    rewritten = traced.rewrite("exits{at=[3]}", check=False)
    with torch.no_grad():
        for parameter in rewritten.parameters():
            parameter.add_(1.0)
    for module in (llama.model, llama.program, traced):
        assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())
    with torch.no_grad():
        for parameter in traced.parameters():
            parameter.add_(1.0)
    for module in (llama.model, llama.program):
        assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())


# ---- state


class WithBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.kept, self.tied = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.tied.weight = self.kept.weight
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.plain = torch.tensor([0.5, 0.25, 0.125, 1.0])

    def forward(self, x):
        return self.tied(torch.relu(self.kept(x * self.scale) + self.table)) * self.plain


def test_state_dict_has_the_models_keys_without_transient_buffers():
    model = WithBuffers()
    program = trace(model, (torch.randn(3, 4),))
    assert {n: t.tolist() for n, t in program.state_dict().items()} == {
        n: t.tolist() for n, t in model.state_dict().items()
    }
    x = torch.randn(5, 4)
    assert equal(program(x), model(x))
    program.load_state_dict({n: t + 1 for n, t in model.state_dict().items()})
    model.load_state_dict({n: t + 1 for n, t in model.state_dict().items()})
    assert equal(program(x), model(x))


def test_tied_parameters_are_one_tensor_and_listed():
    program = trace(WithBuffers(), (torch.randn(3, 4),))
    assert program.tied_groups() == [["kept.weight", "tied.weight"]]
    assert program.tensor("kept.weight") is program.tensor("tied.weight")


def test_smollm2_keeps_its_head_tied_to_the_embedding(smollm2):
    assert [set(group) for group in smollm2.program.tied_groups()] == [{"lm_head.weight", "model.embed_tokens.weight"}]
    assert sum(p.numel() for p in smollm2.program.parameters()) == 134_515_008


# ---- what cannot be traced


def test_a_decision_on_values_is_refused_with_file_and_line():
    class Decides(nn.Module):
        def forward(self, x):
            if x.sum() > 0:
                return x
            return -x

    with pytest.raises(TraceError) as caught:
        trace(Decides(), (torch.randn(2, 3),))
    assert "test_trace.py:" in caught.value.where and "if x.sum() > 0" in caught.value.where
    assert "torch.where" in caught.value.hint


def test_random_numbers_are_refused():
    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.rand_like(x)

    with pytest.raises(TraceError, match="draws random numbers"):
        trace(Noisy(), (torch.randn(2, 3),))


def test_state_between_calls_is_refused():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x * self.calls

    with pytest.raises(TraceError, match="does not give what the model gives"):
        trace(Counting(), (torch.randn(2, 3),))


def test_a_failing_example_and_a_wrong_example_are_told_apart(llama):
    with pytest.raises(UsageError, match="does not fit"):
        trace(llama.model, (llama.ids(2, 3),), {"no_such": 1, "input_ids": llama.ids(2, 3)})
    with pytest.raises(TraceError, match="itself fails"):
        trace(nn.Linear(4, 4), (torch.randn(2, 3),))


# ---- sizes that the model decides by


class Chunked(torch.nn.Module):
    """A running sum over chunks of 8 tokens: the number of chunks is fixed while a graph is made."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x):
        pad = (8 - x.shape[1] % 8) % 8
        padded = torch.nn.functional.pad(self.inner(x), (0, 0, 0, pad))
        state, parts = torch.zeros_like(padded[:, 0]), []
        for i in range(padded.shape[1] // 8):
            chunk = padded[:, 8 * i : 8 * i + 8]
            parts.append(chunk + state.unsqueeze(1))
            state = state + chunk.sum(1)
        return torch.cat(parts, 1)[:, : x.shape[1]]


def test_sizes_that_the_model_decides_by_are_limits(tmp_path):
    model = Chunked().eval()
    program = trace(model, (torch.randn(2, 11, 4),))
    (name,) = program.signature.limits
    assert program.signature.limits[name] == [None, 16]  # below, the second chunk is empty: nothing is wrong
    program.save(tmp_path / "net.hcx")
    for net in (program, load(tmp_path / "net.hcx")):
        with torch.no_grad():
            for length in (3, 8, 16):
                x = torch.randn(3, length, 4)
                assert torch.equal(net(x), model(x))
        for length in (17, 40):
            with pytest.raises(UsageError, match=f"is {length}, and this graph is Chunked for 1 to 16 only"):
                net(torch.randn(3, length, 4))


class Differences(torch.nn.Module):
    """Sums of differences within chunks of 8 tokens: one token alone in a chunk of its own changes nothing."""

    def forward(self, x):
        total = torch.zeros_like(x[:, 0])
        for i in range((x.shape[1] + 7) // 8):
            chunk = x[:, 8 * i : 8 * i + 8]
            total = total + (chunk[:, 1:] - chunk[:, :-1]).square().sum(1)
        return total


def test_one_size_that_happens_to_agree_is_not_believed():
    program = trace(Differences().eval(), (torch.randn(2, 11, 4),))
    (limit,) = program.signature.limits.values()
    assert limit == [None, 17]


def test_guards_that_change_nothing_are_no_limits():
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, stride=2), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    program = trace(net.eval(), (torch.randn(2, 3, 32, 32),))
    assert not program.signature.limits
    x = torch.randn(1, 3, 9, 70)
    with torch.no_grad():
        assert torch.equal(program(x), net(x))


class Blanked(nn.Module):
    """Sets samples to 0 by a mask, which ties the rows of neither to those of the other."""

    def forward(self, waves: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        waves = waves.clone()
        waves[attention_mask == 0] = 0
        return waves * 2


def test_a_mask_has_a_row_for_each_row_of_the_data():
    waves, mask = torch.randn(2, 9), torch.ones(2, 9, dtype=torch.long)
    program = trace(Blanked(), (waves, mask))
    assert [i.shape[0] for i in program.inputs] == ["batch", "batch"]
    with pytest.raises(UsageError):
        program(waves, mask[:1])
