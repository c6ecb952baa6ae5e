"""How a loop combines its iterations.

A window F of the model runs T times: ``h_1 = F(e)``, then for t = 2..T ``x_t = mix(e, h)``, ``h_t = update(h, F(x_t))``,
where e is the stream that enters the window and h the result so far. Sources: docs/sources.md, loop-mixing.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def mix_input(entry: torch.Tensor, state: torch.Tensor, scalar: torch.Tensor) -> torch.Tensor:
    """``(1 - a) e + a h``: what the next iteration reads. Shapes: stream, stream, ``[1]``.

    >>> mix_input(torch.ones(2), torch.zeros(2), torch.tensor([0.25]))
    tensor([0.7500, 0.7500])
    """
    return (1 - scalar) * entry + scalar * state


def mix_input_rms(entry: torch.Tensor, state: torch.Tensor, scalar: torch.Tensor, axis: int = -1) -> torch.Tensor:
    """``(1 - a) e + a h rms(e) / rms(h)`` with the rms over the features, dimension ``axis``: keeps a position whose norm
    has exploded inside the window from flooding its own beginning."""
    scale = entry.square().mean(axis, keepdim=True) / state.square().mean(axis, keepdim=True).clamp_min(
        torch.finfo(state.dtype).tiny
    )
    return (1 - scalar) * entry + scalar * (state * scale.sqrt())


def mix_input_linear(entry: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, axis: int = -1) -> torch.Tensor:
    """``W [h; e]`` with ``W[d, 2d]`` over the features, dimension ``axis``; ``W = [0 | I]`` hands e on.

    >>> mix_input_linear(torch.ones(2), torch.zeros(2), linear_start(2, 0.25))
    tensor([0.7500, 0.7500])
    """
    both = torch.cat([state.movedim(axis, -1), entry.movedim(axis, -1)], -1)
    return F.linear(both, weight).movedim(-1, axis)


def linear_start(width: int, scalar: float) -> torch.Tensor:
    """``[a I | (1 - a) I]``: the linear mix that begins as the scalar one."""
    return torch.cat([scalar * torch.eye(width), (1 - scalar) * torch.eye(width)], 1)


def update_output(state: torch.Tensor, result: torch.Tensor, scalar: torch.Tensor) -> torch.Tensor:
    """``h + b (F(h) - h)``: how far an iteration moves the state.

    >>> update_output(torch.zeros(2), torch.ones(2), torch.tensor([0.25]))
    tensor([0.2500, 0.2500])
    """
    return state + scalar * (result - state)


def update_output_vector(
    state: torch.Tensor,
    result: torch.Tensor,
    scalar: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    bias: torch.Tensor,
    log_rate: torch.Tensor,
    axis: int = -1,
) -> torch.Tensor:
    """``h + b g (F(h) - h)`` with a gate a channel, ``g = exp(-softplus(W2 W1 (F(h) - h) + c) exp(log_rate))``.

    Args:
        state, result: streams with d features in dimension ``axis``.
        scalar: ``[1]``. At 1 this is LoopUS's gate, which is never exactly neutral since g > 0; at 0 the state stays.
        down, up: ``W1[r, d]``, ``W2[d, r]``.
        bias, log_rate: ``c[d]``, ``[d]``.
    """
    step = (result - state).movedim(axis, -1)
    rate = F.softplus(F.linear(F.linear(step, down), up, bias))
    return state + scalar * (torch.exp(-rate * log_rate.exp()) * step).movedim(-1, axis)


def vector_start(width: int) -> dict[str, torch.Tensor]:
    """Initial tensors of :func:`update_output_vector`, as LoopUS (and Mamba for its time step) draws them: rates
    1..d, steps log-uniform in [1e-3, 0.1], W1 and W2 uniform by their inputs. The same for every loop of one width."""
    generator = torch.Generator().manual_seed(width)
    rank = max(1, width // 16)
    steps = torch.exp(torch.rand(width, generator=generator) * math.log(100) + math.log(1e-3))
    return {
        "down": (torch.rand(rank, width, generator=generator) * 2 - 1) / math.sqrt(width),
        "up": (torch.rand(width, rank, generator=generator) * 2 - 1) / math.sqrt(rank),
        "bias": steps + torch.log(-torch.expm1(-steps)),  # inverse of softplus
        "log_rate": torch.arange(1, width + 1).float().log(),
    }


def damped_step(state: torch.Tensor, result: torch.Tensor, count: int) -> torch.Tensor:
    """``x + (F(x) - x) / K``: one of K sub-steps of a single application.

    >>> damped_step(torch.zeros(2), torch.ones(2), 2)
    tensor([0.5000, 0.5000])
    """
    return state + (result - state) / count


def damped_end(first: torch.Tensor, state: torch.Tensor, scalar: torch.Tensor) -> torch.Tensor:
    """``(1 - a) F(e) + a x_K``; the published beta is 1 - a."""
    return (1 - scalar) * first + scalar * state
