"""Tokens that go on through quantised blocks: against the models' own layers with weights rounded by hand."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
from hcx.passes import Exits
from hcx.passes.exits import Decoder, River, drift, set_thresholds, token_batches, within_budget
from hcx.rewrite import NoMatchError, UsageError, load, trace
from hcx.rewrite.run.generation import greedy
from torch.nn import functional as F

from tests.conftest import tiny_llama, token_ids
from tests.test_exits_runtime import BLOCK, HEAD, PLACES, exit_logits, fed

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
NEAR, FAR = 1e-4, 1e-2


def rounded(weight: torch.Tensor, bits: int = 4, group: int = 32) -> torch.Tensor:
    """Round to nearest in groups of inputs, with zero points and float16 scales rounded up, in numpy."""
    rows = weight.detach().double().numpy().reshape(weight.shape[0], -1, group)
    low, high = rows.min(-1, keepdims=True).clip(max=0), rows.max(-1, keepdims=True).clip(min=0)
    exact = ((high - low) / (2**bits - 1)).astype(np.float32)
    half = exact.astype(np.float16)
    scale = np.where(half < exact, np.nextafter(half, np.float16(np.inf)), half).astype(np.float64)
    zero = np.round(-low / scale)
    codes = (np.round(rows / scale) + zero).clip(0, 2**bits - 1)
    return torch.from_numpy(((codes - zero) * scale).reshape(weight.shape)).float()


def quantised(model, start: int = 0, **options):
    """A copy of a model whose blocks from ``start`` on have rounded matrices."""
    other = copy.deepcopy(model)
    for layer in other.model.layers[start:]:
        for parameter in layer.parameters():
            if parameter.dim() == 2:
                parameter.data.copy_(rounded(parameter, **options))
    return other


def plainly(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def hand_over(model, cheap, ids: torch.Tensor, places, threshold: float, at_exit: bool = False):
    """One row, token after token through the layers of one model or the other, which share one cache of Transformers;
    the first token never leaves. Logits and depths."""
    from transformers import DynamicCache

    cache, logits, depths = DynamicCache(), [], []
    for t in range(ids.shape[1]):
        positions = torch.tensor([[t]])
        stream, depth, early = model.model.embed_tokens(ids[:, t : t + 1]), len(model.model.layers), None
        angles = model.model.rotary_emb(stream, positions)
        for number in range(depth):
            if number in places and depth == len(model.model.layers) and t:
                here = model.lm_head(model.model.norm(stream))
                if here.softmax(-1).max() >= threshold:
                    depth, early = number, here
            source = model if depth == len(model.model.layers) else cheap
            output = source.model.layers[number](
                stream, attention_mask=None, position_ids=positions, past_key_values=cache, position_embeddings=angles
            )
            stream = output[0] if isinstance(output, tuple) else output
        late = model.lm_head(model.model.norm(stream))
        logits.append(early if at_exit and early is not None else late)
        depths.append(depth)
    return torch.cat(logits, 1), torch.tensor([depths])


@pytest.fixture(scope="module")
def exits(llama):
    """Exits, and a threshold that a part of the tokens reaches."""
    program = llama.program.rewrite(Exits(at=PLACES), check=False)
    first = exit_logits(llama.model, llama.ids(3, 20), PLACES)[0].softmax(-1).amax(-1)
    return program, first.flatten().quantile(0.75).item()


@pytest.fixture(scope="module")
def river(exits):
    return Decoder(exits[0], "river")


def leaving(program, *thresholds: float):
    """The Program with these thresholds, which its Decoders share."""
    for at, threshold in zip(PLACES, thresholds, strict=True):
        program.tensor(f"hcx.exits_0.{at}.threshold").fill_(threshold)
    return program


def test_never_leaving_is_the_plain_cached_decode_bitwise(llama, exits, river):
    leaving(exits[0], torch.inf, torch.inf)
    ids, program, cache, expected = llama.ids(2, 14), llama.program, {}, []
    for t in range(14):
        call = {"attention_mask": torch.ones(2, t + 1, dtype=torch.int64), "position_ids": torch.full((2, 1), t)}
        with torch.no_grad():
            flat = program.run_flat(program.signature.by_name({"input_ids": ids[:, t : t + 1], **call, **cache}))
        found = dict(zip(program.output_names, flat, strict=True))
        expected.append(found["logits"])
        cache = {"past_key_values" + n.removeprefix("present"): v for n, v in found.items() if "present" in n}
    got, depths = fed(river, ids, leave=True)
    assert torch.equal(got, torch.cat(expected, 1)) and bool((depths == 6).all())
    assert torch.equal(river.generate(ids, 6).tokens, greedy(program, ids, 6)), "behind a prompt"


@pytest.mark.parametrize("at", PLACES)
def test_everybody_in_the_river_is_the_model_with_later_blocks_quantised(llama, exits, river, at, max_diff):
    leaving(exits[0], *(-1.0 if k == at else torch.inf for k in PLACES))
    ids = llama.ids(2, 20)
    got, depths = fed(river, ids, leave=True)
    expected = plainly(quantised(llama.model, at), ids)
    assert max_diff(got, expected) <= NEAR < FAR < max_diff(expected, plainly(llama.model, ids))
    assert bool((depths == at).all())


@pytest.mark.parametrize("answer", ["end", "exit"])
def test_tokens_on_both_ways_share_one_cache(llama, exits, river, answer, max_diff):
    """Rows of a batch leave at different depths in one step, and each is as by hand and as it is alone."""
    program, threshold = exits
    leaving(program, threshold, threshold)
    ids, decoder = llama.ids(3, 20), river if answer == "end" else Decoder(program, "river", answer=answer)
    cheap = quantised(llama.model)
    with torch.no_grad():
        rows = [hand_over(llama.model, cheap, row[None], PLACES, threshold, answer == "exit") for row in ids]
    expected, depths = (torch.cat(x) for x in zip(*rows, strict=True))
    got, found = fed(decoder, ids)
    assert torch.equal(found, depths) and max_diff(got, expected) <= NEAR
    mixed = [len(step.unique()) for step in depths.T]
    assert len(depths.unique()) == 3 and max(mixed) == 3, "one step has rows on all three ways"
    assert max_diff(expected, plainly(llama.model, ids)) > FAR
    for row in range(3):
        alone, same = fed(decoder, ids[row : row + 1])
        assert torch.equal(same[0], depths[row]) and max_diff(alone, got[row : row + 1]) <= 1e-5


def test_smollm2_hands_tokens_over_after_20_blocks(smollm2, max_diff):
    program, ids = smollm2.program.rewrite(Exits(at=(20,)), check=False), smollm2.ids(1, 12)
    threshold = exit_logits(smollm2.model, ids, (20,))[0].softmax(-1).amax(-1)[:, 1:].median().item() - 1e-4
    program = set_thresholds(program, {20: threshold})
    cheap = quantised(smollm2.model, 20)
    with torch.no_grad():
        expected, depths = hand_over(smollm2.model, cheap, ids, (20,), threshold)
    got, found = fed(Decoder(program, "river"), ids)
    assert torch.equal(found, depths) and min((depths == k).sum() for k in (20, 30)) >= 3
    worst, away = max_diff(got, expected), max_diff(expected, plainly(smollm2.model, ids))
    print(f"largest difference {worst:.2g}, from the model {away:.2g}")
    assert worst <= NEAR < 1 < away


def test_padded_prompts_do_not_change_a_row(llama, exits, river, max_diff):
    program, threshold = exits
    leaving(program, threshold, threshold)
    decoder, ids = river, llama.ids(2, 8)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    made = decoder.generate(ids, 12, mask=mask)
    assert len(made.depths.unique()) == 3
    short = decoder.generate(ids[:1, 3:], 12)
    assert torch.equal(short.tokens[0, 5:], made.tokens[0, 8:]) and torch.equal(short.depths[0], made.depths[0])
    assert max_diff(short.logits[0], made.logits[0]) <= NEAR


def test_states_are_carried_on_by_the_river(max_diff):
    """Mamba-2: a state is written by either way."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    torch.manual_seed(0)
    config = Mamba2Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=8, num_heads=8, head_dim=8, n_groups=1,
        chunk_size=4, initializer_range=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model, ids = Mamba2ForCausalLM(config).eval(), token_ids(24, 64).reshape(2, 12)
    program = trace(model, (ids,), {"use_cache": True}).rewrite(Exits(at=(1,)), check=False)
    program = set_thresholds(program, {1: -1.0})
    got, _ = fed(Decoder(program, "river", river="quantize{target=[*in_proj*,*out_proj*]}"), ids, leave=True)
    other = copy.deepcopy(model)
    for layer in other.backbone.layers[1:]:
        for linear in (layer.mixer.in_proj, layer.mixer.out_proj):
            linear.weight.data.copy_(rounded(linear.weight))
    with torch.no_grad():
        expected, before = (m(ids, use_cache=False).logits for m in (other, model))
    assert max_diff(got, expected) <= NEAR < FAR < max_diff(expected, before)


