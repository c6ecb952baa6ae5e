"""The other producer: torch.onnx's own exporter, for graphs that the direct emitter does not cover."""

from __future__ import annotations

import io
import warnings
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import onnx_ir as ir
import torch

FOLDED_BYTES = 4096
"""Largest result that constant folding may put in the file."""


def export(
    program: Any,
    module: torch.fx.GraphModule,
    example: list[torch.Tensor],
    output_names: list[str],
    *,
    opset: int,
    optimize: bool,
) -> ir.Model:
    """Re-export the flat graph and convert it.

    Args:
        program: for the names and dynamic dimensions of its inputs.
        module: the flat graph.
        example: flat inputs, with sizes of at least 2 in dynamic dimensions.
        output_names: one for each flat output.
        opset: version of the default domain.
        optimize: run onnxscript's optimiser; weights are never folded into another layout.
    """
    exported = reexport(program, module, example)
    options = dict(dynamo=True, opset_version=opset, optimize=False, verbose=False)
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        model = torch.onnx.export(exported, **options).model
    _optimize(model, optimize)
    _rename(model, [i.name for i in program.inputs], [tuple(i.shape) for i in program.inputs], output_names)
    _strip(model)
    return model


def reexport(program: Any, module: torch.fx.GraphModule, example: list[torch.Tensor]) -> torch.export.ExportedProgram:
    """The flat graph through torch.export again, with the Program's dynamic dimensions."""
    auto = torch.export.Dim.AUTO
    dynamic = tuple(
        {axis: auto for axis, dim in enumerate(spec.shape) if isinstance(dim, str)} for spec in program.inputs
    )
    inputs = tuple(t.detach().clone() for t in example)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(_Positional(module), inputs, dynamic_shapes=(dynamic,), strict=False)


def functional(program: Any, module: torch.fx.GraphModule, example: list[torch.Tensor]) -> torch.fx.GraphModule:
    """The flat graph with in-place operators replaced by functional ones; other operators are kept."""
    return reexport(program, module, example).run_decompositions({}).module(check_guards=False)


class _Positional(torch.nn.Module):
    """Shares the tensors of the flat module under the same names; takes any number of inputs."""

    def __init__(self, module: torch.fx.GraphModule):
        super().__init__()
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = module.__dict__[name]
        self.__dict__["_flat"] = module

    def forward(self, *flat: torch.Tensor) -> Any:
        return self.__dict__["_flat"](*flat)


def _optimize(model: ir.Model, optimize: bool) -> None:
    from onnx_ir.passes import common
    from onnxscript import optimizer

    if optimize:
        optimizer.optimize_ir(model, should_fold=_may_fold, output_size_limit=FOLDED_BYTES)
    else:
        common.InlinePass()(model)
    for tidy in (
        common.CommonSubexpressionEliminationPass(),
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),
        common.RemoveUnusedOpsetsPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
    ):
        tidy(model)


def _may_fold(node: ir.Node) -> bool | None:
    """Not a transpose of a weight: it would be stored again in every use, and not under the weight's name."""
    return False if any(v is not None and v.is_initializer() for v in node.inputs) else None


def _rename(model: ir.Model, inputs: list[str], dims: list[tuple[Any, ...]], outputs: list[str]) -> None:
    """The Program's names on inputs and outputs; a value inside that has one of them steps aside."""
    graph = model.graph
    wanted = set(inputs) | set(outputs)
    ends = {id(v) for v in (*graph.inputs, *graph.outputs)}
    values = [*graph.initializers.values(), *(v for node in graph.all_nodes() for v in node.outputs)]
    for value in values:
        if value.name in wanted and id(value) not in ends:
            value.name = f"{value.name}.inner"
    for value, name, shape in zip(graph.inputs, inputs, dims, strict=True):
        value.name, value.shape = name, ir.Shape(shape)
    _separate_outputs(graph)
    for value, name in zip(graph.outputs, outputs, strict=True):
        value.name = name


def _separate_outputs(graph: ir.Graph) -> None:
    """An output that is an input, an initializer or another output gets a value of its own."""
    seen: set[int] = set()
    for index, value in enumerate(graph.outputs):
        if value.producer() is None or id(value) in seen:
            node = ir.node("Identity", [value], name=f"output_{index}")
            node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
            graph.append(node)
            graph.outputs[index] = node.outputs[0]
        seen.add(id(graph.outputs[index]))


def _strip(model: ir.Model) -> None:
    """Node names by module; the exporter's stack traces (9/10 of the file without weights) go."""
    used: dict[str, int] = {}
    for node in model.graph.all_nodes():
        scope = _scope(node.metadata_props.get("pkg.torch.onnx.name_scopes", ""))
        stem = f"{scope}/{node.op_type}" if scope else node.op_type
        used[stem] = count = used.get(stem, 0) + 1
        node.name = stem if count == 1 else f"{stem}_{count}"
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.metadata_props.clear()
    model.doc_string = None


def _scope(text: str) -> str:
    """Innermost module path of an exporter's scope list."""
    import ast

    try:
        scopes = ast.literal_eval(text) if text else []
    except (ValueError, SyntaxError):
        return ""
    return next((s for s in reversed(scopes[:-1]) if s), "")
