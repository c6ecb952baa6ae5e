"""From scores to thresholds: sequential quantiles, EERO's exponential weights, Learn-then-Test. Plain functions of
tensors; nothing here knows a Program.

Source: docs/sources.md, exit-thresholds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from hcx.passes.exits.insert.inserted import NEVER
from hcx.rewrite.errors import UsageError

from .trials import Trials


def sequential_quantiles(scores: torch.Tensor, shares: Sequence[float]) -> list[float]:
    """Thresholds under which given shares of all positions leave at each exit.

    Exit k sees those that are still there and takes the ones with the largest scores. Equal scores leave together or
    stay together, whichever comes nearer to the share.

    Args:
        scores: ``[K, N]``; ``shares``: K of them, or K + 1 with the rest that never leaves.

    >>> sequential_quantiles(torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.9, 0.8, 0.7, 0.6]]), [0.25, 0.5])
    [0.4000000059604645, 0.800000011920929]
    """
    alive = torch.ones(scores.shape[1], dtype=torch.bool)
    thresholds, rest = [], 1.0
    for row, share in zip(scores, shares, strict=False):
        values = row[alive].sort(descending=True).values
        wanted = share / rest * len(values) if rest > 1e-12 else 0.0
        thresholds.append(_nearest(values, wanted))
        alive &= row < thresholds[-1]
        rest -= share
    return thresholds


def _nearest(values: torch.Tensor, wanted: float) -> float:
    """A threshold on sorted values that about so many reach."""
    number = round(wanted)
    if number < 1 or not len(values):
        return NEVER
    limit = values[min(number, len(values)) - 1]
    with_ties, without = int((values >= limit).sum()), int((values > limit).sum())
    if abs(with_ties - wanted) <= abs(without - wanted):
        return float(limit)
    return float(values[without - 1]) if without else NEVER


def exponential_weights(
    risks: torch.Tensor, costs: torch.Tensor, budget: float, temperature: float = 0.1
) -> torch.Tensor:
    """EERO: shares ``pi_k ~ exp(-(R_k / T + mu b_k))`` with mean cost ``sum pi_k b_k = budget``; mu by bisection.

    Args:
        risks: of each way through the model alone, ``[K + 1]``; the model itself has 0.
        costs: of each way, ``[K + 1]``, growing.

    Raises:
        UsageError: no shares have this mean.
    """
    risks, costs = risks.double(), costs.double()
    _reachable(costs, budget)
    return _with_mean(costs, budget, lambda mu: torch.softmax(-(risks / temperature + mu * costs), 0))


def geometric_shares(costs: torch.Tensor, budget: float) -> torch.Tensor:
    """MSDNet's rule for the plain quantile method: shares ``~ z^k`` with mean cost equal to the budget; ``[K + 1]``."""
    costs = costs.double()
    _reachable(costs, budget)
    steps = torch.arange(len(costs), dtype=torch.float64)
    return _with_mean(costs, budget, lambda mu: torch.softmax(-mu * steps, 0))


def _with_mean(costs: torch.Tensor, budget: float, shares: Callable[[float], torch.Tensor]) -> torch.Tensor:
    """Shares of a family whose mean cost falls with its parameter, at a given mean."""
    low, high = -200.0, 200.0
    for _ in range(60):
        middle = (low + high) / 2
        if float(shares(middle) @ costs) > budget:
            low = middle
        else:
            high = middle
    return shares((low + high) / 2)


def _reachable(costs: torch.Tensor, budget: float) -> None:
    if not float(costs[0]) < budget <= float(costs[-1]):
        raise UsageError(
            f"no mix of these exits takes {budget:g} blocks on average",
            where="budget",
            hint=f"more than {float(costs[0]):g} and at most {float(costs[-1]):g}",
        )


def for_budget(trials: Trials, budget: float, method: str = "eero") -> list[float]:
    """Thresholds with this mean depth in blocks."""
    if budget == trials.depth:
        return [NEVER] * len(trials.places)
    if method == "quantile":
        shares = geometric_shares(trials.blocks, budget)
    else:
        risks = torch.cat([1 - trials.agrees.double().mean(1), torch.zeros(1, dtype=torch.float64)])
        shares = exponential_weights(risks, trials.blocks, budget)
    return sequential_quantiles(trials.scores, shares.tolist())


def path(trials: Trials, method: str = "eero", steps: int = 100) -> list[list[float]]:
    """Thresholds from never leaving down to the first exit's depth, in equal steps of the budget."""
    budgets = torch.linspace(trials.depth, float(trials.blocks[0]), steps + 2, dtype=torch.float64)[1:-1]
    return [[NEVER] * len(trials.places), *(for_budget(trials, float(b), method) for b in budgets)]


def for_agreement(trials: Trials, target: float, method: str = "eero") -> list[float]:
    """The cheapest thresholds on the path before agreement with the model first falls below the target."""
    best = [NEVER] * len(trials.places)
    for thresholds in path(trials, method):
        if trials.figures(thresholds)["agreement"] < target:
            break
        best = thresholds
    return best


def learn_then_test(
    trials: Trials, risk: float, confidence: float = 0.95, method: str = "eero"
) -> tuple[list[float], float]:
    """CALM's calibration: the cheapest thresholds whose disagreement with the model is at most ``risk`` with a given
    confidence.

    The path is made on the first half of the positions and tested on the second, from never leaving downwards; the
    first hypothesis "disagreement > risk" that Hoeffding's ``exp(-2 n max(0, risk - R)^2)`` does not reject ends it.
    Positions of one text are not independent, so the confidence is nominal.

    Returns:
        thresholds, and the p-value of the last rejection (1 where there was none).
    """
    half = len(trials) // 2
    made, tested = trials.part(0, half), trials.part(half, len(trials))
    best, value = [NEVER] * len(trials.places), 1.0
    for thresholds in path(made, method)[1:]:
        measured = 1 - tested.figures(thresholds)["agreement"]
        p = math.exp(-2 * len(tested) * max(0.0, risk - measured) ** 2)
        if p > 1 - confidence:
            break
        best, value = thresholds, p
    return best, value
