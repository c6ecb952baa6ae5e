"""Walks a flat ATen graph and emits each node."""

from __future__ import annotations

import operator
from collections import ChainMap
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from .emitting import decompose
from .emitting.emitter import Emitter, Operand, onnx_dtype
from .emitting.symbols import dim_text
from .emitting.unsupported import UnsupportedError
from .mutation import without_mutation
from .ops import registry

Fused = dict[fx.Node, tuple[Any, tuple[Any, ...]]]
OUTER = "hcx_outer"
"""Key of ``meta`` of a body's placeholder: the node of the graph around it that it stands for."""


class Walker:
    """Emits the nodes of one graph in order.

    Args:
        e: where nodes go.
        module: holder of parameters, buffers and constants.
        find: nodes of a graph that a pattern replaces: node → (emit function, operand nodes).
    """

    def __init__(self, e: Emitter, module: torch.nn.Module, find: Callable[[fx.Graph], Fused] | None = None):
        self.e, self.module, self.find = e, module, find
        self.fused: Fused = {}
        self.scope = ""
        self.values: MutableMapping[fx.Node, Any] = {}
        self.weights: dict[str, Operand] = {}
        self.order: list[fx.Node] = []
        """Nodes that are to be emitted, in order; those in ``nested`` have been, in a branch."""
        self.nested: set[fx.Node] = set()
        self.given: dict[ir.Value, bool] = {}
        """Predicates of the branches around this place."""

    def run(self, graph: fx.Graph, inputs: list[Operand]) -> list[Operand]:
        """Emit the graph; returns its outputs in order."""
        remaining = iter(inputs)
        self.fused = self.find(graph) if self.find else {}
        needed = self._needed(graph)
        self.order = [n for n in graph.nodes if n in needed]
        for node in graph.nodes:
            if node.op == "placeholder":
                self.values[node] = next(remaining)
            elif node.op == "output":
                return [self._value(n) for n in _flat(node.args[0])]
            elif node in needed and node not in self.nested:
                try:
                    self._emit(node)
                except UnsupportedError as reason:
                    if not hasattr(reason, "node"):
                        reason.node = node
                    raise
        raise AssertionError("a graph has an output node")

    def _needed(self, graph: fx.Graph) -> set[fx.Node]:
        """What the outputs depend on, seen through the fused patterns."""
        needed: set[fx.Node] = set()
        stack = list(graph.output_node().all_input_nodes)
        while stack:
            node = stack.pop()
            if node not in needed:
                needed.add(node)
                stack += (
                    [n for n in self.fused[node][1] if isinstance(n, fx.Node)]
                    if node in self.fused
                    else node.all_input_nodes
                )
        return needed

    def _emit(self, node: fx.Node) -> None:
        fake = node.meta.get("val")
        if node.op == "get_attr":
            self.values[node] = self._attribute(node)
        elif node in self.fused:
            self._describe(node)
            emit, operands = self.fused[node]
            self._store(node, emit(self.e, *(self._value(o) for o in operands)))
        elif isinstance(fake, torch.SymInt | int) and not isinstance(fake, bool):
            self.values[node] = self._size(node, fake)
        elif node.target is operator.getitem:
            self.values[node] = self._value(node.args[0])[node.args[1]]
        elif node.target is torch.ops.higher_order.cond:
            self._branch(node)
        elif node.target is torch.ops.higher_order.while_loop:
            self._loop(node)
        elif node.op != "call_function":
            raise UnsupportedError(f"{node.op} {node.target}")
        else:
            self._call(node)

    def _call(self, node: fx.Node) -> None:
        if not isinstance(node.target, torch._ops.OpOverload):
            raise UnsupportedError(f"{getattr(node.target, '__name__', node.target)}")
        found = registry.find(node.target, involves_complex(node))
        if found is None and self._expanded(node):
            return
        if found is None:
            raise UnsupportedError(
                f"{node.target}, which has no translation" + (" for complex numbers" if involves_complex(node) else "")
            )
        args, kwargs = tuple(self._value(a) for a in node.args), {k: self._value(v) for k, v in node.kwargs.items()}
        self._describe(node)
        self._store(node, found.emit(self.e, **registry.arguments(node.target, found, args, kwargs)))

    def _expanded(self, node: fx.Node) -> bool:
        """Emit the operator's definition in place, if it has one."""
        found = decompose.definition(node, self.e.definitions)
        if found is None:
            return False
        module, operands = found
        inner = Walker(self.e, module)
        inner.scope = module_path(node) or self.scope
        outputs = inner.run(without_mutation(module.graph), [self._value(o) for o in operands])
        self.values[node] = tuple(outputs) if isinstance(node.meta["val"], list | tuple) else outputs[0]
        return True

    def _branch(self, node: fx.Node) -> None:
        """torch.cond as If; the branches read outer values and weights directly.

        Where a predicate is that of a branch around this place, the branch is known. Where later ones would be known in
        the first branch (everybody has left at an earlier exit), they are moved into this If: nothing is asked again,
        and what the first branch made up for them is never computed.
        """
        condition, chosen, other, inputs = (self._value(a) for a in node.args)
        predicate = self._scalar(self.e, condition)
        if predicate in self.given:
            self._enter(node, chosen if self.given[predicate] else other)
            return
        region = self._followers(node, predicate)
        returned = self._escaping(node, region)
        if region and returned:
            self._nest(node, predicate, region, returned)
            return
        branches = []
        for body in (chosen, other):
            e = self.e.subgraph()
            outputs = self._inside(e, body, inputs, list(node.args[3]))
            branches.append(ir.Graph([], self._results(e, outputs), nodes=e.nodes, name=e.name("branch")))
        self._describe(node)
        made = self.e.op("If", predicate, outputs=len(self.e.outs), then_branch=branches[0],
                         else_branch=branches[1])  # fmt: skip
        self._store(node, [made] if len(self.e.outs) == 1 and isinstance(node.meta["val"], list | tuple) else made)

    def _within(self, predicate: ir.Value, taken: bool, limit: list[fx.Node]) -> Walker:
        """A walker for these nodes of the same graph in a branch."""
        inner = Walker(self.e.subgraph(), self.module, self.find)
        inner.fused, inner.scope, inner.weights = self.fused, self.scope, self.weights
        inner.values, inner.given, inner.order = ChainMap({}, self.values), {**self.given, predicate: taken}, limit
        return inner

    def _enter(self, node: fx.Node, body: fx.GraphModule) -> None:
        """Emit a branch of a node here, and take what it gives for the node's value."""
        inputs = [self._value(a) for a in node.args[3]]
        outputs = self._inside(self.e, body, inputs, list(node.args[3]))
        self._describe(node)
        self._store(node, [o.value for o in outputs])

    def _followers(self, node: fx.Node, predicate: ir.Value) -> list[fx.Node]:
        """Later branches that are known where this node takes its first one, and what lies between, in order."""
        after = self.order[self.order.index(node) + 1 :] if node in self.order else []
        later, reached = [], {node}
        for other in after:
            if not reached.isdisjoint(self._read(other)):
                reached.add(other)
                later.append(other)
        branches = [n for n in later if n.target is torch.ops.higher_order.cond]
        if not branches:
            return []
        self._before(later)
        trial, known = self._within(predicate, True, []), []
        trial._enter(node, self._value(node.args[1]))
        for branch in branches:
            if self._scalar(trial.e, trial._value(branch.args[0])) not in trial.given:
                break
            known.append(branch)
        _discard(trial.e.nodes)
        wanted, stack = set(known), list(known)
        while stack:
            for n in self._read(stack.pop()):
                if n in reached and n is not node and n not in wanted:
                    wanted.add(n)
                    stack.append(n)
        parts = [u for n in (node, *known) for u in n.users if u.target is operator.getitem]
        region = [n for n in later if n in wanted or n in parts]
        return [] if any(n in branches and n not in known for n in region) else region

    def _read(self, node: fx.Node) -> list[fx.Node]:
        return (
            [n for n in self.fused[node][1] if isinstance(n, fx.Node)] if node in self.fused else node.all_input_nodes
        )

    def _before(self, nodes: list[fx.Node]) -> None:
        """Emit what some nodes read of others here, outside of branches."""
        for node in nodes:
            for read in self._read(node):
                if read not in nodes and read not in self.values and read.target is not torch.ops.higher_order.cond:
                    self._value(read)

    def _escaping(self, node: fx.Node, region: list[fx.Node]) -> list[fx.Node]:
        """Tensors of a region that others read; empty where one of its values is no tensor."""
        inside = {node, *region}
        found = [n for n in (node, *region) if any(u not in inside for u in n.users)]
        return found if all(isinstance(n.meta.get("val"), torch.Tensor) for n in found) else []

    def _nest(self, node: fx.Node, predicate: ir.Value, region: list[fx.Node], returned: list[fx.Node]) -> None:
        branches = []
        for body, taken in ((self._value(node.args[1]), True), (self._value(node.args[2]), False)):
            inner = self._within(predicate, taken, region)
            inner._enter(node, body)
            for later in region:
                if later not in inner.values and later not in inner.nested:
                    inner._emit(later)
            results = self._results(inner.e, [inner.values[n] for n in returned])
            branches.append(ir.Graph([], results, nodes=inner.e.nodes, name=inner.e.name("branch")))
        self._describe(returned[-1])
        made = self.e.op("If", predicate, outputs=len(returned), then_branch=branches[0], else_branch=branches[1])
        for one, value in zip(returned, made if len(returned) > 1 else [made], strict=True):
            self._describe(one)
            self._store(one, value)
        self.nested |= {node, *region}

    def _loop(self, node: fx.Node) -> None:
        """torch.while_loop as Loop without a trip count: each iteration ends by asking whether there is another."""
        condition, body, carried, others = (self._value(a) for a in node.args)
        outer = [None] * len(carried) + list(node.args[3])  # what is carried is another value in each iteration
        first = self._scalar(self.e, self._inside(self.e, condition, [*carried, *others], outer)[0])
        e = self.e.subgraph()
        name = e.name("loop")
        inputs = [ir.Value(name=f"{name}.{i}", type=ir.TensorType(onnx_dtype(e.dtype(o.dtype))),
                           shape=ir.Shape([dim_text(s) for s in o.shape])) for i, o in enumerate(carried)]  # fmt: skip
        state = [Operand(v, o.dtype, o.shape) for v, o in zip(inputs, carried, strict=True)]
        outputs = self._inside(e, body, [*state, *others], outer)
        again = self._scalar(e, self._inside(e, condition, [*outputs, *others], outer)[0])
        results = self._results(e, [Operand(again, torch.bool, ()), *outputs])
        count, more = (ir.Value(name=f"{name}.{n}", type=ir.TensorType(t), shape=ir.Shape([]))
                       for n, t in (("iteration", ir.DataType.INT64), ("more", ir.DataType.BOOL)))  # fmt: skip
        graph = ir.Graph([count, more, *inputs], results, nodes=e.nodes, name=name)
        self._describe(node)
        made = self.e.op("Loop", None, first, *carried, outputs=len(carried), body=graph)
        self._store(node, made if len(carried) > 1 else [made])

    @staticmethod
    def _scalar(e: Emitter, operand: Operand) -> ir.Value:
        """A single bool without dimensions."""
        return e.op("Reshape", operand, e.const([], torch.int64)) if operand.rank else operand.value

    def _inside(
        self, e: Emitter, module: fx.GraphModule, inputs: list[Operand], outer: list[fx.Node | None]
    ) -> list[Operand]:
        """Emit a body; it reads outer values and weights directly, and patterns see where they come from."""
        inner = Walker(e, module, self.find)
        inner.weights, inner.values, inner.given = self.weights, ChainMap({}, self.values), self.given
        graph = without_mutation(module.graph)
        for placeholder, node in zip(graph.find_nodes(op="placeholder"), outer, strict=True):
            placeholder.meta[OUTER] = node
        return inner.run(graph, inputs)

    @staticmethod
    def _results(e: Emitter, outputs: list[Operand]) -> list[ir.Value]:
        """Results of a body; each is a value of its own."""
        made = []
        for out in outputs:
            node = ir.node("Identity", [out.value], name=e.name("Identity"))
            node.outputs[0].name, node.outputs[0].type = node.name, ir.TensorType(onnx_dtype(e.dtype(out.dtype)))
            e.nodes.append(node)
            made.append(node.outputs[0])
        return made

    def _describe(self, node: fx.Node) -> None:
        """Tell translators what the node returns and where it is."""
        fakes = node.meta.get("val")
        if fakes is None:
            raise UnsupportedError(f"{node.target} without a traced value")
        several = isinstance(fakes, list | tuple)
        self.e.outs = tuple(Operand(None, f.dtype, self.e.symbols.shape(f)) for f in (fakes if several else [fakes]))
        self.e.scope = module_path(node) or self.scope

    def _store(self, node: fx.Node, made: Any) -> None:
        outs = [
            Operand(v, o.dtype, o.shape)
            for v, o in zip(made if isinstance(made, list | tuple) else [made], self.e.outs, strict=True)
        ]
        for out in outs:
            self.e.symbols.bind_result(out.value, out.shape)
        self.values[node] = tuple(outs) if isinstance(node.meta["val"], list | tuple) else outs[0]

    def _size(self, node: fx.Node, fake: torch.SymInt | int) -> Any:
        size = self.e.symbols.size(fake)
        if str(node.target) == "aten.item.default":
            source = self._value(node.args[0])
            self.e.symbols.bind_scalar(
                size, self.e.op("Reshape", self.e.cast(source, source.dtype, torch.int64), self.e.const([1]))
            )
        return size

    def _value(self, argument: Any) -> Any:
        """An argument with fx nodes replaced by operands or sizes."""
        if isinstance(argument, fx.Node):
            if argument in self.values:
                return self.values[argument]
            self._emit(argument)
            return self.values[argument]
        if isinstance(argument, list | tuple):
            return [self._value(a) for a in argument]
        return argument

    def _attribute(self, node: fx.Node) -> Operand | torch.nn.Module:
        name = str(node.target)
        if name not in self.weights:
            tensor = operator.attrgetter(name)(self.module)
            if isinstance(tensor, torch.nn.Module):
                return tensor  # the body of a control-flow node
            if not isinstance(tensor, torch.Tensor):
                raise UnsupportedError(f"attribute {name} of type {type(tensor).__name__}")
            self.weights[name] = weight(self.e, name, tensor)
        return self.weights[name]


