"""Decoding in pieces: against the models' own layers run by hand, for each policy, and counted."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hcx.passes import Exits
from hcx.passes.exits import Decoder, sampler, speculate
from hcx.rewrite import NoMatchError, UsageError, trace
from hcx.rewrite.run.generation import greedy
from hcx.rewrite.testing import tiny_decoder
from torch.nn import functional as F

from tests.test_exits_cond import by_hand, set_thresholds

NEAR = 1e-4
PLACES = (2, 4)
BLOCK = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)
HEAD = 2 * 32 * 128
"""Operations of a block without attention, and of the head, a token."""


def exit_logits(model, ids: torch.Tensor, places) -> list[torch.Tensor]:
    """Logits after some numbers of blocks and, last, of the model; from eager hidden states."""
    with torch.no_grad():
        output = model(ids, output_hidden_states=True, use_cache=False)
        return [*(model.lm_head(model.model.norm(output.hidden_states[k])) for k in places), output.logits]


def taken(logits: list[torch.Tensor], threshold: float, places, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and depth of the first exit whose largest probability reaches a threshold."""
    answer, depths = logits[-1], torch.full(logits[-1].shape[:-1], depth)
    for k, here in reversed(list(zip(places, logits, strict=False))):
        fire = here.softmax(-1).amax(-1) >= threshold
        answer, depths = torch.where(fire[..., None], here, answer), torch.where(fire, k, depths)
    return answer, depths


