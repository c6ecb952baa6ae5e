"""Losses of loops that read out every iteration.

Shapes: T iterations; ``losses [..., T]`` holds the cross entropy of each iteration at each position in nats, ``gates
[..., T]`` the probability to stop there (the tap ``looped.gate``). All return a scalar.
Source: docs/sources.md, loop-losses; the smoothed exit loss is a derivation, its published form is not public to us.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def step_losses(logits: list[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """Next-token cross entropy of every iteration: T tensors ``[B, N, V]`` and ids ``[B, N]`` to ``[B, N - 1, T]``."""
    target = ids[:, 1:]
    return torch.stack([F.cross_entropy(x[:, :-1].mT, target, reduction="none") for x in logits], -1)


def exit_distribution(gates: torch.Tensor) -> torch.Tensor:
    """Probability that each iteration is the last, ``[..., T]``: ``p_t = g_t prod_{s<t} (1 - g_s)``; the last iteration
    takes the rest, whatever its gate says, so that they sum to 1.

    >>> exit_distribution(torch.tensor([0.5, 0.5, 0.1]))
    tensor([0.5000, 0.2500, 0.2500])
    """
    survival = (1 - gates[..., :-1]).cumprod(-1)
    before = torch.cat([torch.ones_like(gates[..., :1]), survival], -1)
    return torch.cat([gates[..., :-1] * before[..., :-1], before[..., -1:]], -1)


def entropy(distribution: torch.Tensor) -> torch.Tensor:
    """``-sum p ln p`` over the last dimension; entries of 0 count nothing, also in the gradient."""
    return -torch.xlogy(distribution, distribution.clamp_min(torch.finfo(distribution.dtype).tiny)).sum(-1)


def ouro_stage_1(losses: torch.Tensor, gates: torch.Tensor, beta: float = 0.05) -> torch.Tensor:
    """Expected loss under the exit distribution minus ``beta`` times its entropy: a uniform prior over iterations."""
    p = exit_distribution(gates)
    return ((p * losses).sum(-1) - beta * entropy(p)).mean()


def ouro_stage_2(
    losses: torch.Tensor, gates: torch.Tensor, sharpness: float = 50.0, margin: float = 0.005
) -> torch.Tensor:
    """Gate training on a frozen model: going on to iteration t was right where it lowered the loss by more than
    ``margin`` nats; binary cross entropy of ``1 - g_t`` to ``sigmoid(k (max(0, CE_{t-1} - CE_t) - margin))``, t = 2..T."""
    gain = (losses[..., :-1] - losses[..., 1:]).clamp_min(0).detach()
    target = torch.sigmoid(sharpness * (gain - margin))
    return F.binary_cross_entropy(1 - gates[..., 1:], target)


def smoothed_exit(
    losses: torch.Tensor, gates: torch.Tensor, epsilon: float = 0.2, beta: float = 0.05, detach: bool = False
) -> torch.Tensor:
    """:func:`ouro_stage_1` with ``(1 - epsilon) p + epsilon / T`` in place of p: no gate can starve an iteration.

    Args:
        detach: keep the weights of the losses out of the gradient; the gate then follows the entropy alone.
    """
    p = exit_distribution(gates)
    weights = (1 - epsilon) * (p.detach() if detach else p) + epsilon / losses.shape[-1]
    return ((weights * losses).sum(-1) - beta * entropy(p)).mean()


def fixed_prior(losses: torch.Tensor, prior: str = "uniform", parameter: float = 0.5) -> torch.Tensor:
    """Depth supervision without a gate: a fixed distribution over the T iterations weighs their losses.

    Args:
        prior: ``uniform``; ``geometric``, ``(1 - parameter)^(t-1) parameter`` cut off at T; ``poisson`` with mean
            ``parameter`` over t - 1, cut off at T; both scaled to sum to 1.
    """
    return (losses * prior_weights(prior, losses.shape[-1], parameter).to(losses)).sum(-1).mean()


def prior_weights(prior: str, steps: int, parameter: float = 0.5) -> torch.Tensor:
    """Weights ``[T]`` of :func:`fixed_prior`, float64.

    >>> prior_weights("geometric", 2, 0.5)
    tensor([0.6667, 0.3333], dtype=torch.float64)
    """
    count = torch.arange(steps, dtype=torch.float64)
    raw = {
        "uniform": torch.ones(steps, dtype=torch.float64),
        "geometric": (1 - parameter) ** count * parameter,
        "poisson": torch.exp(count * math.log(parameter) - torch.lgamma(count + 1)),
    }[prior]
    return raw / raw.sum()


def sampled_steps(mean: float, generator: torch.Generator, sigma: float = 0.5) -> int:
    """Number of iterations of one training step: ``1 + Poisson(exp(N(ln mean - sigma^2 / 2, sigma)))`` (Huginn)."""
    rate = torch.exp(math.log(mean) - sigma**2 / 2 + sigma * torch.randn((), generator=generator))
    return 1 + int(torch.poisson(rate, generator=generator))


def truncated_loop(step, entry: torch.Tensor, state: torch.Tensor, count: int, kept: int) -> torch.Tensor:
    """``count`` applications of ``step(entry, state)``, of which only the last ``kept`` are differentiated in the state.

    The entry keeps its gradient through the differentiated applications.
    """
    with torch.no_grad():
        for _ in range(count - kept):
            state = step(entry, state)
    for _ in range(min(kept, count)):
        state = step(entry, state)
    return state


def norm_growth(states: list[torch.Tensor], weight: float = 1.0) -> torch.Tensor:
    """``mu mean_t (rms(h_t) / rms(h_1) - 1)^2``: a norm before the readout hides from cross entropy that a state grows."""
    rms = torch.stack([h.square().mean(-1).sqrt() for h in states])
    return weight * (rms / rms[0] - 1).square().mean()
