"""Readouts, gates and stops of every iteration against the modules run by hand; losses against sums written out."""

from __future__ import annotations

import math

import pytest
import torch
from hcx.passes.looped import halting, losses
from hcx.rewrite import load

from tests import loops_by_hand

LOOP = "looped{start=2,end=4,steps=3,mix=output,scalar=0.4,readout=steps,gate=ouro}"


@pytest.fixture(scope="module")
def looped(llama):
    program = llama.program.rewrite(LOOP, check=False)
    weight = program.tensor("hcx.looped_0.gate.weight")
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(4)))
        program.tensor("hcx.looped_0.gate.bias").fill_(-0.3)
    return program


@pytest.fixture(scope="module")
def tapped(llama, looped):
    ids = llama.ids(2, 9)
    with torch.no_grad():
        output, taps = looped(ids, taps=True)
    return ids, output, taps


# ---- taps


@pytest.mark.parametrize("step", [1, 2, 3])
def test_the_readout_of_a_step_is_the_loop_of_so_many_steps(llama, tapped, step, max_diff):
    ids, output, taps = tapped
    model, after = llama.model, []
    handle = model.model.layers[4].register_forward_pre_hook(lambda module, args: after.append(args[0]))
    with torch.no_grad(), loops_by_hand.looped(model.model.layers, 2, 4, step, "output", 0.4):
        expected = model(ids, use_cache=False).logits
    handle.remove()
    assert max_diff(taps[f"looped.{step}.logits"], expected) <= 1e-4
    assert max_diff(taps[f"looped.{step}.state"], after[0]) <= 1e-4
    if step == 3:
        assert torch.equal(output.logits, taps["looped.3.logits"])


def test_the_gate_reads_each_state_behind_the_final_norm(llama, looped, tapped, max_diff):
    _, _, taps = tapped
    weight, bias = (looped.tensor(f"hcx.looped_0.gate.{n}") for n in ("weight", "bias"))
    assert weight.numel() + bias.numel() == 32 + 1
    with torch.no_grad():
        normed = [llama.model.model.norm(taps[f"looped.{t}.state"]) for t in (1, 2, 3)]
        expected = torch.stack([1 / (1 + torch.exp(-(h @ weight[0] + bias))) for h in normed], -1)
    assert max_diff(taps["looped.gate"], expected) <= 1e-6 and taps["looped.gate"].std() > 0.1


def test_readouts_leave_the_function_the_structure_and_the_checks_alone(llama):
    plain = llama.program.rewrite("looped{start=2,end=4,steps=3}", check=False)
    program = llama.program.rewrite("looped{start=2,end=4,steps=3,readout=steps,gate=ouro},exits{at=[3,5]},lora")
    ids = llama.ids(2, 9)
    with torch.no_grad():
        assert torch.equal(program(ids).logits, llama.model(ids).logits)
    blocks = [b.address for b in program.sites().main.blocks]
    assert blocks == [b.address for b in plain.sites().main.blocks] and len(blocks) == 6 + 2 * 2
    assert all(c["holds"] for entry in program.history for c in entry["checks"])


def test_full_reads_out_through_the_head_alone(llama, max_diff, tmp_path):
    """Ouro: the state of a step is normed already, and its logits are the head's."""
    program = llama.program.rewrite("looped{mix=full,steps=2,readout=steps,gate=ouro}")
    program.save(tmp_path / "a.hcx")
    ids = llama.ids(2, 9)
    with torch.no_grad():
        _, taps = load(tmp_path / "a.hcx")(ids, taps=True)
        original = llama.model(ids).logits
        assert torch.equal(taps["looped.1.logits"], original)
        assert max_diff(llama.model.lm_head(taps["looped.2.state"]), taps["looped.2.logits"]) <= 1e-5
        assert torch.equal(taps["looped.gate"], torch.full((2, 9, 2), 0.5))


# ---- stops


def test_q_exit_on_gates_worked_out_by_hand():
    gates = torch.tensor([[0.2, 0.5, 0.9], [0.0, 0.0, 0.0], [1.0, 0.3, 0.3]])  # p: .2 .4 .4 | 0 0 1 | 1 0 0
    assert torch.allclose(losses.exit_distribution(gates), torch.tensor([[0.2, 0.4, 0.4], [0, 0, 1], [1, 0, 0]]))
    assert halting.q_exit(gates, 0.5).tolist() == [2, 3, 1]
    assert halting.q_exit(gates, 0.2).tolist() == [1, 3, 1]
    assert halting.q_exit(gates, 1.1).tolist() == [3, 3, 3]


