"""Uses of parameters against a table made by hand, and against the counts of the zoo."""

from __future__ import annotations

import pytest
import torch
from hcx.rewrite import UsageError, trace
from hcx.rewrite.sites.weight_targets import base_count, fits, select
from hcx.rewrite.sites.weights import find_uncovered, find_weights
from torch import nn
from torch.nn import functional as F

from tests.zoo import decoders, encdec, handwritten, traced

ALL = {m.name: m for family in (decoders, encdec, handwritten) for m in family.MODELS}


class EveryKind(nn.Module):
    """Weights in all the ways that the finder knows, and parameters that are no weights."""

    def __init__(self):
        super().__init__()
        width = 6

        def matrix(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape) / 3)

        self.embed = nn.Embedding(9, width)
        self.place = matrix(1, 5, width)
        self.linear = nn.Linear(width, 8)
        self.conv1d = matrix(8, width)  # [in, out], as GPT-2 keeps it
        self.transposed = matrix(7, width)
        self.left = matrix(width, 7)
        self.packed = matrix(3 * width, width)
        self.low = matrix(4, width)
        self.conv = nn.Conv1d(width, 10, 3, padding=1)
        self.up = nn.ConvTranspose1d(10, width, 3, padding=1)
        self.experts = matrix(3, 7, width)
        self.dense = matrix(3, width, 4)
        self.loop = matrix(3, width, width)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(width, width, bias=False))
        self.unused = matrix(3, 3)
        self.head = nn.Linear(width, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.place
        y = torch.addmm(x.new_zeros(6), self.linear(x).flatten(0, 1), self.conv1d).unflatten(0, (-1, 5))
        z = torch.matmul(self.left, (y @ self.transposed.t()).transpose(1, 2)).transpose(1, 2)
        query, rest = self.packed.split([6, 12])
        z = F.linear(z, query) + F.linear(y, rest)[..., :6]
        z = z + F.linear(F.linear(z, self.low[1:3]), self.low[:2].t())
        z = self.up(self.conv(z.transpose(1, 2))).transpose(1, 2)
        chosen = torch.bmm(self.experts[ids.flatten() % 3], z.reshape(-1, 6, 1)).reshape(-1, 5, 7)
        mixed = torch.einsum("btd,edh->bteh", z, self.dense).sum((2, 3))
        for expert in range(3):
            z = z @ self.loop[expert]
        return self.head(self.normed(z) + chosen[..., :1] + mixed.unsqueeze(-1))


EXPECTED = [  # address, kind, output axis, input axes, experts, weight on the left
    ("embed.weight", "embedding", 1, (0,), None, False),
    ("linear.weight", "linear", 0, (1,), None, False),
    ("conv1d", "addmm", 1, (0,), None, False),
    ("transposed", "matmul", 0, (1,), None, False),
    ("left", "matmul", 0, (1,), None, True),
    ("packed", "linear", 0, (1,), None, False),
    ("packed@2", "linear", 0, (1,), None, False),
    ("low", "linear", 0, (1,), None, False),
    ("low@2", "linear", 1, (0,), None, False),
    ("conv.weight", "conv", 0, (1, 2), None, False),
    ("up.weight", "conv", 1, (0, 2), None, False),
    ("experts", "experts", 1, (2,), 0, True),
    ("dense", "experts", 2, (1,), 0, False),
    ("loop", "experts", 2, (1,), 0, False),
    ("loop@2", "experts", 2, (1,), 0, False),
    ("loop@3", "experts", 2, (1,), 0, False),
    ("head.weight", "linear", 0, (1,), None, False),
]


@pytest.fixture(scope="module")
def every():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = EveryKind().eval()
        ids = torch.randint(0, 9, (2, 5))
    return model, trace(model, (ids,)), ids


def test_every_kind_of_use_is_found_with_its_axes(every):
    uses = find_weights(every[1])
    assert [(u.address, u.kind, u.out_axis, u.in_axes, u.batch_axis, u.left) for u in uses] == EXPECTED
    by_address = {u.address: u for u in uses}
    assert by_address["packed@2"].window(0) == (6, 18) and by_address["low"].window(0) == (1, 3)
    assert by_address["low@2"].window(0) == (0, 2) and by_address["low@2"].window(1) == (0, 6)
    assert [by_address[a].calls for a in ("loop", "loop@3", "low", "linear.weight")] == [3, 3, 2, 1]
    assert by_address["head.weight"].names == ("embed.weight", "head.weight") == by_address["embed.weight"].names


def test_axes_say_which_outputs_an_entry_moves(every):
    """The oracle is the graph itself: one entry changed moves exactly one feature of the op's result."""
    from hcx.rewrite.run.reading import observe

    _, program, ids = every
    flat = program.signature.bind((ids,), {})
    for use in find_weights(program):
        if len(use.names) > 1:  # the other end would move too
            continue
        weight = program.tensor(use.name)
        index = [0] * weight.dim()
        for axis in use.in_axes:
            index[axis] = use.window(axis)[0]
        index[use.out_axis] = use.window(use.out_axis)[0] + 1
        (before,) = observe(program, [use.node], flat)
        kept = weight.detach().clone()
        with torch.no_grad():
            weight[tuple(index)] += 0.5
            (after,) = observe(program, [use.node], flat)
            weight.copy_(kept)
        feature = 1 if use.kind == "conv" else -2 if use.left else -1
        moved = (after != before).movedim(feature, 0).flatten(1).any(1).nonzero().flatten().tolist()
        if use.address not in ("loop@2", "loop@3"):  # expert 0 is not theirs
            assert moved == [1], use.address


def test_what_no_op_uses_as_a_weight_is_listed_with_the_reason(every):
    _, program, _ = every
    left = {u.name: u.reason for u in find_uncovered(program, find_weights(program))}
    assert left["place"] == "read by add, not by a weight-carrying op"
    assert left["unused"] == "the graph does not read it"
    assert left["linear.bias"].startswith("a vector")
    assert left["normed.parametrizations.weight.original1"].startswith("read by _weight_norm")


@pytest.mark.parametrize("name", ["gpt2", "moe_einsum", "t5", "shared_block"])
def test_zoo_counts(name):
    """Linears as counted by hand, and no parameter missing from what is covered and what is not."""
    model, _, _, program = traced(name)
    uses = find_weights(program)
    assert sum(u.kind == "linear" for u in uses) == ALL[name].linears
    chosen = select(program, "auto", {"linear", "addmm", "matmul", "conv", "experts", "einsum"})
    covered = {us[0].names: program.tensor(n).numel() for n, us in chosen.chosen.items()}
    everything = sum(p.numel() for p in model.parameters())
    assert base_count(program) == everything == sum(covered.values()) + sum(u.count for u in chosen.left)
    assert len({u.name for u in chosen.left}) == len(chosen.left)
    if name == "t5":  # what reads the encoder inside a decoder's branch is inside too
        assert all(f"inner.decoder.block.0.layer.1.EncDecAttention.{p}.weight" in chosen.chosen for p in "qkvo")
        assert "inner.lm_head.weight" not in chosen.chosen


def test_usual_targets_are_those_in_branches(llama):
    names = list(select(llama.program, "auto", {"linear"}).chosen)
    layers = {n for n, p in llama.model.named_parameters() if ".layers." in n and p.dim() == 2}
    assert set(names) == layers and len(names) == 6 * 7


def test_without_a_stream_all_but_the_readout():
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    selection = select(trace(net, (torch.randn(2, 6),)), "auto", {"linear"})
    assert list(selection.chosen) == ["0.weight", "2.weight"]
    assert {u.name: u.reason for u in selection.left}["4.weight"] == "the readout"


def test_patterns():
    assert fits("model.layers.0.mlp.up_proj.weight", "up_proj") and fits("model.layers.0.mlp.up_proj.weight", "mlp.*")
    assert fits("attn.in_proj_weight", "in_proj_weight") and not fits("model.up_proj_2.weight", "up_proj")


def test_a_pattern_that_fits_nothing_is_an_error(llama):
    with pytest.raises(UsageError, match="no weight is called `qq_proj`"):
        select(llama.program, ("q_proj", "qq_proj"), {"linear"})
    with pytest.raises(UsageError, match="input_layernorm"):
        select(llama.program, ("input_layernorm",), {"linear"})
