"""Training a rewritten Program the ordinary ways, against eager, plain loops and closed forms."""

from __future__ import annotations

import copy

import pytest
import torch
from hcx.rewrite import ArtefactError, UsageError, load, trace
from torch import nn

from tests.conftest import tiny_llama, token_ids

IDS = token_ids(24).reshape(2, 12)


# ---- train mode


class Layers(nn.Module):
    """Attention with dropout inside, an LSTM with dropout between its layers, dropout in place."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.3, batch_first=True)
        self.lstm = nn.LSTM(16, 16, 2, dropout=0.3, batch_first=True)
        self.drop = nn.Dropout(0.2, inplace=True)

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.drop(self.lstm(x)[0] + 0)


class Coin(nn.Module):
    """Skips its layer at random in train mode; with 0 it draws the coin all the same."""

    def __init__(self, probability: float):
        super().__init__()
        self.linear, self.probability = nn.Linear(16, 16), probability

    def forward(self, x):
        if self.training and torch.rand([]) < self.probability:
            return x
        return self.linear(x)


def stream(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(seed))


def drawn(module, *args) -> torch.Tensor:
    torch.manual_seed(11)
    with torch.no_grad():
        result = module(*args)
    return result if isinstance(result, torch.Tensor) else result.logits


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_dropout_inside_attention_follows_the_mode_through_loops_and_files(attention, tmp_path):
    model = tiny_llama(2, attention_dropout=0.3)
    model.set_attn_implementation(attention)
    program = trace(model, (IDS,), cache=False)
    looped = program.rewrite("looped{start=0,end=2,steps=2}", check=False)
    looped.train().save(tmp_path / "a.hcx")
    loaded = load(tmp_path / "a.hcx")
    assert looped.training and not loaded.training
    assert torch.equal(loaded(IDS).logits, model(IDS).logits), "saved in train mode, it drops out in eval mode"
    model.train()
    once, twice = drawn(model, IDS), drawn(looped, IDS)
    assert torch.equal(drawn(program.train(), IDS), once) and not torch.equal(once, drawn(program.eval(), IDS))
    assert torch.equal(drawn(loaded.train(), IDS), twice)
    inside = [n for n in looped.graph.nodes if n.meta.get("modes")]
    assert len(inside) == 4 and all(n.meta["modes"] == inside[0].meta["modes"] for n in inside)


def test_layers_with_dropout_of_their_own_draw_as_in_eager():
    torch.manual_seed(0)
    model = Layers().eval()
    program = trace(model, (stream(),))
    evaluated = drawn(program, stream())
    assert (evaluated - drawn(model, stream())).abs().max() <= 1e-5  # eager takes the fused path in eval mode
    assert torch.equal(drawn(program.train(), stream()), drawn(model.train(), stream()))
    assert not torch.equal(drawn(program, stream()), evaluated)
    assert torch.equal(drawn(program.eval(), stream()), evaluated)


@pytest.mark.parametrize(("model", "reason"), [
    (Coin(0.01), "skips layers at random"),
    (nn.TransformerDecoderLayer(16, 2, 32, dropout=0.1, batch_first=True), None),
    (Coin(0.0), None),
])  # fmt: skip
def test_what_train_mode_alone_does_is_refused_and_not_left_out(model, reason, tmp_path):
    args = (stream(), stream(1)) if isinstance(model, nn.TransformerDecoderLayer) else (stream(),)
    program = trace(model.eval(), args)
    program.save(tmp_path / "a.hcx")
    for one in (program, copy.deepcopy(program), load(tmp_path / "a.hcx")):
        if reason is None:
            assert one.train().training
            continue
        with pytest.raises(UsageError, match=reason) as caught:
            one.train()
        assert caught.value.where and "eval mode" in caught.value.hint and not one.training


def test_dropout_that_the_eval_graph_has_no_op_for_is_refused():
    class Weights(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, dropout=0.3, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x)

    program = trace(Weights().eval(), (stream(),))
    with pytest.raises(UsageError, match="runs dropout in train mode, and the eval graph no such op"):
        program.train()


def test_a_file_names_no_other_modes(tmp_path):
    import json

    program = trace(tiny_llama(1, attention_dropout=0.3), (IDS,), cache=False)
    from hcx.rewrite.graph_text import from_json, to_json

    data = json.loads(json.dumps(to_json(program.graph)))
    names = {n for n, _ in program.named_tensors()}
    assert any(n.meta.get("modes") == {"dropout_p": [0.0, 0.3]} for n in from_json(data, names).nodes)
    entry = next(e for e in data["nodes"] if "modes" in e)
    for wrong in ({"nothing": [0.0, 0.3]}, {"dropout_p": [0.0, "0.3"]}, {"dropout_p": 0.3}):
        entry["modes"] = wrong
        with pytest.raises(ArtefactError, match="as a mode"):
            from_json(data, names)
