"""Losses of exits against values worked out by hand: probabilities are given, logits are their logarithms."""

from __future__ import annotations

from math import log

import pytest
import torch
from hcx.passes.exits import losses
from torch.nn import functional as F

LABELS = torch.tensor([[0, 1, losses.IGNORE]])
FIRST = torch.tensor([[[0.5, 0.5], [0.8, 0.2], [0.5, 0.5]]]).log()
SECOND = torch.tensor([[[0.9, 0.1], [0.5, 0.5], [0.5, 0.5]]]).log()
FULL = torch.tensor([[[0.8, 0.2], [0.25, 0.75], [0.9, 0.1]]]).log()
CE = [-(log(0.5) + log(0.2)) / 2, -(log(0.9) + log(0.5)) / 2, -(log(0.8) + log(0.75)) / 2]
EACH = [(-log(0.5), -log(0.2)), (-log(0.9), -log(0.5)), (-log(0.8), -log(0.75))]
ALL = [FIRST, SECOND, FULL]


def close(got: torch.Tensor, expected: float) -> None:
    assert got.item() == pytest.approx(expected, rel=1e-5)


def test_weighted_by_place():
    close(losses.weighted(ALL, LABELS), (CE[0] + 2 * CE[1] + 3 * CE[2]) / 6)
    close(losses.weighted(ALL, LABELS, [1, 0, 1]), (CE[0] + CE[2]) / 2)


def test_ee_llm():
    close(losses.ee_llm(ALL, LABELS, [0.1, 0.2]), CE[2] + 0.1 * CE[0] + 0.2 * CE[1])
    close(losses.ee_llm(ALL, LABELS, [0.1, 0.2], warm_up=0.5), CE[2] + 0.05 * CE[0] + 0.1 * CE[1])
    first = (0.5 * -log(0.5) + 0.8 * -log(0.2)) / 2
    second = (0.9 * -log(0.9) + 0.5 * -log(0.5)) / 2
    close(losses.ee_llm(ALL, LABELS, [0.1, 0.2], by_confidence=True), CE[2] + 0.1 * first + 0.2 * second)


def test_layer_skip():
    # four blocks, exits after 2 and 3, scale 1/2: layers 1 and 2 weigh 0.5 and 1.5, the last 3 + 1.5
    weights = [0.5 / 6.5, 1.5 / 6.5, 4.5 / 6.5]
    assert losses.layer_skip_weights([2, 3], 4, 0.5) == pytest.approx(weights)
    close(losses.layer_skip(ALL, LABELS, [2, 3], 4, 0.5), sum(w * c for w, c in zip(weights, CE, strict=True)))
    assert losses.layer_skip_weights([2, 3], 4, 0.5, [True, False]) == pytest.approx([0.1, 0, 0.9])


def test_layer_skip_curricula():
    assert losses.rotational(4, 0, 2) == [True, False, True, False]
    assert losses.rotational(4, 1, 2) == [False, True, False, True]
    assert [sum(losses.gradual(4, p)) for p in (0, 0.125, 0.25, 0.5, 1)] == [0, 1, 2, 4, 4]
    assert losses.gradual(4, 0.25) == [False, False, True, True]


def test_self_distillation():
    kl = [
        (0.8 * log(0.8 / 0.5) + 0.2 * log(0.2 / 0.5) + 0.25 * log(0.25 / 0.8) + 0.75 * log(0.75 / 0.2)) / 2,
        (0.8 * log(0.8 / 0.9) + 0.2 * log(0.2 / 0.1) + 0.25 * log(0.25 / 0.5) + 0.75 * log(0.75 / 0.5)) / 2,
    ]
    close(losses.self_distillation(ALL, LABELS, [0.3, 0.7]), 0.3 * kl[0] + 0.7 * kl[1])
    mixed = 0.3 * (0.75 * CE[0] + 0.25 * kl[0]) + 0.7 * (0.75 * CE[1] + 0.25 * kl[1])
    close(losses.self_distillation(ALL, LABELS, [0.3, 0.7], alpha=0.25), mixed)


def test_self_distillation_with_a_temperature():
    # halved logits: probabilities go as square roots
    def soft(p):
        a, b = p**0.5, (1 - p) ** 0.5
        return a / (a + b)

    pairs = [(soft(0.8), soft(0.5)), (soft(0.25), soft(0.8))]
    kl = sum(p * log(p / q) + (1 - p) * log((1 - p) / (1 - q)) for p, q in pairs) / 2
    close(losses.self_distillation([FIRST, FULL], LABELS, [1.0], temperature=2.0), 4 * kl)


def test_the_teacher_gets_no_gradient():
    teacher, student = FULL.clone().requires_grad_(), FIRST.clone().requires_grad_()
    losses.self_distillation([student, teacher], LABELS, [1.0]).backward()
    assert teacher.grad is None and bool(student.grad[:, :2].any()) and not bool(student.grad[:, 2].any())


