"""What no exporter can write rightly, refused before anything is written."""

from __future__ import annotations

from typing import Any

import torch
from hcx.rewrite.errors import ExportError
from torch import fx

from .onnx_direct.walk import module_path

LOWEST, HIGHEST, DEFAULT = 18, 26, 23
"""Opsets that both the emitters and ONNX Runtime 1.32 handle.

23 is the first with Attention and RMSNormalization; ONNX Runtime runs Attention natively on CPU up to 24 and expands it
from 25 on (measured on SmolLM2: decode 20 % slower, 60 % with 1,500 past tokens)."""

RANDOM = {
    "rand",
    "randn",
    "randint",
    "randperm",
    "rand_like",
    "randn_like",
    "randint_like",
    "bernoulli",
    "bernoulli_",
    "normal",
    "normal_",
    "uniform_",
    "multinomial",
    "exponential_",
    "random_",
    "native_dropout",
    "rrelu",
}

TRAINING = {"dropout": 2, "dropout_": 2, "feature_dropout": 2, "alpha_dropout": 2, "batch_norm": 5}
"""Operators with a training flag, and its position."""


def checked_opset(opset: int | None) -> int:
    """The opset to write.

    Raises:
        ExportError: outside the usable range.
    """
    if opset is None:
        return DEFAULT
    if isinstance(opset, bool) or not isinstance(opset, int) or not LOWEST <= opset <= HIGHEST:
        raise ExportError(
            f"ONNX opset {opset} cannot be written",
            where="opset",
            hint=f"usable opsets are {LOWEST} to {HIGHEST}; the default is {DEFAULT}",
        )
    return opset


def check(module: fx.GraphModule, *, upcast: bool) -> None:
    """Refuse what ONNX Runtime on CPU cannot run or an ONNX file cannot hold.

    Raises:
        ExportError: weights that are not there, bfloat16 without ``upcast``, random or training-mode operators.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise ExportError(
                f"`{name}` is on the meta device: there are no weights to write",
                where=name,
                hint="load the weights before exporting",
            )
    for inner in module.modules():
        for node in inner.graph.nodes if isinstance(inner, fx.GraphModule) else ():
            _check_dtype(node, upcast)
            if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
                _check_mode(node)


def _check_dtype(node: fx.Node, upcast: bool) -> None:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16 and not upcast:
        raise ExportError(
            "ONNX Runtime on CPU cannot compute in bfloat16",
            where=where(node),
            hint="`--upcast` (`upcast=True` in Python) writes float32",
        )


def _check_mode(node: fx.Node) -> None:
    name = node.target._schema.name.split("::")[1]
    if name in RANDOM:
        raise ExportError(
            f"{node.target} draws random numbers", where=where(node), hint="switch the model to eval() before tracing"
        )
    position = TRAINING.get(name)
    if position is not None and _argument(node, position):
        raise ExportError(
            f"{node.target} is in training mode", where=where(node), hint="switch the model to eval() before tracing"
        )


def _argument(node: fx.Node, position: int) -> Any:
    name = node.target._schema.arguments[position].name
    return (
        node.args[position]
        if position < len(node.args)
        else node.kwargs.get(name, node.target._schema.arguments[position].default_value)
    )


def where(node: fx.Node) -> str:
    """Module path and source line of a node."""
    path = module_path(node)
    lines = [
        line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip().startswith('File "/')
    ]
    own = [line for line in lines if f'"{torch.__path__[0]}/' not in line] or lines
    return ", ".join(x for x in (path or node.name, own[-1] if own else "") if x)
