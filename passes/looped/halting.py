"""After which iteration each position stops: gates, and rules that need no training.

Everything reads taps of a loop with ``readout=steps`` (``looped.1.logits``, ``looped.1.state``, ...) or ``gate=ouro``
(``looped.gate``) and returns the number of the chosen iteration, from 1 to T, as int64 ``[B, N]``. All iterations have
run: what is chosen is a depth of prediction. Source: docs/sources.md, loop-halting; defaults as published.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from .losses import exit_distribution


def q_exit(gates: torch.Tensor, q: float) -> torch.Tensor:
    """First iteration at which the exit distribution's sum reaches q; above 1: never before the last.

    >>> q_exit(torch.tensor([0.5, 0.5, 0.5]), 0.7)
    tensor(2)
    """
    reached = exit_distribution(gates).cumsum(-1) >= q
    reached[..., -1] = True
    return reached.long().argmax(-1) + 1


def entropy_change(logits: list[torch.Tensor], limit: float = 1e-3) -> torch.Tensor:
    """The entropy of the prediction changes by less than ``limit`` nats."""
    return _first([(_entropy(b) - _entropy(a)).abs() < limit for a, b in pairwise(logits)])


def state_change(states: list[torch.Tensor], limit: float = 0.03) -> torch.Tensor:
    """``|h_t - h_{t-1}| / |h_t|`` is below ``limit``."""
    return _first([(b - a).norm(dim=-1) / b.norm(dim=-1).clamp_min(1e-12) < limit for a, b in pairwise(states)])


def kl_change(logits: list[torch.Tensor], limit: float = 5e-4) -> torch.Tensor:
    """KL of the prediction from the one before is below ``limit`` nats."""
    return _first([_kl(b, a) < limit for a, b in pairwise(logits)])


def repeats(logits: list[torch.Tensor], count: int = 5) -> torch.Tensor:
    """The same token is likeliest in ``count`` iterations on end."""
    tokens = [x.argmax(-1) for x in logits]
    run, fires = torch.ones_like(tokens[0]), [torch.full_like(tokens[0], count <= 1, dtype=torch.bool)]
    for a, b in pairwise(tokens):
        run = torch.where(a == b, run + 1, 1)
        fires.append(run >= count)
    return _first(fires, start=1)


def confidence(logits: list[torch.Tensor], threshold: float = 0.9, margin: bool = False) -> torch.Tensor:
    """The largest probability, or its lead over the second, reaches ``threshold``: a readout chosen after training."""
    scores = []
    for x in logits:
        top = x.float().softmax(-1).topk(2, -1).values
        scores.append(top[..., 0] - top[..., 1] if margin else top[..., 0])
    return _first([s >= threshold for s in scores], start=1)


def chosen(values: list[torch.Tensor], step: torch.Tensor) -> torch.Tensor:
    """The value ``[B, N, C]`` of the chosen iteration at each position."""
    stack = torch.stack(values, -1)
    return stack.gather(-1, (step - 1)[..., None, None].expand(*stack.shape[:-1], 1))[..., 0]


def _first(fires: list[torch.Tensor], start: int = 2) -> torch.Tensor:
    """First iteration that fires; the last one where none does. The first of ``fires`` belongs to iteration ``start``."""
    stack = torch.stack(fires, -1)
    stack[..., -1] = True
    return stack.long().argmax(-1) + start


def _entropy(logits: torch.Tensor) -> torch.Tensor:
    log = logits.float().log_softmax(-1)
    return -(log.exp() * log).sum(-1)


def _kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    log_p, log_q = p.float().log_softmax(-1), q.float().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)
