"""From what torch.export returns to the flat graph that passes work on.

The result has one placeholder per input tensor, one output tuple, original parameter names, no guards and no
metadata assertions (with them gone the graph runs under autocast exactly as the eager model does).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from hcx.rewrite.errors import TraceError
from hcx.rewrite.ir.aliases import mutated
from hcx.rewrite.ir.control import Cond, copy_graph
from hcx.rewrite.ir.graphs import rename
from hcx.rewrite.ir.mutation import functional
from hcx.rewrite.ir.tensors import fetch, set_tensor
from torch import fx

WRAPPER = "m"
"""Attribute of the tracing wrapper that holds the user's model."""

_ASSERTIONS = {
    "_assert_tensor_metadata",
    "_assert_scalar",
    "_assert_async",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
}


def flat_graph(exported: torch.export.ExportedProgram, input_names: list[str]) -> tuple[fx.Graph, torch.nn.Module]:
    """The flat graph and a module tree holding its parameters, buffers and constants.

    Args:
        exported: program of a wrapper that takes flat tensors and returns a tuple of tensors.
        input_names: one name for each flat input.
    """
    return _flat(exported, input_names)


def _flat(exported: torch.export.ExportedProgram, input_names: list[str]) -> tuple[fx.Graph, torch.nn.Module]:
    module = exported.module(check_guards=False)
    graph = module.graph
    graph.set_codegen(fx.graph.CodeGen())
    _inline_subgraphs(module, graph)
    _drop_assertions(graph)
    _take_branches(module, graph)
    _flatten_output(graph)
    functional(graph)
    state = _state(module)
    root = torch.nn.Module()
    names = _install(root, module, state)
    for node in graph.nodes:
        if node.op == "get_attr":
            node.target = names[node.target]
        _clean_meta(node)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    for node, name in zip(placeholders, input_names, strict=True):
        rename(graph, node, name)
    clean = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:  # a fresh graph: the old one belongs to the module of torch.export
        copied[node] = clean.node_copy(node, copied.__getitem__)
        if node.op == "get_attr":
            rename(clean, copied[node], node.target)
    clean.eliminate_dead_code()
    return clean, root


def strip_prefix(name: str) -> str:
    """Original fully qualified name of something below the tracing wrapper."""
    return "" if name == WRAPPER else name.removeprefix(WRAPPER + ".")


