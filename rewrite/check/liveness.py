"""Whether what a pass added can learn: a gradient at the start, or after one step of the optimiser.

Run in float64 on the example: in lower precision a dead parameter still shows rounding noise as a "gradient".
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from hcx.rewrite.ir.program import Program
from hcx.rewrite.pipeline.passbase import Pass

from .report import Check

LEAST = 1e-4
"""Least gradient rms of a new tensor, relative to the largest among the new tensors."""


def check_live(program: Program, flat: list[torch.Tensor], prefix: str, step: Pass) -> Check | None:
    """Gradient rms of every new parameter below ``prefix``; None where there is none.

    The loss is next-token cross entropy where the model reads ``input_ids`` and returns logits (taps of logits
    included), else a fixed linear functional of every floating output and tap.
    """
    names = [n for n in program.new_parameters() if n.startswith(prefix)]
    if not names:
        return None
    double = copy.deepcopy(program).to(torch.float64)
    inputs = [
        t.double() if t.is_floating_point() else t.to(torch.complex128) if t.is_complex() else t
        for t in double.signature.complete(flat)
    ]
    new = dict(double.named_parameters())
    parameters = [new[n] for n in names]
    for parameter in double.parameters():
        parameter.requires_grad_(False)
    for parameter in parameters:
        parameter.requires_grad_(True)
    rms = _gradients(double, inputs, parameters)
    live = _alive(rms)
    if not all(live):
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        optimizer.step()
        later = _gradients(double, inputs, parameters)
        live = [a or b for a, b in zip(live, _alive(later), strict=True)]
    dead = [n for n, ok in zip(names, live, strict=True) if not ok]
    reasons = {n: step.inert(n.removeprefix(prefix)) for n in dead}
    note = "; ".join(f"dead: {n}{f' ({r})' if r else ''}" for n, r in list(reasons.items())[:5])
    note += f" and {len(dead) - 5} more" if len(dead) > 5 else ""
    if caveat := step.caveat():
        note += f"{'; ' if note else ''}{caveat}"
    unexplained = [n for n, r in reasons.items() if r is None]
    figures = {"parameters": len(names), "dead": len(dead), "unexplained": len(unexplained)}
    return Check("live gradients", not unexplained, {**figures, "min_rms": min(rms), "max_rms": max(rms)}, note)


def _alive(rms: list[float]) -> list[bool]:
    top = max(rms)
    return [top > 0 and r >= LEAST * top for r in rms]


def _gradients(program: Program, inputs: list[torch.Tensor], parameters: list[torch.nn.Parameter]) -> list[float]:
    for parameter in parameters:
        parameter.grad = None
    with torch.enable_grad():
        results = program.run_flat(inputs, taps=True)
        loss = _loss(program, inputs, results)
    if not loss.requires_grad:
        return [0.0] * len(parameters)
    loss.backward()  # type: ignore[no-untyped-call]
    return [0.0 if p.grad is None else p.grad.square().mean().sqrt().item() for p in parameters]


def _loss(program: Program, inputs: list[torch.Tensor], results: list[torch.Tensor]) -> torch.Tensor:
    names = [i.name for i in program.inputs]
    ids = inputs[names.index("input_ids")] if "input_ids" in names else None
    total = torch.zeros((), dtype=torch.float64)
    labels = [*program.output_names, *program.taps]
    for number, (label, value) in enumerate(zip(labels, results, strict=True)):
        if not value.is_floating_point() or not value.numel() or label.startswith("present."):
            continue
        if (
            ids is not None
            and value.dim() == 3
            and value.shape[:2] == ids.shape
            and label.rsplit(".", 1)[-1] == "logits"
            and ids.shape[1] > 1
        ):
            total = total + F.cross_entropy(value[:, :-1].reshape(-1, value.shape[-1]), ids[:, 1:].reshape(-1))
        else:
            weights = (
                torch.linspace(-1, 1, value.numel(), dtype=torch.float64).mul(7 + number).sin().reshape(value.shape)
            )
            total = total + (value * weights).mean()
    return total
