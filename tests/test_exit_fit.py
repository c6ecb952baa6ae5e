"""Fitting and calibrating exits: closed forms against other solvers, figures against runs of the Program itself."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hcx.cli.main import main
from hcx.passes.exits import calibrate, exit_costs, fit, measure, set_thresholds, token_batches
from hcx.passes.exits.fitting.ridge import Ridge, logistic, softmax_regression
from hcx.passes.exits.fitting.rules import (
    exponential_weights,
    for_agreement,
    for_budget,
    geometric_shares,
    learn_then_test,
    sequential_quantiles,
)
from hcx.passes.exits.fitting.trials import Trials
from hcx.rewrite import UsageError, load

from tests.test_exit_heads import streams

pytestmark = pytest.mark.usefixtures("traced_once")
NEVER = math.inf


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- closed forms


def ridge_of(x, y, ridge, chunks=3):
    sums = Ridge(x.shape[1])
    for part in zip(x.chunk(chunks), y.chunk(chunks), strict=True):
        sums.add(*part)
    return sums.solve(ridge)


def test_ridge_is_the_least_squares_solution_of_its_stacked_system():
    x, y = noise(50, 4) * torch.tensor([1, 5, 0.1, 2.0]), noise(50, 4, seed=1) * 3
    a, c = ridge_of(x, y, 0.2)
    w = y.square().mean(-1).rsqrt()[:, None]
    rows = torch.cat([x, torch.ones(50, 1)], 1) * w
    penalty = torch.cat([torch.diag((0.2 * (w * x).square().sum(0)).sqrt()), torch.zeros(4, 1)], 1)
    system = torch.cat([rows, penalty])
    target = torch.cat([w * (y - x), torch.zeros(4, 4)])
    solution = torch.linalg.lstsq(system, target).solution
    assert torch.allclose(a, torch.eye(4) + solution[:-1].T, atol=1e-9) and torch.allclose(c, solution[-1], atol=1e-9)


def test_ridge_finds_an_affine_map_and_shrinks_towards_the_identity():
    x, true, shift = noise(200, 6), torch.eye(6) + noise(6, 6, seed=1), noise(6, seed=2)
    y = x @ true.T + shift
    a, c = ridge_of(x, y, 0.0)
    assert torch.allclose(a, true, atol=1e-8) and torch.allclose(c, shift, atol=1e-8)
    a, _ = ridge_of(x, y, 1e6)
    assert torch.allclose(a, torch.eye(6, dtype=torch.float64), atol=1e-4)


def test_regressions_against_scikit_learn():
    linear_model = pytest.importorskip("sklearn.linear_model")
    x = noise(300, 5) * torch.tensor([1, 10, 0.2, 1, 3.0])
    z = ((x - x.mean(0)) / x.std(0)).numpy()
    y = (x[:, 0] + 0.1 * x[:, 1] + noise(300, seed=3) > 0.3).double()
    weight, bias = logistic(x, y, ridge=0.02)
    theirs = linear_model.LogisticRegression(C=1 / (0.02 * 300), tol=1e-10, max_iter=10000).fit(z, y)
    assert torch.allclose(weight[0] * x.std(0), torch.tensor(theirs.coef_[0]), atol=1e-4)
    assert torch.allclose(torch.sigmoid(x @ weight[0] + bias), torch.tensor(theirs.predict_proba(z)[:, 1]), atol=1e-4)
    weight, _ = logistic(x, y, ridge=0.02, balanced=True)
    model = linear_model.LogisticRegression(C=1 / (0.02 * 300), tol=1e-10, max_iter=10000, class_weight="balanced")
    assert torch.allclose(weight[0] * x.std(0), torch.tensor(model.fit(z, y).coef_[0]), atol=1e-4)
    labels = (x[:, 0] > 0).long() + (x[:, 4] > 1).long()
    weight, bias = softmax_regression(x, labels, 3, ridge=0.02)
    theirs = linear_model.LogisticRegression(C=1 / (0.02 * 300), tol=1e-10, max_iter=10000).fit(z, labels)
    got = (x @ weight.T + bias).softmax(-1)
    assert torch.allclose(got, torch.tensor(theirs.predict_proba(z)), atol=2e-3)


def test_labels_that_are_all_equal_give_a_constant():
    weight, bias = logistic(noise(20, 3), torch.ones(20))
    assert not bool(weight.any()) and torch.sigmoid(bias).item() == pytest.approx(21 / 22)


# ---- rules


def test_quantiles_take_the_shares_that_they_are_asked_for():
    scores = noise(3, 1000).float()
    thresholds = sequential_quantiles(scores, [0.2, 0.3, 0.1, 0.4])
    taken = Trials([1, 2, 3], 4, scores, torch.zeros(4, 1000)).leave(thresholds)
    assert (torch.bincount(taken) / 1000).tolist() == pytest.approx([0.2, 0.3, 0.1, 0.4])
    assert sequential_quantiles(scores, [0.0, 0.3, 0.0])[0] == NEVER


def test_equal_scores_leave_together():
    scores = torch.tensor([[2.0, 2.0, 2.0, 1.0, 0.0, 0.0]])
    assert sequential_quantiles(scores, [0.5]) == [2.0]
    assert sequential_quantiles(scores, [1 / 6]) == [NEVER]
    assert sequential_quantiles(scores, [2 / 3]) == [1.0]


def test_exponential_weights_have_the_budget_and_eeros_form():
    risks, costs = torch.tensor([0.6, 0.3, 0.2, 0.0]), torch.tensor([10.0, 15.0, 25.0, 30.0])
    pi = exponential_weights(risks, costs, 22.0, temperature=0.1)
    assert float(pi @ costs.double()) == pytest.approx(22.0) and float(pi.sum()) == pytest.approx(1)
    # ln pi + R / T is affine in the cost
    line = (pi.log() + risks.double() / 0.1).numpy()
    slopes = [(line[i + 1] - line[i]) / float(costs[i + 1] - costs[i]) for i in range(3)]
    assert slopes == pytest.approx([slopes[0]] * 3)
    z = geometric_shares(costs, 22.0)
    assert float(z @ costs.double()) == pytest.approx(22.0) and float(z[1] / z[0]) == pytest.approx(float(z[3] / z[2]))
    for budget in (10, 31):
        with pytest.raises(UsageError):
            exponential_weights(risks, costs, budget)


def synthetic(count: int, seed: int) -> Trials:
    """Scores that are the probability of agreeing at two exits; the risk of any rule can be worked out from them."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(2, count, generator=generator)
    scores[1] = scores[1].sqrt()
    agrees = torch.rand(2, count, generator=generator) < scores
    return Trials([4, 8], 12, scores, torch.cat([agrees.long(), torch.ones(1, count, dtype=torch.long)]))


