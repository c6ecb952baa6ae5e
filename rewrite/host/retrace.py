"""Other dtypes: tracing the source model again and replaying what was done to the first trace."""

from __future__ import annotations

import copy

import torch
from hcx.rewrite.driver import rewrite
from hcx.rewrite.errors import UsageError
from hcx.rewrite.ir.oracle import Oracle
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.signature import Fill
from hcx.rewrite.pipeline.plan import Plan
from hcx.rewrite.tracing.capture import Call
from hcx.rewrite.tracing.tracer import trace


def cast(program: Program, dtype: torch.dtype) -> None:
    """Cast the program in place.

    Up to float64 every floating cast in the graph goes along. Any other dtype traces the source model again in that
    dtype and replays the history, because a graph does not say which of its casts follow the model's dtype.

    Raises:
        UsageError: the source model is no longer in memory.
    """
    if dtype == torch.float64:
        Program.to(program, dtype)
        return
    if program.reference is None:
        raise UsageError(
            f"this program cannot be cast to {dtype}: its source model is not in memory, and the graph does not say "
            "which casts follow the model's dtype",
            where=program.signature.model,
            hint="rewrite the source model in that dtype: hcx rewrite MODEL --dtype ...",
        )
    program.become(retraced(program, program.reference, dtype))


def retraced(program: Program, reference: Oracle, dtype: torch.dtype) -> Program:
    """A Program of the source model in ``dtype`` with the same rewrites; tensors that passes added keep their values."""
    model = copy.deepcopy(reference.model)
    model._apply(lambda t: t.to(dtype) if t.is_floating_point() else t)  # Module.to would drop imaginary parts
    flat = [t.to(dtype) if t.is_floating_point() else t for t in program.examples[0][: len(reference.structure.names)]]
    values = {
        n: v for n, v in reference.structure.rebuild(flat).items() if n not in reference.optional and n != "use_cache"
    }
    masks = [i.name for i in program.inputs if i.fill == Fill.ONES]
    call = Call({n: v for n, v in values.items() if n not in masks}, reference.positions)
    new = trace(model, (), call.values)
    for entry in program.history:
        new = rewrite(new, Plan.from_json({**entry.plan, "fingerprint": None}), check=False)
    kept = {n for n, _ in program.named_buffers() if n in program.origin}  # buffers of passes keep their own dtype
    new.load_state_dict(
        {n: t.to(dtype) if t.is_floating_point() and n not in kept else t for n, t in program.state_dict().items()}
    )
    new.belongings.companions = program.companions
    return new
