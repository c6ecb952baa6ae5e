"""Operators that are not in the table, through their own definition in terms of simpler ones.

hcx's operators and many of ATen's are defined by other ATen operators; tracing the definition on the node's own fake
tensors gives a small graph over the same symbolic sizes, which is emitted in place.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from hcx.rewrite.errors import let_through
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

RECURRENT = {"aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"}
"""Their definitions are loops over time, unrolled; torch.onnx has operators for them."""


Known = dict[tuple[Any, ...], fx.GraphModule | None]


def definition(node: fx.Node, known: Known) -> tuple[fx.GraphModule, list[fx.Node]] | None:
    """The graph of a node's operator and the nodes that are its inputs, or None if it has no definition to trace.

    Args:
        node: a call of an operator.
        known: definitions traced before, by operator, shapes and numbers.
    """
    if node.target._schema.name in RECURRENT:
        return None
    arguments, structure = pytree.tree_flatten((node.args, dict(node.kwargs)))
    tensors = [
        i for i, a in enumerate(arguments) if isinstance(a, fx.Node) and isinstance(a.meta.get("val"), torch.Tensor)
    ]
    fakes = [arguments[i].meta["val"] for i in tensors]
    if not fakes or not all(isinstance(f, torch._subclasses.FakeTensor) for f in fakes):
        return None
    numbers = [
        str(a.meta.get("val")) if isinstance(a, fx.Node) else a for i, a in enumerate(arguments) if i not in tensors
    ]
    key = (node.target, str(structure), str(numbers), *((f.dtype, str(f.shape)) for f in fakes))
    if key not in known:
        known[key] = _traced(node, arguments, structure, tensors, fakes)
    module = known[key]
    return (module, [arguments[i] for i in tensors]) if module is not None else None


def _traced(
    node: fx.Node, arguments: list[Any], structure: Any, tensors: list[int], fakes: list[Any]
) -> fx.GraphModule | None:
    def call(*values: torch.Tensor) -> Any:
        given = [a.meta["val"] if isinstance(a, fx.Node) else a for a in arguments]
        for index, value in zip(tensors, values, strict=True):
            given[index] = value
        args, kwargs = pytree.tree_unflatten(given, structure)
        return node.target(*args, **kwargs)

    try:
        with fakes[0].fake_mode, torch.no_grad():
            module = make_fx(torch.func.functionalize(call), decomposition_table=_decompositions())(*fakes)
    except Exception as error:  # noqa: BLE001  whatever stops torch's tracer, the operator stays unknown
        let_through(error)
        return None
    calls = [n for n in module.graph.nodes if n.op == "call_function"]
    return None if any(n.target is node.target for n in calls) else module


@functools.cache
def _decompositions() -> dict[Any, Any]:
    return dict(torch._decomp.core_aten_decompositions())
