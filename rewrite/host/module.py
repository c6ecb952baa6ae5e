"""A Program as an ordinary module, for everything that trains modules: DDP, FSDP2, accelerate, a plain loop.

The module tree is the model's own, so that state-dict keys are too. Where a block's weights lie below one module, that
module runs the block; ``fully_shard`` and activation checkpointing find it there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from hcx.rewrite.errors import UsageError
from hcx.rewrite.ir.autocast import suit_autocast
from hcx.rewrite.ir.compiled import compiled
from hcx.rewrite.ir.control import copy_graph
from hcx.rewrite.ir.modes import refuse_train, switch
from hcx.rewrite.ir.tensors import fetch
from torch import fx
from torch.utils.checkpoint import checkpoint as run_again

from .partition import Part, partition

UNOWNED = "hcx_blocks"
"""Module that runs the blocks whose weights do not lie together; it holds none itself."""


def as_module(program, checkpoint: str | None = None) -> ProgramModule:
    """See :meth:`hcx.rewrite.Program.as_module`.

    Args:
        checkpoint: ``"blocks"`` keeps only what goes into a block for the backward pass and runs the block again there.

    Raises:
        UsageError: another word, or a program without blocks to checkpoint.
    """
    if checkpoint not in (None, "blocks"):
        raise UsageError(f"checkpoint={checkpoint!r} is not known", where="as_module", hint="None or 'blocks'")
    module = ProgramModule(program)
    blocks = [m for m in module.modules() if isinstance(m, BlockModule)]
    if checkpoint and not blocks:
        raise UsageError("there are no blocks to checkpoint", where=program.signature.model,
                         hint="`hcx inspect MODEL --why` shows what was found")  # fmt: skip
    for block in blocks:
        block.gradient_checkpointing = checkpoint == "blocks"
    return module


class BlockModule(torch.nn.Module):
    """A module of the model that runs a block, or every pass over it where it lies in a loop.

    Attributes:
        gradient_checkpointing: run again in the backward pass instead of keeping what was computed. Transformers
            switches it by this name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        self._gradient_checkpointing_func = partial(run_again, use_reentrant=False)

    def forward(self, segment: Segment, *inputs: Any) -> tuple[Any, ...]:
        if self.gradient_checkpointing and torch.is_grad_enabled():
            return self._gradient_checkpointing_func(partial(segment, self), *inputs)
        return segment(self, *inputs)


class ProgramModule(torch.nn.Module):
    """Called like the Program; parameters are the Program's own objects, so training one trains the other.

    Made by :meth:`hcx.rewrite.Program.as_module`. ``fully_shard`` puts other parameters in their place; then
    ``program.load_state_dict`` takes a full state dict back.
    """

    def __init__(self, program):
        super().__init__()
        self.__dict__["_hcx"] = code = _Code(program)
        owners = {p.owner for p in code.parts if p.owner}
        _copy_tree(program.tree, self, "", owners)
        if any(p.block and not p.owner for p in code.parts):
            self.add_module(UNOWNED, BlockModule())
        self.training = program.training
        for module in self.children():
            module.train(self.training)

    def forward(self, *args: Any, taps: bool = False, **kwargs: Any) -> Any:
        """As :meth:`hcx.rewrite.Program.forward`."""
        signature = self._hcx.signature
        flat = self.run_flat(signature.bind(args, kwargs), taps=taps)
        count = len(signature.outputs.names)
        output = signature.rebuild(flat[:count])
        return (output, dict(zip(self._hcx.taps, flat[count:], strict=True))) if taps else output

    def run_flat(self, inputs: list[torch.Tensor], *, taps: bool = False) -> list[torch.Tensor]:
        """Flat outputs for flat inputs, then (with taps) the taps."""
        device = next((p.device for p in self.parameters()), None)
        schedule = self._hcx.schedule(taps, self.training, device)
        values: dict[str, Any] = dict(zip(schedule.inputs, inputs, strict=True))
        for segment in schedule.segments:
            given = [values[n] if n in values else fetch(self, schedule.tensors[n]) for n in segment.inputs]
            for name in segment.last:
                values.pop(name, None)
            if segment.part.block is None:
                results = segment(self, *given)
            else:
                results = self.get_submodule(segment.part.owner or UNOWNED)(segment, *given)
            del given
            values.update(zip(segment.outputs, results, strict=True))
        return [
            (values[r.name] if r.name in values else fetch(self, schedule.tensors[r.name]))
            if isinstance(r, fx.Node)
            else r
            for r in schedule.results
        ]

    def train(self, mode: bool = True) -> ProgramModule:
        """Raises UsageError where the graph has no train mode; see :func:`hcx.rewrite.ir.modes.switch`."""
        if mode:
            refuse_train(self._hcx.graph)
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Devices, not dtypes: which casts of the graph follow the model's dtype, only the Program knows."""
        if fn(torch.empty(0)).dtype != torch.float32:
            raise UsageError("this module cannot be cast", where="as_module",
                             hint="cast the Program: program.to(dtype).as_module()")  # fmt: skip
        return super()._apply(fn, recurse)