def test_the_river_is_a_pipeline_or_a_program_of_ones_own(llama, exits, tmp_path, max_diff):
    program, _ = exits
    ids, pipeline = llama.ids(2, 12), "quantize{bits=3,group=16}"
    leaving(program, -1.0, torch.inf)
    expected = plainly(quantised(llama.model, 2, bits=3, group=16), ids)
    program.rewrite(pipeline, check=False).save(tmp_path / "river.hcx")
    for river in (pipeline, load(tmp_path / "river.hcx")):
        got, _ = fed(Decoder(program, "river", river=river), ids, leave=True)
        assert max_diff(got, expected) <= NEAR, river


def test_operations_and_bytes_of_weights_are_counted(llama):
    """Quantised blocks take the same operations and read 4 bits a weight, a scale of 2 bytes for 32 inputs, and a zero
    point of 4 bits, in whole bytes a row; norms stay as they are."""
    program = llama.program.rewrite(Exits(at=PLACES, score="cosine"), check=False)
    prompt, decoder = llama.ids(1, 5), Decoder(program, "river", count=True)
    made = decoder.generate(prompt, 6)
    angles = 4 * 4 * 3  # frequencies of the rotary embedding, in each segment
    block, head = 4 * (BLOCK // 2 + 2 * 32), 4 * (HEAD // 2 + 32)
    assert made.net == 1 and made.net_bytes == 1 and made.plain_bytes == 6 * (6 * block + head + angles)
    decoder = Decoder(set_thresholds(program, {2: -2.0}), "river", count=True)
    made = decoder.generate(prompt, 6)
    assert made.net == 1 and made.depths.tolist() == [[6, *5 * [2]]], "the prompt runs in full"
    rows = {32: 2 * 32 + 2 * 16 + 2 * 64, 64: 32}  # inputs of a matrix -> rows in a block
    codes = sum(count * (width // 2 + 2 * (width // 32) + 1) for width, count in rows.items())
    masks = 2 * (2 + 2 * 4)  # for taking codes out of a byte, in each segment
    step = 2 * block + 4 * (codes + 4 * 2 * 32) + head + angles + masks
    assert made.weight_bytes == 6 * block + head + angles + 5 * step
    assert 0.5 < made.net_bytes < 0.6


def test_the_head_runs_once_a_step(llama):
    """At the exit or at the end."""
    program = llama.program.rewrite(Exits(at=(2,), score="cosine"), check=False)
    rows = llama.ids(2, 6)
    decoder = Decoder(program, "river", answer="exit", count=True)
    for threshold, at_exit in ((-2.0, True), (-2.0, False), (torch.inf, True)):
        program.tensor("hcx.exits_0.2.threshold").fill_(threshold)
        decoder.reset(), decoder.feed(rows)
        before, decoder.at_exit = decoder.pieces.flops, at_exit
        depth = decoder.feed(rows[:, :1]).depth
        assert decoder.pieces.flops - before == 2 * 6 * (BLOCK + 2 * 2 * 32 * 7) + 2 * HEAD, (threshold, at_exit)
        assert depth.tolist() == [6, 6] if threshold > 0 else [2, 2]


def test_drift_is_the_cosine_of_hidden_states_and_limits_exits(llama, exits, river):
    program, threshold = exits
    leaving(program, threshold, threshold)
    batches = token_batches(program, llama.text, 20, rows=2)[:4]
    measured = drift(program, batches, skip=1)
    ids = llama.text[: 8 * 20].reshape(8, 20)
    seen = []

    def keep(module, args, output):  # hidden_states has the last one behind the final norm
        seen.append(output[0] if isinstance(output, tuple) else output)

    handle = llama.model.model.layers[-1].register_forward_hook(keep)
    with torch.no_grad():
        states = llama.model(ids, output_hidden_states=True, use_cache=False).hidden_states
    handle.remove()
    states = [*states[:-1], seen[0]]
    expected = [F.cosine_similarity(a[:, 1:], b[:, 1:], -1).mean().item() for a, b in itertools.pairwise(states)]
    assert measured.positions == 8 * 19 and measured.cosines == pytest.approx(expected, abs=1e-6)
    errors = {k: sum(1 - c for c in expected[k:]) for k in PLACES}
    assert measured.errors == pytest.approx(errors, abs=1e-5) and 0 < errors[4] < errors[2] - 0.01

    budget = (errors[2] + errors[4]) / 2
    assert measured.within(budget) == [4] and measured.within(errors[2] + 1) == [2, 4] and not measured.within(0)
    limited = within_budget(program, measured, budget)
    ids = llama.ids(3, 20)
    depths = fed(Decoder(limited, "river"), ids)[1]
    before = fed(river, ids)[1]
    assert set(before.unique().tolist()) == {2, 4, 6} and set(depths.unique().tolist()) == {4, 6}
    assert limited.tensor("hcx.exits_0.4.threshold").item() == pytest.approx(threshold)
    assert limited.history[-1]["drift"]["within"] == [4]


def test_refusals(llama, exits, river):
    program, pieces = exits[0], river.pieces
    with pytest.raises(UsageError, match="has no river"):
        Decoder(program, "mask", river="quantize")
    with pytest.raises(UsageError, match="has no river"):
        Decoder(program, answer="end")
    with pytest.raises(UsageError, match="no answer at the `middle`"):
        Decoder(program, "river", answer="middle")
    with pytest.raises(UsageError, match="not said where"):
        Decoder(llama.program, "river")
    with pytest.raises(UsageError, match=r"exits at \[3\]"):
        River(pieces, llama.program.rewrite(Exits(at=(3,)), check=False))
    with pytest.raises(NoMatchError, match="nothing to change"):
        Decoder(program.rewrite("quantize{bits=8}", check=False), "river")

    other = trace(tiny_llama(num_key_value_heads=4), (llama.ids(2, 12),)).rewrite("exits{at=[2,4]}", check=False)
    with pytest.raises(UsageError, match=r"past_key_values\.2\.key"):
        River(pieces, other)
    with pytest.raises(UsageError, match=r"embed_tokens\.weight` has other values"):
        River(pieces, with_other_values(program.rewrite("quantize", check=False), "embed_tokens.weight"))
    lora = llama.program.rewrite("exits{at=[2,4]},lora{rank=2}", check=False)
    with pytest.raises(UsageError, match=r"q_proj\.A` has other values"):
        Decoder(lora, "river", river=with_other_values(lora.rewrite("quantize", check=False), ".A"))
    with pytest.raises(UsageError, match="measure"):
        drift(program, [])
    measured = drift(program, token_batches(program, llama.text, 20)[:1])
    for budget in (-1.0, float("nan")):
        with pytest.raises(UsageError, match="budget"):
            within_budget(program, measured, budget)
    with pytest.raises(UsageError, match="no exit after 2"):
        within_budget(llama.program.rewrite(Exits(at=(4,)), check=False), measured, 0)


def with_other_values(program, part: str):
    """A copy with other values of the parameters whose names end so."""
    changed = copy.deepcopy(program)
    with torch.no_grad():
        for name, parameter in changed.named_parameters():
            if name.endswith(part):
                parameter.add_(0.1)
    return changed
