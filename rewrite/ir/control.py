"""Control flow in a graph: a call whose target holds the graphs that may run.

``cond`` runs one of two bodies, ``while_loop`` one body again and again. The node's arguments are what goes in, its
value is a tuple. Bodies fetch no tensors: weights come in as operands, so that names, ties, devices and gradients stay
the outer graph's business. For exporters the node becomes ``torch.ops.higher_order.cond`` or ``while_loop``.

A target is never changed: :meth:`Control.changed` makes another one, so that copies of a graph may share it.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from hcx.rewrite.errors import ArtefactError
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor


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
        self._functions: dict[int, Callable] = {}

    def changed(self, change: Callable[[fx.Graph], Any]) -> Control:
        """The same with its bodies copied and changed; bodies inside bodies are left to ``change``."""
        copies = [copy_graph(g) for g in self.bodies]
        for graph in copies:
            change(graph)
        return self._with(*copies)

    def _with(self, *bodies: fx.Graph) -> Control:
        return type(self)(*bodies)

    def function(self, index: int) -> Callable:
        """A body as compiled Python."""
        if index not in self._functions:
            code = self.bodies[index].python_code("self")
            scope = dict(code.globals)
            exec(compile(code.src, f"<hcx {self.kind} {self.parts[index]}>", "exec"), scope)
            self._functions[index] = scope["forward"]
        return self._functions[index]

    def __str__(self) -> str:
        """Stands for what the bodies compute: fingerprints of graphs are made of it."""
        digest = hashlib.sha256()
        for graph in self.bodies:
            number = {n: i for i, n in enumerate(graph.nodes)}
            for node in graph.nodes:
                arguments = fx.map_arg((node.args, node.kwargs), lambda n, number=number: f"%{number[n]}")
                digest.update(f"{node.target if node.op == 'call_function' else node.op}{arguments};".encode())
        return f"higher_order.{self.kind}[{digest.hexdigest()[:16]}]"

    __repr__ = __str__

    def __call__(self, *operands: Any) -> tuple:
        raise NotImplementedError

    def hop(self, bodies: list, operands: tuple) -> tuple[Any, tuple]:
        """The operator of torch that says the same, and its arguments."""
        raise NotImplementedError

    def operands_of(self, operands: tuple, index: int) -> tuple:
        """What a body takes of the node's arguments."""
        raise NotImplementedError

    def shared(self, operands: tuple, index: int) -> fx.Node | None:
        """The operand whose memory a result may share, or None."""
        from .mutation import Aliases

        for part, body in enumerate(self.bodies):
            results = body.output_node().args[0]
            root = Aliases(body).root(results[index]) if index < len(results) else None
            if root is not None and root.op == "placeholder":
                return self.operands_of(operands, part)[list(body.nodes).index(root)]
        return None

    def fill(self, operands: tuple) -> tuple[Control, tuple]:
        """The same with ``meta['val']`` on every node of its bodies, and the results; for operands that are fake."""
        results: list[tuple] = []

        def run(graph: fx.Graph) -> None:
            given = self.operands_of(operands, len(results))
            results.append(_filled(graph, given))

        filled = self.changed(run)
        return filled, results[-1]


class Cond(Control):
    """``then`` where the first operand, a single bool, is true, else ``otherwise``; both take the other operands."""

    kind = "cond"
    parts = ("then", "otherwise")

    def operands_of(self, operands, index):
        return operands[1:]

    def __call__(self, predicate: torch.Tensor, *operands: Any) -> tuple:
        if torch.compiler.is_exporting():
            op, arguments = self.hop([fx.GraphModule({}, g) for g in self.bodies], (predicate, *operands))
            return op(*arguments)
        if _unknown(predicate):  # both give the same shapes
            return self.function(1)(None, *operands)
        return self.function(0 if predicate else 1)(None, *operands)

    def hop(self, bodies, operands):
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

    def _with(self, *bodies):
        return While(*bodies, carried=self.carried)

    def operands_of(self, operands, index):
        return operands

    def shared(self, operands, index):
        return operands[index]  # without an iteration, what came in goes out

    def __str__(self) -> str:
        return f"{super().__str__()}({self.carried})"

    def __call__(self, *operands: Any) -> tuple:
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

    def hop(self, bodies, operands):
        return torch.ops.higher_order.while_loop, (*bodies, operands[: self.carried], operands[self.carried :])


KINDS: dict[str, type[Control]] = {"higher_order.cond": Cond, "higher_order.while_loop": While}
"""By stored name."""


def _unknown(value: Any) -> bool:
    return isinstance(value, FakeTensor) or value.is_meta


def _filled(graph: fx.Graph, operands: tuple) -> tuple:
    given = iter(operands)
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "output":
            return fx.map_arg(node.args[0], values.__getitem__)
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
    target = node.target
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
    counts = [len(b.output_node().args[0]) for b in target.bodies]
    if counts != ([1, target.carried] if isinstance(target, While) else [counts[0]] * 2):
        raise ArtefactError(f"the bodies of `{node.name}` give {counts} results", where=node.name)


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
    used = sorted({u.args[1] for u in getitems})
    count = len(node.target.bodies[0].output_node().args[0])

    def shorten(body: fx.Graph) -> None:
        output = body.output_node()
        output.args = (tuple(output.args[0][i] for i in used),)
        prune(body, is_impure)

    target = node.target.changed(shorten) if len(used) < count else node.target
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
        user.args = (node, used.index(user.args[1]))
    if isinstance(node.meta.get("val"), tuple):
        node.meta["val"] = tuple(node.meta["val"][i] for i in used)
    return True


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
    from .mutation import Aliases

    aliases, seen, output = Aliases(body), set(), body.output_node()
    results = list(output.args[0])
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
        target: Control = node.target
        fetched = []
        for part, body in zip(target.parts, target.bodies, strict=True):
            body = copy_graph(body)
            _give_new_tensors(body)
            inner = [n for n in body.nodes if isinstance(n.target, Control)]
            own = torch.nn.Module()
            if inner:
                own.add_module("control_flow", _written(body, inner, "control_flow"))
            if isinstance(target, While) and part == "condition":  # torch takes a tensor there, not a tuple
                body.output_node().args = (body.output_node().args[0][0],)
            label = f"{node.name}_{part}"
            home.add_module(label, fx.GraphModule(own, body, class_name=part.capitalize()))
            with graph.inserting_before(node):
                fetched.append(graph.create_node("get_attr", f"{prefix}.{label}", name=label))
        node.target, node.args = target.hop(fetched, node.args)
    return home