def true_risk(thresholds: list[float]) -> float:
    big = synthetic(30_000, 999)
    taken = big.leave(thresholds)
    p = torch.cat([big.scores, torch.ones_like(big.scores[:1])]).gather(0, taken[None])[0]
    return float((1 - p).double().mean())


def test_learn_then_test_keeps_its_risk():
    found = [learn_then_test(synthetic(1000, seed), 0.1, 0.9) for seed in range(20)]
    risks = [true_risk(t) for t, _ in found]
    assert sum(r > 0.1 for r in risks) <= 2, "more than a tenth of the calibrations break the promise"
    assert sum(r > 0.02 for r in risks) >= 15, "it hardly ever lets anything leave: the promise is empty"
    assert all(p <= 0.1 for t, p in found if t != [NEVER, NEVER])


def test_agreement_takes_the_cheapest_rule_that_keeps_it():
    trials = synthetic(4000, 1)
    thresholds = for_agreement(trials, 0.9)
    figures = trials.figures(thresholds)
    assert 0.9 <= figures["agreement"] < 0.91 and figures["mean_depth"] < 12
    assert for_agreement(trials, 1.01) == [NEVER, NEVER] == for_budget(trials, 12)
    assert trials.figures(for_budget(trials, 9.0, "quantile"))["mean_depth"] == pytest.approx(9, abs=0.01)


# ---- on a Program


@pytest.fixture(scope="module")
def rewritten(llama):
    return llama.program.rewrite("exits{at=[2,4],head=affine,score=probe}", check=False)


@pytest.fixture(scope="module")
def fitted(llama, rewritten):
    return fit(rewritten, batches(llama, rewritten, 1, 15), skip=1)


