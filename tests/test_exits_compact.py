"""Row compaction: each row gives what the select form gives, and rows that left are computed no further."""

from __future__ import annotations

import pytest
import torch
from hcx.passes import Exits
from hcx.passes.exits import Compact
from hcx.rewrite import trace
from hcx.rewrite.testing import tiny_decoder
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from tests.test_exits_cond import set_thresholds

PLACES = (1, 2, 3)


class Encoder(nn.Module):
    """Mean of token vectors through four residual blocks: ``[B, S] -> [B, 5]``."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 5)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16)) for _ in range(4)])

    def forward(self, input_ids, attention_mask):
        x = self.embed(input_ids) * attention_mask[..., None]
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.mean(1))


class Sentences(nn.Module):
    """A classifier on an encoder's mean."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(384, 4)

    def forward(self, input_ids, attention_mask):
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return self.head(hidden.mean(1))


def leaving(program, args, places):
    """With classifiers that say something, and thresholds at which about a third of the rows leaves at each."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for parameter in program.new_parameters().values():
            parameter.add_(torch.randn_like(parameter) * 0.5)
        taps = program(*args, taps=True)[1]
        for k in places:
            score = taps[f"exits.{k}.score"]
            limit = score.flatten().quantile(0.66).item()  # counts of patience are the same for many
            program.tensor(f"hcx.exits_0.{k}.threshold").fill_(limit if limit > score.min() else limit + 0.5)
    return program


@pytest.mark.parametrize("score", ["max_prob", "probe", "patience", "jei"])
def test_rows_that_left_are_computed_no_further(score):
    torch.manual_seed(0)
    model = Encoder().eval()
    ids = torch.randint(0, 50, (12, 7))
    mask = (torch.rand(12, 7) < 0.8).long()
    program = trace(model, (ids, mask)).rewrite(Exits(at=PLACES, head="classifier", score=score), check=False)
    compact = Compact(leaving(program, (ids, mask), PLACES))
    with torch.no_grad():
        expected, taps = program(ids, mask, taps=True)
        with FlopCounterMode(display=False) as counter:
            found = compact(ids, mask)
    depth = taps["exits.depth"]
    assert torch.equal(found.depth, depth) and len(depth.unique()) >= (2 if score == "patience" else 3)
    assert (found.logits - expected).abs().max() <= 1e-5
    assert found.rows == [int((depth > k).sum()) for k in (0, *PLACES)], "as many rows as are on the way"
    block, head, gate = 7 * 2 * 2 * 16 * 24, 2 * 16 * 5, {"probe": 2 * 16, "jei": 2 * 4}.get(score, 0)
    asked = sum(found.rows[:3])
    heads = 12 if score == "probe" else asked + found.rows[3]
    assert counter.get_total_flops() == sum(found.rows) * block + heads * head + asked * gate
    set_thresholds(program, torch.inf)
    with torch.no_grad():
        assert (compact(ids, mask).logits - model(ids, mask)).abs().max() <= 1e-5
    set_thresholds(program, -torch.inf)
    assert compact(ids, mask).rows == [12]


def test_a_row_of_tokens_goes_on_until_its_last_position_has_left():
    model, _ = tiny_decoder()
    ids = torch.randint(0, 40, (9, 3), generator=torch.Generator().manual_seed(0))
    program = trace(model, (ids,)).rewrite(Exits(at=(1, 2)), check=False)
    compact = Compact(leaving(program, (ids,), (1, 2)))
    with torch.no_grad():
        expected, taps = program(ids, taps=True)
    found, depth = compact(ids), taps["exits.depth"]
    assert torch.equal(found.depth, depth) and (found.logits - expected["logits"]).abs().max() <= 1e-5
    assert found.rows == [9, int((depth.amax(1) > 1).sum()), int((depth.amax(1) > 2).sum())] and found.rows[1] < 9


def test_minilm_rows_leave(minilm):
    torch.manual_seed(0)
    model = Sentences(minilm.model).eval()
    ids = minilm.ids(8, 12)
    mask = torch.ones_like(ids)
    mask[3, 6:] = 0
    program = trace(model, (ids, mask)).rewrite(Exits(at=(2, 4), head="classifier"), check=False)
    compact = Compact(leaving(program, (ids, mask), (2, 4)))
    with torch.no_grad():
        expected, taps = program(ids, mask, taps=True)
    found = compact(ids, mask)
    assert torch.equal(found.depth, taps["exits.depth"]) and len(found.depth.unique()) == 3
    assert (found.logits - expected).abs().max() <= 1e-4
    assert F.cosine_similarity(found.logits, expected).min() > 0.9999
