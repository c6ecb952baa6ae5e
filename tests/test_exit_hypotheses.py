"""Hypotheses of sequences, their posteriors and CTC losses, against all alignments of a small case added up by hand."""

from __future__ import annotations

import math
from itertools import groupby, product

import pytest
import torch
from hcx.passes.exits import error_rate, hypothesis_posterior, losses, spelled
from hcx.passes.exits.insert.sequences import choose
from hcx.rewrite import UsageError
from torch.nn import functional as F


def draw(*shape: int) -> torch.Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def collapsed(path: tuple[int, ...], blank: int) -> tuple[int, ...]:
    return tuple(c for c, _ in groupby(path) if c != blank)


def log_likelihood(logits: torch.Tensor, labels: tuple[int, ...], blank: int) -> float:
    """``ln sum p(path)`` over every path of the frames that spells the labels."""
    p = logits.double().softmax(-1)
    paths = product(range(logits.shape[-1]), repeat=len(logits))
    spelling = [path for path in paths if collapsed(path, blank) == labels]
    return math.log(sum(math.prod(p[t, c].item() for t, c in enumerate(path)) for path in spelling))


def test_repeats_and_blanks_are_taken_out_of_what_counts():
    classes = torch.tensor([[0, 2, 2, 0, 2, 1], [1, 1, 0, 0, 2, 2]])
    valid = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    assert spelled(classes, valid, 0) == [(2, 2, 1), (1,)]
    assert spelled(classes, valid, 2) == [(0, 0, 1), (1, 0)]
    assert spelled(classes, valid) == [(0, 2, 2, 0, 2, 1), (1, 1, 0, 0)]
    holes = torch.tensor([[True, False, True, True, True, True]])
    assert spelled(torch.tensor([[3, 0, 3, 1, 1, 3]]), holes, 0) == [(3, 1, 3)], "what is left out parts nothing"


@pytest.mark.parametrize("blank", [0, 2])
def test_the_posterior_of_a_hypothesis_adds_all_its_alignments_up(blank):
    logits, frames = draw(3, 5, 3), [5, 3, 4]
    valid = torch.arange(5) < torch.tensor(frames)[:, None]
    valid[2] = torch.tensor([False, True, True, True, True])  # padded on the left
    found = hypothesis_posterior(logits, valid, blank)
    for row, keep, count, value in zip(logits, valid, frames, found.tolist(), strict=True):
        row = row[keep]
        labels = collapsed(tuple(row.argmax(-1).tolist()), blank)
        assert value == pytest.approx(log_likelihood(row, labels, blank) / count, abs=1e-5)
        assert value > row.log_softmax(-1).amax(-1).mean().item(), "the best path is one of several"
    assert hypothesis_posterior(logits[:1], blank=blank).item() == pytest.approx(found[0].item(), abs=1e-6)


def test_the_loss_is_the_sum_over_exits_each_row_by_its_labels_and_frames():
    readings, frames = [draw(2, 4, 3), draw(3, 4, 3)[1:]], torch.tensor([4, 3])
    targets, labels = torch.tensor([[1, 2], [2, losses.IGNORE]]), [(1, 2), (2,)]
    each = [[-log_likelihood(r[row, : frames[row]], labels[row], 0) for row in range(2)] for r in readings]
    mean = [(a / 2 + b / 1) / 2 for a, b in each]
    assert losses.ctc(readings, targets, frames).item() == pytest.approx(sum(mean), rel=1e-5)
    weighted = losses.ctc(readings, targets, frames, weights=[0.3, 2.0])
    assert weighted.item() == pytest.approx(0.3 * mean[0] + 2 * mean[1], rel=1e-5)
    total = losses.ctc(readings, targets, frames, reduction="sum")
    assert total.item() == pytest.approx(sum(map(sum, each)), rel=1e-5)
    whole = losses.ctc(readings[:1], targets, reduction="sum").item()
    assert whole == pytest.approx(
        -sum(log_likelihood(r, said, 0) for r, said in zip(readings[0], labels, strict=True)), rel=1e-5
    )
    log_p = readings[0].log_softmax(-1).transpose(0, 1)
    torchs = F.ctc_loss(log_p, torch.tensor([[1, 2], [2, 0]]), frames, torch.tensor([2, 1]))
    assert losses.ctc(readings[:1], targets, frames).item() == pytest.approx(torchs.item(), rel=1e-6)