@pytest.mark.parametrize("bias", [-30.0, -3.0, 0.0, 3.0, 30.0])
def test_the_exit_distribution_sums_to_one(bias):
    gates = torch.sigmoid(torch.full((4, 5), bias) + torch.randn(4, 5, generator=torch.Generator().manual_seed(0)))
    assert torch.allclose(losses.exit_distribution(gates).sum(-1), torch.ones(4), atol=1e-7)


def two_class(*probabilities: float) -> list[torch.Tensor]:
    """Logits of iterations whose first class has these probabilities, one position."""
    return [torch.tensor([[[math.log(p), math.log(1 - p)]]]) for p in probabilities]


def test_training_free_stops_on_cases_worked_out_by_hand():
    def h(p):
        return -p * math.log(p) - (1 - p) * math.log(1 - p)

    x = two_class(0.5, 0.8, 0.79, 0.3)
    change = abs(h(0.79) - h(0.8))
    assert halting.entropy_change(x, change * 1.01).item() == 3 and halting.entropy_change(x, change * 0.99).item() == 4
    kl = 0.79 * math.log(0.79 / 0.8) + 0.21 * math.log(0.21 / 0.2)
    assert halting.kl_change(x, kl * 1.01).item() == 3 and halting.kl_change(x, kl * 0.99).item() == 4
    states = [torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[3.0, 4.1]]]), torch.tensor([[[9.0, 9.0]]])]
    ratio = 0.1 / math.hypot(3.0, 4.1)
    assert halting.state_change(states, ratio * 1.01).item() == 2
    assert halting.state_change(states, ratio * 0.99).item() == 3
    tokens = two_class(0.9, 0.4, 0.3, 0.2, 0.9)
    assert [halting.repeats(tokens, n).item() for n in (1, 2, 3, 4)] == [1, 3, 4, 5]
    assert halting.confidence(x, 0.75).item() == 2 and halting.confidence(x, 0.85).item() == 4
    assert halting.confidence(x, 0.55, margin=True).item() == 2 and halting.confidence(x, 0.65, margin=True).item() == 4
    assert torch.equal(halting.chosen(x, torch.tensor([[3]])), x[2])


def test_a_stop_that_never_fires_gives_the_answer_of_the_model(tapped):
    _, output, taps = tapped
    logits = [taps[f"looped.{t}.logits"] for t in (1, 2, 3)]
    for step in (
        halting.confidence(logits, 1.1),
        halting.kl_change(logits, 0.0),
        halting.q_exit(taps["looped.gate"], 2),
    ):
        assert torch.equal(halting.chosen(logits, step), output.logits)
    early = halting.confidence(logits, torch.stack(logits).softmax(-1).amax(-1).median().item())
    assert 1 <= early.min() < early.max() <= 3
    row = (early == 1).nonzero()[0].tolist()
    assert torch.equal(halting.chosen(logits, early)[*row], logits[0][*row])


# ---- losses


CE = torch.tensor([[2.0, 1.0, 1.5], [3.0, 3.0, 0.5]])
GATES = torch.tensor([[0.2, 0.5, 0.9], [0.1, 0.4, 0.7]])
P = [[0.2, 0.4, 0.4], [0.1, 0.36, 0.54]]


def h_of(row):
    return -sum(p * math.log(p) for p in row)


def test_cross_entropy_of_every_step():
    logits = [torch.log(torch.tensor([[[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]]])), torch.zeros(1, 2, 3)]
    got = losses.step_losses(logits, torch.tensor([[2, 1]]))
    assert got.shape == (1, 1, 2) and got.flatten().tolist() == pytest.approx([-math.log(0.2), math.log(3)])


def test_ouro_stage_one_by_hand():
    expected = (0.4 + 0.4 + 0.6 - 0.1 * h_of(P[0]) + 0.3 + 1.08 + 0.27 - 0.1 * h_of(P[1])) / 2
    assert losses.ouro_stage_1(CE, GATES, beta=0.1).item() == pytest.approx(expected, rel=1e-6)


def test_ouro_stage_two_by_hand():
    """Gains: 1.0 and 0 in the first row, 0 and 2.5 in the second; targets of going on for iterations 2 and 3."""
    sigmoid = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    yes, no, large = sigmoid(50 * 0.995), sigmoid(50 * -0.005), sigmoid(50 * 2.495)
    cross = lambda target, go: -(target * math.log(go) + (1 - target) * math.log(1 - go))  # noqa: E731
    expected = (cross(yes, 0.5) + cross(no, 0.1) + cross(no, 0.6) + cross(large, 0.3)) / 4
    ce = CE.clone().requires_grad_()
    got = losses.ouro_stage_2(ce, GATES)
    assert got.item() == pytest.approx(expected, rel=1e-5) and not got.requires_grad