def batches(llama, program, start: int, end: int, length: int = 16):
    text = torch.cat([llama.text, llama.text.flip(0)])
    return token_batches(program, text[start * 48 : end * 48], length, 3)


def test_the_translator_is_fitted_to_the_models_own_streams(llama, rewritten, fitted):
    new, report = fitted
    sums = {2: Ridge(32), 4: Ridge(32)}
    ends = []
    hook = llama.model.model.norm.register_forward_pre_hook(lambda module, args: ends.append(args[0].detach()))
    calls = batches(llama, rewritten, 1, 15)
    try:
        for flat in calls[: round(0.7 * len(calls))]:
            hidden = streams(llama.model, flat[0])
            for k, ridge in sums.items():
                ridge.add(hidden[k][:, 1:].flatten(0, 1), ends[-1][:, 1:].flatten(0, 1))
    finally:
        hook.remove()
    for k, ridge in sums.items():
        a, c = ridge.solve(1e-3)
        assert torch.allclose(new.tensor(f"hcx.exits_0.{k}.weight"), a.float(), atol=1e-3)
        assert torch.allclose(new.tensor(f"hcx.exits_0.{k}.bias"), c.float(), atol=1e-3)
    assert report.positions["heads"] == sums[2].count
    assert all(report.agreement[k] > report.before[k] + 0.03 for k in ("2", "4")), report


def test_fitting_moves_no_bit_of_the_output_and_nothing_of_what_was_given(llama, rewritten, fitted):
    new, report = fitted
    ids = llama.ids(3, 20)
    with torch.no_grad():
        assert torch.equal(new(ids).logits, llama.model(ids).logits)
    assert torch.equal(rewritten.tensor("hcx.exits_0.2.weight"), torch.eye(32))
    assert "fit" in new.history[-1] and "fit" not in rewritten.history[-1]
    assert {n for n in report.fitted} == set(new.new_parameters())
    base = [n for n, _ in new.named_parameters() if not n.startswith("hcx.")]
    assert all(new.tensor(n) is rewritten.tensor(n) for n in base)


def test_a_fitted_probe_ranks_positions_better_than_chance(llama, fitted):
    trials = measure(fitted[0], batches(llama, fitted[0], 15, 25), skip=1)
    for scores, agrees in zip(trials.scores, trials.agrees, strict=True):
        yes, no = scores[agrees], scores[~agrees]
        assert (yes[:, None] > no[None]).double().mean() > 0.55


def test_figures_are_those_of_the_program_that_comes_out(llama, fitted):
    program = fitted[0]
    mine, other = batches(llama, program, 1, 12), batches(llama, program, 12, 25)
    new, report = calibrate(program, mine, other, budget=4.6)
    assert report.calibration["mean_depth"] == pytest.approx(4.6, abs=0.05)
    depths, same = [], []
    for flat in other:
        with torch.no_grad():
            output, taps = new(flat[0], taps=True)
            same.append(output.logits.argmax(-1) == llama.model(flat[0]).logits.argmax(-1))
        depths.append(taps["exits.depth"])
    depths = torch.cat(depths).flatten()
    assert report.held_out["mean_depth"] == pytest.approx(depths.double().mean().item())
    assert report.held_out["agreement"] == pytest.approx(torch.cat(same).double().mean().item())
    assert report.held_out["shares"] == {str(k): pytest.approx((depths == k).double().mean().item()) for k in (2, 4, 6)}
    assert 0.1 < report.held_out["agreement"] < 1 and len(depths.unique()) == 3


def test_thresholds_change_what_the_history_promises_and_survive_saving(llama, fitted, tmp_path):
    program = fitted[0]
    assert program.history[-1]["contract"]["contract"] == "Exact"
    new = set_thresholds(program, {2: 0.4, 4: NEVER})
    entry = new.history[-1]
    assert entry["contract"]["contract"] == "Structural" and program.history[-1]["contract"]["contract"] == "Exact"
    assert [s["detail"]["threshold"] for s in entry["plan"]["steps"][0]["sites"]] == [0.4, None]
    new, report = calibrate(new, batches(llama, new, 1, 8), batches(llama, new, 8, 12), agreement=0.8)
    new.save(tmp_path / "a.hcx")
    again = load(tmp_path / "a.hcx")
    assert again.history[-1]["calibration"] == json.loads(json.dumps(report.to_json()))
    ids = llama.ids(2, 9)
    assert torch.equal(again(ids, taps=True)[1]["exits.depth"], new(ids, taps=True)[1]["exits.depth"])
    back = set_thresholds(new, {2: NEVER, 4: NEVER})
    assert back.history[-1]["contract"]["contract"] == "Exact"
    with torch.no_grad():
        assert torch.equal(back(ids).logits, llama.model(ids).logits)


