"""Exits in one pass of a loop: site = (block, iteration), read as an eager loop written out here says it there."""

from __future__ import annotations

import pytest
import torch
from hcx.passes.exits import calibrate, fit, losses, token_batches
from hcx.passes.exits.applied import applied
from hcx.rewrite import UsageError, load
from hcx.rewrite.run.generation import decode

from tests.test_looped import rms
from tests.trained_nets import llama_by_hand

PLACES = ["3~1", "4~1", "3~2", "4~2", "4~3", "5"]
AT = "[" + ",".join(PLACES) + "]"
FORMS = ["input", "input_rms", "output", "damped"]


def states_by_hand(model, ids, mix, a, mask=None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits of blocks [2, 4) run three times, and the stream after blocks of each pass; at the end of a pass its state."""
    seen: dict[str, torch.Tensor] = {}

    def middle(block, x):
        def window(x, t):
            for number in (2, 3):
                x = seen[f"{number + 1}~{t}"] = block(number, x)
            return x

        e = block(1, block(0, x))
        h = first = window(e, 1)
        x = e + (h - e) / 3
        for t in (2, 3):
            if mix == "damped":
                h = x = x + (window(x, t) - x) / 3
            elif mix == "output":
                h = h + a * (window(h, t) - h)
            else:
                h = window((1 - a) * e + a * h * (rms(e) / rms(h) if mix == "input_rms" else 1), t)
            seen[f"4~{t}"] = h
        if mix == "damped":
            h = seen["4~3"] = (1 - a) * first + a * h
        seen["5"] = block(4, h)
        return block(5, seen["5"])

    return llama_by_hand(model, ids, middle, mask), seen


def between(scores: torch.Tensor) -> float:
    """A threshold that some 40 % of the scores reach, away from all of them."""
    low, high = scores.flatten().sort().values[int(0.6 * scores.numel()) - 1 :][:2].tolist()
    return (low + high) / 2


def left(model, logits, states, places, limit) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits where each position leaves at the first place whose max_prob reaches a limit, and the place's number."""
    expected, taken = logits, torch.full(logits.shape[:2], len(places))
    for number, place in reversed(list(enumerate(places))):
        here = model.lm_head(model.model.norm(states[place]))
        leaves = here.softmax(-1).amax(-1) >= limit
        expected, taken = torch.where(leaves[..., None], here, expected), taken.masked_fill(leaves, number)
    return expected, taken


@pytest.fixture(scope="module")
def base(llama):
    return llama.program.rewrite("looped{start=2,end=4,steps=3,scalar=0.4}", check=False)


@pytest.mark.parametrize("mix", FORMS)
def test_every_exit_reads_its_own_pass(llama, mix, max_diff):
    program = llama.program.rewrite(f"looped{{start=2,end=4,steps=3,scalar=0.4,mix={mix}}},exits{{at={AT}}}")
    ids, model = llama.ids(2, 9), llama.model
    with torch.no_grad():
        output, taps = program(ids, taps=True)
        expected, states = states_by_hand(model, ids, mix, 0.4)
        read = {k: model.lm_head(model.model.norm(states[k])) for k in PLACES}
    assert max_diff(output.logits, expected) <= 1e-4
    for place in PLACES:
        assert max_diff(taps[f"exits.{place}.logits"], read[place]) <= 1e-4
    assert min(max_diff(read[a], read[b]) for a in PLACES for b in PLACES if a < b) > 1e-3
    assert torch.equal(taps["exits.depth"], torch.full((2, 9), 6 + 2 * 2))
    assert [t.data_ptr() for t in losses.taps_of(taps)] == [taps[f"exits.{k}.logits"].data_ptr() for k in PLACES]


def test_positions_leave_in_the_order_in_which_blocks_run(llama, base, max_diff):
    """Away from neutral: 4~1 comes before 3~2, and whoever leaves says what the loop says there."""
    ids, model, places = llama.ids(4, 12), llama.model, ["4~1", "3~2", "5"]
    with torch.no_grad():
        logits, states = states_by_hand(model, ids, "input", 0.4)
        limit = between(model.lm_head(model.model.norm(states["4~1"])).softmax(-1).amax(-1))
        expected, taken = left(model, logits, states, places, limit)
        program = base.rewrite(f"exits{{at=[3~2,5,4~1],threshold={limit}}}", check=False)
        output, taps = program(ids, taps=True)
    assert [str(s["detail"]["at"]) for s in program.history[-1]["plan"]["steps"][0]["sites"]] == places
    assert len(set(taken.flatten().tolist())) >= 3, "the threshold must divide the positions"
    assert torch.equal(taps["exits.depth"], torch.tensor([4, 5, 9, 10])[taken])
    assert max_diff(output.logits, expected) <= 1e-4 and max_diff(expected, logits) > 1e-3


def test_cached_decoding_with_exits_in_a_pass(llama, base, max_diff):
    """All passes run whoever leaves, so that every slot holds what later tokens read."""
    ids, model, places = llama.ids(2, 5), llama.model, ["4~1", "3~2"]
    with torch.no_grad():
        _, states = states_by_hand(model, llama.ids(4, 12), "input", 0.4)
        limit = between(model.lm_head(model.model.norm(states["4~1"])).softmax(-1).amax(-1))
        program = base.rewrite(f"exits{{at=[4~1,3~2],threshold={limit}}}", check=False)
        tokens, steps = decode(program.signature, program.run_flat, program.output_names, ids, 16)
        logits, states = states_by_hand(model, tokens[:, :-1], "input", 0.4)
        expected, taken = left(model, logits, states, places, limit)
    got, expected, taken = torch.stack(steps, 1), expected[:, 4:], taken[:, 4:]
    assert max_diff(got, expected) <= 1e-4 and torch.equal(got.argmax(-1), expected.argmax(-1))
    assert len(set(taken.flatten().tolist())) >= 2 and max_diff(expected, logits[:, 4:]) > 1e-3


def test_fitted_calibrated_saved_and_loaded(llama, base, tmp_path):
    program = base.rewrite("exits{at=[4~1,4~2,5],head=affine,score=probe}", check=False)
    text = torch.randint(0, 40, (900,), generator=torch.Generator().manual_seed(0))
    batches = token_batches(program, text, length=20, rows=4)
    fitted, report = fit(program, batches[:7], skip=1)
    assert list(report.agreement) == ["4~1", "4~2", "5"]
    ready, calibration = calibrate(fitted, batches[7:9], batches[9:], budget=7.0, skip=1)
    assert applied(ready).before == [4, 6, 9] and applied(ready).depth == 10
    assert list(calibration.held_out["shares"]) == ["4~1", "4~2", "5", "10"]
    assert 4 <= calibration.held_out["mean_depth"] <= 10
    ways = list(calibration.ways.values())
    assert len(ways) == 4 and ways == sorted(ways), "a later pass has paid for the earlier ones"
    ready.save(tmp_path / "a.hcx")
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "a.hcx")(llama.ids(2, 9)).logits, ready(llama.ids(2, 9)).logits)


def test_a_neutral_loop_with_exits_in_its_passes_is_taken_out(llama):
    program = llama.program.rewrite("looped{start=2,end=4,steps=3},exits{at=[3~1,3~2,4~2]}").rewrite("unloop")
    ids = llama.ids(2, 9)
    with torch.no_grad():
        output, taps = program(ids, taps=True)
        assert torch.equal(output.logits, llama.model(ids).logits)
    assert torch.equal(taps["exits.3~1.logits"], taps["exits.3~2.logits"])
    assert len(program.inputs) == len(llama.program.inputs)


@pytest.mark.parametrize("place", ["1~2", "3~4", "6~3", "3~0", "3~", "x", "7~1"])
def test_places_that_are_not_there_are_refused(base, place):
    with pytest.raises(UsageError) as caught:
        base.plan(f"exits{{at=[{place}]}}")
    assert caught.value.where == "at" and caught.value.hint


def test_branches_take_no_pass(base):
    with pytest.raises(UsageError, match="last pass"):
        base.plan("exits{at=[3~1],form=cond}")
    (skip,) = base.rewrite("exits{at=[3~1]}", check=False).plan("skipping{kv=propagate}").steps[0].skips
    assert "last pass" in skip.detail
