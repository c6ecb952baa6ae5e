"""Shapes and dtypes of graph values, as fake tensors; made again where a graph was read from a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from .control import Control
from .signature import size_of
from .tensors import fetch

if TYPE_CHECKING:
    from .program import Program


def fake_mode_of(program: Program) -> FakeTensorMode:
    """The fake mode that the graph's values belong to; values are computed if any is missing."""
    mode = None
    for node in program.graph.nodes:
        val = node.meta.get("val")
        if val is None and node.op != "output":
            return propagate(program)
        if isinstance(val, FakeTensor):
            mode = val.fake_mode
    return mode if mode is not None else propagate(program)


def propagate(program: Program) -> FakeTensorMode:
    """Compute ``meta['val']`` of every node from the signature: inputs share a symbol for each named dimension."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    values: dict[fx.Node, Any] = {}
    examples = program.signature.complete(program.examples[0])
    sizes = _symbols(program, mode, examples)
    inputs = iter(zip(program.inputs, examples, strict=True))
    with mode, torch.no_grad(), enable_python_dispatcher():  # without it addcmul and lerp fail on symbolic sizes
        for node in program.graph.nodes:
            if node.op == "placeholder":
                spec, example = next(inputs)
                shape = [size_of(dim, sizes) for dim in spec.shape]
                values[node] = torch.empty(shape, dtype=example.dtype, device=example.device)
            elif node.op == "get_attr":
                values[node] = stand_in(program, mode, node.target)
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                if isinstance(node.target, Control):
                    node.target, values[node] = node.target.fill(args)
                else:
                    values[node] = node.target(*args, **kwargs)
            else:
                continue
            node.meta["val"] = values[node]
    return mode


def stand_in(program: Program, mode: FakeTensorMode, name: str) -> torch.Tensor:
    """The fake tensor of a parameter or buffer; on the CPU for one that still lies in a file."""
    tensor = fetch(program.tree, name)
    if tensor.is_meta and name in program.stored:
        with mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return mode.from_tensor(tensor, static_shapes=True)


def _symbols(program: Program, mode: FakeTensorMode, examples: list[torch.Tensor]) -> dict[str, int]:
    """A symbol for each named dimension; its hint is the example's size, or 5 where that is 0, 1 or unknown."""
    hints: dict[str, int] = {}
    for spec, example in zip(program.inputs, examples, strict=True):
        for dim, size in zip(spec.shape, example.shape, strict=True):
            if isinstance(dim, str) and "+" not in dim:
                hints.setdefault(dim, int(size) if size > 1 else 5)
    for spec in program.inputs:  # where the cache is states alone, only a sum tells that there is a past
        for dim in spec.shape:
            for name in dim.split("+") if isinstance(dim, str) else ():
                hints.setdefault(name, 5)
    if not hints:
        return {}
    context: StatelessSymbolicContext[..., Any] = StatelessSymbolicContext(
        dynamic_sizes=[DimDynamic.DYNAMIC] * len(hints)
    )
    # a storage of one element: only the sizes matter
    example = torch.empty(1).expand(*hints.values())
    return dict(zip(hints, mode.from_tensor(example, symbolic_context=context).shape, strict=True))
