"""What users do to any module: switch its mode, move it, cast it."""

from __future__ import annotations

from typing import Any

import torch
from hcx.rewrite.errors import UsageError
from hcx.rewrite.ir.control import change_bodies
from hcx.rewrite.ir.dataflow import op_name
from hcx.rewrite.ir.program import Program
from hcx.rewrite.tracing.modes import switch
from torch import fx


def set_mode(program: Program, train: bool) -> None:
    """Train or eval mode, in the graph itself; see :func:`hcx.rewrite.tracing.modes.switch`.

    Raises:
        UsageError: the source model computes something else in train mode than the graph can.
    """
    if program.training is not train:  # trainers ask for the mode before every step
        switch(program.graph, train)
        program._forget_compiled()
    for module in program.children():
        module.train(train)
    program.training = train


def param_groups(
    program: Program, train: str = "all", *, weight_decay: float = 0.01, new_lr: float | None = None
) -> list[dict]:
    """Optimiser groups, and ``requires_grad`` set to match.

    Args:
        train: ``all``; ``new`` for what passes added; or the name of a pass, for its parameters alone (``lora``).
        weight_decay: of base matrices; gains, biases and everything new are not decayed: a decayed mixing scalar or
            stream coefficient drifts away from the start that keeps the function.
        new_lr: learning rate of new parameters, where it should differ.

    Raises:
        UsageError: nothing to train.
    """
    chosen = {"all": lambda n: True, "new": lambda n: n in program.origin}.get(
        train, lambda n: program.origin.get(n) == train
    )
    groups: dict[str, list] = {"decay": [], "plain": [], "new": []}
    for name, parameter in program.named_parameters():
        parameter.requires_grad_(chosen(name))
        if chosen(name):
            groups["new" if name in program.origin else "decay" if parameter.dim() > 1 else "plain"].append(parameter)
    if not any(groups.values()):
        raise UsageError(f"nothing to train for train={train!r}", where="param_groups",
                         hint="passes with parameters: " + (", ".join(sorted(set(program.origin.values()))) or "none"))  # fmt: skip
    result = [
        {"params": ps, "weight_decay": weight_decay if key == "decay" else 0.0} for key, ps in groups.items() if ps
    ]
    if groups["new"] and new_lr is not None:
        result[-1]["lr"] = new_lr
    return result


def move(program: Program, *args: Any, **kwargs: Any) -> Program:
    """Devices: tensors, examples and every ``device=`` in the graph. Dtypes: see :func:`cast`."""
    device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
    if dtype is not None and dtype != program.dtype:
        cast(program, dtype)
    if device is not None:
        torch.nn.Module.to(program, device=device)
        replace_constants(program.graph, lambda v: device if isinstance(v, torch.device) else v)
        program.examples = [[t.to(device) for t in flat] for flat in program.examples]
        drop_values(program)
    return program


def cast(program: Program, dtype: torch.dtype) -> None:
    """Cast the program in place.

    Up to float64 every floating cast in the graph goes along. Any other dtype traces the source model again in that
    dtype and replays the history, because a graph does not say which of its casts follow the model's dtype.

    Raises:
        UsageError: the source model is no longer in memory.
    """
    if dtype == torch.float64:
        _promote(program)
        return
    if program.reference is None or not hasattr(program.reference, "model"):
        raise UsageError(
            f"this program cannot be cast to {dtype}: its source model is not in memory, and the graph does not say "
            "which casts follow the model's dtype",
            where=program.signature.model,
            hint="rewrite the source model in that dtype: hcx rewrite MODEL --dtype ...",
        )
    from .retrace import retraced

    other = retraced(program, dtype)
    for name, value in other.__dict__.items():
        program.__dict__[name] = value


_WIDEST = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


def _widest(tensor: torch.Tensor) -> torch.Tensor:
    """float64, or complex128 where a cast to float64 would drop the imaginary part."""
    return tensor.to(_WIDEST.get(tensor.dtype, tensor.dtype))


def _promote(program: Program) -> None:
    program._apply(_widest)
    replace_constants(program.graph, lambda v: _WIDEST.get(v, v) if isinstance(v, torch.dtype) else v)
    _cast_to_double(program.graph)
    program.examples = [[_widest(t) for t in flat] for flat in program.examples]
    signature = type(program.signature).from_json(program.signature.to_json())
    signature.outputs.templates = program.signature.outputs.templates
    signature.inputs = [type(i)(i.name, _WIDEST.get(i.dtype, i.dtype), i.shape, i.fill) for i in signature.inputs]
    program.__dict__["signature"] = signature
    drop_values(program)


def _cast_to_double(graph: fx.Graph) -> None:
    change_bodies(graph, _cast_to_double)
    for node in graph.nodes:
        if op_name(node) in ("float", "half", "bfloat16"):
            node.target = torch.ops.aten.to.dtype
            node.args = (node.args[0], torch.float64)


def drop_values(program: Program) -> None:
    """Forget the shapes and dtypes of all nodes; they are computed again when needed."""
    _drop_values(program.graph)
    program._forget_compiled()


def _drop_values(graph: fx.Graph) -> None:
    change_bodies(graph, _drop_values)
    for node in graph.nodes:
        node.meta.pop("val", None)


def replace_constants(graph: fx.Graph, change) -> None:
    """Apply a function to every argument of every node that is no container."""

    def walk(value):
        if isinstance(value, list | tuple):
            return type(value)(walk(v) for v in value)
        if isinstance(value, dict):
            return {k: walk(v) for k, v in value.items()}
        return change(value)

    change_bodies(graph, lambda body: replace_constants(body, change))
    for node in graph.nodes:
        node.args, node.kwargs = walk(node.args), walk(node.kwargs)
