"""A graph as JSON and back: the stored form, and the text that goldens and diffs compare.

Only targets of an allowed list resolve, so a file cannot name arbitrary Python.
"""

from __future__ import annotations

import importlib
import keyword
import math
import operator
from typing import Any

import torch
from hcx.rewrite.errors import ArtefactError
from torch import fx

from .control import KINDS, Control, While, check_form
from .dataflow import schema_of
from .tags import Part, hcx_tag, part_before, set_tag

_PYTHON = {
    f"operator.{n}": getattr(operator, n)
    for n in (
        "add",
        "sub",
        "mul",
        "floordiv",
        "truediv",
        "mod",
        "neg",
        "pow",
        "getitem",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "and_",
        "or_",
    )
}
_PYTHON |= {f"math.{n}": getattr(math, n) for n in ("floor", "ceil", "trunc", "sqrt")}
_PYTHON |= {
    f"torch.{n}": getattr(torch, n)
    for n in ("sym_max", "sym_min", "sym_float", "sym_int", "sym_not", "sym_ite", "sym_sum", "sym_sqrt")
    if hasattr(torch, n)
}
_NAMES = {function: name for name, function in _PYTHON.items()}
_NAMESPACES = {"aten", "prims", "hcx"}
_ELSEWHERE = {"transformers.grouped_mm_fallback": "transformers.integrations.moe"}
"""Ops of libraries that hcx itself knows -> the module that registers them."""
_REFUSED = {"aten.from_file", "aten.set_", "aten.resize_", "aten.set_data"}


def allow_ops(namespace: str) -> None:
    """Let graph files use the custom ops of a namespace that is already registered with torch.

    The package that owns the ops must be imported first; hcx never imports a package because a file names it. The one
    op of Transformers that its mixtures of experts use by default is known to hcx.
    """
    _NAMESPACES.add(namespace)


def target_name(target: Any) -> str:
    """Stored name of a call target.

    Raises:
        ArtefactError: a target that could not be read back.
    """
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target.overloadpacket.__name__}.{target._overloadname}"
    if isinstance(target, Control):
        return f"higher_order.{target.kind}"
    if target in _NAMES:
        return _NAMES[target]
    raise ArtefactError(
        f"the graph calls {target!r}, which cannot be stored",
        where=str(target),
        hint="use ATen or registered custom ops",
    )


def resolve_target(name: str) -> Any:
    """The function behind a stored name.

    Raises:
        ArtefactError: a name outside the allowed list, or an op that this torch does not have.
    """
    if name in _PYTHON:
        return _PYTHON[name]
    parts = name.split(".")
    if len(parts) != 3 or not all(p.isidentifier() for p in parts) or ".".join(parts[:2]) in _REFUSED:
        raise ArtefactError(f"the graph file names `{name}`, which is not an allowed target", where=name)
    home = _ELSEWHERE.get(".".join(parts[:2]))
    if home is not None:
        _register(home, name)
    elif parts[0] not in _NAMESPACES:
        raise ArtefactError(
            f"the graph file uses the op `{name}` of the namespace `{parts[0]}`, which is not allowed",
            where=name,
            hint=f"if you trust it: import the package that registers it, then hcx.rewrite.allow_ops({parts[0]!r})",
        )
    packet = getattr(getattr(torch.ops, parts[0]), parts[1], None)
    overload = getattr(packet, parts[2], None) if isinstance(packet, torch._ops.OpOverloadPacket) else None
    if not isinstance(overload, torch._ops.OpOverload):
        raise ArtefactError(f"this torch ({torch.__version__}) has no op `{name}`", where=name)
    return overload