def test_smoothed_exit_by_hand():
    weights = [[0.8 * p + 0.2 / 3 for p in row] for row in P]
    expected = (
        sum(w * c for row, ce in zip(weights, CE.tolist(), strict=True) for w, c in zip(row, ce, strict=True)) / 2
    )
    expected -= 0.05 * (h_of(P[0]) + h_of(P[1])) / 2
    assert losses.smoothed_exit(CE, GATES, epsilon=0.2).item() == pytest.approx(expected, rel=1e-6)
    uniform = losses.smoothed_exit(CE, GATES, epsilon=1.0, beta=0.0)
    assert uniform.item() == pytest.approx(losses.fixed_prior(CE).item(), rel=1e-6) == pytest.approx(11 / 6)


def test_a_closed_gate_cannot_starve_a_step():
    ce, gates = CE.clone().requires_grad_(), torch.tensor([[1.0, 0.5, 0.5], [1.0, 0.5, 0.5]], requires_grad=True)
    losses.ouro_stage_1(ce, gates, beta=0.0).backward()
    assert ce.grad[:, 1:].abs().max() == 0
    ce.grad = None
    losses.smoothed_exit(ce, gates, epsilon=0.3).backward()
    assert torch.allclose(ce.grad[:, 1:], torch.full((2, 2), 0.3 / 3 / 2)) and gates.grad.isfinite().all()
    gates.grad = None
    losses.smoothed_exit(CE, gates, beta=0.0, detach=True).backward()
    assert gates.grad.abs().max() == 0


def test_priors_by_hand():
    assert losses.prior_weights("geometric", 3, 0.5).tolist() == pytest.approx([4 / 7, 2 / 7, 1 / 7])
    raw = [1, 2, 2]  # 2^k / k!
    assert losses.prior_weights("poisson", 3, 2.0).tolist() == pytest.approx([r / 5 for r in raw])
    geometric = (2 * 4 + 1 * 2 + 1.5 + 3 * 4 + 3 * 2 + 0.5) / 14
    assert losses.fixed_prior(CE, "geometric", 0.5).item() == pytest.approx(geometric, rel=1e-6)


def test_sampled_steps_have_the_asked_mean_and_a_long_tail():
    generator = torch.Generator().manual_seed(0)
    drawn = torch.tensor([losses.sampled_steps(8.0, generator) for _ in range(4000)]).double()
    # 1 + Poisson with a log-normal rate of mean 8: variance 8 + 64 (e^0.25 - 1)
    assert drawn.mean().item() == pytest.approx(9, abs=0.3) and drawn.min() >= 1
    assert drawn.var().item() == pytest.approx(8 + 64 * (math.exp(0.25) - 1), rel=0.15)


def test_truncated_gradient_by_hand():
    """h <- w h + e from h_0: five steps, the last two differentiated, so dh_5/dw = h_4 + w h_3 and dh_5/de = 1 + w."""
    w, e, seen = torch.tensor(0.5, requires_grad=True), torch.tensor(1.0, requires_grad=True), [4.0]
    for _ in range(5):
        seen.append(0.5 * seen[-1] + 1)
    result = losses.truncated_loop(lambda entry, h: w * h + entry, e, torch.tensor(4.0), 5, 2)
    result.backward()
    assert result.item() == seen[5]
    assert w.grad.item() == pytest.approx(seen[4] + 0.5 * seen[3]) and e.grad.item() == pytest.approx(1.5)
    assert losses.truncated_loop(lambda entry, h: h + 1, e, torch.tensor(0.0), 2, 8).item() == 2


def test_norm_growth_by_hand():
    states = [torch.tensor([[3.0, 4.0]]), torch.tensor([[6.0, 8.0]]), torch.tensor([[3.0, -4.0]])]
    assert losses.norm_growth(states, 0.5).item() == pytest.approx(0.5 * 1 / 3)


def test_training_with_the_smoothed_loss_moves_gate_and_scalar(llama):
    program = llama.program.rewrite("looped{start=2,end=4,steps=2,readout=steps,gate=ouro}", check=False)
    optimizer = torch.optim.AdamW(program.param_groups("new"), lr=1e-2)
    ids, seen = llama.ids(2, 12), []
    for _ in range(5):
        _, taps = program(ids, taps=True)
        ce = losses.step_losses([taps["looped.1.logits"], taps["looped.2.logits"]], ids)
        loss = losses.smoothed_exit(ce, taps["looped.gate"][:, :-1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    assert seen[-1] < seen[0] and all(p.abs().max() > 1e-3 for p in program.new_parameters().values())
