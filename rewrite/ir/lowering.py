"""Control flow as torch's own operators, for exporters and compilers."""

from __future__ import annotations

from typing import cast

import torch
from torch import fx

from .aliases import Aliases
from .control import Control, While, copy_graph
from .dataflow import results_of


def as_operators(graph: fx.Graph, root: torch.nn.Module) -> torch.nn.Module:
    """Write control flow as ``torch.ops.higher_order`` calls on submodules, in place.

    Returns:
        the module tree to run the graph on: ``root``, or one over the same tensors that has the bodies too.
    """
    nodes = [n for n in graph.nodes if isinstance(n.target, Control)]
    if not nodes:
        return root
    holder = torch.nn.Module()
    for key in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
        holder.__dict__[key] = root.__dict__[key]
    name = "control_flow"
    while name in root._modules or name in root._parameters or name in root._buffers:
        name += "_"
    holder._modules = {**root._modules, name: _written(graph, nodes, name)}
    return holder


def _give_new_tensors(body: fx.Graph) -> None:
    """Clone results that share memory with an operand or another result: torch's operators must not give those."""
    aliases, seen, output = Aliases(body), set(), body.output_node()
    results = list(results_of(body))
    for index, result in enumerate(results):
        root = aliases.root(result)
        if root.op == "placeholder" or root in seen:
            with body.inserting_before(output):
                results[index] = body.call_function(torch.ops.aten.clone.default, (result,))
            results[index].meta = dict(result.meta)
        seen.add(root)
    output.args = (tuple(results),)


def _written(graph: fx.Graph, nodes: list[fx.Node], prefix: str) -> torch.nn.Module:
    home = torch.nn.Module()
    for node in nodes:
        target = cast("Control", node.target)
        fetched = []
        for part, body in zip(target.parts, target.bodies, strict=True):
            body = copy_graph(body)
            _give_new_tensors(body)
            inner = [n for n in body.nodes if isinstance(n.target, Control)]
            own = torch.nn.Module()
            if inner:
                own.add_module("control_flow", _written(body, inner, "control_flow"))
            if isinstance(target, While) and part == "condition":  # torch takes a tensor there, not a tuple
                body.output_node().args = (results_of(body)[0],)
            label = f"{node.name}_{part}"
            home.add_module(label, fx.GraphModule(own, body, class_name=part.capitalize()))
            with graph.inserting_before(node):
                fetched.append(graph.create_node("get_attr", f"{prefix}.{label}", name=label))
        node.target, node.args = target.hop(fetched, node.args)
    return home
