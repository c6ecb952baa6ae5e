"""Loops over the modules of a source model, in eager: hooks on its own blocks, equations written out again.

Nothing here uses hcx: the oracle of the ``looped`` tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import contextmanager

import torch
from torch import nn


def rms(x: torch.Tensor, axis: int = -1) -> torch.Tensor:
    return x.pow(2).mean(axis, keepdim=True).sqrt()


def combine(
    mix: str, run: Callable, e: torch.Tensor, first: torch.Tensor, steps: int, a: float, gate: dict | None = None
):
    """The last state of a loop whose first pass is done; docs/sources.md, loop-mixing.

    Args:
        run: one application of the window.
        e, first: the stream before it, and ``run(e)``.
        gate: tensors of ``output_vector``.
    """
    h = first
    if mix == "damped":
        x = e + (first - e) / steps
        for _ in range(steps - 1):
            x = x + (run(x) - x) / steps
        return (1 - a) * first + a * x
    for _ in range(steps - 1):
        if mix in ("input", "input_linear"):
            h = run((1 - a) * e + a * h)
        elif mix == "input_rms":
            h = run((1 - a) * e + a * h * rms(e) / rms(h))
        elif mix == "output":
            h = h + a * (run(h) - h)
        elif mix == "output_vector":
            move = run(h) - h
            raw = (gate["up"] @ (gate["down"] @ move.mT)).mT + gate["bias"]
            kept = torch.exp(-torch.log1p(raw.exp()) * torch.exp(gate["log_rate"]))
            h = (a * kept) * (h + move) + (1 - a * kept) * h
        else:
            h = run(h)
    return h


@contextmanager
def looped(blocks: nn.ModuleList, start: int, end: int, steps: int, mix: str, a: float, gate=None, norm=None):
    """A model whose blocks [start, end) run in a loop: the last one's hook runs the others again, with the arguments
    that the model gave to each (its own masks, positions and tables).

    Args:
        norm: for ``full``: what runs between two passes.
    """
    calls: dict[int, tuple] = {}

    def remember(number: int):
        def hook(module, args, kwargs):
            calls[number] = (args, kwargs)

        return hook

    def again(x: torch.Tensor) -> torch.Tensor:
        x = norm(x) if norm is not None else x
        for number in range(start, end):
            args, kwargs = calls[number]
            x = first_of(blocks[number].forward(x, *args[1:], **kwargs))
        return x

    def finish(module, args, kwargs, output):
        entry = calls[start][0][0]
        result = combine(mix, again, entry, first_of(output), steps, a, gate)
        return (result, *output[1:]) if isinstance(output, tuple) else result

    handles = [blocks[n].register_forward_pre_hook(remember(n), with_kwargs=True) for n in range(start, end)]
    handles.append(blocks[end - 1].register_forward_hook(finish, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def first_of(output):
    return output[0] if isinstance(output, tuple) else output


def blocks_of(model: nn.Module, depth: int) -> nn.ModuleList:
    """The one list of ``depth`` blocks in a model."""
    found = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    assert len(found) == 1
    return found[0]


def perplexity(logits: torch.Tensor, ids: torch.Tensor) -> float:
    return math.exp(nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item())