P = torch.tensor([[[0.2, 0.5, 0.3]], [[0.3, 0.1, 0.3]], [[0.5, 0.4, 0.4]]])


def test_halting_probabilities_from_cumulated_ones():
    assert torch.allclose(losses.halting([P[0], P[0] + P[1]]), P)


def test_ponder():
    prior = [0.25, 0.75 * 0.25, 0.75**2]
    assert losses.geometric(3, 0.25).tolist() == pytest.approx(prior)
    task = [sum(float(P[k, 0, t]) * EACH[k][t] for k in range(3)) for t in range(2)]
    forward = [sum(q * log(q / float(P[k, 0, t])) for k, q in enumerate(prior)) for t in range(2)]
    back = [sum(float(P[k, 0, t]) * log(float(P[k, 0, t]) / q) for k, q in enumerate(prior)) for t in range(2)]
    close(losses.ponder(ALL, LABELS, P, rate=0.25, beta=0.5), (sum(task) + 0.5 * sum(forward)) / 2)
    close(losses.ponder(ALL, LABELS, P, rate=0.25, beta=0.01, reverse=True), (sum(task) + 0.01 * sum(back)) / 2)


GATES = torch.tensor([[0.3, 0.8], [0.9, 0.1]])


def test_jei_shares():
    assert torch.allclose(losses.jei_shares(GATES), torch.tensor([[0.3, 0.8], [0.7, 0.1], [0.0, 0.1]]), atol=1e-6)


def test_jei_inference():
    shares = [[0.3, 0.8], [0.7, 0.1], [0.0, 0.1]]
    # rescaled a position, so the value is the mean of the plain sums; the shares are in the gradient
    logits = [r.clone().requires_grad_() for r in ALL]
    value = losses.jei_inference(logits, LABELS, GATES)
    close(value, sum(EACH[k][t] for k in range(3) for t in range(2)) / 2)
    value.backward()
    for t, label in enumerate([0, 1]):
        scale = sum(EACH[k][t] for k in range(3)) / sum(shares[k][t] * EACH[k][t] for k in range(3))
        for k, reading in enumerate(ALL):
            p = reading[0, t].softmax(-1)
            expected = scale * shares[k][t] / 2 * (p - F.one_hot(torch.tensor(label), 2))
            assert torch.allclose(logits[k].grad[0, t], expected, atol=1e-6)


def test_jei_gates():
    # costs 0.2, 0.5, 1 at a trade of 2: first position 1.09, 1.11, 2.22 -> exit 0; second 2.01, 1.69, 2.29 -> exit 1
    first = (-log(0.3) - log(1 - 0.8)) / 2
    second = (-log(0.9) - log(0.1)) / 2  # both positives
    close(losses.jei_gates(ALL, LABELS, GATES, [0.2, 0.5, 1.0], 2.0), (first + second) / 2)


def test_jei_gates_weigh_both_classes_alike():
    readings = [torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.1, 0.9]]).log(), torch.tensor([[0.6, 0.4]] * 3).log()]
    gates, labels = torch.tensor([[0.3, 0.4, 0.6]]), torch.tensor([0, 0, 0])
    expected = ((-log(0.3) - log(0.4)) / 2 - log(1 - 0.6)) / 2
    close(losses.jei_gates(readings, labels, gates, [0.5, 1.0], 0.1), expected)


def test_calm_meta():
    # answers: first 0, 0; second 0 and a tie broken to 0; full 0, 1
    readings = [r[:, :2] for r in ALL]
    first = (-log(0.3) - log(1 - 0.8)) / 2
    second = (-log(0.9) - log(1 - 0.1)) / 2
    close(losses.calm_meta(GATES, readings), (first + second) / 2)


def test_taps_come_in_the_order_of_depth_and_train_heads(llama):
    program, ids = llama.program.rewrite("exits{at=[4,2],head=norm,score=gate}", check=False), llama.ids(3, 12)
    new = list(program.new_parameters().values())
    optimizer = torch.optim.AdamW(new, lr=3e-2)
    found = []
    for _ in range(8):
        output, taps = program(ids, taps=True)
        readings, _ = zip(*(losses.shifted(r, ids) for r in [*losses.taps_of(taps), output.logits]), strict=True)
        labels = ids[:, 1:]
        p = losses.halting([s[:, :-1] for s in losses.taps_of(taps, "score")])
        loss = losses.self_distillation(readings, labels, [1 / 3, 2 / 3]) + losses.ponder(readings, labels, p)
        optimizer.zero_grad()
        loss.backward()
        assert all(bool(parameter.grad.any()) for parameter in new)
        optimizer.step()
        found.append(loss.item())
    assert found[-1] < 0.97 * found[0]
    assert torch.equal(losses.taps_of(taps)[0], taps["exits.2.logits"])
    with torch.no_grad():
        assert torch.equal(program(ids).logits, llama.model(ids).logits)
