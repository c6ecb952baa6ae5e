"""Exits against final norm and head on the Transformers model's own hidden states, token by token."""

from __future__ import annotations

import pytest
import torch
from hcx.passes import Exits
from hcx.rewrite import NoMatchError, UsageError, trace
from hcx.rewrite.run.generation import decode
from torch import nn
from torch.nn import functional as F

from tests.conftest import tiny_llama

PLACES = {"llama": (3, 5), "smollm2": (20, 25)}
NEAR = 1e-4


def eager(model, ids: torch.Tensor, *places: int, view=lambda x: x) -> list[torch.Tensor]:
    """Logits read after some blocks, then the model's own."""
    with torch.no_grad():
        output = model(ids, output_hidden_states=True)
        early = [model.lm_head(model.model.norm(view(output.hidden_states[k]))) for k in places]
    return [*early, output.logits]


def max_prob(logits: torch.Tensor) -> torch.Tensor:
    return logits.double().softmax(-1).max(-1).values


def margin(logits: torch.Tensor) -> torch.Tensor:
    first, second = logits.double().softmax(-1).sort(-1, descending=True).values[..., :2].unbind(-1)
    return first - second


def between(scores: torch.Tensor, share: float = 0.5) -> float:
    """A threshold in the widest gap among the scores next to a quantile, so that rounding decides nothing."""
    ordered = scores.flatten().sort().values
    centre = int((1 - share) * ordered.numel())
    reach = max(1, ordered.numel() // 5)
    window = ordered[max(0, centre - reach) : centre + reach + 1]
    gap = (window[1:] - window[:-1]).argmax()
    assert window[gap + 1] - window[gap] > 1e-5
    return (window[gap] + window[gap + 1]).item() / 2


@pytest.mark.parametrize("net", PLACES)
def test_a_threshold_below_every_score_reads_the_first_exit(net, request, max_diff):
    traced, (first, second) = request.getfixturevalue(net), PLACES[net]
    program = traced.program.rewrite(Exits(at=(first, second), threshold=-1.0), check=False)
    for shape in [(2, 12), (3, 33)]:
        ids = traced.ids(*shape)
        with torch.no_grad():
            output, taps = program(ids, taps=True)
        early, later, full = eager(traced.model, ids, first, second)
        assert max_diff(output.logits, early) <= NEAR < 1e-3 < max_diff(output.logits, full)
        assert bool((taps["exits.depth"] == first).all()), "the first exit that is sure wins"
        assert max_diff(taps[f"exits.{second}.logits"], later) <= NEAR


@pytest.mark.parametrize(("score", "by_hand"), [("max_prob", max_prob), ("margin", margin)])
@pytest.mark.parametrize("net", PLACES)
def test_each_token_leaves_where_its_own_score_says(net, score, by_hand, request, max_diff):
    traced, (first, second) = request.getfixturevalue(net), PLACES[net]
    shapes, layers = [(2, 12), (3, 33)], traced.model.config.num_hidden_layers
    reference = eager(traced.model, traced.ids(*shapes[1]), first, second)
    threshold = between(by_hand(reference[0]), share=0.4)
    program = traced.program.rewrite(Exits(at=(first, second), score=score, threshold=threshold), check=False)
    for shape in shapes:
        ids = traced.ids(*shape)
        with torch.no_grad():
            output, taps = program(ids, taps=True)
        readings = dict(zip((first, second, layers), eager(traced.model, ids, first, second), strict=True))
        depth = torch.full(shape, layers)
        for place in (second, first):
            scores = by_hand(readings[place])
            depth[scores >= threshold] = place
            rounding = max_diff(taps[f"exits.{place}.logits"], readings[place])  # of logits, other on each machine
            assert rounding <= NEAR
            # probabilities, and the margin of two, move by no more than the logits do; a sum of many in float32 rounds
            summed = torch.finfo(torch.float32).eps * readings[place].shape[-1] ** 0.5
            assert max_diff(taps[f"exits.{place}.score"].double(), scores) <= 1e-6 + rounding + summed
        assert torch.equal(taps["exits.depth"], depth)
        early = (depth < layers).double().mean().item()
        assert 0.1 <= early <= 0.9, "the threshold does not separate the tokens"
        for row in range(shape[0]):
            for position in range(shape[1]):
                expected = readings[int(depth[row, position])][row, position]
                assert max_diff(output.logits[row, position], expected) <= NEAR


def test_never_is_bitwise_the_model(llama):
    program = llama.program.rewrite("exits{at=[1,3,5]}", check=False)
    for shape in [(2, 12), (1, 1), (3, 33)]:
        ids = llama.ids(*shape)
        with torch.no_grad():
            output, taps = program(ids, taps=True)
            assert torch.equal(output.logits, llama.model(ids).logits)
        assert bool((taps["exits.depth"] == 6).all())


def test_never_is_bitwise_even_where_a_probability_is_exactly_one(llama):
    model = tiny_llama(3)
    with torch.no_grad():
        model.lm_head.weight.mul_(3e4)
    program, ids = trace(model, (llama.ids(2, 9),), cache=False), llama.ids(3, 8)
    never = program.rewrite("exits{at=[1,2]}", check=False)
    with torch.no_grad():
        output, taps = never(ids, taps=True)
        assert bool((taps["exits.1.score"] == 1).any()), "no score is exactly 1: the case is not tested"
        assert torch.equal(output.logits, model(ids).logits)
        at_one = program.rewrite("exits{at=[1,2],threshold=1.0}", check=False)
        depth = at_one(ids, taps=True)[1]["exits.depth"]
    assert torch.equal(depth == 1, taps["exits.1.score"] == 1), "a threshold of 1 is not never"


def test_a_score_that_is_not_a_number_does_not_leave(llama):
    model = tiny_llama(3)
    program = trace(model, (llama.ids(2, 9),), cache=False)
    program = program.rewrite("exits{at=[1],head=affine,threshold=-1}", check=False)
    with torch.no_grad():
        next(p for n, p in program.named_parameters() if n.endswith("1.bias")).fill_(float("nan"))
        assert torch.equal(program(llama.ids(2, 5)).logits, model(llama.ids(2, 5)).logits)


@pytest.mark.parametrize("net", PLACES)
def test_affine_heads_translate_the_stream(net, request, max_diff):
    traced, (place, _) = request.getfixturevalue(net), PLACES[net]
    program = traced.program.rewrite(Exits(at=(place,), head="affine", threshold=-1.0), check=False)
    ids, width = traced.ids(2, 12), traced.model.config.hidden_size
    with torch.no_grad():
        before = program(ids).logits
    assert max_diff(before, eager(traced.model, ids, place)[0]) <= NEAR, "it does not start as the identity"
    weight, bias = program.new_parameters().values()
    assert weight.shape == (width, width) and bias.shape == (width,)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        weight.copy_(torch.eye(width) + 0.3 * torch.randn(width, width, generator=generator) / width**0.5)
        bias.copy_(0.1 * torch.randn(width, generator=generator))
        got = program(ids).logits
    expected = eager(traced.model, ids, place, view=lambda x: F.linear(x, weight, bias))[0]
    assert max_diff(got, expected) <= NEAR and max_diff(got, before) > 1e-3


def test_heads_learn_through_taps_while_the_output_gives_them_exactly_nothing(llama):
    program, ids = llama.program.rewrite("exits{at=[2,4],head=affine}", check=False), llama.ids(2, 9)
    program(ids).logits[:, :, 0].sum().backward()
    for name, parameter in program.new_parameters().items():
        assert parameter.grad is None or not bool(parameter.grad.any()), name
    _, taps = program(ids, taps=True)
    losses = [F.cross_entropy(taps[f"exits.{k}.logits"][:, :-1].flatten(0, 1), ids[:, 1:].flatten()) for k in (2, 4)]
    sum(losses).backward()
    for name, parameter in program.new_parameters().items():
        assert parameter.grad is not None and bool(parameter.grad.any()), name


def test_an_exit_that_is_taken_learns_from_the_output(llama):
    ids = llama.ids(2, 9)
    threshold = between(max_prob(eager(llama.model, ids, 2)[0]))
    program = llama.program.rewrite(Exits(at=(2,), head="affine", threshold=threshold), check=False)
    program(ids).logits[:, :, 0].sum().backward()
    assert all(bool(parameter.grad.any()) for parameter in program.new_parameters().values())


def test_training_heads_through_taps_lowers_their_loss_and_keeps_the_model_bitwise(llama):
    program = llama.program.rewrite("exits{at=[3],head=affine}", check=False)
    optimizer = torch.optim.AdamW(program.new_parameters().values(), lr=1e-2)
    ids, losses = llama.ids(4, 12), []
    for _ in range(5):
        _, taps = program(ids, taps=True)
        loss = F.cross_entropy(taps["exits.3.logits"][:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]
    with torch.no_grad():
        assert torch.equal(program(ids).logits, llama.model(ids).logits)


def test_taps_are_off_in_a_normal_call_and_named_in_order(llama):
    program = llama.program.rewrite("exits{at=[4,2]}", check=False)
    ids = llama.ids(2, 5)
    names = ["exits.2.logits", "exits.2.score", "exits.4.logits", "exits.4.score", "exits.depth"]
    assert program.taps == names and list(program(ids, taps=True)[1]) == names
    assert type(program(ids)) is type(llama.model(ids))
    assert len(program.run_flat(program.signature.bind((ids,), {}))) == len(program.output_names)


def test_exits_inserted_twice_keep_all_their_taps(llama):
    program = llama.program.rewrite("exits{at=[2]}", check=False).rewrite("exits{at=[2,4],head=affine}", check=False)
    values = program(llama.ids(2, 5), taps=True)[1]
    assert len(values) == len(program.taps) == 3 + 5


def test_rows_do_not_depend_on_each_other(llama, max_diff):
    scores = max_prob(eager(llama.model, llama.ids(3, 9), 3)[0])
    program = llama.program.rewrite(Exits(at=(3,), threshold=between(scores)), check=False)
    ids = llama.ids(3, 9)
    with torch.no_grad():
        together, taps = program(ids, taps=True)
        for row in range(3):
            alone, own = program(ids[row : row + 1], taps=True)
            assert torch.equal(own["exits.depth"][0], taps["exits.depth"][row])
            assert max_diff(alone.logits[0], together.logits[row]) <= NEAR


def test_cached_decoding_leaves_where_the_full_forward_leaves(llama, max_diff):
    scores = max_prob(eager(llama.model, llama.ids(3, 9), 3)[0])
    program = llama.program.rewrite(Exits(at=(3,), threshold=between(scores)), check=False)
    tokens, steps = decode(program.signature, program.run_flat, program.output_names, llama.ids(2, 5), 12)
    with torch.no_grad():
        for number, logits in enumerate(steps):
            assert max_diff(program(tokens[:, : 5 + number]).logits[:, -1], logits) <= NEAR


@pytest.mark.parametrize("options", ["at=[0]", "at=[6]", "at=[3,9]", "at=[-1]", "stack=nowhere", "score=entropie"])
def test_an_exit_that_cannot_be_is_refused(llama, options):
    with pytest.raises(UsageError) as caught:
        llama.program.plan(f"exits{{{options}}}")
    assert caught.value.where and caught.value.hint


def test_a_model_of_one_block_has_no_place_for_an_exit():
    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8)])

        def forward(self, x):
            return x + self.layers[0](x)

    with pytest.raises(NoMatchError):
        trace(One(), (torch.randn(2, 3, 8),)).rewrite("exits")


