"""Small work on plain graphs: dropping, renaming, ordering nodes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, cast

from hcx.rewrite.errors import PlanError
from torch import fx

from .control import Cond, Control, change_bodies
from .dataflow import results_of


def is_impure(node: fx.Node) -> bool:
    """Only placeholders and the output must stay; random ops and mutation are never dead while used."""
    return node.op in ("placeholder", "output") or (node.op == "call_function" and is_mutation(node))


def is_mutation(node: fx.Node) -> bool:
    """Whether an op writes to one of its arguments."""
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def rename(graph: fx.Graph, node: fx.Node, name: str) -> None:
    """Give a node a readable unique name."""
    node.name = graph._graph_namespace.create_name(name.replace(".", "_"), None)
    if node.op == "placeholder":
        node.target = node.name


def prune(graph: fx.Graph, is_impure: Callable[[fx.Node], bool]) -> None:
    """Leave out results of branches that nobody reads, and what is computed for them alone."""
    again = True
    while again:
        graph.eliminate_dead_code(is_impure_node=is_impure)
        again = any([_prune(n, is_impure) for n in graph.nodes if isinstance(n.target, Cond)])


def _prune(node: fx.Node, is_impure: Callable[[fx.Node], bool]) -> bool:
    getitems = list(node.users)
    if any(u.target is not operator.getitem for u in getitems):
        return False
    before = cast("Control", node.target)
    numbers = {user: cast("int", user.args[1]) for user in getitems}
    used = sorted(set(numbers.values()))
    count = len(results_of(before.bodies[0]))

    def shorten(body: fx.Graph) -> None:
        output = body.output_node()
        results = results_of(body)
        output.args = (tuple(results[i] for i in used),)
        prune(body, is_impure)

    target = before.changed(shorten) if len(used) < count else before
    places = [[n for n in b.nodes if n.op == "placeholder"] for b in target.bodies]
    idle = [i for i, pair in enumerate(zip(*places, strict=True)) if not any(p.users for p in pair)]
    if len(used) == count and not idle:
        return False
    if idle:

        def narrow(body: fx.Graph) -> None:
            inputs = [n for n in body.nodes if n.op == "placeholder"]
            for index in idle:
                body.erase_node(inputs[index])

        target = target.changed(narrow)
        node.args = (node.args[0], *(a for i, a in enumerate(node.args[1:]) if i not in set(idle)))
    node.target = target
    for user in getitems:
        user.args = (node, used.index(numbers[user]))
    if isinstance(node.meta.get("val"), tuple):
        node.meta["val"] = tuple(node.meta["val"][i] for i in used)
    return True


def drop_values(graph: fx.Graph) -> None:
    """Forget the shapes and dtypes of all nodes."""
    change_bodies(graph, drop_values)
    for node in graph.nodes:
        node.meta.pop("val", None)


def replace_constants(graph: fx.Graph, change: Callable[[Any], Any]) -> None:
    """Apply a function to every argument of every node that is no container."""

    def walk(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(walk(v) for v in value)
        if isinstance(value, dict):
            return {k: walk(v) for k, v in value.items()}
        return change(value)

    change_bodies(graph, lambda body: replace_constants(body, change))
    for node in graph.nodes:
        node.args, node.kwargs = walk(node.args), walk(node.kwargs)


def sort_graph(graph: fx.Graph) -> None:
    """Put every node after its operands, moving as little as possible: redirected uses may point forward."""
    done: set[fx.Node] = set()
    order: list[fx.Node] = []
    for node in list(graph.nodes):
        pending, open_nodes = [node], {node}
        while pending:
            top = pending[-1]
            missing = [o for o in top.all_input_nodes if o not in done]
            if not missing:
                pending.pop()
                open_nodes.discard(top)
                if top not in done:
                    done.add(top)
                    order.append(top)
            elif any(o in open_nodes for o in missing):
                raise PlanError(
                    f"a pass made `{top.name}` depend on itself", where=top.name, hint="see Editor.redirect"
                )
            else:
                pending.append(missing[0])
                open_nodes.add(missing[0])
    output = graph.output_node()
    for node in order:
        if node is not output:
            output.prepend(node)
