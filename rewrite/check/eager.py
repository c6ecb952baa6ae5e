"""Outputs against what they must be: a contract, and the source model's own eager run."""

from __future__ import annotations

import torch
from hcx.rewrite.ir import oracle
from hcx.rewrite.ir.program import Program
from hcx.rewrite.pipeline import contracts
from hcx.rewrite.pipeline.contracts import Contract

from .measuring import compared, same_values
from .report import Check


def check_contract(
    contract: Contract, got: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]], name: str
) -> Check:
    """Outputs against what they must be."""
    measured = compared(got, expected)
    return Check(name, contract.check(measured), measured, f"contract {contract}")


def check_source(
    program: Program,
    contract: Contract,
    inputs: list[list[torch.Tensor]],
    got: list[dict[str, torch.Tensor]],
    base: list[dict[str, torch.Tensor]] | None = None,
) -> Check | None:
    """Outputs against the source model's own eager run; None where it is not in memory.

    Args:
        base: outputs of the Program before this rewrite. Where they are no longer what the source gives, what
            earlier passes added has been trained, and the source is no oracle any more.
    """
    if program.reference is None:
        return None
    if not reference_is_current(program):
        note = "left out: the weights were changed since the trace"
        return Check("against the source model in eager", True, {}, note)
    expected = []
    for flat in inputs:
        tensors = oracle.run(program.reference, flat)
        expected.append(dict(zip(program.output_names[: len(tensors)], tensors, strict=False)))
    if isinstance(contract, contracts.Exact) and not program.trace_exact:
        contract = contracts.Rounding(64)
    if base is not None and not contract.check(compared(base, expected)):
        note = "left out: what earlier passes added was changed since"
        return Check("against the source model in eager", True, {}, note)
    return check_contract(contract, got, expected, "against the source model in eager")


def reference_is_current(program: Program) -> bool:
    """Whether the source model still holds the weights of the Program: either may have been trained since the trace."""
    theirs = dict(program.reference.model.state_dict()) if program.reference is not None else {}
    mine = dict(program.named_tensors())
    return all(n not in mine or mine[n].shape != t.shape or same_values(mine[n], t) for n, t in theirs.items())
