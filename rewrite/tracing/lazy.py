"""Tracing a model whose weights are not in memory: on ``meta``, with a place in a file for every tensor."""

from __future__ import annotations

from typing import Any

import torch
from hcx.rewrite.errors import TraceError
from hcx.rewrite.ir.graphs import replace_constants
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.signature import Fill
from hcx.rewrite.ir.structure import flatten
from hcx.rewrite.ir.values import propagate
from hcx.rewrite.source.stored import Stored

from .tracer import trace

CPU = torch.device("cpu")


def trace_lazily(model: torch.nn.Module, kwargs: dict[str, Any], stored: dict[str, Stored]) -> Program:
    """Trace a model that lies on ``meta``.

    The Program's tensors stay on ``meta``; its graph is one for the CPU. What a pass reads of them comes from the files
    (:meth:`Program.read`). Nothing was run, so every check of values is owed.

    Args:
        model: parameters on ``meta``, buffers real.
        kwargs: example keyword arguments, real.
        stored: state-dict name -> where the tensor lies; tied tensors under each name.

    Raises:
        TraceError: the model makes constants while it runs, whose values are then unknown.
    """
    tensors, structure = flatten(kwargs)
    given = dict(zip(structure.names, tensors, strict=True))
    program = trace(model, (), structure.rebuild([t.to("meta") for t in tensors]))
    unknown = [n for n, t in program.named_tensors() if t.is_meta and n not in stored]
    if unknown:
        raise TraceError(
            f"the model makes a tensor while it runs ({unknown[0]}), and without weights its values are not known",
            where=program.signature.model,
            hint="leave out --lazy",
        )
    examples = [_example(program, given)]
    program.reference, program.examples = None, examples
    program.belongings.stored = dict(stored)
    replace_constants(program.graph, lambda v: CPU if isinstance(v, torch.device) and v.type == "meta" else v)
    program.drop_values()
    propagate(program)
    return program


def _example(program: Program, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Real inputs of the traced sizes: the given ones repeated and cut, and what fills the others."""
    flat = []
    sizes = {d: s for i, t in zip(program.inputs, program.examples[0], strict=True)
             for d, s in zip(i.shape, t.shape, strict=True) if isinstance(d, str)}  # fmt: skip
    for spec, traced in zip(program.inputs, program.examples[0], strict=True):
        if spec.name in given:
            tensor = given[spec.name]
            for axis, size in enumerate(traced.shape):
                tensor = torch.cat([tensor] * -(-size // tensor.shape[axis]), axis).narrow(axis, 0, size)
            flat.append(tensor.to(spec.dtype).contiguous())
        elif spec.fill == Fill.POSITIONS:
            start = sizes.get("past", 0)
            row = torch.arange(start, start + traced.shape[-1], dtype=spec.dtype)
            flat.append(row.expand(traced.shape).contiguous())
        else:
            flat.append(torch.full(traced.shape, int(spec.fill == Fill.ONES), dtype=spec.dtype))
    return flat
