"""Which positions count, against the lengths that the inputs were made from, whichever way round these say it."""

from __future__ import annotations

import math

import pytest
import torch
from hcx.passes.exits.insert.padding import find_valid
from hcx.rewrite import NoMatchError, trace
from torch import nn

ROWS, TIME, WIDTH = 4, 12, 16
LENGTHS = torch.tensor([12, 7, 3, 10])
COUNTS = torch.arange(TIME) < LENGTHS[:, None]


class Encoder(nn.Module):
    """PyTorch's own encoder; what hides padding from it is made by ``hide`` from the input under test, with the data."""

    def __init__(self, hide):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 7)
        self.hide = hide

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x, src_key_padding_mask=self.hide(x, padding)))


class CalledMask(Encoder):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(x, mask)


class PyTorchs(Encoder):
    def forward(self, x: torch.Tensor, src_key_padding_mask: torch.Tensor) -> torch.Tensor:
        return super().forward(x, src_key_padding_mask)


def behind(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[1], device=x.device) >= lengths[:, None]


WAYS = {
    "src_key_padding_mask": (PyTorchs, lambda x, m: m, ~COUNTS),
    "bool, left out": (Encoder, lambda x, m: m, ~COUNTS),
    "bool, kept": (Encoder, lambda x, m: ~m, COUNTS),
    "integers, kept": (Encoder, lambda x, m: m == 0, COUNTS.long()),
    "integers, left out": (Encoder, lambda x, m: m != 0, (~COUNTS).long()),
    "floats, kept": (CalledMask, lambda x, m: m < 0.5, COUNTS.float()),
    "floats, left out": (CalledMask, lambda x, m: m > 0.5, (~COUNTS).float()),
    "floats, added": (CalledMask, lambda x, m: m, torch.zeros(ROWS, TIME).masked_fill(~COUNTS, -math.inf)),
    "lengths": (Encoder, behind, LENGTHS),
}


def encoder(net, hide) -> nn.Module:
    torch.manual_seed(0)
    return net(hide).eval()


@pytest.mark.parametrize("way", WAYS)
def test_an_encoder_is_asked_what_it_leaves_out(way, max_diff):
    net, hide, padding = WAYS[way]
    model, x = encoder(net, hide), torch.randn(ROWS, TIME, WIDTH)
    program = trace(model, (x, padding)).rewrite("exits{at=[1],per=sequence,score=posterior}", check=False)
    with torch.no_grad():
        taps = program(x, padding, taps=True)[1]
        early = model.head(model.blocks.layers[0](x, src_key_padding_mask=~COUNTS)).log_softmax(-1).amax(-1)
    assert torch.equal(taps["exits.valid"], COUNTS)
    expected = torch.stack([row[:n].mean() for row, n in zip(early, LENGTHS, strict=True)])
    assert max_diff(taps["exits.1.score"], expected) <= 1e-5 < 1e-2 < max_diff(early.mean(1), expected)


class Decoder(Encoder):
    """The same, where no position looks ahead; hidden by a large number, as rows of padding alone have no softmax else."""

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        ahead = -1e4 * torch.ones(x.shape[1], x.shape[1]).triu(1)
        hidden = -1e4 * self.hide(x, padding).to(x.dtype)
        return self.head(self.blocks(x, mask=ahead, is_causal=False, src_key_padding_mask=hidden))


@pytest.mark.parametrize("way", ["kept", "left out"])
def test_a_decoder_never_looks_ahead_and_its_mask_is_understood_all_the_same(way):
    left = torch.arange(TIME) >= torch.tensor([0, 3, 5, 2])[:, None]  # padded at the start
    for counts in (COUNTS, left):
        padding = counts if way == "kept" else ~counts
        program = trace(encoder(Decoder, (lambda x, m: ~m) if way == "kept" else (lambda x, m: m)),
                        (torch.randn(ROWS, TIME, WIDTH), padding))  # fmt: skip
        taps = program.rewrite("exits{at=[1],per=sequence}", check=False)(program.examples[0][0], padding, taps=True)[1]
        assert torch.equal(taps["exits.valid"], counts)


@pytest.mark.parametrize("norm", ["layer", "group"])
def test_transformers_masks_keep_where_they_are_one(norm):
    """A group norm over time mixes what is padding into every frame, so that the answers do not tell."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    torch.manual_seed(0)
    model = Wav2Vec2ForCTC(
        Wav2Vec2Config(
            vocab_size=12, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
            conv_dim=(8, 8), conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2,
            num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, feat_extract_norm=norm, mask_time_prob=0,
        )
    ).eval()  # fmt: skip
    lengths = torch.tensor([800, 500, 300])
    mask = (torch.arange(800) < lengths[:, None]).long()
    program = trace(model, (), {"input_values": torch.randn(3, 800), "attention_mask": mask})
    taps = program.rewrite("exits{at=[2],per=sequence}", check=False)(torch.randn(3, 800), mask, taps=True)[1]
    assert taps["exits.valid"].sum(1).tolist() == model._get_feat_extract_output_lengths(lengths).tolist()


def test_classes_of_bert_tokens():
    from transformers import BertConfig, BertForTokenClassification

    sizes = dict(hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, vocab_size=40)
    torch.manual_seed(0)
    model = BertForTokenClassification(BertConfig(**sizes)).eval()
    call = {"input_ids": torch.randint(3, 40, (ROWS, TIME)), "attention_mask": COUNTS.long()}
    call["token_type_ids"] = torch.zeros_like(call["input_ids"])
    program = trace(model, (), call)
    plan = program.plan("exits{at=[1],per=sequence}")
    assert not plan.steps[0].notes, "token types are no mask"
    taps = program.rewrite("exits{at=[1],per=sequence}", check=False)(**call, taps=True)[1]
    assert torch.equal(taps["exits.valid"], COUNTS)


class Scaled(Encoder):
    """What ``padding`` means for attention is nothing: answers are multiplied with it."""

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        scale = self.hide(x, padding).to(x.dtype)
        return self.head(self.blocks(x * (1 + scale.sum() / 8)))


def test_an_integer_input_that_is_not_understood_is_named_and_all_positions_count():
    for padding in (LENGTHS, COUNTS.long()):
        x = torch.randn(ROWS, TIME, WIDTH)
        program = trace(encoder(Scaled, lambda x, m: m), (x, padding))
        (step,) = program.plan("exits{at=[1],per=sequence}").steps
        assert step.sites and any("`padding`" in note for note in step.notes)
        rewritten = program.rewrite("exits{at=[1],per=sequence}", check=False)
        assert "exits.valid" not in rewritten(x, padding, taps=True)[1]


def test_a_bool_input_that_is_not_understood_is_the_reason_to_skip():
    program = trace(encoder(Scaled, lambda x, m: m), (torch.randn(ROWS, TIME, WIDTH), COUNTS))
    with pytest.raises(NoMatchError) as caught:
        program.rewrite("exits{at=[1],per=sequence}")
    assert "`padding`" in caught.value.where


def test_numbers_of_a_table_are_not_taken_for_lengths():
    class Speakers(Encoder):
        def forward(self, x: torch.Tensor, speaker: torch.Tensor) -> torch.Tensor:
            return self.head(self.blocks(x + self.hide(speaker)[:, None]))

    program = trace(encoder(Speakers, nn.Embedding(3, WIDTH)), (torch.randn(3, TIME, WIDTH), torch.tensor([0, 2, 1])))
    notes: list[str] = []
    assert find_valid(program, program.graph.output_node().args[0][0], notes) is None and not notes