def _copy_tree(source: torch.nn.Module, target: torch.nn.Module, path: str, owners: set[str]) -> None:
    """The same tensors in a tree of their own; buffers stay one dictionary with the Program's."""
    target._parameters.update(source._parameters)
    target.__dict__["_buffers"] = source._buffers
    target._non_persistent_buffers_set.update(source._non_persistent_buffers_set)
    for name, child in source._modules.items():
        below = f"{path}.{name}".lstrip(".")
        copied = BlockModule() if below in owners else torch.nn.Module()
        target._modules[name] = copied
        _copy_tree(child, copied, below, owners)


class Segment:
    """One part of the graph as a function: ``(module that fetches its tensors, *inputs) -> outputs``.

    Attributes:
        inputs, outputs: names of values.
        last: inputs that nothing later reads.
    """

    def __init__(self, part: Part, graph: fx.Graph, inputs: list[str], outputs: list[str]):
        self.part, self.graph, self.inputs, self.outputs = part, graph, inputs, outputs
        self.last: list[str] = []
        self._functions: dict[bool, Any] = {}

    def __call__(self, module: torch.nn.Module, *inputs: Any) -> tuple[Any, ...]:
        ambient = any(torch.is_autocast_enabled(d) for d in ("cpu", "cuda"))
        if ambient not in self._functions:
            graph = copy_graph(self.graph)
            if ambient:
                suit_autocast(graph)
            self._functions[ambient] = compiled(graph, self.part.block or "between blocks")
        return self._functions[ambient](module, *inputs)


@dataclass
class _Schedule:
    """Segments in order, names of the flat inputs, result nodes, and the tensor behind each ``get_attr``."""

    segments: list[Segment]
    inputs: list[str]
    results: list[Any]
    tensors: dict[str, str]


class _Code:
    """The graph in parts, and schedules made of it. Holds no tensors and never changes, so copies share it."""

    def __init__(self, program):
        self.signature, self.taps = program.signature, program.taps
        parts = partition(program)
        self.graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in program.graph.nodes:
            copies[node] = self.graph.node_copy(node, copies.__getitem__)
            copies[node].meta = {k: v for k, v in node.meta.items() if k in ("custom", "modes", "eval_only")}
        switch(self.graph, False)
        self.parts = [Part([copies[n] for n in p.nodes], p.block, p.owner) for p in parts]
        self._schedules: dict[tuple[Any, ...], _Schedule] = {}

    def __deepcopy__(self, memo: dict[str, Any]) -> _Code:
        return self

    def schedule(self, taps: bool, train: bool, device: torch.device | None) -> _Schedule:
        """What to run for a call."""
        key = (taps, train, device)
        if key not in self._schedules:
            self._schedules[key] = self._scheduled(*key)
        return self._schedules[key]

    def _scheduled(self, taps: bool, train: bool, device: torch.device | None) -> _Schedule:
        count = None if taps else len(self.signature.outputs.names)
        results = list(self.graph.output_node().args[0])[:count]
        wanted = [r for r in results if isinstance(r, fx.Node)]
        live = set(wanted)
        segments = []
        for part in reversed(self.parts):
            segment = _segment(part, live, train, device)
            if segment is not None:
                segments.append(segment)
        segments.reverse()
        seen = {n.name for n in wanted}
        for segment in reversed(segments):
            segment.last = [n for n in segment.inputs if n not in seen]
            seen.update(segment.inputs)
        placeholders = [n.name for n in self.graph.nodes if n.op == "placeholder"]
        tensors = {n.name: n.target for n in self.graph.nodes if n.op == "get_attr"}
        return _Schedule(segments, placeholders, results, tensors)


def _segment(part: Part, live: set[fx.Node], train: bool, device: torch.device | None) -> Segment | None:
    """The nodes of a part that live values need; ``live`` grows by what these read. None where it is nothing."""
    from hcx.rewrite.ir.graphs import replace_constants

    kept = [n for n in reversed(part.nodes) if _is_live(n, live)][::-1]
    if not kept:
        return None
    members = set(kept)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    operands = list(dict.fromkeys(o for n in kept for o in n.all_input_nodes if o not in members))
    local = {n: _local(n, part) for n in operands}
    inputs = [n for n in operands if local[n] is None]
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
    for node in operands:
        if local[node] is not None:
            copies[node] = graph.create_node("get_attr", local[node], name=node.name)
    for node in kept:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = dict(node.meta)
    outputs = [n for n in kept if n in live and any(u not in members for u in n.users)]
    graph.output(tuple(copies[n] for n in outputs))
    if train:
        switch(graph, True)
    if device is not None:
        replace_constants(graph, lambda v: device if isinstance(v, torch.device) else v)
    return Segment(part, graph, [n.name for n in inputs], [n.name for n in outputs])


def _is_live(node: fx.Node, live: set[fx.Node]) -> bool:
    from hcx.rewrite.ir.graphs import is_mutation

    if node in live or is_mutation(node):
        live.add(node)
        live.update(node.all_input_nodes)
        return True
    return False


def _local(node: fx.Node, part: Part) -> str | None:
    """Where the module that runs the part finds a tensor, or None where it is handed in."""
    if node.op != "get_attr" or (part.block and not part.owner):
        return None
    if not part.block:
        return node.target
    return node.target.removeprefix(part.owner + ".") if node.target.startswith(part.owner + ".") else None