def test_padding_gets_no_gradient_and_rows_that_are_too_short_can_count_nothing():
    reading, frames = draw(2, 4, 3).requires_grad_(), torch.tensor([4, 1])
    targets = torch.tensor([[1, -100], [1, 2]])  # two labels in one frame
    assert losses.ctc([reading], targets, frames).isinf()
    losses.ctc([reading], targets, frames, zero_infinity=True).backward()
    assert bool(reading.grad[0].any()) and not bool(reading.grad[1].any())
    other = draw(2, 4, 3).requires_grad_()
    losses.ctc([other], torch.tensor([[1, -100], [2, -100]]), torch.tensor([4, 2])).backward()
    assert bool(other.grad[1, :2].any()) and not bool(other.grad[1, 2:].any())


def test_label_errors():
    # kitten -> sitting takes 3, and of the second nothing was heard
    assert error_rate(["kitten", ""], ["sitting", "abc"]) == pytest.approx((3 + 3) / (7 + 3))
    assert error_rate([(1, 2)], [(1, 2)]) == 0


def test_choose():
    inf, nan = math.inf, math.nan
    scores = torch.tensor([[0.3, 0.9, nan, 0.2, 0.5], [0.8, 0.7, 0.1, 0.2, 0.5]])
    own = torch.tensor([0.5, 0.5, 0.0, 0.6, 0.5])
    assert choose(scores, [0.25, 0.75]).tolist() == [0, 0, 2, 2, 0]
    assert choose(scores, [-inf, -inf]).tolist() == [0, 0, 1, 0, 0]
    assert choose(scores, [inf, inf]).tolist() == [2] * 5 == choose(scores, [inf, inf], "max", own).tolist()
    assert choose(scores, [-inf, -inf], "max", own).tolist() == [1, 0, 1, 2, 0], "the first of equal ones"
    assert choose(scores, [0.95, -inf], "max", own).tolist() == [1, 1, 1, 2, 1]
    assert choose(scores, [-inf, inf], "max").tolist() == [0, 0, 2, 0, 0]
    assert choose(scores, [-inf, -inf], "max", torch.full((5,), nan)).tolist() == [2] * 5


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32])
def test_masks_of_numbers_are_those_of_bools(dtype):
    logits, valid = draw(3, 5, 3), torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    classes = torch.tensor([[3, 3, 0, 3, 1], [1, 0, 1, 1, 2], [1, 2, 0, 2, 2]])
    assert spelled(classes, valid.to(dtype), 0) == [(3, 3, 1), (1, 1), (1, 2, 2)]
    expected = [
        log_likelihood(row[keep.bool()], collapsed(tuple(row[keep.bool()].argmax(-1).tolist()), 0), 0) / int(keep.sum())
        for row, keep in zip(logits, valid, strict=True)
    ]
    assert hypothesis_posterior(logits, valid.to(dtype)).tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("call", "where"),
    [
        (lambda: error_rate([(1, 2)], [(1, 2), (3,)]), "found"),
        (lambda: losses.ctc([], torch.tensor([[1]])), "readings"),
        (lambda: losses.ctc([draw(1, 4, 3)], torch.tensor([[1]]), weights=[]), "readings"),
        (lambda: choose(torch.zeros(2, 3), [0.0, 0.0], "best"), "rule"),
        (lambda: choose(torch.zeros(2, 3), [0.0]), "thresholds"),
        (lambda: choose(torch.zeros(2, 3), [0.0] * 3), "thresholds"),
    ],
)
def test_what_does_not_fit_is_refused(call, where):
    with pytest.raises(UsageError) as caught:
        call()
    assert caught.value.where == where and caught.value.hint
