"""Control flow in a graph: a call whose target holds the graphs that may run.

``cond`` runs one of two bodies, ``while_loop`` one body again and again. The node's arguments are what goes in, its
value is a tuple. Bodies fetch no tensors: weights come in as operands, so that names, ties, devices and gradients stay
the outer graph's business. For exporters the node becomes ``torch.ops.higher_order.cond`` or ``while_loop``.

A target is never changed: :meth:`Control.changed` makes another one, so that copies of a graph may share it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, cast

import torch
from hcx.rewrite.errors import ArtefactError
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from .compiled import compiled
from .dataflow import results_of

Operands = tuple[Any, ...]
Results = tuple[Any, ...]
Function = Callable[..., Results]


class Control:
    """Target of a control-flow node.

    Attributes:
        kind: ``cond`` or ``while_loop``.
        bodies: graphs with a placeholder an operand and a tuple of results.
    """

    kind: ClassVar[str]
    parts: ClassVar[tuple[str, str]]

    def __init__(self, *bodies: fx.Graph):
        self.bodies = bodies
        self.__name__ = self.__qualname__ = self.kind  # generated code calls it by this name
        self._functions: dict[int, Function] = {}

    def changed(self, change: Callable[[fx.Graph], Any]) -> Control:
        """The same with its bodies copied and changed; bodies inside bodies are left to ``change``."""
        copies = [copy_graph(g) for g in self.bodies]
        for graph in copies:
            change(graph)
        return self._with(*copies)

    def _with(self, *bodies: fx.Graph) -> Control:
        return type(self)(*bodies)

    def function(self, index: int) -> Function:
        """A body as compiled Python."""
        if index not in self._functions:
            self._functions[index] = compiled(self.bodies[index], f"{self.kind} {self.parts[index]}")
        return self._functions[index]

    def __str__(self) -> str:
        """Stands for what the bodies compute: fingerprints of graphs are made of it."""
        digest = hashlib.sha256()
        for graph in self.bodies:
            spelled = {n: f"%{i}" for i, n in enumerate(graph.nodes)}
            for node in graph.nodes:
                arguments = fx.map_arg((node.args, node.kwargs), spelled.__getitem__)
                digest.update(f"{node.target if node.op == 'call_function' else node.op}{arguments};".encode())
        return f"higher_order.{self.kind}[{digest.hexdigest()[:16]}]"

    __repr__ = __str__

    def __call__(self, *operands: Any) -> Results:
        raise NotImplementedError

    def hop(self, bodies: Sequence[Any], operands: Operands) -> tuple[Function, Operands]:
        """The operator of torch that says the same, and its arguments."""
        raise NotImplementedError

    def operands_of(self, operands: Operands, index: int) -> Operands:
        """What a body takes of the node's arguments."""
        raise NotImplementedError

    def fill(self, operands: Operands) -> tuple[Control, Results]:
        """The same with ``meta['val']`` on every node of its bodies, and the results; for operands that are fake."""
        results: list[Results] = []

        def run(graph: fx.Graph) -> None:
            given = self.operands_of(operands, len(results))
            results.append(_filled(graph, given))

        filled = self.changed(run)
        return filled, results[-1]


class Cond(Control):
    """``then`` where the first operand, a single bool, is true, else ``otherwise``; both take the other operands."""

    kind = "cond"
    parts = ("then", "otherwise")

    def operands_of(self, operands: Operands, index: int) -> Operands:
        return operands[1:]

    def __call__(self, predicate: torch.Tensor, *operands: Any) -> Results:
        if torch.compiler.is_exporting():
            op, arguments = self.hop([fx.GraphModule({}, g) for g in self.bodies], (predicate, *operands))
            return op(*arguments)
        if _unknown(predicate):  # both give the same shapes
            return self.function(1)(None, *operands)
        return self.function(0 if predicate else 1)(None, *operands)

    def hop(self, bodies: Sequence[Any], operands: Operands) -> tuple[Function, Operands]:
        return torch.ops.higher_order.cond, (operands[0], *bodies, tuple(operands[1:]))


