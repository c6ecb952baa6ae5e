"""A pass must change something: what it added moves an output, or the graph is another one."""

from __future__ import annotations

import math
from typing import Any

import torch
from hcx.rewrite.ir.history import tensor_prefix
from hcx.rewrite.ir.program import Program
from torch import fx

from .report import Check


def check_not_vacuous(program: Program, step: Any, number: int, flat: list[torch.Tensor]) -> Check | None:
    """Changing what the pass added must move an output or a tap; None where it added no tensor."""
    prefix = tensor_prefix(step.name, number) + "."
    own = {n: t for n, t in program.named_tensors() if n.startswith(prefix) and ".constant." not in n}
    if not own:
        return None
    complete = program.signature.complete(flat)
    saved = {n: t.detach().clone() for n, t in own.items()}
    moved = 0.0
    with torch.no_grad():
        before = [t.clone() for t in program.run_flat([t.clone() for t in complete], taps=True)]
        try:
            for _ in range(3):  # a switch may have to go to its other side
                for name, tensor in own.items():
                    tensor.copy_(step.perturbed(name, tensor.detach().clone()))
                moved = _movement(program.run_flat([t.clone() for t in complete], taps=True), before)
                if moved > 0:
                    break
        finally:
            for name, tensor in own.items():
                tensor.copy_(saved[name])
    finite = all(t.isfinite().all() for t in before if t.is_floating_point())
    note = "" if finite else "the outputs are not finite before any change: look for NaN in the weights or the example"
    figures = {"tensors": len(own), "moved": moved}
    return Check(f"not vacuous: {step.name}", moved > 0 and math.isfinite(moved), figures, note)


def check_changed(step: Any, before: Any, after: Any) -> Check:
    """A pass that reports sites has changed the graph or a tensor; ``before`` and ``after`` are of :func:`state_of`."""
    return Check(f"not vacuous: {step.name}", before != after, {"tensors": 0})


def state_of(program: Program) -> tuple[Any, ...]:
    """What a pass may change, cheaply: operations, their operands, and which tensors there are."""
    number = {node: i for i, node in enumerate(program.graph.nodes)}
    nodes = [(n.op, str(n.target), *(number[i] for i in n.all_input_nodes)) for n in program.graph.nodes]
    literals = [repr([a for a in (*n.args, *n.kwargs.values()) if not isinstance(a, fx.Node)]) for n in number]
    tensors = [(n, t.data_ptr(), t._version, t.dtype) for n, t in program.named_tensors()]
    return nodes, literals, tensors, tuple(program.taps)


def _movement(after: list[torch.Tensor], before: list[torch.Tensor]) -> float:
    pairs = [(a, b) for a, b in zip(after, before, strict=True) if a.numel()]
    wide = [(a.to(torch.complex128 if a.is_complex() else torch.float64), b) for a, b in pairs]
    return max((a - b.to(a.dtype)).nan_to_num().abs().max().item() for a, b in wide)
