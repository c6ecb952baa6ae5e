"""Select form to cond form: fitted and calibrated exits keep their tensors, their answers and their taps."""

from __future__ import annotations

import pytest
import torch
from hcx.passes.exits import calibrate, fit, set_thresholds
from hcx.rewrite import NoMatchError, UsageError, load
from hcx.rewrite.ir.mutation import mutated
from torch.utils.flop_counter import FlopCounterMode

from tests.conftest import token_ids
from tests.zoo import traced

PLACES = (2, 4)


@pytest.fixture(scope="module")
def plain(llama_without_cache):
    return llama_without_cache.program


@pytest.fixture(scope="module")
def cached(llama):
    return llama.program


def same(one, other, ids) -> bool:
    with torch.no_grad():
        (a, taps), (b, others) = (p(ids, taps=True) for p in (one, other))
    key = "exits.depth"
    return torch.equal(a.logits, b.logits) and torch.equal(taps[key], others[key])


@pytest.mark.parametrize(
    "options", ["head=affine", "head=norm,score=margin", "head=mlp,score=probe", "score=gate", "candidates=16"]
)
def test_calibrated_exits_skip_with_the_same_answers(plain, options, tmp_path):
    exits = plain.rewrite(f"exits{{at=[2,4],{options}}}", check=False)
    calls = [[token_ids(200)[i * 24 : i * 24 + 24].reshape(2, 12)] for i in range(6)]
    if "affine" in options or "probe" in options or "gate" in options or "candidates" in options:
        exits, _ = fit(exits, [exits.signature.complete(c) for c in calls])
    batches = [exits.signature.complete(c) for c in calls]
    exits, _ = calibrate(exits, batches[:3], batches[3:], budget=4.5)
    fast = exits.rewrite("skipping")
    assert fast.history[-1]["contract"]["contract"] == "Exact"
    depths = set()
    for shape in ((2, 12), (1, 1), (5, 7)):
        ids = token_ids(60)[: shape[0] * shape[1]].reshape(shape)
        assert same(exits, fast, ids)
        depths |= set(fast(ids, taps=True)[1]["exits.depth"].flatten().tolist())
    assert len(depths) > 1, "nobody left, or nobody stayed"
    assert set(fast.state_dict()) == set(exits.state_dict())
    fast.save(tmp_path / "fast.hcx")
    assert same(load(tmp_path / "fast.hcx"), fast, token_ids(24).reshape(2, 12))
    with pytest.raises(UsageError, match="in cond form"):
        calibrate(fast, batches, batches, budget=4.0)


def test_it_is_the_cond_form_of_the_pass(plain):
    exits = plain.rewrite("exits{at=[2,4],form=select}", check=False)
    other = plain.rewrite("exits{at=[2,4],form=cond}", check=False)
    fast = set_thresholds(exits, {2: 0.03, 4: 0.02}).rewrite("skipping", check=False)
    other.load_state_dict(fast.state_dict())
    assert same(other, fast, token_ids(40).reshape(4, 10)) and fast.taps == other.taps
    ops = [sorted(str(n.target) for n in p.graph.nodes if n.op == "call_function") for p in (fast, other)]
    assert [o for o in ops[0] if "higher_order" not in o] == [o for o in ops[1] if "higher_order" not in o]


def test_a_cache_needs_to_know_what_skipped_blocks_leave_in_it(cached):
    exits = cached.rewrite("exits{at=[2,4],threshold=0.02}", check=False)
    with pytest.raises(NoMatchError, match="kv=propagate"):
        exits.rewrite("skipping")
    fast = exits.rewrite("skipping{kv=propagate}")
    other = cached.rewrite("exits{at=[2,4],threshold=0.02,form=cond,kv=propagate}", check=False)
    assert fast.history[-1]["contract"]["contract"] == "Structural"
    assert same(fast, other, token_ids(24).reshape(2, 12))
    assert cached.rewrite("exits{at=[2,4]},skipping{kv=propagate}").history[-1]["contract"]["contract"] == "Exact"


def test_without_exits_there_is_nothing_to_skip(plain):
    with pytest.raises(NoMatchError, match="rewrite with `exits` first"):
        plain.rewrite("skipping")


@pytest.mark.parametrize("score", ["probe", "gate", "cosine"])
def test_a_head_that_the_score_does_not_read_runs_only_where_somebody_leaves(plain, score):
    """Counted: never leaving costs a linear probe an exit; leaving in one call costs that call one head."""
    exits = plain.rewrite(f"exits{{at=[2,4],score={score}}}", check=False)
    ids = token_ids(24).reshape(2, 12)
    head = 2 * 24 * exits.tensor("lm_head.weight").numel()

    def operations(program, taps=False):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            program(ids, taps=taps)
        return counter.get_total_flops()

    fast = exits.rewrite("skipping")
    probes = 0 if score == "cosine" else 2 * 2 * 24 * 32
    assert operations(fast) == operations(plain) + probes
    with torch.no_grad():
        figures = exits(ids, taps=True)[1]["exits.2.score"].flatten()
    if figures.unique().numel() > 1:  # one position leaves at the first exit, nobody at the second
        one = set_thresholds(exits, {2: figures.max().item(), 4: float("inf")}).rewrite("skipping", check=False)
        assert operations(one) == operations(plain) + probes + head and same(one, set_thresholds(
            exits, {2: figures.max().item(), 4: float("inf")}), ids)  # fmt: skip


def test_writes_in_place_that_are_viewed_afterwards_lie_in_branches():
    """Mixtures of experts scale their routing weights in place; a view made after that is one of the new value."""
    model, args, _, program = traced("mixtral")
    assert not any(mutated(n) for n in program.graph.nodes)
    exits = program.rewrite("exits{at=[2]}", check=False)
    with torch.no_grad():
        middle = exits(*args, taps=True)[1]["exits.2.score"].median().item()
        fast = set_thresholds(exits, {2: middle}).rewrite("skipping")
        output, taps = fast(*args, taps=True)
        stay = taps["exits.depth"] > 2
        assert 0 < stay.sum() < stay.numel()
        assert torch.equal(output[stay], model(*args)[stay])


def test_a_stream_that_changes_its_shape_cannot_be_held():
    exits = traced("convnext")[3].rewrite("exits", check=False)
    with pytest.raises(NoMatchError, match="leave kv out, there is no cache"):
        exits.rewrite("skipping{kv=propagate}")
    assert exits.rewrite("skipping").history[-1]["contract"]["contract"] == "Exact"
