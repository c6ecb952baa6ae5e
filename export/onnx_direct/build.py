"""Assembles the ONNX model of a flat graph."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch import fx

from . import patterns
from .emitting.emitter import Emitter, Operand, onnx_dtype
from .emitting.symbols import dim_text
from .emitting.unsupported import UnsupportedError
from .mutation import without_mutation
from .walk import Walker

IR_VERSION = 11


def build(
    module: fx.GraphModule,
    input_names: list[str],
    input_dims: list[tuple[Any, ...]],
    output_names: list[str],
    *,
    opset: int,
    upcast: bool = False,
    fuse: bool = True,
) -> ir.Model:
    """Emit a flat graph as an ONNX model.

    Args:
        module: flat ATen graph; placeholders are tensors, every node has a traced value in ``meta["val"]``.
        input_names: names of the graph inputs, in placeholder order.
        input_dims: for each input its dimensions, numbers or names (equal names are equal sizes).
        output_names: names of the graph outputs.
        opset: version of the default domain.
        upcast: compute and store bfloat16 as float32.
        fuse: use ONNX operators that stand for several ATen nodes.

    Raises:
        AliasedError: in-place arithmetic through views; make the graph functional and come back.
        UnsupportedError: an operator, dtype or size has no exact translation here; ``.node`` is the fx node.
    """
    e = Emitter(opset, upcast, [*input_names, *output_names])
    graph = without_mutation(module.graph)
    inputs = _inputs(e, graph, input_names, input_dims)
    walker = Walker(e, module, (lambda g: patterns.find(g, opset)) if fuse else None)
    outputs = walker.run(graph, inputs)
    made = [_output(e, name, out) for name, out in zip(output_names, outputs, strict=True)]
    onnx_graph = ir.Graph(
        [i.value for i in inputs],
        made,
        nodes=e.nodes,
        initializers=list(e.initializers.values()),
        opset_imports={"": opset},
        name="hcx",
    )
    model = ir.Model(onnx_graph, ir_version=IR_VERSION)
    RemoveUnusedNodesPass()(model)  # what merged reshapes leave behind, and constants that no node took
    return model


def _inputs(e: Emitter, graph: fx.Graph, names: list[str], dims: list[tuple[Any, ...]]) -> list[Operand]:
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    fakes = [n.meta.get("val") for n in placeholders]
    if not all(isinstance(f, torch.Tensor) for f in fakes):
        raise UnsupportedError("an input without a traced value")
    for fake, declared in zip(fakes, dims, strict=True):
        e.symbols.name_dims(fake, declared)
    operands = []
    for name, fake, declared in zip(names, fakes, dims, strict=True):
        shape = e.symbols.shape(fake)
        fixed = [s if isinstance(s, int) else d for s, d in zip(shape, declared, strict=True)]
        value = ir.Value(name=name, type=ir.TensorType(onnx_dtype(e.dtype(fake.dtype))), shape=ir.Shape(fixed))
        operands.append(Operand(value, fake.dtype, shape))
    for operand in sorted(operands, key=lambda o: o.rank):
        e.symbols.bind_input(operand.value, operand.shape)
    return operands


def _output(e: Emitter, name: str, out: Operand) -> ir.Value:
    """A value of its own under the output's name."""
    value = out.value
    if value.producer() is None or value.meta.get("output") or value.is_graph_output():
        e.scope = ""
        node = ir.node("Identity", [value], name=e.name("Identity"))
        e.nodes.append(node)
        value = node.outputs[0]
    value.meta["output"] = True
    value.name = name
    value.type = ir.TensorType(onnx_dtype(e.dtype(out.dtype)))
    value.shape = ir.Shape([dim_text(s) for s in out.shape])
    return value
