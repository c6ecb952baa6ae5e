"""How a loop combines its iterations.

A window F of the model runs T times: ``h_1 = F(e)``, then for t = 2..T ``x_t = mix(e, h)``, ``h_t = update(h, F(x_t))``,
where e is the stream that enters the window and h the result so far. With the scalar at 0 every form gives ``h_1``.
Source: methods note on loops, section 2.1 (forms IN, IN-RMS and OUT).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch


def mix_input(entry: torch.Tensor, state: torch.Tensor, scalar: torch.Tensor) -> torch.Tensor:
    """``(1 - a) e + a h``: what the next iteration reads. Shapes: stream, stream, ``[1]``.

    >>> mix_input(torch.ones(2), torch.zeros(2), torch.tensor([0.25]))
    tensor([0.7500, 0.7500])
    """
    return (1 - scalar) * entry + scalar * state


@cache
def mix_input_rms(axis: int) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """``(1 - a) e + a h rms(e) / rms(h)`` with the rms over the features, dimension ``axis``: keeps a position whose norm
    has exploded inside the window from flooding its own beginning."""
    return lambda entry, state, scalar: _mix_rms(entry, state, scalar, axis)


def _mix_rms(entry: torch.Tensor, state: torch.Tensor, scalar: torch.Tensor, axis: int) -> torch.Tensor:
    scale = entry.square().mean(axis, keepdim=True) / state.square().mean(axis, keepdim=True).clamp_min(
        torch.finfo(state.dtype).tiny
    )
    return (1 - scalar) * entry + scalar * (state * scale.sqrt())


def update_output(state: torch.Tensor, result: torch.Tensor, scalar: torch.Tensor) -> torch.Tensor:
    """``h + b (F(h) - h)``: how far an iteration moves the state.

    >>> update_output(torch.zeros(2), torch.ones(2), torch.tensor([0.25]))
    tensor([0.2500, 0.2500])
    """
    return state + scalar * (result - state)