class While(Control):
    """Repeats ``body`` while ``condition`` holds: both take all operands; the body returns the next first ``carried``.

    Attributes:
        carried: number of operands that an iteration replaces.
    """

    kind = "while_loop"
    parts = ("condition", "body")

    def __init__(self, *bodies: fx.Graph, carried: int):
        super().__init__(*bodies)
        self.carried = carried

    def _with(self, *bodies: fx.Graph) -> While:
        return While(*bodies, carried=self.carried)

    def operands_of(self, operands: Operands, index: int) -> Operands:
        return operands

    def __str__(self) -> str:
        return f"{super().__str__()}({self.carried})"

    def __call__(self, *operands: Any) -> Results:
        if torch.compiler.is_exporting():
            op, arguments = self.hop([fx.GraphModule({}, g) for g in self.bodies], operands)
            return op(*arguments)
        condition, body = self.function(0), self.function(1)
        carried, others = operands[: self.carried], operands[self.carried :]
        if _unknown(condition(None, *operands)[0]):  # an iteration keeps shapes
            return body(None, *operands)
        while condition(None, *carried, *others)[0]:
            carried = body(None, *carried, *others)
        return tuple(carried)

    def hop(self, bodies: Sequence[Any], operands: Operands) -> tuple[Function, Operands]:
        return torch.ops.higher_order.while_loop, (*bodies, operands[: self.carried], operands[self.carried :])


KINDS: dict[str, type[Control]] = {"higher_order.cond": Cond, "higher_order.while_loop": While}
"""By stored name."""


def _unknown(value: torch.Tensor) -> bool:
    return isinstance(value, FakeTensor) or value.is_meta


def _filled(graph: fx.Graph, operands: Operands) -> Results:
    given = iter(operands)
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "output":
            return cast("Results", fx.map_arg(node.args[0], values.__getitem__))
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            if isinstance(node.target, Control):
                node.target, values[node] = node.target.fill(args)
            else:
                values[node] = node.target(*args, **kwargs)
        node.meta["val"] = values[node]
    raise AssertionError("a graph has an output node")


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A graph with the same nodes, names and metadata (metadata dictionaries are copied, values are shared)."""
    new = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        mapping[node] = new.node_copy(node, mapping.__getitem__)
        mapping[node].meta = dict(node.meta)
    return new


def change_bodies(graph: fx.Graph, change: Callable[[fx.Graph], Any]) -> None:
    """Apply a change to the bodies of a graph's control flow; it must reach the bodies inside those itself."""
    for node in graph.nodes:
        if isinstance(node.target, Control):
            node.target = node.target.changed(change)


def every_node(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes of a graph, and of the bodies of its control flow, at every depth."""
    for node in graph.nodes:
        yield node
        if isinstance(node.target, Control):
            for body in node.target.bodies:
                yield from every_node(body)


def check_form(node: fx.Node) -> None:
    """A control-flow node that was read from a file fits its bodies.

    Raises:
        ArtefactError: it does not.
    """
    target = cast("Control", node.target)
    for index, body in enumerate(target.bodies):
        nodes = list(body.nodes)
        takes = sum(n.op == "placeholder" for n in nodes)
        gives = nodes[-1].args[0] if nodes and nodes[-1].op == "output" else None
        if isinstance(target, While) and not 0 < target.carried <= len(node.args):
            raise ArtefactError(f"`{node.name}` carries {target.carried} of {len(node.args)} operands", where=node.name)
        if sum(n.op == "output" for n in nodes) != 1 or not isinstance(gives, tuple):
            raise ArtefactError(
                f"the {target.parts[index]} of `{node.name}` has no results at its end", where=node.name
            )
        if takes != len(target.operands_of(node.args, index)):
            raise ArtefactError(f"the {target.parts[index]} of `{node.name}` takes {takes} operands", where=node.name)
    counts = [len(results_of(b)) for b in target.bodies]
    if counts != ([1, target.carried] if isinstance(target, While) else [counts[0]] * 2):
        raise ArtefactError(f"the bodies of `{node.name}` give {counts} results", where=node.name)