def test_an_exit_that_nearly_nobody_takes_is_called_useless(llama, fitted):
    program = fitted[0]
    calls = batches(llama, program, 1, 12)
    trials = measure(program, calls)
    limit = trials.scores[0].quantile(0.98).item()
    figures = trials.figures([limit, trials.scores[1].quantile(0.5).item()])
    assert figures["useless"] == [2] and 0 < figures["shares"]["2"] < 0.05 < figures["shares"]["4"]


@pytest.mark.parametrize(
    "options", ["head=affine", "score=jei,candidates=16", "score=gate", "score=palbert", "score=jei"]
)
def test_other_parts_are_fitted_too(llama, options):
    program = llama.program.rewrite(f"exits{{at=[2,4],{options}}}", check=False)
    new, report = fit(program, batches(llama, program, 1, 15), skip=1)
    assert report.fitted
    for name in report.fitted:
        assert not torch.equal(new.tensor(name), program.tensor(name)), name
    if "candidates" in options:
        answers = measure(program, batches(llama, program, 1, 15)[:10], skip=1).answers[-1]
        common = torch.bincount(answers).argsort(descending=True)[:8].tolist()
        rows = new.tensor("hcx.exits_0.candidates").tolist()
        assert set(common) <= set(rows) and len(set(rows)) == 16


def test_one_gate_for_all_exits_is_fitted_where_no_earlier_exit_was_right(llama):
    """PALBERT's last layer, from the eager model's hidden states: scikit-learn's solver on the same standardised features."""
    linear_model = pytest.importorskip("sklearn.linear_model")
    program = llama.program.rewrite("exits{at=[2,4],score=palbert}", check=False)
    calls = batches(llama, program, 1, 15)
    new, _ = fit(program, calls, skip=1)
    layers = [[program.tensor(f"hcx.exits_0.gate.{n}.{part}") for part in ("weight", "bias")] for n in range(3)]
    ids = torch.cat([call[0] for call in calls[round(0.7 * len(calls)) :]])
    hidden, missed, features, labels = streams(llama.model, ids), True, [], []
    with torch.no_grad():
        head, norm = llama.model.lm_head, llama.model.model.norm
        final = head(hidden[-1]).argmax(-1)  # the last hidden state is normed
        for k in (2, 4):
            x = torch.cat([h / h.square().mean(-1, keepdim=True).sqrt() for h in (hidden[k], hidden[k - 1])], -1)
            for weight, bias in layers:
                x = torch.tanh(x @ weight.T + bias)
            right = head(norm(hidden[k])).argmax(-1) == final
            keep = (torch.ones_like(right) if missed is True else missed)[:, 1:]
            features.append(x[:, 1:][keep].double()), labels.append(right[:, 1:][keep])
            missed = keep.new_ones(right.shape) & ~right
    x, y = torch.cat(features), torch.cat(labels)
    theirs = linear_model.LogisticRegression(C=1 / (0.01 * len(y)), tol=1e-10, max_iter=20000)
    theirs.fit(((x - x.mean(0)) / x.std(0)).numpy(), y.numpy())
    weight = new.tensor("hcx.exits_0.gate.3.weight")[0].double() * x.std(0)
    assert 0.02 < y.double().mean() < 0.98 and len(labels[1]) < len(labels[0])
    assert torch.allclose(weight, torch.tensor(theirs.coef_[0]), atol=2e-3) and weight.abs().max() > 0.1
    assert torch.equal(new.tensor("hcx.exits_0.gate.0.weight"), program.tensor("hcx.exits_0.gate.0.weight"))


