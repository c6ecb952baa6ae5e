"""Looped windows against loops over the Transformers modules that are written out here by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hcx.passes import Looped
from hcx.rewrite import UsageError, trace
from hcx.rewrite.run.generation import decode, greedy
from torch import nn

from tests.trained_nets import llama_by_hand


def rms(x: torch.Tensor) -> torch.Tensor:
    return x.pow(2).mean(-1, keepdim=True).sqrt()


def looped_by_hand(model, ids, start, end, steps, mix, a, mask=None) -> torch.Tensor:
    """Logits with blocks [start, end) run ``steps`` times, by three of the forms of docs/sources.md, loop-mixing."""

    def middle(block, x):
        def blocks(numbers, state):
            for number in numbers:
                state = block(number, state)
            return state

        entry = blocks(range(start), x)
        state = blocks(range(start, end), entry)
        for _ in range(steps - 1):
            if mix == "input":
                state = blocks(range(start, end), (1 - a) * entry + a * state)
            elif mix == "input_rms":
                state = blocks(range(start, end), (1 - a) * entry + a * state * rms(entry) / rms(state))
            else:
                state = state + a * (blocks(range(start, end), state) - state)
        return blocks(range(end, len(model.model.layers)), state)

    return llama_by_hand(model, ids, middle, mask)


NETS = {
    "llama": (SimpleNamespace(start=2, end=4), [(2, 12), (3, 7)]),
    "smollm2": (SimpleNamespace(start=12, end=16), [(2, 12), (3, 33)]),
}
FORMS = [("output", 0.25), ("input", 0.3), ("input_rms", 0.3)]


@pytest.mark.parametrize(("mix", "scalar"), FORMS)
@pytest.mark.parametrize("net", NETS)
def test_three_steps_equal_the_loop_by_hand_and_differ_from_the_model(net, mix, scalar, request, max_diff):
    traced, (window, shapes) = request.getfixturevalue(net), NETS[net]
    step = Looped(start=window.start, end=window.end, steps=3, mix=mix, scalar=scalar)
    program = traced.program.rewrite(step, check=False)
    for shape in shapes:
        ids = traced.ids(*shape)
        with torch.no_grad():
            got, original = program(ids).logits, traced.model(ids).logits
        expected = looped_by_hand(traced.model, ids, window.start, window.end, 3, mix, scalar)
        assert max_diff(got, expected) <= 1e-4
        assert max_diff(got, original) > 1e-3


def test_left_padding_is_seen_by_every_iteration(llama, max_diff):
    program = llama.program.rewrite("looped{start=1,end=5,steps=2,scalar=0.7,mix=output}", check=False)
    ids, mask = llama.ids(3, 8), torch.ones(3, 8, dtype=torch.int64)
    mask[0, :3], mask[1, :5] = 0, 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        got = program(ids, attention_mask=mask, position_ids=positions).logits
    expected = looped_by_hand(llama.model, ids, 1, 5, 2, "output", 0.7, mask)
    assert max_diff(got[mask.bool()], expected[mask.bool()]) <= 1e-4


@pytest.mark.parametrize("mix", ["input", "input_rms", "output"])
@pytest.mark.parametrize("steps", [2, 4])
def test_a_scalar_of_zero_is_bitwise_the_model(llama, mix, steps):
    program = llama.program.rewrite(Looped(start=0, end=6, steps=steps, mix=mix), check=False)
    for shape in [(2, 12), (1, 1), (5, 30)]:
        with torch.no_grad():
            assert torch.equal(program(llama.ids(*shape)).logits, llama.model(llama.ids(*shape)).logits)


@pytest.mark.parametrize("mix", ["input", "output"])
def test_the_scalar_is_one_trainable_parameter_whose_value_counts(llama, mix, max_diff):
    program = llama.program.rewrite(Looped(start=2, end=4, steps=3, mix=mix), check=False)
    ((name, scalar),) = program.new_parameters().items()
    assert scalar.shape == (1,) and program.origin[name] == "looped"
    with torch.no_grad():
        scalar.fill_(-0.4)
        got = program(llama.ids(2, 6)).logits
    assert max_diff(got, looped_by_hand(llama.model, llama.ids(2, 6), 2, 4, 3, mix, -0.4)) <= 1e-4
    program(llama.ids(2, 6)).logits.square().mean().backward()
    step = 1e-2
    losses = []
    for value in (-0.4 + step, -0.4 - step):
        with torch.no_grad():
            scalar.fill_(value)
            losses.append(program(llama.ids(2, 6)).logits.double().square().mean().item())
    assert scalar.grad.item() == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=0.02)


def test_weights_are_shared_by_the_iterations(llama):
    program = llama.program.rewrite("looped{start=2,end=4,steps=4,scalar=0.5}", check=False)
    assert set(program.state_dict()) - set(llama.program.state_dict()) == set(program.new_parameters())
    assert sum(p.numel() for p in program.parameters()) == 1 + sum(p.numel() for p in llama.model.parameters())


# ---- caches


@pytest.fixture(scope="module")
def looped(llama):
    return llama.program.rewrite("looped{start=2,end=4,steps=3,scalar=0.4,mix=output}", check=False)


def test_every_iteration_has_cache_slots_of_its_own(llama, looped):
    with torch.no_grad():
        cache = looped(llama.ids(2, 5)).past_key_values
    assert len(cache.layers) == 6 + 2 * 2
    keys = [layer.keys for layer in cache.layers]
    assert all(k.shape == keys[0].shape for k in keys)
    assert not any(torch.equal(keys[i], keys[j]) for i in range(len(keys)) for j in range(i))


def test_cached_decoding_is_the_full_forward_away_from_neutral(llama, looped, max_diff):
    ids = llama.ids(2, 5)
    tokens, steps = decode(looped.signature, looped.run_flat, looped.output_names, ids, 16)
    for number, logits in enumerate(steps):
        prefix = tokens[:, : 5 + number]
        full = looped_by_hand(llama.model, prefix, 2, 4, 3, "output", 0.4)[:, -1]
        assert max_diff(logits, full) <= 1e-4
        assert torch.equal(tokens[:, 5 + number], full.argmax(-1))


def test_left_padded_rows_decode_as_they_do_alone(llama, looped):
    lengths, width = (3, 7, 5), 7
    rows = [llama.ids(1, n, start=50 * n) for n in lengths]
    ids = torch.cat([torch.cat([torch.zeros(1, width - n, dtype=torch.int64), row], 1)
                     for n, row in zip(lengths, rows, strict=True)])  # fmt: skip
    mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths])
    together = greedy(looped, ids, 16, attention_mask=mask)
    for number, row in enumerate(rows):
        assert torch.equal(together[number, width:], greedy(looped, row, 16)[0, row.shape[1] :])


def test_neutral_decoding_gives_the_tokens_of_transformers_generate(llama):
    program = llama.program.rewrite("looped{start=2,end=4,steps=2},exits{at=[3,5]}", check=False)
    ids, mask = llama.ids(3, 6), torch.ones(3, 6, dtype=torch.int64)
    ids[0, :4], mask[0, :4], ids[2, :1], mask[2, :1] = 0, 0, 0, 0
    expected = llama.model.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False)
    assert expected.shape == (3, 22)
    assert torch.equal(greedy(program, ids, 16, attention_mask=mask), expected)


# ---- which window


def test_default_window_is_near_the_middle_and_says_what_it_costs(llama):
    (step,) = llama.program.plan("looped").steps
    (site,) = step.sites
    assert (site.detail["start"], site.detail["end"]) == (3, 5) and site.address == "model.layers[3:5]"
    assert step.estimate == {"extra block applications": 2, "new parameters": 1}


def test_default_window_of_smollm2_starts_after_the_attention_sink(smollm2):
    """The rms of position 0 jumps in block 11 (docs/sources.md, attention-sink); [12, 16) lies after it."""
    (step,) = smollm2.program.plan("looped").steps
    assert (step.sites[0].detail["start"], step.sites[0].detail["end"]) == (12, 16) and not step.notes
    (step,) = smollm2.program.plan("looped{start=10,end=14}").steps
    assert any("sink" in note and "11" in note for note in step.notes)


class Sinking(nn.Module):
    """Six equal blocks; one of them blows position 0 up, as the block does in which an attention sink appears."""

    def __init__(self, sink: int):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.gains = nn.ParameterList(nn.Parameter(torch.tensor(1000.0 * (i == sink))) for i in range(6))

    def forward(self, x):
        first = (torch.arange(x.shape[1]) == 0)[:, None]
        for block, gain in zip(self.blocks, self.gains, strict=True):
            x = x + torch.tanh(block(x)) * (1 + gain * first)
        return x


@pytest.mark.parametrize(("sink", "window"), [(0, (3, 5)), (2, (3, 5)), (3, (4, 6)), (4, (2, 4)), (5, (3, 5))])
def test_default_window_keeps_clear_of_the_block_in_which_a_sink_appears(sink, window):
    torch.manual_seed(0)
    plan = trace(Sinking(sink), (torch.randn(2, 7, 8),)).plan("looped").steps[0]
    assert (plan.sites[0].detail["start"], plan.sites[0].detail["end"]) == window


@pytest.mark.parametrize("options", ["start=3,end=3", "start=4,end=9", "start=-1,end=2", "start=2", "steps=0"])
def test_a_window_that_cannot_be_is_refused(llama, options):
    with pytest.raises(UsageError) as caught:
        llama.program.plan(f"looped{{{options}}}")
    assert caught.value.where


def test_sixty_four_cached_tokens_of_smollm2_are_those_of_the_full_forward(smollm2, max_diff):
    """Input mixing at 0.3 with the attention sink inside the window, where a wrong cache shows at once."""
    program = smollm2.program.rewrite("looped{start=10,end=20,steps=2,scalar=0.3}", check=False)
    ids = smollm2.ids(1, 20)
    tokens, steps = decode(program.signature, program.run_flat, program.output_names, ids, 64)
    full = looped_by_hand(smollm2.model, tokens[:, :-1], 10, 20, 2, "input", 0.3)[:, 19:]
    cached = torch.stack(steps, 1)
    assert cached.shape[1] == 64 and max_diff(cached, full) <= 1e-4
    assert torch.equal(cached.argmax(-1), full.argmax(-1))
