"""The input sets that an exported file is checked on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hcx.rewrite.ir.signature import Count, Fill
from hcx.rewrite.run.inputs import check_inputs

Flat = list[torch.Tensor]

HIDDEN_SLACK = 10.0
"""Rows that see nothing carry rounding alone through the norms that follow; wrong handling shows as errors near 1."""


@dataclass(frozen=True)
class Sample:
    """One flat input set, and how exactly it must be met.

    Attributes:
        flat: input tensors in order.
        slack: factor on the tolerance; above 1 the order of the largest entries is not compared either.
    """

    flat: Flat
    slack: float = 1.0


def samples(program: Any) -> list[Sample]:
    """The Program's own check inputs, one with filled caches, and one whose masks hide whole rows.

    The masked set is where exporters go wrong unseen: a query that may look at nothing is zero in torch.
    """
    own = [Sample(list(flat)) for flat in check_inputs(program, 2)]
    if not own:
        return own
    past, hidden = with_past(program, own[-1].flat), with_hidden_rows(program, own[0].flat)
    more = with_other_numbers(program, own[0].flat)
    found = [Sample(s) for s in (past, more) if s is not None]
    return own + found + [Sample(hidden, HIDDEN_SLACK)] * (hidden is not None)


def with_other_numbers(program: Any, flat: Flat) -> Flat | None:
    """Two more than what stands for inputs that are a number (steps of a loop)."""
    numbers = [isinstance(_fill(spec), Count) for spec in program.inputs]
    return [t + 2 if n else t for t, n in zip(flat, numbers, strict=True)] if any(numbers) else None


def with_past(program: Any, flat: Flat) -> Flat | None:
    """A second step of a decoder: the caches that the first step returns, masks and positions moved on."""
    specs = program.inputs
    caches = [i for i, spec in enumerate(specs) if _fill(spec) == Fill.EMPTY]
    if not caches:
        return None
    with torch.no_grad():
        outputs = dict(zip(program.output_names, program.run_flat([t.clone() for t in flat]), strict=False))
    returned = {name.removeprefix("present"): t for name, t in outputs.items() if name.startswith("present.")}
    step = list(flat)
    for index in caches:
        matches = [t for suffix, t in returned.items() if specs[index].name.endswith(suffix)]
        if len(matches) != 1:
            return None
        step[index] = matches[0].detach().clone()
    grown = next(((i, s.shape.index("past")) for i, s in enumerate(specs) if i in caches and "past" in s.shape), None)
    tokens = program.signature.tokens
    past = flat[[s.name for s in specs].index(tokens)].shape[1] if tokens else 0  # what states of fixed size have seen
    past = step[grown[0]].shape[grown[1]] if grown else past
    for index, spec in enumerate(specs):
        axis = next((a for a, d in enumerate(spec.shape) if isinstance(d, str) and "past+" in d), None)
        if axis is not None and _fill(spec) != Fill.ONES:
            return None
        if axis is not None:
            step[index] = torch.cat(
                [torch.ones_like(flat[index]).narrow(axis, 0, 1).repeat_interleave(past, axis), flat[index]], axis
            )
        elif _fill(spec) == Fill.POSITIONS:
            step[index] = flat[index] + past
    return step


def with_hidden_rows(program: Any, flat: Flat) -> Flat | None:
    """Masks that hide everything (bool inputs) or the first half (masks of ones) from the first row of the batch."""
    changed = list(flat)
    for index, (spec, tensor) in enumerate(zip(program.inputs, flat, strict=True)):
        if tensor.dim() < 2 or not tensor.numel():
            continue
        if tensor.dtype is torch.bool:
            changed[index] = tensor.clone()
            changed[index][0] = False
        elif _fill(spec) == Fill.ONES:
            changed[index] = tensor.clone()
            changed[index][0, ..., : tensor.shape[-1] // 2] = 0
    return changed if any(a is not b for a, b in zip(changed, flat, strict=True)) else None


def _fill(spec: Any) -> Fill | Count | None:
    return getattr(spec, "fill", None)
