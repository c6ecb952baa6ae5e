"""Heads and scores of exits away from their start, against the Transformers model's own modules and closed forms."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hcx.passes import Exits
from hcx.rewrite import NoMatchError, load, trace
from hcx.rewrite.run.generation import decode
from torch import nn
from torch.nn import functional as F

from tests.test_exits import NEAR, TimeFirst, between, eager, max_prob
from tests.trained_nets import llama_by_hand

HEADS = ("shared", "norm", "affine", "mlp", "block")
SCORES = ("max_prob", "margin", "entropy", "cosine", "patience", "probe", "gate", "palbert", "jei")
AT = 3


def shaken(program, seed: int = 5, scale: float = 0.2) -> dict[str, torch.Tensor]:
    """New parameters moved away from their start, by the name behind ``hcx.exits_0.``."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in program.new_parameters().values():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator) / max(1, parameter.dim()) ** 2)
    return {n.removeprefix("hcx.exits_0."): p for n, p in program.new_parameters().items()}


def streams(model, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return model(ids, output_hidden_states=True).hidden_states


def read(model, stream: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.lm_head(model.model.norm(stream))


@pytest.mark.parametrize("head", HEADS)
def test_no_head_moves_a_bit_while_nothing_leaves(llama, head):
    program = llama.program.rewrite(Exits(at=(2, 4), head=head))
    for shape in [(2, 12), (3, 33)]:
        ids = llama.ids(*shape)
        with torch.no_grad():
            assert torch.equal(program(ids).logits, llama.model(ids).logits)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("head", HEADS)
def test_a_threshold_below_every_score_reads_the_first_exit_bitwise(llama, head, score):
    program = llama.program.rewrite(Exits(at=(2, 4), head=head, score=score, threshold=-1.0), check=False)
    with torch.no_grad():
        output, taps = program(llama.ids(3, 9), taps=True)
        assert torch.equal(output.logits, taps["exits.2.logits"]) and bool((taps["exits.depth"] == 2).all())
        assert not torch.equal(output.logits, llama.model(llama.ids(3, 9)).logits)


def test_a_head_with_its_own_norm_starts_from_the_models(llama, max_diff):
    program, ids = llama.program.rewrite(Exits(at=(AT,), head="norm", threshold=-1.0), check=False), llama.ids(2, 12)
    assert max_diff(program(ids).logits, eager(llama.model, ids, AT)[0]) <= NEAR
    own = shaken(program)
    assert list(own) == [f"{AT}.norm.weight"]
    stream = streams(llama.model, ids)[AT]
    normed = F.rms_norm(stream, stream.shape[-1:], own[f"{AT}.norm.weight"], llama.model.config.rms_norm_eps)
    got = program(ids).logits
    assert max_diff(got, F.linear(normed, llama.model.lm_head.weight)) <= NEAR
    assert max_diff(got, eager(llama.model, ids, AT)[0]) > 1e-2


def test_an_mlp_head_runs_its_own_copy_of_the_last_blocks_mlp(llama, max_diff):
    program, ids = llama.program.rewrite(Exits(at=(AT,), head="mlp", threshold=-1.0), check=False), llama.ids(2, 12)
    stream, block = streams(llama.model, ids)[AT], copy.deepcopy(llama.model.model.layers[-1])
    for _ in range(2):
        with torch.no_grad():
            expected = read(llama.model, stream + block.mlp(block.post_attention_layernorm(stream)))
            got = program(ids).logits
        assert max_diff(got, expected) <= NEAR
        for name, parameter in shaken(program).items():
            block.get_parameter(name.removeprefix(f"{AT}.")).data = parameter.detach()
    assert max_diff(got, expected) <= NEAR < 1e-2 < max_diff(got, program(ids).logits)


def test_a_block_head_runs_its_own_copy_of_the_last_block_with_its_own_cache(llama, max_diff):
    program, ids = llama.program.rewrite(Exits(at=(AT,), head="block", threshold=-1.0), check=False), llama.ids(2, 12)
    copied = copy.deepcopy(llama.model)
    for _ in range(2):

        def middle(block, hidden):
            for number in range(AT):
                hidden = block(number, hidden)
            return block(5, hidden)

        assert max_diff(program(ids).logits, llama_by_hand(copied, ids, middle)) <= NEAR
        for name, parameter in shaken(program).items():
            copied.model.layers[5].get_parameter(name.removeprefix(f"{AT}.")).data = parameter.detach()
    assert sum(n.endswith(".key") for n in (i.name for i in program.inputs)) == 6 + 1
    tokens, steps = decode(program.signature, program.run_flat, program.output_names, ids[:, :5], 6)
    with torch.no_grad():
        for number, logits in enumerate(steps):
            assert max_diff(program(tokens[:, : 5 + number]).logits[:, -1], logits) <= NEAR


class Parallel(nn.Module):
    """Attention and MLP read the same norm, as in GPT-NeoX; the readout has no norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(8), "attn": nn.Linear(8, 8), "mlp": nn.Linear(8, 8)}) for _ in range(3)
        )
        self.head = nn.Linear(8, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y = layer["norm"](x)
            x = x + torch.tanh(layer["attn"](y)) + torch.relu(layer["mlp"](y))
        return self.head(x)


@pytest.mark.parametrize("options", ["head=mlp", "head=norm", "candidates=12", "head=classifier,candidates=4"])
def test_a_head_that_the_model_cannot_have_is_refused_with_the_reason(options):
    program = trace(Parallel().eval(), (torch.randn(2, 5, 8),))
    with pytest.raises(NoMatchError) as caught:
        program.rewrite(f"exits{{at=[1],{options}}}")
    assert "head-does-not-fit" in caught.value.where


def test_a_stream_score_needs_the_answers_positions():
    program = trace(TimeFirst().eval(), (torch.zeros(2, 7, dtype=torch.long),))
    with pytest.raises(NoMatchError) as caught:
        program.rewrite("exits{at=[1],score=probe}")
    assert "positions" in caught.value.where


# ---- scores


def entropy(logits):
    p = logits.double().softmax(-1)
    return -(p * p.log()).sum(-1) / math.log(logits.shape[-1])


def probe(stream, weight, bias):
    stream = stream.double()
    unit = stream / stream.square().mean(-1, keepdim=True).sqrt()
    return torch.sigmoid(unit @ weight.double().T + bias.double()).squeeze(-1)


def test_each_score_is_what_it_says(llama):
    ids, places = llama.ids(3, 33), (1, 3, 4)
    hidden, logits = streams(llama.model, ids), dict(zip(places, eager(llama.model, ids, *places), strict=False))
    same = {k: logits[j].argmax(-1) == logits[k].argmax(-1) for j, k in [(1, 3), (3, 4)]}

    def scores(name):
        program = llama.program.rewrite(Exits(at=places, score=name), check=False)
        own = shaken(program, scale=2.0)
        with torch.no_grad():
            taps = program(ids, taps=True)[1]
        return [taps[f"exits.{k}.score"].double() for k in places], own

    def close(got, expected):
        for one, other in zip(got, expected, strict=True):
            assert (one - other).abs().max() <= min(2e-5, 0.05 * other.double().std())

    close(scores("entropy")[0], [1 - entropy(logits[k]) for k in places])
    close(scores("cosine")[0], [F.cosine_similarity(hidden[k].double(), hidden[k - 1].double(), -1) for k in places])
    close(scores("patience")[0][1:], [same[3].double(), same[4] * (1 + same[3].double())])
    assert bool((scores("patience")[0][0] == 0).all())

    got, own = scores("probe")
    lambdas = [probe(hidden[k], own[f"{k}.gate.weight"], own[f"{k}.gate.bias"]) for k in places]
    close(got, lambdas)
    got, own = scores("gate")
    lambdas = [probe(hidden[k], own[f"{k}.gate.weight"], own[f"{k}.gate.bias"]) for k in places]
    close(got, [1 - torch.stack([1 - x for x in lambdas[: n + 1]]).prod(0) for n in range(3)])

    got, own = scores("palbert")
    layers = [(own[f"gate.{n}.weight"].double(), own[f"gate.{n}.bias"].double()) for n in range(4)]
    assert [tuple(weight.shape) for weight, _ in layers] == [(64, 64)] * 3 + [(1, 64)]  # the stream is 32 wide
    lambdas = []
    for k in places:
        read = [h / h.square().mean(-1, keepdim=True).sqrt() for h in (hidden[k].double(), hidden[k - 1].double())]
        x = torch.cat(read, -1)
        for weight, bias in layers[:-1]:
            x = (x @ weight.T + bias).tanh()
        lambdas.append(torch.sigmoid(x @ layers[-1][0].T + layers[-1][1]).squeeze(-1))
    close(got, [1 - torch.stack([1 - x for x in lambdas[: n + 1]]).prod(0) for n in range(3)])

    got, own = scores("jei")
    left, expected = torch.ones(ids.shape, dtype=torch.float64), []
    for k in places:
        p, sharp = logits[k].double().softmax(-1), (2 * logits[k].double())
        top = p.topk(2, -1).values
        read = torch.stack([top[..., 0], entropy(logits[k]), top[..., 0] - top[..., 1], entropy(sharp)], -1)
        gate = torch.sigmoid(read @ own[f"{k}.gate.weight"].double().T + own[f"{k}.gate.bias"].double()).squeeze(-1)
        taken = torch.minimum(gate, left)
        expected.append(taken / left.clamp_min(1e-6))
        left = left - taken
    close(got, expected)


def test_patience_leaves_at_the_first_exit_that_repeats_the_answer(llama, max_diff):
    places, ids = (1, 2, 3, 4), llama.ids(3, 33)
    readings = eager(llama.model, ids, *places)
    program = llama.program.rewrite(Exits(at=places, score="patience", threshold=2), check=False)
    with torch.no_grad():
        output, taps = program(ids, taps=True)
    answers = [r.argmax(-1) for r in readings]
    for row in range(3):
        for t in range(33):
            count, depth, expected = 0, 6, readings[-1]
            for number in range(1, 4):
                count = count + 1 if answers[number][row, t] == answers[number - 1][row, t] else 0
                if count == 2:
                    depth, expected = places[number], readings[number]
                    break
            assert taps["exits.depth"][row, t] == depth
            assert max_diff(output.logits[row, t], expected[row, t]) <= NEAR
    assert len(taps["exits.depth"].unique()) >= 2


@pytest.mark.parametrize("head", ["shared", "norm"])
def test_candidates_restrict_what_the_score_reads_not_the_answer(llama, head, max_diff):
    ids, rows = llama.ids(2, 12), torch.tensor([7, 100, 3, 55, 90, 31])
    early = eager(llama.model, ids, AT)[0]
    expected = max_prob(early[..., rows])
    options = {"at": (AT,), "head": head, "candidates": len(rows), "threshold": between(expected)}
    program = llama.program.rewrite(Exits(**options), check=False)
    program.tensor("hcx.exits_0.candidates").copy_(rows)
    with torch.no_grad():
        output, taps = program(ids, taps=True)
    assert max_diff(taps[f"exits.{AT}.score"].double(), expected) <= 1e-5
    assert max_diff(taps[f"exits.{AT}.logits"], early) <= NEAR
    leaves = expected >= options["threshold"]
    assert torch.equal(taps["exits.depth"] == AT, leaves) and 0 < leaves.sum() < leaves.numel()
    full = llama.model(ids).logits.detach()
    assert max_diff(output.logits, torch.where(leaves[..., None], early, full)) <= NEAR


@pytest.mark.parametrize(
    "options",
    [
        "head=norm,score=gate",
        "head=mlp,score=jei,candidates=9",
        "head=block,score=probe",
        "score=cosine",
        "score=palbert",
    ],
)
def test_every_new_part_is_live_and_survives_saving(llama, options, tmp_path):
    program = llama.program.rewrite(f"exits{{at=[2,4],{options},threshold=0.4}}")
    checks = {c["name"]: c for c in program.history[-1]["checks"]}
    if program.new_parameters():
        assert checks["live gradients"]["measured"]["unexplained"] == 0, checks["live gradients"]
    shaken(program)
    program.save(tmp_path / "a.hcx")
    ids = llama.ids(2, 9)
    with torch.no_grad():
        one, other = program(ids, taps=True), load(tmp_path / "a.hcx")(ids, taps=True)
    assert torch.equal(one[0].logits, other[0]["logits"] if isinstance(other[0], dict) else other[0].logits)
    assert all(torch.equal(one[1][n], other[1][n]) for n in one[1])


def test_rows_of_a_batch_leave_alone_bitwise(llama):
    """Eight rows that leave at three depths and more give, each, what the row gives on its own."""
    ids, places = llama.ids(8, 12), (1, 2, 3, 4)
    program = llama.program.rewrite(Exits(at=places), check=False)
    with torch.no_grad():
        taps = program(ids, taps=True)[1]
        for k in places:
            limit = taps[f"exits.{k}.score"].quantile(0.6)
            program.tensor(f"hcx.exits_0.{k}.threshold").fill_(limit)
        together, taps = program(ids, taps=True)
        assert len(taps["exits.depth"][:, -1].unique()) >= 3, taps["exits.depth"][:, -1]
        for row in range(8):
            # one row as a batch of equal ones: the same kernels, so the same bits
            alone, own = program(ids[row : row + 1].expand(8, -1), taps=True)
            assert torch.equal(own["exits.depth"][0], taps["exits.depth"][row])
            assert torch.equal(alone.logits[0], together.logits[row])
            single, own = program(ids[row : row + 1], taps=True)
            assert torch.equal(own["exits.depth"][0], taps["exits.depth"][row])
            assert torch.equal(single.logits[0], together.logits[row])
