"""Figures of a Program: parameters, bytes, floating-point operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from hcx.rewrite import Program


def sizes(program: Program) -> dict[str, Any]:
    """Distinct parameters and their bytes (tied tensors once), tensors added by passes, nodes of the graph."""
    distinct = {id(p): p for p in program.parameters()}.values()
    return {
        "parameters": sum(p.numel() for p in distinct),
        "parameter_bytes": sum(p.numel() * p.element_size() for p in distinct),
        "added_parameters": sum(p.numel() for p in program.new_parameters().values()),
        "nodes": len(program.graph.nodes),
        "dtype": str(program.dtype).removeprefix("torch."),
    }


def flops(program: Program, flat: list[torch.Tensor]) -> int | None:
    """Floating-point operations of one call: products of matrices, convolutions and attention, a multiply-add as two.

    None where the tensors are not in memory.
    """
    from hcx.rewrite.run.flops import count

    return None if any(t.is_meta for t in program.parameters()) else count(program, flat)


def call_shapes(program: Program, flat: list[torch.Tensor]) -> dict[str, list[int]]:
    """Shapes of the inputs that a user gives; filled ones are left out."""
    return {s.name: list(t.shape) for s, t in zip(program.inputs, flat, strict=False) if s.fill is None}


def megabytes(count: int | None) -> str:
    """``12.3 MB``."""
    if count is None:
        return "-"
    return f"{count / 1e6:.1f} MB" if count >= 100_000 else f"{count / 1e3:.1f} kB"


def big(count: int | None) -> str:
    """``1,234``."""
    return "-" if count is None else f"{count:,}"


def change(before: int | None, after: int | None) -> str:
    """``before -> after (+1.2 %)``."""
    text = f"{big(before)} -> {big(after)}"
    if before and after is not None:
        text += f" ({100 * (after - before) / before:+.2f} %)"
    return text
