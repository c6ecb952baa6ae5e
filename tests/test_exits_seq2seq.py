"""Exits of an encoder that a decoder reads: greedy decoding by hand with the modules of a small Whisper."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hcx.passes.exits import EncoderExits
from hcx.passes.exits.applied import with_values
from hcx.rewrite import UsageError, trace
from hcx.rewrite.run.flops import counter
from torch.nn import functional as F

STACK, PLACES, PROMPT, LIMIT = "model.encoder.layers", (1, 3), torch.tensor([3, 7]), 6


@dataclass
class Net:
    """A Whisper of four and two blocks, its Program, log mel spectra, and a token that ends some rows early."""

    model: Any
    program: Any
    mel: torch.Tensor
    stop: int

    def by_hand(self, row: int, place: int, stop: int, view=lambda x: x, not_first=()) -> tuple[list[int], float]:
        """Greedy tokens from the encoder after so many blocks, and their mean log posterior."""
        with torch.no_grad():
            encoder, decoder = self.model.model.encoder, self.model.model.decoder
            hidden: list[torch.Tensor] = []
            hooks = [
                layer.register_forward_hook(lambda _, __, out: hidden.append(out[0] if isinstance(out, tuple) else out))
                for layer in encoder.layers
            ]
            encoder(self.mel[row : row + 1])
            for hook in hooks:
                hook.remove()
            memory = encoder.layer_norm(view(hidden[place - 1]))
            ids, log_p = PROMPT[None], []
            while len(log_p) < LIMIT:
                states = decoder(input_ids=ids, encoder_hidden_states=memory, use_cache=False).last_hidden_state
                logits = self.model.proj_out(states)[0, -1].double()
                if not log_p:
                    logits[list(not_first)] = -math.inf
                best = int(logits.argmax())
                log_p.append(float(logits.log_softmax(-1)[best]))
                ids = torch.cat([ids, torch.tensor([[best]])], 1)
                if best == stop:
                    break
        return ids[0, len(PROMPT) :].tolist(), sum(log_p) / len(log_p)


@pytest.fixture(scope="module")
def net() -> Net:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=30, d_model=16, encoder_layers=4, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8, max_source_positions=12,
        max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
        init_std=0.4, suppress_tokens=[], begin_suppress_tokens=[],
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = WhisperForConditionalGeneration(config).eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data.add_(0.1 * torch.randn_like(parameter))
        model.model.decoder.embed_positions.weight.data.mul_(3)
        mel = torch.randn(5, 8, 24)
    example = {"input_features": mel[:2], "decoder_input_ids": torch.tensor([[3, 7, 4], [3, 7, 5]]), "use_cache": False}
    found = Net(model, trace(model, (), example, cache=False), mel, -1)
    # the token that comes up within the first rows most often, but not at once
    said = [found.by_hand(row, place, -1)[0][1:] for row in range(5) for place in (*PLACES, 4)]
    found.stop = max(range(30), key=lambda t: sum(t in s for s in said))
    return found


@pytest.fixture(scope="module")
def exits(net) -> EncoderExits:
    return EncoderExits(net.program, at=PLACES, stack=STACK)


def decoded(net: Net, exits: EncoderExits, rows=slice(None), **options: Any) -> Any:
    options = {"must_end": False, **options}
    return exits({"input_features": net.mel[rows]}, PROMPT, stop=net.stop, limit=LIMIT, **options)


def test_every_exit_decodes_what_the_models_own_decoder_says_of_it(net, exits):
    found = decoded(net, exits, rule="max")
    assert [a.at for a in found.attempts] == [*PLACES, 4]
    lengths = set()
    for attempt in found.attempts:
        for row in range(5):
            tokens, confidence = net.by_hand(row, attempt.at, net.stop)
            assert attempt.tokens[row] == tokens
            assert attempt.confidence[row].item() == pytest.approx(confidence, abs=1e-5)
            lengths.add(len(tokens))
    assert len(lengths) >= 2, "no row ends before others"
    assert len({tuple(a.tokens[0]) for a in found.attempts}) > 1, "all exits say the same"


def test_the_surest_hypothesis_is_kept(net, exits):
    found = decoded(net, exits, rule="max")
    for row in range(5):
        hand = {k: net.by_hand(row, k, net.stop) for k in (*PLACES, 4)}
        best = max(hand, key=lambda k: hand[k][1])
        assert (found.depth[row].item(), found.tokens[row]) == (best, hand[best][0])
        assert found.confidence[row].item() == pytest.approx(hand[best][1], abs=1e-5)
    assert len(found.depth.unique()) > 1


def test_rows_leave_at_the_first_exit_that_is_sure_and_the_others_go_on(net, exits):
    hand = {k: [net.by_hand(row, k, net.stop) for row in range(5)] for k in (*PLACES, 4)}
    ordered = sorted(c for _, c in hand[1])
    limits = {1: (ordered[2] + ordered[3]) / 2, 3: sorted(c for _, c in hand[3])[2] - 1e-4}
    found = decoded(net, exits, threshold=limits)
    depth = [next((k for k in PLACES if hand[k][row][1] >= limits[k]), 4) for row in range(5)]
    assert found.depth.tolist() == depth and len(set(depth)) >= 2
    assert found.tokens == [hand[k][row][0] for row, k in enumerate(depth)]
    assert [len(a.rows) for a in found.attempts] == [n for k in (0, *PLACES) if (n := sum(d > k for d in depth))]
    for row in range(5):
        alone = decoded(net, exits, slice(row, row + 1), threshold=limits)
        assert (alone.tokens[0], alone.depth[0].item()) == (found.tokens[row], depth[row])


def test_the_ends_of_the_scale(net, exits):
    never, always = decoded(net, exits), decoded(net, exits, threshold=-math.inf)
    assert never.depth.tolist() == [4] * 5 and len(never.attempts) == 1
    assert always.depth.tolist() == [1] * 5 and len(always.attempts) == 1
    assert never.tokens == [net.by_hand(row, 4, net.stop)[0] for row in range(5)]
    assert always.tokens == [net.by_hand(row, 1, net.stop)[0] for row in range(5)]
    assert always.encoder_flops < never.encoder_flops and always.flops < never.flops


@pytest.mark.parametrize("rule", ["first", "max"])
def test_a_hypothesis_that_has_not_ended_is_taken_from_the_model_alone(net, exits, rule):
    def taken(hand: dict, stop: int | None) -> list[int]:
        """By hand; without a stop any hypothesis is taken."""
        depth = []
        for row in range(5):
            allowed = [k for k in PLACES if stop is None or hand[k][row][0][-1] == stop]
            best = max([*allowed, 4], key=lambda k: hand[k][row][1])
            depth.append(best if rule == "max" else [*allowed, 4][0])
        return depth

    whole = [t for k in PLACES for row in range(5) for t in net.by_hand(row, k, -1)[0]]
    for stop in dict.fromkeys(whole):  # the first that ends some hypotheses which are taken, and not all of them
        hand = {k: [net.by_hand(row, k, stop) for row in range(5)] for k in (*PLACES, 4)}
        depth = taken(hand, stop)
        if depth != taken(hand, None) and min(depth) < 4:
            break
    assert depth != taken(hand, None) and min(depth) < 4
    found = exits({"input_features": net.mel}, PROMPT, stop=stop, limit=LIMIT, rule=rule, threshold=-math.inf)
    assert found.depth.tolist() == depth
    assert found.tokens == [hand[k][row][0] for row, k in enumerate(depth)]


def test_tokens_that_may_not_come_first(net, exits):
    first = decoded(net, exits).tokens[0][0]
    found = decoded(net, exits, not_first=(first,))
    expected = net.by_hand(0, 4, net.stop, not_first=(first,))
    assert found.tokens[0] == expected[0] != net.by_hand(0, 4, net.stop)[0]
    assert found.confidence[0].item() == pytest.approx(expected[1], abs=1e-5)


def test_operations_are_those_of_the_modules(net, exits):
    found = decoded(net, exits, slice(0, 1), threshold=-math.inf)
    steps = len(found.tokens[0])
    d, frames, ffn, vocabulary, seen = 16, 12, 32, 30, len(PROMPT)
    conv = 2 * d * 8 * 3 * 24 + 2 * d * d * 3 * frames
    block = 2 * frames * (4 * d * d + 2 * d * ffn) + 2 * 2 * frames * frames * d
    assert found.encoder_flops == conv + block
    keys = 2 * 2 * 2 * frames * d * d  # keys and values of both decoder blocks, once
    step = 0
    for n in range(seen, seen + steps):
        own = 4 * d * d + 2 * d * d + 2 * d * ffn
        step += 2 * (2 * n * own + 2 * 2 * n * n * d + 2 * 2 * n * frames * d) + 2 * n * d * vocabulary
    assert found.attempts[0].flops == keys + step
    with counter() as counted:
        assert decoded(net, exits, slice(0, 1), threshold=-math.inf).tokens == found.tokens
    assert counted.get_total_flops() == found.flops


def test_translated_streams(net):
    program = net.program.rewrite(f"exits{{stack={STACK},at=[1,3],head=affine}}", check=False)
    generator = torch.Generator().manual_seed(3)
    weight = torch.eye(16) + 0.4 * torch.randn(16, 16, generator=generator) / 4
    bias = 0.2 * torch.randn(16, generator=generator)
    exits = EncoderExits(with_values(program, {"hcx.exits_0.3.weight": weight, "hcx.exits_0.3.bias": bias}))
    found = decoded(net, exits, rule="max")
    for row in range(5):
        for attempt, view in zip(found.attempts, (None, lambda x: F.linear(x, weight, bias), None), strict=True):
            expected = net.by_hand(row, attempt.at, net.stop, **({"view": view} if view else {}))
            assert attempt.tokens[row] == expected[0]
            assert attempt.confidence[row].item() == pytest.approx(expected[1], abs=1e-5)
    plain = [net.by_hand(row, 3, net.stop)[1] for row in range(5)]
    assert max(abs(a - b) for a, b in zip(plain, found.attempts[1].confidence.tolist(), strict=True)) > 1e-3


def test_what_cannot_be_decoded_from_is_refused(net, llama):
    own = net.program.rewrite(f"exits{{stack={STACK},at=[1],head=own}}", check=False)
    for make in (
        lambda: EncoderExits(net.program, at=(4,), stack=STACK),
        lambda: EncoderExits(net.program, stack=STACK),
        lambda: EncoderExits(net.program, at=(1,), stack="model.decoder.layers"),
        lambda: EncoderExits(llama.program, at=(1,)),
        lambda: EncoderExits(net.program, at=2, stack=STACK),
        lambda: EncoderExits(own),
        lambda: EncoderExits(own, at=[1], stack=STACK),
        lambda: decoded(net, EncoderExits(net.program, at=PLACES, stack=STACK), rule="best"),
    ):
        with pytest.raises(UsageError) as caught:
            make()
        assert caught.value.where and caught.value.hint


def test_another_place_than_that_of_a_head_of_its_own_is_read_as_it_is(net):
    own = net.program.rewrite(f"exits{{stack={STACK},at=[1],head=own}}", check=False)
    found = decoded(net, EncoderExits(own, at=[3], stack=STACK), threshold=-math.inf)
    assert found.tokens == [net.by_hand(row, 3, net.stop)[0] for row in range(5)]


@pytest.mark.parametrize(
    ("changed", "where"),
    [
        ({"prompt": PROMPT.expand(5, 2)}, "prompt"),
        ({"prompt": PROMPT[:0]}, "prompt"),
        ({"prompt": PROMPT.float()}, "prompt"),
        ({"prompt": torch.tensor([3, 30])}, "prompt"),
        ({"prompt": torch.tensor([-1, 3])}, "prompt"),
        ({"limit": 0}, "limit"),
        ({"threshold": {1: 0.0}}, "threshold"),
        ({"threshold": {1: 0.0, 2: 0.0, 3: 0.0}}, "threshold"),
        ({"threshold": math.nan}, "threshold"),
        ({"inputs": {}}, "inputs"),
        ({"inputs": {"input_feature": torch.zeros(1, 8, 24)}}, "inputs"),
        ({"inputs": {"input_features": torch.zeros(0, 8, 24)}}, "inputs"),
        ({"not_first": (30,)}, "not_first"),
        ({"not_first": (-1,)}, "not_first"),
    ],
)
def test_calls_that_mean_nothing_are_refused(net, exits, changed, where):
    call = {"inputs": {"input_features": net.mel}, "prompt": PROMPT, "stop": net.stop, "limit": LIMIT, **changed}
    with pytest.raises(UsageError) as caught:
        exits(**call)
    assert caught.value.where == where and caught.value.hint


def test_a_threshold_of_none_at_one_place_never_leaves_there(net, exits):
    found = decoded(net, exits, threshold={1: None, 3: -math.inf})
    assert found.depth.tolist() == [3] * 5 and [a.at for a in found.attempts] == [3]