def _register(module: str, name: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise ArtefactError(
            f"the graph file uses the op `{name}` of {package}, which cannot be imported: {error}",
            where=name,
            hint=f"pip install {package}",
        ) from error


def to_json(graph: fx.Graph) -> dict[str, Any]:
    """Nodes in order, with each distinct module stack stored once."""
    stacks: dict[tuple[Any, ...], int] = {}
    nodes = []
    for node in graph.nodes:
        entry: dict[str, Any] = {"name": node.name, "op": node.op}
        if node.op == "call_function":
            entry["target"] = target_name(node.target)
            entry |= _bodies(node.target)
        elif node.op == "get_attr":
            entry["target"] = node.target
        elif node.op not in ("placeholder", "output"):
            raise ArtefactError(f"a graph with {node.op} nodes cannot be stored", where=node.name)
        if node.args:
            entry["args"] = [_encode(a) for a in node.args]
        if node.kwargs:
            entry["kwargs"] = {k: _encode(v) for k, v in node.kwargs.items()}
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor):
            entry["dtype"] = str(val.dtype).removeprefix("torch.")
            entry["shape"] = [s if isinstance(s, int) else str(s) for s in val.shape]
        elif "shape" in node.meta:
            entry["dtype"], entry["shape"] = node.meta["dtype"], node.meta["shape"]
        stack = tuple((k, *v) for k, v in (node.meta.get("nn_module_stack") or {}).items())
        if stack:
            entry["stack"] = stacks.setdefault(stack, len(stacks))
        if tag := hcx_tag(node):
            entry["hcx"] = dict(tag)
            entry |= {"part": tag.part.value} if tag.part is not None else {}
        entry |= {key: node.meta[key] for key in ("taps", "modes", "eval_only") if node.meta.get(key)}
        nodes.append(entry)
    return {"stacks": [[list(level) for level in stack] for stack in stacks], "nodes": nodes}


def _bodies(target: Any) -> dict[str, Any]:
    """What is stored of control flow beside its name: the bodies, as graphs in the graph."""
    if not isinstance(target, Control):
        return {}
    more = {"carried": target.carried} if isinstance(target, While) else {}
    return {"bodies": [to_json(g) for g in target.bodies], **more}


def _control(entry: dict[str, Any]) -> Control:
    """The target behind :func:`_bodies`; bodies fetch no tensors."""
    bodies = [from_json(data, set()) for data in entry["bodies"]]
    kind = KINDS[entry["target"]]
    if len(bodies) != len(kind.parts):
        raise ArtefactError(f"`{entry['name']}` has {len(bodies)} bodies, not {len(kind.parts)}", where="graph.json")
    return While(*bodies, carried=int(entry["carried"])) if kind is While else kind(*bodies)


def from_json(data: dict[str, Any], tensors: set[str]) -> fx.Graph:
    """The graph behind :func:`to_json`.

    Args:
        tensors: names that ``get_attr`` may fetch.

    Raises:
        ArtefactError: the data is damaged or asks for something that is not allowed.
    """
    graph = fx.Graph()
    named: dict[str, fx.Node] = {}
    try:
        stacks = [{k: (name, kind) for k, name, kind in stack} for stack in data["stacks"]]
        for entry in data["nodes"]:
            node = _node(graph, entry, named, tensors)
            if node.op != "output":
                node.name = entry["name"]
                graph._graph_namespace.create_name(entry["name"], None)
            named[entry["name"]] = node
            if "stack" in entry:
                node.meta["nn_module_stack"] = dict(stacks[entry["stack"]])
            if "hcx" in entry:
                tag = dict(entry["hcx"])
                set_tag(node, tag, Part(entry["part"]) if "part" in entry else part_before(tag))
            for key in ("taps", "shape", "dtype", "modes", "eval_only"):
                if key in entry:
                    node.meta[key] = entry[key]
            _check_modes(node)
        graph.lint()
    except ArtefactError:
        raise
    except (
        Exception
    ) as error:  # a foreign file: what it lacks or holds too much of shows as any type, here and in torch
        raise ArtefactError(
            f"the graph file is damaged: {type(error).__name__}: {error}", where="graph.json"
        ) from error
    return graph


def _check_modes(node: fx.Node) -> None:
    """What :mod:`hcx.rewrite.tracing.modes` keeps on a node has the form that it gives it."""
    modes = node.meta.get("modes", {})
    known = {a.name for a in schema_of(node).arguments} if node.op == "call_function" and modes else set()
    for name, values in modes.items():
        numbers = isinstance(values, list) and len(values) == 2 and all(isinstance(v, bool | float) for v in values)
        if name not in known or not numbers:
            raise ArtefactError(f"the graph file has `{name}` as a mode of {node.name}", where="graph.json")
    if not isinstance(node.meta.get("eval_only", ""), str):
        raise ArtefactError("the graph file has a reason that is no text", where="graph.json")


