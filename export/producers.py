"""From a flat graph to an ONNX model in memory: the two ways there are, behind one interface."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hcx.rewrite.errors import ExportError, HcxError, let_through

from . import preflight
from .samples import Sample


@dataclass
class Task:
    """What is to be written.

    Attributes:
        program: for the names and dimensions of its inputs.
        module: its flat graph.
        output_names: one for each flat output.
        opset: version of the default domain.
        optimize: use operators that stand for several ATen nodes.
        upcast: bfloat16 as float32.
        samples: makes the input sets, when a producer needs an example.
    """

    program: Any
    module: torch.fx.GraphModule
    output_names: list[str]
    opset: int
    optimize: bool
    upcast: bool
    samples: Callable[[], list[Sample]]


def direct(task: Task) -> Any:
    """Our own emitter; a graph that writes through views is made functional first."""
    from . import onnx_torch
    from .onnx_direct.build import build
    from .onnx_direct.emitting.unsupported import UnsupportedError
    from .onnx_direct.mutation import AliasedError

    inputs = task.program.inputs
    names, dims = [i.name for i in inputs], [tuple(i.shape) for i in inputs]
    options = dict(opset=task.opset, upcast=task.upcast, fuse=task.optimize)
    try:
        try:
            return build(task.module, names, dims, task.output_names, **options)
        except AliasedError:
            functional = onnx_torch.functional(task.program, task.module, example(task))
            return build(functional, names, dims, task.output_names, **options)
    except UnsupportedError as reason:
        node = getattr(reason, "node", None)
        raise ExportError(
            f"the direct emitter does not cover {reason}",
            where=preflight.where(node) if node is not None else None,
            hint="leave producer out, so that torch.onnx is tried",
        ) from reason
    except Exception as error:  # a gap between torch, onnx_ir and the emitter must not keep torch.onnx from trying
        let_through(error)
        if isinstance(error, HcxError):
            raise
        raise ExportError(
            f"the direct emitter failed: {type(error).__name__}: {error}", hint="please report this graph"
        ) from error


def by_torch(task: Task) -> Any:
    """torch.onnx."""
    from . import onnx_torch
    from .session import first_line

    try:
        return onnx_torch.export(
            task.program, task.module, example(task), task.output_names, opset=task.opset, optimize=task.optimize
        )
    except Exception as error:  # any type: torch.onnx wraps failures in many types; the innermost names the operator
        cause = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ExportError(
            f"torch.onnx cannot convert the graph: {type(cause).__name__}: {first_line(cause)}",
            hint="rewrite that operator in the model",
        ) from error


PRODUCERS: dict[str, Callable[[Task], Any]] = {"direct": direct, "torch": by_torch}
"""By name, in the order in which they are tried."""


def example(task: Task) -> list[torch.Tensor]:
    """The input set with most sizes of 2 and more in dynamic dimensions: 0 and 1 are special to torch.export."""
    specs = task.program.inputs

    def small(flat: list[torch.Tensor]) -> int:
        sizes = [(t.shape[a], d) for t, s in zip(flat, specs, strict=True) for a, d in enumerate(s.shape)]
        return sum(size < 2 for size, dim in sizes if isinstance(dim, str))

    return min((s.flat for s in task.samples()), key=small)