def _drop_assertions(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        name = getattr(node.target, "_opname", None) if node.op == "call_function" else None
        if name in _ASSERTIONS or (node.op == "call_module" and node.target == "_guards_fn"):
            graph.erase_node(node)


def _take_branches(module: torch.nn.Module, graph: fx.Graph) -> None:
    """The model's own ``torch.cond`` as :class:`~hcx.rewrite.ir.control.Cond`."""
    for node in list(graph.nodes):
        if node.target is not torch.ops.higher_order.cond:
            continue
        predicate, *fetched, operands = node.args
        bodies = []
        for source in fetched:
            inner = fetch(module, source.target)
            _inline_subgraphs(inner, inner.graph)
            body = copy_graph(inner.graph)
            _drop_assertions(body)
            _flatten_output(body)
            functional(body)
            if any(n.op not in ("placeholder", "call_function", "output") or mutated(n) for n in body.nodes) or any(
                n.target is torch.ops.higher_order.cond for n in body.nodes
            ):
                raise TraceError("a branch of torch.cond holds tensors, writes in place or branches again",
                                 where=node.name, hint="pass the tensors as operands, with one torch.cond")  # fmt: skip
            for inside in body.nodes:
                _clean_meta(inside)
            bodies.append(body)
        node.target, node.args = Cond(*bodies), (predicate, *operands)
        for source in fetched:
            graph.erase_node(source)


def _flatten_output(graph: fx.Graph) -> None:
    output = graph.output_node()
    flat: list[fx.Node] = []

    def collect(value):
        for item in value if isinstance(value, list | tuple) else (value,):
            collect(item) if isinstance(item, list | tuple) else flat.append(item)

    collect(output.args[0])
    output.args = (tuple(flat),)


def _state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor a graph may fetch, with tied tensors under each of their names."""
    found: dict[str, torch.Tensor] = {}
    found.update(module.named_parameters(remove_duplicate=False))
    found.update(module.named_buffers(remove_duplicate=False))
    for node in module.graph.nodes:
        if node.op == "get_attr" and node.target not in found:
            found[node.target] = fetch(module, node.target)
    return found


def _install(root: torch.nn.Module, module: torch.nn.Module, state: dict[str, torch.Tensor]) -> dict[str, str]:
    """Copy the tensors into a plain module tree under their original names; returns old name -> new name."""
    transient = {
        f"{prefix}.{n}".lstrip(".")
        for prefix, m in module.named_modules(remove_duplicate=False)
        for n in m._non_persistent_buffers_set
    }
    buffers = dict(module.named_buffers(remove_duplicate=False))
    names: dict[str, str] = {}
    for old, tensor in state.items():
        new = strip_prefix(old)
        if new == old and not old.startswith(WRAPPER + "."):
            new = f"hcx_constants.{old.replace('.', '_')}"
        names[old] = new
        persistent = old in buffers and old not in transient and not new.startswith("hcx_constants.")
        set_tensor(root, new, tensor, persistent=persistent)
    return names


def _clean_meta(node: fx.Node) -> None:
    stack = node.meta.get("nn_module_stack") or {}
    clean = {}
    for key, (name, kind) in stack.items():
        kind = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
        key = key.replace("L__self__" + WRAPPER, "L__self__", 1).replace("L__self__.", "L__self__", 1)
        if name or clean:
            clean[key] = (strip_prefix(name), kind)
    meta = {k: node.meta[k] for k in ("val", "stack_trace", "custom") if k in node.meta}
    if clean:
        meta["nn_module_stack"] = clean
    node.meta.clear()
    node.meta.update(meta)


def _inline_subgraphs(module: torch.nn.Module, graph: fx.Graph) -> None:
    """Inline the bodies that torch.export wraps around ``no_grad`` and ``autocast`` regions.

    A ``no_grad`` body keeps its meaning through ``detach`` on its results.
    """
    for node in list(graph.nodes):
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name == "wrap_with_set_grad_enabled":
            enabled, body, operands = node.args[0], node.args[1], node.args[2:]
        elif name == "wrap_with_autocast":
            if node.args[2] and node.args[1] != torch.float32:
                stack = list((node.meta.get("nn_module_stack") or {}).values())
                raise TraceError(
                    f"the model switches autocast to {node.args[1]} on inside its forward",
                    where=stack[-1][0] if stack else WRAPPER,
                    hint="cast the tensors there instead",
                )
            enabled, body, operands = True, node.args[4], node.args[5:]
        else:
            continue
        results = _inline(
            module, graph, node, body, operands, {"autocast": "off"} if name == "wrap_with_autocast" else {}
        )
        if not enabled:
            with graph.inserting_before(node):
                results = [_detached(graph, r) for r in results]
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
        if isinstance(body, fx.Node) and not body.users:
            graph.erase_node(body)


def _detached(graph: fx.Graph, node: fx.Node) -> fx.Node:
    new = graph.call_function(torch.ops.aten.detach.default, (node,))
    new.meta = dict(node.meta)
    return new


def _inline(
    module, graph: fx.Graph, site: fx.Node, body: fx.Node, operands: Iterable[Any], tag: dict[str, str]
) -> list[fx.Node]:
    inner = fetch(module, body.target)
    _inline_subgraphs(inner, inner.graph)
    values: dict[fx.Node, fx.Node] = {}
    operands = list(operands)
    with graph.inserting_before(site):
        for node in inner.graph.nodes:
            if node.op == "placeholder":
                values[node] = operands.pop(0)
            elif node.op == "output":
                results = node.args[0]
            else:
                values[node] = graph.node_copy(node, values.__getitem__)
                if node.op == "get_attr":
                    values[node].target = f"{body.target}.{node.target}"
                elif tag:
                    custom = values[node].meta.get("custom") or {}
                    values[node].meta["custom"] = {**custom, "hcx": {**custom.get("hcx", {}), **tag}}
    results = results if isinstance(results, list | tuple) else [results]
    return [values[r] for r in results]
