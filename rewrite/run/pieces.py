"""One Program cut into several that run one after the other, each with the tensors, inputs and caches it needs.

A piece takes what earlier pieces have made from the data as inputs of its own. What depends on the call's bookkeeping
alone (masks, positions, the sizes of caches) is computed again in each piece that reads it, and where a size was read
from a value of another piece it is read from one of the piece's own inputs: its cache may have another length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from hcx.rewrite.errors import PlanError
from hcx.rewrite.ir.aliases import mutated
from hcx.rewrite.ir.belongings import Belongings
from hcx.rewrite.ir.control import copy_graph
from hcx.rewrite.ir.dataflow import op_name, operand_at, tensor_of, value
from hcx.rewrite.ir.graphs import rename
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.signature import Argument, CallSignature, Fill, InputSpec
from hcx.rewrite.ir.structure import Structure, tensor_indices
from hcx.rewrite.ir.tensors import set_tensor
from hcx.rewrite.ir.values import propagate
from torch import fx

from .reading import reader

OWN = "value."
"""Prefix of values that cross a cut and that nobody has named."""


@dataclass
class _Stage:
    """What one piece computes.

    Attributes:
        wanted: output name -> node.
        own: its calls; ``constants`` and ``inputs``: tensors and inputs of the whole that it reads.
        carried: values of earlier pieces that it takes.
        sizes: calls that read a size of something that may lie elsewhere.
    """

    wanted: dict[str, fx.Node]
    own: set[fx.Node] = field(default_factory=set)
    constants: set[fx.Node] = field(default_factory=set)
    inputs: set[fx.Node] = field(default_factory=set)
    carried: list[fx.Node] = field(default_factory=list)
    sizes: set[fx.Node] = field(default_factory=set)


def cut(program: Program, graph: fx.Graph, stages: Sequence[Mapping[str, str]]) -> list[Program]:
    """Programs over the same tensors that together compute what a graph computes.

    Args:
        program: whose tensors, call and examples the graph has.
        graph: of the Program, or a changed copy of it; it is not changed.
        stages: for each piece the values it gives, output name -> name of the node. What a piece needs of earlier ones
            is added to these, under the name they give it or as ``value.NODE``.

    Returns:
        one Program a stage. An input that is an output of an earlier piece has its name; the others are those of the
        whole. Outputs are a dict, in which the cache (where a piece has a part of it) keeps its kind.

    Raises:
        PlanError: values are changed in place, or a size is read of a value that lies in another piece.
    """
    whole = Program.build(
        copy_graph(graph),
        program.tree,
        program.signature,
        examples=program.examples,
        belongings=Belongings(stored=program.stored),
    )
    if writes := [n for n in whole.graph.nodes if mutated(n)]:
        raise PlanError(f"`{writes[0].name}` changes a value in place", where=writes[0].name,
                        hint="write that line of the model without the in-place op")  # fmt: skip
    propagate(whole)  # so that equal sizes are equal symbols
    found = _stages(whole, stages)
    names = {node: name for stage in found for name, node in stage.wanted.items()}
    for stage in found:
        for node in stage.carried:
            names.setdefault(node, OWN + node.name)
    for stage in found:  # an earlier piece gives what a later one takes
        for node in stage.carried:
            home = next(s for s in found if node in s.own)
            if node not in home.wanted.values():
                home.wanted[names[node]] = node
    examples = _examples(whole, found)
    dims = _dims(whole, [n for n in whole.graph.nodes if n.op == "placeholder"])
    for stage in found:
        _name_sizes(stage, names, dims)
    return [_built(program, whole, stage, names, examples, dims) for stage in found]


def _bookkeeping(whole: Program) -> set[fx.Node]:
    """Values that no input with data reaches: weights, masks, positions, sizes."""
    placeholders = [n for n in whole.graph.nodes if n.op == "placeholder"]
    data = {n for n, spec in zip(placeholders, whole.inputs, strict=True) if spec.fill in (None, Fill.EMPTY)}
    free: set[fx.Node] = set()
    for node in whole.graph.nodes:
        if node.op == "output" or node in data:
            continue
        if is_size(node) or all(o in free for o in node.all_input_nodes):
            free.add(node)
    return free


def is_size(node: fx.Node) -> bool:
    """Whether a node reads one size of a tensor."""
    return op_name(node) == "sym_size" and len(node.args) == 2


def _stages(whole: Program, stages: Sequence[Mapping[str, str]]) -> list[_Stage]:
    by_name = {n.name: n for n in whole.graph.nodes}
    free, made, found = _bookkeeping(whole), set(), []
    for wanted in stages:
        stage = _Stage({name: by_name[node] for name, node in wanted.items()})
        pending, carried = list(stage.wanted.values()), set()
        while pending:
            node = pending.pop()
            if node in made and node not in free and value(node) is not None and node not in stage.wanted.values():
                carried.add(node)
            elif node.op == "placeholder":
                stage.inputs.add(node)
            elif node.op == "get_attr":
                stage.constants.add(node)
            elif node not in stage.own:
                stage.own.add(node)
                if is_size(node):
                    stage.sizes.add(node)
                else:
                    pending += node.all_input_nodes
        stage.carried = sorted(carried)
        made |= {n for n in stage.own if n not in free}
        found.append(stage)
    for stage in found:
        _resize(whole, stage)
    return found


def _resize(whole: Program, stage: _Stage) -> None:
    """Sizes whose tensor the piece does not have, and that no other input tells, make an input of that tensor."""
    for node in sorted(stage.sizes):
        if node.args[0] in stage.own | stage.constants or _teller(stage, node) is not None:
            continue
        source = operand_at(node)
        if source.op != "placeholder":
            raise PlanError(f"`{node.name}` is the size of a value that lies in another piece", where=node.name)
        stage.inputs.add(source)


def _teller(stage: _Stage, size: fx.Node) -> tuple[fx.Node, int] | None:
    """An input of the piece and its axis that has a size; the one that was asked where the piece has it."""
    tensor, axis = cast("tuple[fx.Node, int]", size.args)
    if tensor in stage.inputs or tensor in stage.carried:
        return tensor, axis
    wanted = tensor_of(tensor).shape[axis]
    for candidate in (*stage.carried, *sorted(stage.inputs)):
        for other, found in enumerate(tensor_of(candidate).shape):
            if isinstance(found, torch.SymInt) and isinstance(wanted, torch.SymInt) and _same(found, wanted):
                return candidate, other
    return None


def _same(one: torch.SymInt, other: torch.SymInt) -> bool:
    return bool(one.node.expr == other.node.expr)


def _examples(whole: Program, found: list[_Stage]) -> list[dict[fx.Node, torch.Tensor]]:
    """Values that cross, for each example of the Program."""
    nodes = list(dict.fromkeys(n for stage in found for n in stage.carried))
    if any(t.is_meta for _, t in whole.named_tensors()):
        return []
    read = reader(whole, whole.graph, [n.name for n in nodes])
    return [dict(zip(nodes, read(whole.signature.complete(e)), strict=True)) for e in whole.examples[:1]]


def _built(
    program: Program,
    whole: Program,
    stage: _Stage,
    names: dict[fx.Node, str],
    examples: list[dict[fx.Node, torch.Tensor]],
    dims: dict[Any, str],
) -> Program:
    placeholders = [n for n in whole.graph.nodes if n.op == "placeholder"]
    used = [i for i, n in enumerate(placeholders) if n in stage.inputs]
    inputs = [InputSpec(names[n], tensor_of(n).dtype, _shape(n, dims), None) for n in stage.carried]
    inputs += [whole.inputs[i] for i in used]
    signature = CallSignature(
        program.signature.model,
        _arguments(program.signature, stage, names, used),
        dict(program.signature.others),
        inputs,
        _outputs(program, stage),
        list(program.signature.notes),
        dict(program.signature.limits),
    )
    graph, root = _graph(
        whole, stage, [names[n] for n in stage.carried], [whole.inputs[i].name for i in used], signature
    )
    flats = []
    for example, values in zip(whole.examples, examples, strict=False):
        complete = whole.signature.complete(example)
        flats.append([*(values[n].contiguous() for n in stage.carried), *(complete[i] for i in used)])
    piece = type(program).build(graph, root, signature, examples=flats, training=program.training)
    piece.belongings = program.belongings.of_tensors({name for name, _ in piece.named_tensors()})
    return piece


def _dims(whole: Program, placeholders: list[fx.Node]) -> dict[Any, str]:
    """Size of an input as an expression -> how the signature names it."""
    found: dict[Any, str] = {}
    for node, spec in zip(placeholders, whole.inputs, strict=True):
        for size, dim in zip(tensor_of(node).shape, spec.shape, strict=True):
            if isinstance(size, torch.SymInt) and isinstance(dim, str):
                found.setdefault(size.node.expr, dim)
    return found


def _shape(node: fx.Node, dims: dict[Any, str]) -> tuple[int | str, ...]:
    result: list[int | str] = []
    for size in tensor_of(node).shape:
        if isinstance(size, int):
            result.append(size)
        elif size.node.expr.is_Integer:
            result.append(int(size.node.expr))
        else:
            result.append(dims[size.node.expr])
    return tuple(result)


def _name_sizes(stage: _Stage, names: dict[fx.Node, str], dims: dict[Any, str]) -> None:
    """Name the sizes of values that cross and that no input has: an encoder of speech makes one frame of many samples."""
    for node in stage.carried:
        for axis, size in enumerate(tensor_of(node).shape):
            if isinstance(size, torch.SymInt) and not size.node.expr.is_Integer:
                dims.setdefault(size.node.expr, f"{names[node].replace('.', '_')}_{axis}")


def _arguments(signature: CallSignature, stage: _Stage, names: dict[fx.Node, str], used: list[int]) -> list[Argument]:
    """Values of earlier pieces by position, then what is left of the arguments of the whole."""
    first = len(stage.carried)
    numbers = {old: first + new for new, old in enumerate(used)}
    result = [Argument(names[n], i, {"kind": "tensor", "index": i}, fill=False) for i, n in enumerate(stage.carried)]
    for argument in signature.arguments:
        spec = subset(argument.spec, numbers)
        if spec is not None:
            result.append(
                Argument(
                    argument.name, argument.position if not first else None, spec, argument.fill, argument.left_out
                )
            )
    return result


def subset(spec: dict[str, Any], numbers: dict[int, int]) -> dict[str, Any] | None:
    """A structure description with some of its tensors, renumbered; None where it had tensors and has none left."""
    before = list(tensor_indices(spec))
    if not before:
        return spec
    if not set(before) & set(numbers):
        return None
    if "index" in spec:
        return {**spec, "index": numbers[spec["index"]]}
    kept = [(i, s) for i, item in enumerate(spec["items"]) if (s := subset(item, numbers)) is not None]
    new = {**spec, "items": [s for _, s in kept]}
    for key in ("keys", "fields"):
        if key in spec:
            new[key] = [spec[key][i] for i, _ in kept]
    return new


def _outputs(program: Program, stage: _Stage) -> Structure:
    """A dict: values by name, and parts of the whole's output under their field."""
    structure = program.signature.outputs
    names = list(stage.wanted)
    numbers = {structure.names.index(n): i for i, n in enumerate(names) if n in structure.names}
    keys = [n for n in names if n not in structure.names]
    items = [{"kind": "tensor", "index": names.index(n)} for n in keys]
    fields = structure.spec.get("fields", structure.spec.get("keys"))
    if fields is None:
        tensors = [n for n in names if n in structure.names]
        keys += tensors
        items += [{"kind": "tensor", "index": names.index(n)} for n in tensors]
    for key, item in zip(fields or (), structure.spec.get("items", ()), strict=False):
        part = subset(item, numbers)
        if part is not None and list(tensor_indices(part)):
            keys.append(key)
            items.append(part)
    return Structure({"kind": "dict", "keys": keys, "items": items}, names, dict(structure.templates))


def _graph(
    whole: Program, stage: _Stage, carried: list[str], used: list[str], signature: CallSignature
) -> tuple[fx.Graph, torch.nn.Module]:
    graph, root = fx.Graph(), torch.nn.Module()
    mapping: dict[fx.Node, fx.Node] = {}
    placeholders = sorted(stage.inputs)
    for node, name in zip((*stage.carried, *placeholders), (*carried, *used), strict=True):
        mapping[node] = new = graph.placeholder(name.replace(".", "_"))
        rename(graph, new, name)
        new.meta = {"val": node.meta["val"], "hcx_name": name}
    persistent = set(whole.state_dict())
    for node in whole.graph.nodes:
        if node in stage.constants:
            set_tensor(root, node.target, whole.tensor(node.target), persistent=node.target in persistent)
        elif node not in stage.own:
            continue
        teller = _teller(stage, node) if node in stage.sizes and node.args[0] not in mapping else None
        if teller is not None:
            mapping[node] = graph.call_function(node.target, (mapping[teller[0]], teller[1]))
        else:
            mapping[node] = graph.node_copy(node, mapping.__getitem__)
        mapping[node].meta = dict(node.meta)
    graph.output(tuple(mapping[n] for n in stage.wanted.values()))
    return graph, root
