"""The mixing forms by name: which equations of :mod:`hcx.passes.looped.mixing` a loop inserts where, with which tensors.

Every function takes the loop's parameters last, in the order of ``parameters``. With the scalar at 0 all of them give
back the first iteration, bitwise; ``full`` has no scalar and is exact with one step alone. Nor has ``restart``, whose
messages :mod:`hcx.passes.looped.restart` inserts; it is exact while its gates are 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from . import mixing, restart

Equation = Callable[..., torch.Tensor]
NAMES = ("input", "input_rms", "input_linear", "output", "output_vector", "damped", "full", "restart")


@dataclass(frozen=True)
class Form:
    """One way to combine iterations; what is None is left out.

    Attributes:
        parameters: new tensors by name, in float32.
        start: ``(e, F(e))`` to the first state; None: it is ``F(e)``.
        mix: ``(e, state)`` to what an iteration reads; None: it reads the state.
        update: ``(state, F(x))`` to the next state; None: it is ``F(x)``.
        end: ``(F(e), last state)`` to what leaves the loop; None: the last state.
    """

    parameters: dict[str, torch.Tensor]
    start: Equation | None = None
    mix: Equation | None = None
    update: Equation | None = None
    end: Equation | None = None


def form(name: str, *, scalar: float, width: int, steps: int, axis: int = -1) -> Form:
    """A mixing form for a stream.

    Args:
        name: one of ``NAMES``.
        scalar: initial mixing scalar.
        width: features of the stream.
        steps: number of passes T over the window.
        axis: dimension of the features.
    """
    scalars = {"scalar": torch.full((1,), scalar)}
    if name == "input":
        return Form(scalars, mix=mixing.mix_input)
    if name == "input_rms":
        return Form(scalars, mix=_along(mixing.mix_input_rms, axis))
    if name == "input_linear":
        return Form({"weight": mixing.linear_start(width, scalar)}, mix=_along(mixing.mix_input_linear, axis))
    if name == "output":
        return Form(scalars, update=mixing.update_output)
    if name == "output_vector":
        return Form({**scalars, **mixing.vector_start(width)}, update=_along(mixing.update_output_vector, axis))
    if name == "damped":
        step = _sub_step(steps)
        return Form(scalars, start=step, update=step, end=mixing.damped_end)
    if name == "restart":
        return Form({}, mix=_entry)
    return Form({})


def is_neutral(name: str, steps: int, tensors: dict[str, torch.Tensor]) -> bool:
    """Whether a loop with these tensors gives back its first iteration."""
    if steps == 1:
        return True
    if name == "full":
        return False
    if name == "restart":
        return restart.is_silent(tensors)
    if name == "input_linear":
        weight = tensors["weight"]
        return torch.equal(weight, mixing.linear_start(weight.shape[0], 0.0).to(weight))
    return not bool(tensors["scalar"].any())


def _entry(entry: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    return entry


@cache  # one function object for one meaning: the editor traces each once
def _along(equation: Equation, axis: int) -> Equation:
    return lambda *tensors: equation(*tensors, axis=axis)


@cache
def _sub_step(count: int) -> Equation:
    return lambda state, result, *_: mixing.damped_step(state, result, count)