@pytest.mark.parametrize("options", ["head=shared", "head=norm,score=margin"])
def test_nothing_to_fit_is_said(llama, options):
    program = llama.program.rewrite(f"exits{{at=[2],{options}}}", check=False)
    with pytest.raises(UsageError, match="nothing to fit"):
        fit(program, batches(llama, program, 1, 5))


def test_a_program_without_exits_is_refused(llama):
    for attempt in (fit, measure):
        with pytest.raises(UsageError, match="no exits"):
            attempt(llama.program, batches(llama, llama.program, 1, 3))


@pytest.mark.parametrize("targets", [{}, {"budget": 4, "risk": 0.1}, {"budget": 2}, {"budget": 7}, {"agreement": 1.0}])
def test_targets_that_cannot_be_are_refused(llama, fitted, targets):
    calls = batches(llama, fitted[0], 1, 3)
    with pytest.raises(UsageError):
        calibrate(fitted[0], calls, calls, **targets)


@pytest.mark.parametrize("score", ["probe", "palbert"])
@pytest.mark.parametrize("before", ["hc{mult=2}", "looped{start=1,end=3,scalar=0.3}", "exits{at=[3],threshold=0.02}"])
def test_exits_are_found_again_behind_other_passes(llama, before, score, tmp_path):
    """Behind several streams, a loop, and other exits, whose own selection then counts as late."""
    program = llama.program.rewrite(f"{before},exits{{at=[2,4],head=affine,score={score}}}", check=False)
    program.save(tmp_path / "a.hcx")
    program = load(tmp_path / "a.hcx")
    number = 1 if before.startswith("exits") else 0
    calls = batches(llama, program, 1, 15)
    new, report = fit(program, calls, skip=1)
    assert len(report.fitted) == {"probe": 8, "palbert": 6}[score] and all(
        n.startswith(f"hcx.exits_{number}.") for n in report.fitted
    )
    assert all(report.agreement[k] > report.before[k] for k in ("2", "4")), report
    costs = exit_costs(new, calls[0])
    assert (
        costs.leave[0] < costs.leave[1] < costs.leave[2]
        and 1 <= costs.relative()[-1] < {"probe": 1.02, "palbert": 2}[score]
    )
    with torch.no_grad():
        assert torch.equal(new.run_flat(calls[0])[0], program.run_flat(calls[0])[0])


# ---- costs


def test_costs_are_the_products_worked_out_by_hand(llama):
    length, width, inner, vocabulary = 20, 32, 64, 128
    block = 2 * (width * (32 + 16 + 16 + 32) + 3 * width * inner)
    attention = 2 * 2 * length * width  # scores and values over all positions, as the kernel computes them
    head, translator, probe = 2 * width * vocabulary, 2 * width * width, 2 * width
    rotary = None

    def costs(options: str):
        program = llama.program.rewrite(f"exits{{at=[2,5],{options}}}", check=False)
        return exit_costs(program, token_batches(program, llama.text, length, 2)[0])

    shared = costs("head=shared")
    depth = block + attention
    rotary = shared.plain - 6 * depth - head  # angles: positions times frequencies, once a call
    assert 0 <= rotary <= 2 * width
    base = rotary
    assert shared.leave == pytest.approx(
        (base + 2 * depth + head, base + 5 * depth + 2 * head, base + 6 * depth + 3 * head)
    )
    fitted = costs("head=affine,score=probe")
    assert fitted.plain == shared.plain
    early = base + 2 * depth + probe + translator + head
    late = base + 5 * depth + 2 * probe + translator + head
    assert fitted.leave == pytest.approx((early, late, base + 6 * depth + 2 * probe + head))
    some = costs("head=shared,candidates=10")
    row = 2 * width * 10
    assert some.leave[0] == pytest.approx(base + 2 * depth + row + head)
    assert some.leave[2] == pytest.approx(base + 6 * depth + 2 * row + head)
    assert some.net([0.5, 0, 0.5]) == pytest.approx((some.leave[0] + some.leave[2]) / 2 / some.plain)


def test_costs_do_not_depend_on_thresholds(llama, fitted):
    calls = batches(llama, fitted[0], 1, 3)
    assert exit_costs(set_thresholds(fitted[0], {2: 0.1, 4: 0.1}), calls[0]) == exit_costs(fitted[0], calls[0])


