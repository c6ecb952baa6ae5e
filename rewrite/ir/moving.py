"""Programs on other devices, and in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from hcx.rewrite.errors import UsageError
from torch import fx

from .control import change_bodies
from .dataflow import op_name
from .graphs import replace_constants

if TYPE_CHECKING:
    from .program import Program

_WIDEST = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


def move(program: Program, *args: Any, **kwargs: Any) -> None:
    """Take the arguments of ``Module.to``, in place.

    A device moves tensors, examples and every ``device=`` in the graph. Up to float64 every floating cast in the graph
    goes along; the graph does not say which of its casts follow the model's dtype down to a narrower one.

    Raises:
        UsageError: another dtype.
    """
    device, dtype = asked(*args, **kwargs)
    if dtype is not None and dtype != program.dtype:
        if dtype != torch.float64:
            raise UsageError(
                f"this graph cannot be cast to {dtype}: it does not say which of its casts follow the model's dtype",
                where=program.signature.model,
                hint="cast the Program that trace() or load() gave",
            )
        _promote(program)
    if device is not None:
        torch.nn.Module.to(program, device=device)
        replace_constants(program.graph, lambda v: device if isinstance(v, torch.device) else v)
        program.examples = [[t.to(device) for t in flat] for flat in program.examples]
        program.drop_values()


def asked(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None]:
    """Device and dtype in the arguments of ``Module.to``."""
    device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
    return device, dtype


def _widest(tensor: torch.Tensor) -> torch.Tensor:
    """float64, or complex128 where a cast to float64 would drop the imaginary part."""
    return tensor.to(_WIDEST.get(tensor.dtype, tensor.dtype))


def _promote(program: Program) -> None:
    program._apply(_widest)
    replace_constants(program.graph, lambda v: _WIDEST.get(v, v) if isinstance(v, torch.dtype) else v)
    _cast_to_double(program.graph)
    program.examples = [[_widest(t) for t in flat] for flat in program.examples]
    program.signature = program.signature.copied()
    program.signature.inputs = [
        type(i)(i.name, _WIDEST.get(i.dtype, i.dtype), i.shape, i.fill) for i in program.signature.inputs
    ]
    program.drop_values()


def _cast_to_double(graph: fx.Graph) -> None:
    change_bodies(graph, _cast_to_double)
    for node in graph.nodes:
        if op_name(node) in ("float", "half", "bfloat16"):
            node.target = torch.ops.aten.to.dtype
            node.args = (node.args[0], torch.float64)
