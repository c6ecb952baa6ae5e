"""Heads that start as copies of the model's own parts: its final norm, the MLP of its last block, its last block.

The copies have parameters of their own; what they compute at the start is what the model's own part computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from hcx.rewrite.edit.editor import Editor
from hcx.rewrite.ir.dataflow import Dataflow, op_name, resolve, value
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.traced import results, traced
from hcx.rewrite.sites.finder import cache_nodes
from hcx.rewrite.sites.spans import Span, span_of
from hcx.rewrite.sites.views import Stack
from torch import fx

from .roles import HEAD

OWN_CACHE = "keeps keys and values of its own, which a step that leaves earlier or skips it would owe"
"""Why ``head=block`` of a model with a cache is only for the select form as a whole."""


def own_copies(
    editor: Editor, program: Program, site: str, nodes: Iterable[fx.Node], wanted: Callable[[torch.Tensor], bool]
) -> dict[fx.Node, fx.Node]:
    """Insert copies of the parameters that some nodes read, and of what is computed from these alone.

    Args:
        site: prefix of the new names; behind it stands the path of the parameter as far as these differ.
        wanted: which parameters get a copy.

    Returns:
        node -> copy, as :meth:`Editor.clone` takes it.
    """
    flow = Dataflow(program.graph)
    static: set[fx.Node] = set()
    frontier = [o for n in nodes for o in n.all_input_nodes]
    while frontier:
        node = frontier.pop()
        if node not in static and flow.is_static(node):
            static.add(node)
            frontier += node.all_input_nodes
    parameters = [
        n
        for n in sorted(static)
        if n.op == "get_attr" and isinstance(t := program.tensor(n.target), torch.nn.Parameter) and wanted(t)
    ]
    names = _short([n.target for n in parameters])
    mapping = {
        node: editor.parameter(
            f"{site}.{name}", program.read(node.target).detach().to(program.home(node.target)).clone()
        )
        for node, name in zip(parameters, names, strict=True)
    }
    derived = [n for n in sorted(static) if n.op != "get_attr" and any(flow.reaches(p, n) for p in parameters)]
    return editor.clone(derived, mapping, role=HEAD)


def _short(names: list[str]) -> list[str]:
    """Names without the path that all of them share; two parts at least, where there are two."""
    paths = [n.split(".") for n in names]
    shared = 0
    while paths and all(len(p) > shared + 2 and p[shared] == paths[0][shared] for p in paths):
        shared += 1
    return [".".join(p[shared:]) for p in paths]


def norm_parameters(program: Program, readout: list[fx.Node]) -> Callable[[torch.Tensor], bool] | None:
    """Which parameters of a readout belong to its norm: vectors that come before the head; None where there are none.

    Args:
        readout: nodes from the last boundary to the answer.
    """
    flow = Dataflow(program.graph)
    heads = [i for i, n in enumerate(readout) if flow.carries_weight(n)]
    before = readout[: heads[-1]] if heads else readout
    vectors = {
        id(program.tensor(o.target))
        for n in before
        for o in _fetched(n)
        if isinstance(t := program.tensor(o.target), torch.nn.Parameter) and t.dim() == 1
    }
    return (lambda tensor: id(tensor) in vectors) if vectors else None


def _fetched(node: fx.Node) -> list[fx.Node]:
    """Tensors that a node reads, also through casts and sums of constants."""
    found, frontier = [], list(node.all_input_nodes)
    while frontier:
        operand = frontier.pop()
        if operand.op == "get_attr":
            found.append(operand)
        elif operand.op == "call_function" and all(o.op == "get_attr" for o in operand.all_input_nodes):
            frontier += operand.all_input_nodes
    return found


@dataclass
class Part:
    """A part of the last block that a head copies.

    Attributes:
        entry: the stream that it reads.
        loop: its nodes up to the end of the block, with the caches they use.
    """

    entry: fx.Node
    loop: Span


def last_part(program: Program, stack: Stack, head: str) -> Part | str:
    """What ``mlp`` or ``block`` copies, or why there is nothing to copy.

    The MLP is copied with what lies between it and the end of the block: its norm, the residual add, a norm after it.
    """
    block = stack.blocks[-1]
    if head == "block":
        entry = block.entry
    else:
        residual = block.residuals[-1]
        kinds = [b.kind for b in residual.branches]
        if len(kinds) != 1 or kinds[0] not in ("mlp", "moe"):
            return f"the last block ends in {' beside '.join(kinds)}, not in an MLP of its own"
        entry = resolve(residual.skip)
    loop = span_of(program.graph, entry, block.exit, cache_nodes(program))
    if loop.leaks:
        return f"`{loop.leaks[0].name}` of the last block is used elsewhere"
    if not loop.nodes or value(entry) is None:
        return "the last block has no nodes of its own"
    return Part(entry, loop)


def copied_view(editor: Editor, program: Program, site: str, part: Part, stream: fx.Node) -> fx.Node:
    """Insert a part of the last block on another stream, with parameters and cache slots of its own."""
    mapping = {part.entry: stream}
    mapping |= own_copies(editor, program, site, part.loop.nodes, lambda t: True)
    mapping |= editor.add_cache_slots(part.loop.caches)
    outputs = set(results(program.graph))
    for node in part.loop.nodes:  # the stream as its readers take it
        mapping |= {o: stream for o in node.all_input_nodes if o is not stream and resolve(o) is part.entry}
    editor.clone(part.loop.nodes, mapping, role=HEAD)
    editor.add_cache_outputs({n: mapping[n] for n in part.loop.nodes if n in outputs})
    return mapping[part.loop.exit]


def restricted_readout(
    editor: Editor, program: Program, readout: list[fx.Node], mapping: dict[fx.Node, fx.Node], count: int
) -> fx.Node:
    """Insert the readout for some rows of the head only; which ones lies in the buffer ``candidates``, ``[count]``.

    The rows are gathered once a call and shared by all exits.

    Args:
        readout: nodes from the last boundary to the answer, see :func:`restrictable`.
        mapping: their operands -> what they read here.
    """
    flow = Dataflow(program.graph)
    head = _head_of(flow, readout)
    rows = editor.buffer("candidates", torch.arange(count, device=traced(head).device))
    mapping = dict(mapping)
    for operand in head.args[1:3]:
        if isinstance(operand, fx.Node):
            mapping[operand] = _gathered(editor, mapping.get(operand, operand), rows)
    for node in readout:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: mapping.get(n, n))
        mapping[node] = editor.call(node.target, *args, **kwargs)
    return mapping[readout[-1]]


def _gathered(editor: Editor, tensor: fx.Node, rows: fx.Node) -> fx.Node:
    """Some rows of a tensor; the node of an earlier exit where there is one."""
    index_select = torch.ops.aten.index_select.default
    made = [u for u in tensor.users if u.target is index_select and u.args[2] is rows]
    return made[0] if made else editor.call(index_select, tensor, 0, rows)


_ROWWISE = {"to", "_to_copy", "mul", "div", "tanh", "alias", "clone", "contiguous", "detach"}


def restrictable(program: Program, readout: list[fx.Node], classes: int, count: int) -> str | None:
    """Why only some rows of the head cannot be computed, or None."""
    if not 1 < count < classes:
        return f"candidates is {count}, the head has {classes} rows"
    flow = Dataflow(program.graph)
    head = _head_of(flow, readout)
    if head is None:
        return "the answer is not made by one linear layer"
    after = readout[readout.index(head) + 1 :]
    if any(op_name(n) not in _ROWWISE or len([o for o in n.all_input_nodes if o in readout]) != 1 for n in after):
        return "what follows the head does not treat its rows alone"
    return None


def _head_of(flow: Dataflow, readout: list[fx.Node]) -> fx.Node | None:
    heads = [n for n in readout if flow.carries_weight(n)]
    last = heads[-1] if heads else None
    return last if last is not None and op_name(last) == "linear" and flow.is_static(last.args[1], 2) else None