# ---- the command line


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A rewritten model with a tokenizer, and two texts in its words."""
    from hcx.rewrite.source.prose import PROSE
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from tests.conftest import tiny_llama

    place = tmp_path_factory.mktemp("exits")
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator([PROSE], trainers.WordLevelTrainer(vocab_size=128, special_tokens=["[UNK]"]))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(place / "tiny")
    tiny_llama().save_pretrained(place / "tiny")
    pipeline = "exits{at=[2,4],head=affine,score=probe}"
    assert main(["rewrite", str(place / "tiny"), "-p", pipeline, "-o", str(place / "a.hcx")]) == 0
    shuffled = PROSE.split()
    torch.manual_seed(0)
    order = [torch.randperm(len(shuffled)).tolist() for _ in range(6)]
    (place / "one.txt").write_text(" ".join(" ".join(shuffled[i] for i in o) for o in order[:4]))
    (place / "two.txt").write_text(" ".join(" ".join(shuffled[i] for i in o) for o in order[4:]))
    return place


def run(capsys, *arguments) -> tuple[int, dict, str]:
    capsys.readouterr()
    code = main([*map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


def test_fit_and_calibrate_write_artefacts_that_verify(folder, capsys):
    code, data, err = run(
        capsys, "exits", "fit", folder / "a.hcx", "--text", folder / "one.txt", "-o", folder / "b.hcx", "--length", "24"
    )
    assert code == 0 and data["command"] == "exits fit" and data["schema_version"] == 1 and "fitting on" in err
    assert data["fitted"] and set(data["agreement"]) == {"2", "4"}
    target = ["--budget", "4.5", "--held-out", folder / "two.txt"]
    code, data, err = run(
        capsys,
        "exits",
        "calibrate",
        folder / "b.hcx",
        "--text",
        folder / "one.txt",
        *target,
        "--length",
        "24",
        "--overwrite",
    )
    assert code == 0 and data["output"] == str(folder / "b.hcx") and data["target"] == {"budget": 4.5}
    assert data["calibration"]["mean_depth"] == pytest.approx(4.5, abs=0.1)
    assert {"thresholds", "held_out", "ways", "useless", "note"} <= set(data)
    assert main(["verify", str(folder / "b.hcx")]) == 0
    capsys.readouterr()
    assert main(["exits", "calibrate", str(folder / "b.hcx"), "--text", str(folder / "one.txt"), "--risk", "0.6",
                 "-o", str(folder / "c.hcx"), "--length", "24"]) == 0  # fmt: skip
    out = capsys.readouterr().out
    assert "target risk 0.6" in out and "held out" in out and ("useless" in out or "%" in out)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fit", "a.hcx", "--text", "one.txt"], "would be replaced"),
        (["fit", "a.hcx", "--text", "one.txt", "-o", "out"], "ends in .hcx"),
        (["fit", "a.hcx", "--text", "none.txt", "-o", "x.hcx"], "cannot read"),
        (["fit", "a.hcx", "--text", "one.txt", "-o", "x.hcx", "--length", "100000"], "do not fill a window"),
        (["calibrate", "a.hcx", "--text", "one.txt", "-o", "x.hcx"], "one target"),
        (["calibrate", "a.hcx", "--text", "one.txt", "-o", "x.hcx", "--budget", "3", "--risk", "0.1"], "one target"),
        (["calibrate", "a.hcx", "--text", "one.txt", "-o", "x.hcx", "--budget", "9"], "on average"),
        (["calibrate", "a.hcx", "--text", "one.txt", "-o", "x.hcx", "--budget", "3", "--method", "best"], "no method"),
        (["calibrate", "tiny", "--text", "one.txt", "-o", "x.hcx", "--budget", "3"], "not a folder written by"),
    ],
)
def test_bad_command_lines_say_what_to_do(folder, arguments, said, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    code, data, _ = run(capsys, "exits", *arguments)
    assert code == 2 and said in data["what"] and data["try"], data
    assert not (folder / "x.hcx").exists()


def test_the_functions_have_the_commands_names():
    from hcx.cli import exits

    assert all(getattr(exits, name).__name__ == name for name in ("fit", "calibrate", "split"))
