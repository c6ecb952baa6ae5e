"""Slots of the cache: taken out, and added."""

from __future__ import annotations

from hcx.rewrite.ir.dataflow import results_of
from hcx.rewrite.ir.graphs import rename
from hcx.rewrite.ir.signature import CACHE, InputSpec
from hcx.rewrite.ir.structure import list_items, renumber, tensor_indices, without_items
from torch import fx

from .inserting import Inserter


def drop_cache_slots(editor: Inserter, inputs: set[fx.Node]) -> None:
    """Take whole slots out of the cache, inputs and outputs; later slots move up.

    Args:
        inputs: cache placeholders of the slots. What reads them must be dead by then but for the outputs.
    """
    signature, structure = editor.program.signature, editor.program.signature.outputs
    placeholders = [n for n in editor.graph.nodes if n.op == "placeholder"]
    gone = {placeholders.index(n) for n in inputs}
    slots = {signature.inputs[i].name.split(".")[1] for i in gone}
    results = {i for i, n in enumerate(structure.names) if n.startswith("present.") and n.split(".")[1] in slots}
    output = editor.graph.output_node()
    output.args = (tuple(n for i, n in enumerate(results_of(editor.graph)) if i not in results),)
    for argument in signature.arguments:
        argument.spec = without_items(argument.spec, gone)
    structure.spec = without_items(structure.spec, results)
    kept = [i for i in range(len(structure.names)) if i not in results]
    names = {structure.names[i]: _moved_up(structure.names[i], slots) for i in kept}
    before = {now: old for old, now in editor.moved.items()}
    editor.moved = {before.get(n, n): new for n, new in names.items()}
    structure.names[:] = names.values()
    structure.spec = renumber(structure.spec, {old: new for new, old in enumerate(kept)})
    left = [i for i in range(len(signature.inputs)) if i not in gone]
    for argument in signature.arguments:
        argument.spec = renumber(argument.spec, {old: new for new, old in enumerate(left)})
    editor.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    specs = [signature.inputs[i] for i in left]
    for index in sorted(gone, reverse=True):
        editor.graph.erase_node(placeholders[index])
    for number, (spec, index) in enumerate(zip(specs, left, strict=True)):
        name = _moved_up(spec.name, slots)
        if name != spec.name:
            specs[number] = InputSpec(name, spec.dtype, spec.shape, spec.fill)
            rename(editor.graph, placeholders[index], name)
            placeholders[index].meta["hcx_name"] = name
    signature.inputs[:] = specs
    editor.program.examples[:] = [[t for i, t in enumerate(flat) if i not in gone] for flat in editor.program.examples]


def add_cache_slots(editor: Inserter, inputs: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Extend the cache by copies of the slots that some placeholders belong to.

    Args:
        inputs: cache placeholders of whole slots (a layer's key and value).

    Returns:
        old placeholder -> new placeholder.
    """
    signature = editor.program.signature
    placeholders = [n for n in editor.graph.nodes if n.op == "placeholder"]
    indices = {placeholders.index(n): n for n in inputs}
    mapping: dict[fx.Node, fx.Node] = {}
    last = placeholders[-1]
    for argument in signature.arguments:
        for slot, siblings in list_items(argument.spec, set(indices)):
            number = len(siblings)
            renumbered: dict[int, int] = {}
            for index in tensor_indices(slot):
                old = signature.inputs[index]
                node = _new_placeholder(
                    editor, last, placeholders[index], f"{CACHE}.{number}.{old.name.split('.', 2)[2]}"
                )
                renumbered[index] = len(signature.inputs)
                signature.inputs.append(InputSpec(node.meta["hcx_name"], old.dtype, old.shape, old.fill))
                mapping[placeholders[index]] = last = node
            siblings.append(renumber(slot, renumbered))
    return mapping


def _new_placeholder(editor: Inserter, last: fx.Node, like: fx.Node, name: str) -> fx.Node:
    with editor.graph.inserting_before(last.next):
        node = editor.graph.placeholder(name.replace(".", "_"))
    rename(editor.graph, node, name)
    node.meta = {"val": like.meta["val"], "hcx_name": name}
    return node


def add_cache_outputs(editor: Inserter, outputs: dict[fx.Node, fx.Node]) -> None:
    """Return new cache slots beside existing ones.

    Args:
        outputs: for whole slots: node that is an output now -> node of the new slot.
    """
    structure = editor.program.signature.outputs
    output = editor.graph.output_node()
    flat = list(results_of(editor.graph))
    count = len(structure.names)
    wanted = {i for i, n in enumerate(flat[:count]) if n in outputs and structure.names[i].startswith("present.")}
    added: list[fx.Node] = []
    for slot, siblings in list_items(structure.spec, wanted):
        number = len(siblings)
        renumbered: dict[int, int] = {}
        for index in tensor_indices(slot):
            renumbered[index] = len(structure.names)
            structure.names.append(f"present.{number}.{structure.names[index].split('.', 2)[2]}")
            added.append(outputs[flat[index]])
        siblings.append(renumber(slot, renumbered))
    output.args = (tuple([*flat[:count], *added, *flat[count:]]),)


def _moved_up(name: str, gone: set[str]) -> str:
    """The name of a cache tensor once some slots before its own are gone."""
    head, number, *rest = [*name.split("."), "", ""][: max(2, name.count(".") + 1)]
    if head not in (CACHE, "present") or not number.isdigit():
        return name
    return ".".join([head, str(int(number) - sum(int(g) < int(number) for g in gone)), *rest])