def weight(e: Emitter, name: str, tensor: torch.Tensor) -> Operand:
    """A parameter, buffer or constant as an initializer under its own name; one storage is one initializer.

    Complex numbers are stored as pairs in a last dimension of 2.
    """
    dtype = torch.float32 if tensor.dtype is torch.complex64 else e.dtype(tensor.dtype)
    onnx_dtype(dtype)
    key = (
        ("weight", tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel()
        else ("weight", name)
    )
    if key not in e.constants:
        plain = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
        stored = plain.to(dtype).cpu().contiguous()
        e.constants[key] = e.initializer(name, ir.tensor(stored.numpy(), name=name))
    return Operand(e.constants[key], tensor.dtype, tuple(int(s) for s in tensor.shape))


def involves_complex(node: fx.Node) -> bool:
    """Whether an argument or the result is complex."""
    values = [node.meta.get("val"), *(n.meta.get("val") for n in node.all_input_nodes)]
    return any(isinstance(v, torch.Tensor) and v.is_complex() for v in values)


def module_path(node: fx.Node) -> str:
    """Innermost module that a node comes from."""
    stack = node.meta.get("nn_module_stack") or {}
    return next(
        (path for path, _ in reversed(list(stack.values())) if path and not path.startswith("_empty_nn_module_stack")),
        "",
    )


def _discard(nodes: Iterable[ir.Node]) -> None:
    """Let go of what nodes read that belong to no graph: constants that only they use are then unused."""
    for node in nodes:
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                _discard(list(attribute.as_graph()))
        node.resize_inputs(0)


def _flat(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [x for item in value for x in _flat(item)]
    return [value]