def fed(decoder: Decoder, ids: torch.Tensor, leave: bool | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and depths of one token after another."""
    decoder.reset()
    steps = [decoder.feed(ids[:, t : t + 1], leave=leave) for t in range(ids.shape[1])]
    return torch.stack([s.logits for s in steps], 1), torch.stack([s.depth for s in steps], 1)


@pytest.fixture(scope="module")
def exits(llama):
    """Exits that a quarter of the positions take at first."""
    program = llama.program.rewrite(Exits(at=PLACES), check=False)
    first = exit_logits(llama.model, llama.ids(3, 20), PLACES)[0].softmax(-1).amax(-1)
    threshold = first.flatten().quantile(0.75).item()
    set_thresholds(program, threshold)
    return program, threshold


@pytest.fixture(scope="module")
def decoders(exits):
    """Decoders of these exits by policy, each cut once; feeding and generating begin by forgetting."""
    return cache(lambda kv: Decoder(exits[0], kv))


def test_recompute_gives_the_logits_of_a_forward_without_a_cache(llama, exits, decoders, max_diff):
    _, threshold = exits
    ids = llama.ids(3, 20)
    expected, depths = taken(exit_logits(llama.model, ids, PLACES), threshold, PLACES, 6)
    got, found = fed(decoders("recompute"), ids)
    assert len(depths.unique()) == 3 and torch.equal(found, depths)
    assert max_diff(got, expected) <= NEAR


def test_smollm2_recomputes_exactly_over_3_x_64_tokens(smollm2, max_diff):
    places, ids = (10, 20, 25), smollm2.ids(3, 64)
    program = smollm2.program.rewrite(Exits(at=places), check=False)
    logits = exit_logits(smollm2.model, ids, places)
    threshold = logits[0].softmax(-1).amax(-1).flatten().quantile(0.7).item()
    set_thresholds(program, threshold)
    expected, depths = taken(logits, threshold, places, 30)
    decoder = Decoder(program, "recompute")
    got, found = fed(decoder, ids)
    usual = max_diff(fed(decoder, ids, leave=False)[0], logits[-1])  # of decoding through a cache without exits
    shares = [round((depths == k).float().mean().item(), 2) for k in (*places, 30)]
    worst = max_diff(got, expected)
    print(f"shares {shares}; largest difference {worst:.2g}, without exits {usual:.2g}, of logits up to "
          f"{expected.abs().max().item():.3g}")  # fmt: skip
    assert min(shares) >= 0.05 and torch.equal(found, depths)
    assert worst <= max(NEAR, 2 * usual) and usual <= 1e-3


def test_propagate_holds_what_has_left_where_it_was(llama, exits, decoders, max_diff):
    """Rows leave at different depths in one batch: the same by hand, and each row as if it were alone."""
    _, threshold = exits
    ids, decoder = llama.ids(3, 20), decoders("propagate")
    with torch.no_grad():
        expected, depths = by_hand(llama.model, ids, PLACES, threshold)
    got, found = fed(decoder, ids, leave=True)
    assert len(depths.unique()) == 3 and torch.equal(found, depths)
    assert max_diff(got, expected) <= NEAR
    assert max_diff(fed(decoder, ids[1:2], leave=True)[0], got[1:2]) <= 1e-5


def masked_by_hand(model, ids, threshold, window=None):
    """Layers in which tokens see only those that came as far as that, and no further back than a window; the first token
    never leaves."""
    inner, length = model.model, ids.shape[1]
    positions = torch.arange(length)[None]
    stream = inner.embed_tokens(ids)
    angles = inner.rotary_emb(stream, positions)
    left = torch.zeros(ids.shape, dtype=torch.bool)
    logits, depth = torch.zeros(*ids.shape, model.config.vocab_size), torch.full(ids.shape, 6)
    for number, layer in enumerate(inner.layers):
        if number in PLACES:
            here = model.lm_head(inner.norm(stream))
            fire = (here.softmax(-1).amax(-1) >= threshold) & ~left
            fire[:, 0] = False
            logits[fire], depth[fire] = here[fire], number
            left |= fire
        seen = torch.ones(length, length).tril().triu(1 - (window or length)).bool()
        hidden = ~seen[None] | left[:, None, :]
        mask = torch.zeros(len(ids), 1, length, length).masked_fill(
            hidden[:, None] & ~torch.eye(length).bool(), -torch.inf
        )
        output = layer(stream, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        stream = output[0] if isinstance(output, tuple) else output
    logits[~left] = model.lm_head(inner.norm(stream))[~left]
    return logits, depth


def test_mask_leaves_out_what_has_left(llama, exits, decoders, max_diff):
    _, threshold = exits
    ids, decoder = llama.ids(3, 20), decoders("mask")
    with torch.no_grad():
        expected, depths = masked_by_hand(llama.model, ids, threshold)
    got, found = fed(decoder, ids)
    assert len(depths.unique()) == 3 and torch.equal(found, depths)
    assert max_diff(got, expected) <= NEAR
    alone = fed(decoder, ids[1:2])[0]
    assert max_diff(alone, got[1:2]) <= 1e-5
    assert [p.length for p in decoder.pieces.segments] == [20] * 3, "every token has its place, seen or not"


def test_mask_counts_windows_in_places_whoever_shares_the_batch(max_diff):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    config = transformers.MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=4, initializer_range=0.2,
    )  # fmt: skip
    model, ids = transformers.MistralForCausalLM(config).eval(), torch.randint(0, 64, (3, 16))
    program = trace(model, (ids,)).rewrite(Exits(at=PLACES), check=False)
    threshold = exit_logits(model, ids, PLACES)[0].softmax(-1).amax(-1).flatten().quantile(0.5).item()
    set_thresholds(program, threshold)
    decoder = Decoder(program, "mask")
    got, found = fed(decoder, ids)
    with torch.no_grad():
        expected, depths = masked_by_hand(model, ids, threshold, window=4)
    assert torch.equal(found, depths) and len(depths.unique()) == 3 and max_diff(got, expected) <= NEAR
    for row in range(3):
        assert max_diff(fed(decoder, ids[row : row + 1])[0][0], got[row]) <= 1e-5


def test_generating_with_exact_caches_is_greedy_decoding_of_the_select_form(llama, exits, decoders):
    program, _ = exits
    ids, mask = llama.ids(2, 8), torch.ones(2, 8, dtype=torch.int64)
    mask[0, :3] = 0
    made = decoders("recompute").generate(ids, 16, mask=mask)
    assert torch.equal(made.tokens, greedy(program, ids, 16, attention_mask=mask))
    assert len(made.depths.unique()) == 3 and made.depths.shape == (2, 16) and made.logits.shape == (2, 16, 128)
    stop = made.tokens[0, 10].item()
    stopped = decoders("recompute").generate(ids[:1], 16, mask=mask[:1], stop=stop).tokens[0]
    assert (
        stop not in stopped[8:-1].tolist()
        and stopped[-1] == stop
        and torch.equal(stopped, made.tokens[0, : len(stopped)])
    )


def test_thresholds_fall_along_a_text(llama, exits, decoders, max_diff):
    program, threshold = exits
    ids, logits = llama.ids(3, 24), exit_logits(llama.model, llama.ids(3, 24), PLACES)
    limits = threshold * (0.9 + 0.1 * torch.exp(-4 * torch.arange(24) / 12))  # token 0 answers the first call
    expected, depths = logits[-1], torch.full(ids.shape, 6)
    for k, here in ((4, logits[1]), (2, logits[0])):
        fire = here.softmax(-1).amax(-1) >= limits
        expected, depths = torch.where(fire[..., None], here, expected), torch.where(fire, k, depths)
    got, found = fed(Decoder(program, decay=12), ids)
    assert torch.equal(found, depths) and max_diff(got, expected) <= NEAR
    assert not torch.equal(fed(decoders("recompute"), ids)[1], depths)
    with pytest.raises(UsageError, match="decay"):
        Decoder(program, decay=0)


def test_sampling_draws_from_the_softmax_over_the_temperature():
    logits = torch.tensor([[1.0, 0.0, -1.0]]).repeat(20000, 1)
    drawn = sampler(0.5, torch.Generator().manual_seed(0))(logits)
    shares = torch.bincount(drawn, minlength=3) / 20000
    assert (shares - F.softmax(torch.tensor([2.0, 0.0, -2.0]), 0)).abs().max() <= 0.015


@pytest.mark.parametrize("kv", ["recompute", "propagate", "mask"])
def test_operations_are_counted(llama, kv):
    """A score without operations: never leaving costs nothing; always leaving costs the blocks before the exit, one head,
    and what the policy owes the rest."""
    program = llama.program.rewrite(Exits(at=PLACES, score="cosine"), check=False)
    prompt, decoder = llama.ids(2, 5), Decoder(program, kv, count=True)
    never = decoder.generate(prompt, 6)
    assert never.flops == never.plain and bool((never.depths == 6).all())
    attention = [6 * 2 * 2 * 2 * 32 * n * p for n, p in [(5, 5), *((1, 6 + i) for i in range(5))]]
    assert never.plain == 2 * (10 * 6 * BLOCK + 6 * HEAD) + sum(attention)
    decoder.feed(prompt[:, :1], leave=False)
    set_thresholds(program, -2.0)
    before = decoder.pieces.flops
    for _ in range(3):
        decoder.feed(prompt[:, :1])
    owed = 4 * 2 * 2 * 32 * 16 if kv == "propagate" else 0  # keys and values of four blocks
    seen = 2 * 2 * 2 * 32 * (2 + 3 + 4)
    assert decoder.pieces.flops - before == 2 * (3 * (2 * BLOCK + HEAD + owed) + seen)


@pytest.mark.parametrize(("score", "at", "draft"), [("max_prob", 4, 3), ("cosine", 2, 5), ("patience", 4, 1)])
def test_speculation_gives_greedy_text_and_says_what_was_accepted(llama, score, at, draft, max_diff):
    program = llama.program.rewrite(Exits(at=(2, 3, 4), score=score), check=False)
    ids, steps = llama.ids(1, 8), 24
    made = speculate(program, ids, steps, draft=draft, at=at)
    want = greedy(llama.program, ids, steps)
    assert torch.equal(made.tokens, want)
    early, late = exit_logits(llama.model, want, (at,))
    assert max_diff(made.logits, late[:, 7:-1]) <= NEAR
    guesses, place, drafted, accepted, rounds = early.argmax(-1)[0, 7:-1] == want[0, 8:], 0, 0, 0, 0
    while place < steps:
        tried = guesses[place : place + draft]
        agree = int(tried.int().cumprod(0).sum())
        place += min(agree + 1, len(tried))
        drafted, accepted, rounds = drafted + len(tried), accepted + agree, rounds + 1
    assert (made.drafted, made.accepted, made.rounds) == (drafted, accepted, rounds) and 0 < accepted < drafted
    stop = want[0, 14].item()
    stopped = speculate(program, ids, steps, draft=draft, at=at, stop=stop).tokens
    assert stopped[0, -1] == stop and stop not in stopped[0, 8:-1] and torch.equal(stopped, want[:, : stopped.shape[1]])


@pytest.mark.parametrize("head", ["affine", "mlp"])
def test_drafts_of_heads_whose_score_reads_some_rows(llama, head):
    program = llama.program.rewrite(f"exits{{at=[2,4],head={head},candidates=9}}", check=False)
    ids = llama.ids(1, 8)
    assert torch.equal(speculate(program, ids, 10, draft=3).tokens, greedy(llama.program, ids, 10))
    rows, translator = 4 * 9 * 32, 4 * (32 * 32 + 32) if head == "affine" else 4 * (3 * 32 * 64 + 32)
    norm, numbers = 4 * 32, 8 * 9
    for piece in Decoder(program).pieces.scores[:2]:
        assert piece.weight_bytes == rows + translator + norm + numbers, "nine rows of the head, not all of it"


def test_refusals(llama, exits, decoders):
    program, _ = exits
    with pytest.raises(UsageError, match="no policy"):
        Decoder(program, "copy")
    with pytest.raises(UsageError, match="not said where"):
        Decoder(llama.program)
    with pytest.raises(UsageError, match="one row"):
        speculate(program, llama.ids(2, 5), 3)
    with pytest.raises(UsageError, match="no exit after 3"):
        speculate(program, llama.ids(1, 5), 3, at=3)
    with pytest.raises(UsageError, match="exact"):
        speculate(decoders("mask"), llama.ids(1, 5), 3)
    with pytest.raises(UsageError, match="cannot draft"):
        speculate(program, llama.ids(1, 5), 3, draft=0)
    for steps, attempt in ((0, speculate), (-1, lambda *given: decoders("recompute").generate(*given[1:]))):
        with pytest.raises(UsageError, match="cannot add"):
            attempt(program, llama.ids(1, 5), steps)
    for ids in (llama.ids(1, 5)[0], llama.ids(2, 5)[:, :0]):
        with pytest.raises(UsageError, match="prompts are"):
            decoders("recompute").generate(ids, 3)
    with pytest.raises(UsageError, match="is padding"):
        decoders("recompute").generate(llama.ids(2, 5), 3, mask=torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]))
    with pytest.raises(UsageError, match="temperature"):
        sampler(0)
    block = llama.program.rewrite("exits{at=[2],head=block,score=cosine}", check=False)
    with pytest.raises(UsageError, match="head=block keeps"):
        Decoder(block)
    for attempt in (lambda: block.rewrite("skipping{kv=propagate}"),
                    lambda: llama.program.rewrite("exits{at=[2],head=block,form=cond,kv=propagate}")):  # fmt: skip
        with pytest.raises(NoMatchError, match="head=block keeps"):
            attempt()
    model, ids = tiny_decoder()
    with pytest.raises(UsageError, match="cache"):
        Decoder(trace(model, (ids,)).rewrite("exits{at=[2]}", check=False))