def _node(graph: fx.Graph, entry: dict[str, Any], named: dict[str, fx.Node], tensors: set[str]) -> fx.Node:
    args = tuple(_decode(a, named) for a in entry.get("args", ()))
    kwargs = {k: _decode(v, named) for k, v in entry.get("kwargs", {}).items()}
    for name in (entry["name"], *kwargs):  # both are written into generated source
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            raise ArtefactError(f"the graph file uses {name!r} as a name", where="graph.json")
    match entry["op"]:
        case "placeholder":
            node = graph.placeholder(entry["name"])
        case "get_attr":
            if entry["target"] not in tensors:
                raise ArtefactError(
                    f"the graph file fetches `{entry['target']}`, which is not a stored tensor", where=entry["name"]
                )
            node = graph.create_node("get_attr", entry["target"])
        case "call_function":
            target = _control(entry) if entry["target"] in KINDS else resolve_target(entry["target"])
            node = graph.call_function(target, args, kwargs)
            if isinstance(target, Control):
                check_form(node)
        case "output":
            node = graph.output(args[0])
        case other:
            raise ArtefactError(f"the graph file has a node of kind {other!r}", where=entry["name"])
    return node


def _encode(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, list):
        return [_encode(v) for v in value]
    if isinstance(value, tuple):
        return {"tuple": [_encode(v) for v in value]}
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, slice):
        return {"slice": [_encode(value.start), _encode(value.stop), _encode(value.step)]}
    raise ArtefactError(f"a graph argument of type {type(value).__name__} cannot be stored", where=repr(value)[:80])


def _decode(value: Any, named: dict[str, fx.Node]) -> Any:
    if isinstance(value, list):
        return [_decode(v, named) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    match kind:
        case "node":
            return named[content]
        case "float":
            return float(content)
        case "tuple":
            return tuple(_decode(v, named) for v in content)
        case "dtype" | "layout" | "memory_format":
            found = getattr(torch, content)
            if type(found) is not getattr(torch, kind):
                raise ArtefactError(f"the graph file names torch.{content} as a {kind}", where="graph.json")
            return found
        case "device":
            return torch.device(content)
        case "complex":
            return complex(*content)
        case "slice":
            return slice(*(_decode(v, named) for v in content))
    raise ArtefactError(f"the graph file has an argument of kind {kind!r}", where="graph.json")


def text(graph: fx.Graph) -> str:
    """One line a node: ``%name = op(args) : dtype[shape]  @module``. Stable across runs; used by goldens and diffs.

    Bodies of control flow follow their node, indented.
    """
    lines = []
    for node, line in zip(graph.nodes, node_lines(graph), strict=True):
        lines.append(line)
        if isinstance(node.target, Control):
            for part, body in zip(node.target.parts, node.target.bodies, strict=True):
                lines.append(f"  {part}:")
                lines += [f"    {inner}" for inner in text(body).splitlines()]
    return "\n".join(lines) + "\n"


def node_lines(graph: fx.Graph) -> list[str]:
    """One line a node, without bodies: control flow shows a hash of what they compute."""
    lines = []
    for entry, node in zip(to_json(graph)["nodes"], graph.nodes, strict=True):
        call = ", ".join([*(_show(a) for a in node.args), *(f"{k}={_show(v)}" for k, v in node.kwargs.items())])
        kind = f" : {entry['dtype']}{entry['shape']}".replace("'", "") if "shape" in entry else ""
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        where = f"  @{stack[-1][0]}" if stack and stack[-1][0] else ""
        tag = f"  #{entry['hcx']}" if "hcx" in entry else ""
        name = str(node.target) if isinstance(node.target, Control) else entry.get("target", node.op)
        lines.append(f"%{node.name} = {name}({call}){kind}{where}{tag}")
    return lines


def _show(value: Any) -> str:
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_show(v) for v in value) + "]"
    return str(value).removeprefix("torch.")
