"""Tracing the source model again in another dtype and replaying what was done to the first trace."""

from __future__ import annotations

import copy

import torch
from hcx.rewrite.ir.program import Program
from hcx.rewrite.pipeline.plan import Plan
from hcx.rewrite.tracing.capture import Call


def retraced(program: Program, dtype: torch.dtype) -> Program:
    """A Program of the source model in ``dtype`` with the same rewrites; tensors that passes added keep their values."""
    from hcx.rewrite.driver import rewrite
    from hcx.rewrite.tracing.tracer import trace

    reference = program.reference
    model = copy.deepcopy(reference.model)
    model._apply(lambda t: t.to(dtype) if t.is_floating_point() else t)  # Module.to would drop imaginary parts
    flat = [t.to(dtype) if t.is_floating_point() else t for t in program.examples[0][: len(reference.structure.names)]]
    values = {
        n: v for n, v in reference.structure.rebuild(flat).items() if n not in reference.optional and n != "use_cache"
    }
    masks = [i.name for i in program.inputs if i.fill == "ones"]
    call = Call({n: v for n, v in values.items() if n not in masks}, reference.positions)
    new = trace(model, (), call.values)
    for entry in program.history:
        new = rewrite(new, Plan.from_json({**entry["plan"], "fingerprint": None}), check=False)
    state = {n: t for n, t in program.state_dict().items()}
    new.load_state_dict(
        {n: t.to(dtype) if t.is_floating_point() and n not in _kept(program) else t for n, t in state.items()}
    )
    new.companions = program.companions
    return new


def _kept(program: Program) -> set[str]:
    """Buffers of passes keep their own dtype."""
    return {n for n, b in program.named_buffers() if n in program.origin}