class TimeFirst(nn.Module):
    """Blocks over ``[time, batch, width]`` between an embedding and a head over ``[batch, time]``, as FSMT is."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3))

    def forward(self, input_ids: torch.Tensor, depth: int = 3) -> torch.Tensor:
        x = self.embed(input_ids).transpose(0, 1)
        for block in self.blocks[:depth]:
            x = x + block(x)
        return self.head(x.transpose(0, 1))


def test_a_stream_in_another_order_than_the_answer_exits_at_the_answer(max_diff):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, ids = TimeFirst().eval(), torch.randint(0, 16, (2, 7))
    with torch.no_grad():
        early, full, other = model(ids, depth=1), model(ids), model(ids[:1, :5])
    scores = max_prob(early)
    threshold = between(scores)
    program = trace(model, (ids,))
    assert torch.equal(program.rewrite("exits{at=[1]}")(ids[:1, :5]), other)
    output, taps = program.rewrite(Exits(at=(1,), threshold=threshold), check=False)(ids, taps=True)
    leaves = scores >= threshold
    assert 0 < leaves.sum() < leaves.numel() and torch.equal(taps["exits.depth"] == 1, leaves)
    assert max_diff(output, torch.where(leaves[..., None], early, full)) <= NEAR < max_diff(early, full)
