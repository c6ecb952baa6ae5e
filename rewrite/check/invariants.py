"""The checks behind every rewrite. The driver runs them; a pass cannot skip or soften one."""

from __future__ import annotations

import torch
from hcx.rewrite.ir.program import Program
from hcx.rewrite.pipeline import contracts

from .measuring import same_values
from .report import Check


def check_grad_mode(program: Program, inputs: list[list[torch.Tensor]], got: list[dict[str, torch.Tensor]]) -> Check:
    """The same numbers with gradients recorded: a kernel chosen while tracing may not fit the other mode."""
    flat = program.signature.complete(inputs[0])
    with torch.enable_grad():
        result = dict(zip(program.output_names, program.run_flat([t.clone() for t in flat]), strict=True))
    measured = contracts.compare([result[n].detach() for n in got[0]], list(got[0].values()))
    return Check(
        "with gradients recorded",
        measured["ulps"] <= 64,
        {"bitwise": measured["bitwise"], "max_diff": measured["max_diff"]},
    )


def check_shapes(program: Program, base: Program) -> Check:
    """Without values: the graph computes in shapes and dtypes from its inputs on, and outputs have those of before."""
    from hcx.rewrite.ir.dataflow import results_of
    from hcx.rewrite.ir.fork import fork
    from hcx.rewrite.ir.values import propagate

    def described(one: Program) -> list[tuple[torch.dtype, tuple[str, ...]]]:
        copied = fork(one)
        copied.examples = [copied.signature.complete(flat) for flat in one.examples[:1]]
        copied.drop_values()
        propagate(copied)
        results = results_of(copied.graph)[: len(base.output_names)]
        return [(r.meta["val"].dtype, tuple(map(str, r.meta["val"].shape))) for r in results]

    different = [n for n, a, b in zip(base.output_names, described(program), described(base), strict=True) if a != b]
    figures = {"nodes": len(program.graph.nodes), "outputs": len(base.output_names)}
    return Check("graph in shapes and dtypes", not different, figures, ", ".join(different))


def check_base_untouched(program: Program, base: Program) -> Check:
    """Every tensor of the base is bitwise what it was."""
    theirs = dict(base.named_tensors())
    changed = [n for n, t in program.named_tensors() if n in theirs and not t.is_meta and not same_values(t, theirs[n])]
    return Check(
        "base parameters untouched", not changed, {"tensors": len(theirs)}, f"changed: {changed[:3]}" if changed else ""
    )
