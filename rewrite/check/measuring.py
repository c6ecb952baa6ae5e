"""What Programs give, and how far apart two results are."""

from __future__ import annotations

from typing import Any

import torch
from hcx.rewrite.ir.program import Program
from hcx.rewrite.pipeline import contracts


def is_meta(program: Program) -> bool:
    """Whether the tensors are not there, so that nothing can be run."""
    return any(p.is_meta for p in program.parameters())


def outputs(program: Program, inputs: list[list[torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Named outputs of each input set, without gradients."""
    with torch.no_grad():
        found = [program.run_flat([t.clone() for t in program.signature.complete(flat)]) for flat in inputs]
    return [dict(zip(program.output_names, tensors, strict=True)) for tensors in found]


def compared(got: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Worst difference over input sets, by output name; outputs that only one side has are left out."""
    return contracts.merge(
        [
            contracts.compare([g[n] for n in e if n in g], [e[n] for n in e if n in g])
            for g, e in zip(got, expected, strict=True)
        ]
    )


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() or torch.equal(a, b) or torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
