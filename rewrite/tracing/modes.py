"""What a model does otherwise in train mode: seen in one run of the source model, kept on the nodes, switched there.

A trace is made in eval mode. ``F.dropout`` keeps its probability there and only changes a flag, but attention is called
with a dropout probability of 0, and other models leave whole ops out. The ops that draw random numbers are therefore
recorded in train mode too and matched one to one with those of the graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from hcx.rewrite.errors import UsageError, let_through
from hcx.rewrite.ir.dataflow import op_name
from hcx.rewrite.ir.modes import DROPOUT, EVAL_ONLY, MODES, switch
from hcx.rewrite.ir.program import Program
from torch._subclasses.schema_check_mode import SchemaCheckMode

from .capture import Call, buffers_kept, invoke, reference_mode

_SWITCHES = {"p", "dropout", "dropout_p", "train", "training"}
"""Arguments that follow the mode. Others may differ too, because models ask whether they are being traced."""

_ALIKE = 1e-2
"""Largest difference in train mode relative to the rms of an output; another mask or noise changes about all of it."""

_Arguments = dict[str, Any]


class _Draws(SchemaCheckMode):
    """Records calls of ops that draw random numbers, as torch.export sees ops: before autograd takes them apart.

    torch lets only its own kinds of mode in at that place; of these the schema checker is the one that changes nothing.
    """

    def __init__(self, coin: float):
        super().__init__()
        self._dispatch_key = torch._C.DispatchKey.PreDispatch
        self.coin, self.coins = coin, 0
        self.seen: list[tuple[str, _Arguments]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if _draws(func):
            if isinstance(result, torch.Tensor) and not result.dim():  # decides whether a layer is skipped
                self.coins += 1
                return torch.full_like(result, self.coin)
            self.seen.append((_plain(func), _arguments(func, args, kwargs or {})))
        return result


def record_modes(program: Program, reference) -> None:
    """Note on the nodes of a fresh trace which arguments are others in train mode, or on the output why it has none.

    Args:
        program: traced in eval mode, its graph not rewritten yet.
        reference: the source model behind the flat interface; run once in train mode, without gradients.
    """
    flat = program.examples[0]
    if any(t.is_meta for t in (*flat, *reference.model.parameters())):
        return
    try:
        draws, outputs = _run(reference, flat, coin=0.0)
        skips = draws.coins and not all(map(torch.equal, outputs, _run(reference, flat, coin=1.0)[1]))
    except Exception as error:  # noqa: BLE001  whatever a model raises there, it cannot be trained so
        let_through(error)
        first = (str(error).splitlines() or [""])[0]
        reason = f"the model itself fails in train mode: {type(error).__name__}: {first}"
        program.graph.output_node().meta[EVAL_ONLY] = reason
        return
    if skips:
        program.graph.output_node().meta[EVAL_ONLY] = "in train mode the model skips layers at random"
        return
    nodes = [n for n in program.graph.nodes if n.op == "call_function" and _draws(n.target)]
    here = [_plain(n.target) for n in nodes]
    there = [name for name, _ in draws.seen]
    if here != there:
        at = next((i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), min(len(here), len(there)))
        graph, model = ([*names, "no such op"][min(at, len(names))] for names in (here, there))
        program.graph.output_node().meta[EVAL_ONLY] = (
            f"at its random op number {at + 1} the model runs {model} in train mode, and the eval graph {graph}"
        )
        return
    for node, (_, trained) in zip(nodes, draws.seen, strict=True):
        traced = _arguments(node.target, node.args, node.kwargs)
        changed = {k: [v, trained[k]] for k, v in traced.items() if k in _SWITCHES and v != trained[k]}
        if changed and not (op_name(node) in DROPOUT and set(changed) == {"train"}):
            node.meta[MODES] = changed
    _compare(program, flat, _run(reference, flat)[1])


def _compare(program: Program, flat: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """Run the graph in train mode with the random numbers of the source model: it may do there what no op shows (masks
    that another library draws, another formula)."""
    graph = program.graph
    try:
        switch(graph, True)
    except UsageError:
        return  # BatchNorm: refused when train mode is asked for
    program.forget_compiled()
    with _drawing_alike(program.parameters()), torch.no_grad():
        got = program.run_flat([t.clone() for t in flat])
    switch(graph, False)
    program.forget_compiled()
    for name, one, other in zip(program.output_names, got, wanted, strict=True):
        if one.shape != other.shape or not other.is_floating_point():
            alike = torch.equal(one, other)
        else:
            size = other.double().square().mean().sqrt()
            limit = _ALIKE * size * (1 if torch.finfo(other.dtype).bits >= 32 else 10)
            alike = bool(((one.double() - other.double()).abs() <= limit).all()) or torch.equal(one, other)
        if not alike:
            graph.output_node().meta[EVAL_ONLY] = (
                f"with the same random numbers `{name}` of the source model is another one in train mode"
            )
            return


def _run(reference, flat: list[torch.Tensor], coin: float | None = None) -> tuple[_Draws, list[torch.Tensor]]:
    """One call in train mode: what was drawn, and the flat outputs. Scalars that are drawn come out as ``coin``.

    Without a coin nothing is recorded, and layers draw as they always do: recording takes some of them apart.
    """
    from torch._dispatch.python import enable_python_dispatcher

    call = Call(reference.structure.rebuild([t.clone() for t in flat]), reference.positions)
    model, draws = reference.model, _Draws(coin or 0.0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_drawing_alike(model.parameters()))
        stack.enter_context(torch.no_grad())
        stack.enter_context(buffers_kept(model))
        stack.enter_context(reference_mode(model, train=True))
        if coin is not None:
            stack.enter_context(enable_python_dispatcher())
            stack.enter_context(draws)
        return draws, reference.flat(invoke(model, call))


@contextlib.contextmanager
def _drawing_alike(parameters) -> Iterator[None]:
    """The same random numbers at every entry; the caller's are not used up."""
    with torch.random.fork_rng(devices={p.device for p in parameters if p.device.type == "cuda"}):
        torch.manual_seed(0)
        yield


def _draws(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def _plain(op: torch._ops.OpOverload) -> str:
    """Name without the underscore of an in-place op, which a graph holds in its functional form."""
    return op.overloadpacket.__name__.rstrip("_")


def _arguments(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
    """Every argument of a call by its name, defaults included."""
    return {
        a.name: args[i] if i < len(args) else kwargs.get(a.name, a.default_value)
        for i, a in enumerate(op._schema.arguments)
    }
