"""Inserting into a graph and rewiring it: provenance, metadata and counts come with every node."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self, cast

import torch
from hcx.rewrite.errors import PlanError, UsageError
from hcx.rewrite.ir.graph_text import target_name
from hcx.rewrite.ir.graphs import rename
from hcx.rewrite.ir.history import tensor_prefix
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.tags import REDUCE, Part, Role, hcx_tag, role_of, set_tag
from hcx.rewrite.ir.values import fake_mode_of, stand_in
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis


class Inserter:
    """Edits the graph of one Program on behalf of one pass.

    Every node made here carries the module stack of its anchor, an entry for the pass, and ``meta["custom"]["hcx"]``.

    Attributes:
        program: the Program being changed; it belongs to the driver, never to the caller.
        counts: number of inserted and cloned nodes and of redirected uses.
    """

    def __init__(self, program: Program, pass_name: str, number: int):
        self.program, self.pass_name, self.number = program, pass_name, number
        self.graph = program.graph
        self.fake_mode = fake_mode_of(program)
        self.counts = {"inserted": 0, "cloned": 0, "redirected": 0}
        self._anchor: fx.Node | None = None
        self._tag: dict[str, Any] = {}
        self._part: Part | None = None
        self._tensors: dict[str, fx.Node] = {}
        self._names: dict[str, str] = {}  # tensor -> the name it was asked for by
        self._traced: dict[tuple[Any, ...], fx.GraphModule] = {}
        self.moved: dict[str, str] = {}  # outputs that have another name now: cache slots that moved up

    # ---- where and as what

    @contextlib.contextmanager
    def after(self, node: fx.Node, *, role: Role | str | None = None, **tag: Any) -> Iterator[Self]:
        """Insert what follows right after a node.

        Args:
            role: what every inserted node is to the stream; without one, part of what the module computes.
            tag: recorded on every inserted node beside it.
        """
        with self._insert(self.graph.inserting_before(node.next), node, role, tag):
            yield self

    @contextlib.contextmanager
    def before(self, node: fx.Node, *, role: Role | str | None = None, **tag: Any) -> Iterator[Self]:
        """Insert what follows right before a node; see :meth:`after`."""
        with self._insert(self.graph.inserting_before(node), node, role, tag):
            yield self

    @contextlib.contextmanager
    def _insert(self, point: Any, node: fx.Node, role: Role | str | None, tag: dict[str, Any]) -> Iterator[None]:
        saved = self._anchor, self._tag, self._part
        made = role_of(role)
        self._anchor, self._tag = node, {**({"role": made.word} if made else {}), **tag}
        self._part = made.part if made else None
        try:
            with point:
                yield
        finally:
            self._anchor, self._tag, self._part = saved

    # ---- inserting

    def call(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Insert one op; its shape and dtype are computed.

        Raises:
            UsageError: not an overload of a registered op, so that the graph could not be stored.
        """
        target_name(op)
        self._need_place()
        node = self.graph.call_function(op, args, kwargs)
        unpacked = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.fake_mode, torch.no_grad(), enable_python_dispatcher():  # addcmul and lerp need it on symbolic sizes
            node.meta["val"] = op(*unpacked[0], **unpacked[1])
        self.mark(node)
        self.counts["inserted"] += 1
        return node

    def inline(self, function: Callable[..., Any], *nodes: fx.Node) -> Any:
        """Insert a plain torch function of some values as ATen ops.

        The equations of a family are written once as functions, tested eagerly, and end up in the graph through here.

        Args:
            function: takes one tensor a node, returns a tensor or a tuple of tensors.

        Returns:
            a node, or a tuple of nodes.
        """
        self._need_place()
        key = (function, *((n.meta["val"].dtype, tuple(map(str, n.meta["val"].shape))) for n in nodes))
        if key not in self._traced:
            with self.fake_mode, torch.no_grad(), enable_python_dispatcher():
                # copies of a node share one value, and tracing tells its inputs apart by their values
                values = [n.meta["val"].detach() for n in nodes]
                self._traced[key] = make_fx(
                    lambda *tensors: function(*tensors),
                    tracing_mode="real",
                    pre_dispatch=True,
                    _allow_non_fake_inputs=True,
                )(*values)
            self._traced[key].graph.eliminate_dead_code()  # such as the indices of a topk whose values alone are used
        traced = self._traced[key]
        mapping = dict(zip((n for n in traced.graph.nodes if n.op == "placeholder"), nodes, strict=True))
        result: Any = None
        for node in traced.graph.nodes:
            if node.op == "output":
                result = fx.map_arg(node.args[0], mapping.__getitem__)
            elif node.op == "get_attr":
                mapping[node] = self.constant(f"{node.target}", getattr(traced, node.target))
            elif node.op != "placeholder":
                mapping[node] = new = self.graph.node_copy(node, mapping.__getitem__)
                new.meta = {"val": node.meta["val"]}
                self.mark(new)
                self.counts["inserted"] += 1
        return tuple(result) if isinstance(result, list | tuple) else result

    def size(self, size: int | torch.SymInt) -> fx.Node | int:
        """A size of some value as a node that computes it from the inputs' sizes, or as the number that it is.

        Raises:
            PlanError: a size that only the data knows.
        """
        if isinstance(size, int):
            return size
        self._need_place()
        env: dict[Any, fx.Proxy] = {}
        tracer, known = fx.proxy.GraphAppendingTracer(self.graph), set(self.graph.nodes)
        for node in self.graph.find_nodes(op="placeholder"):
            for axis, dim in enumerate(node.meta["val"].shape):
                if isinstance(dim, torch.SymInt) and dim.node.expr in size.node.expr.free_symbols - env.keys():
                    env[dim.node.expr] = fx.Proxy(self.call(torch.ops.aten.sym_size.int, node, axis), tracer)
        if missing := size.node.expr.free_symbols - env.keys():
            raise PlanError(f"the size {missing.pop()} is not a size of an input", where=self.pass_name)
        result: fx.Node = sympy_interp(PythonReferenceAnalysis, env, size.node.expr).node
        for node in [n for n in self.graph.nodes if n not in known and "val" not in n.meta]:
            node.meta["val"] = node.target(*fx.map_arg(node.args, lambda n: n.meta["val"]))
            self.mark(node)
            self.counts["inserted"] += 1
        return result

    def clone(
        self, nodes: Iterable[fx.Node], mapping: dict[fx.Node, fx.Node], *, role: Role | str | None = None, **tag: Any
    ) -> dict[fx.Node, fx.Node]:
        """Copy nodes at the current point with some operands replaced; parameters stay shared.

        Args:
            nodes: in graph order.
            mapping: operand -> replacement, for values from outside; extended with the copies.
            role: of the copies; without one they are to the stream what their originals are.
        """
        made = role_of(role)
        for node in nodes:
            new = self.graph.node_copy(node, lambda n: mapping.get(n, n))
            new.meta = {k: v for k, v in node.meta.items() if k != "custom"}
            old = hcx_tag(node)
            own = {k: v for k, v in old.items() if k != "closes"}  # a copy of a loop ends no loop
            new.meta["custom"] = node.meta.get("custom")
            origin = {"pass": self.pass_name, "of": old.original or node.name}
            set_tag(new, {**own, **origin, **({"role": made.word} if made else {}), **tag}, (made or old).part)
            mapping[node] = new
            self.counts["cloned"] += 1
        return mapping

    def _need_place(self) -> None:
        if self._anchor is None:
            raise UsageError(
                f"pass `{self.pass_name}` inserts without saying where",
                where="Editor",
                hint="with editor.after(node): ...",
            )

    def mark(self, node: fx.Node) -> None:
        """Give a node that was made by hand what every inserted node carries."""
        stack = dict(self._anchor.meta.get("nn_module_stack") or {}) if self._anchor is not None else {}
        stack.setdefault("L__self__", ("", self.program.signature.model))
        home = tensor_prefix(self.pass_name, self.number)
        stack[home.replace(".", "_")] = (home, f"hcx.passes.{self.pass_name}")
        node.meta["nn_module_stack"] = stack
        node.meta.pop("custom", None)
        set_tag(node, {"pass": self.pass_name, **self._tag}, self._part)

    # ---- tensors

    def parameter(self, name: str, tensor: torch.Tensor) -> fx.Node:
        """A new trainable parameter of the pass, named ``hcx.PASS_N.NAME``; the same name gives the same node."""
        return self._tensor(name, torch.nn.Parameter(tensor), True)

    def buffer(self, name: str, tensor: torch.Tensor) -> fx.Node:
        """A new buffer of the pass (a threshold, a mask); saved with the model."""
        return self._tensor(name, tensor, True)

    def constant(self, name: str, tensor: torch.Tensor) -> fx.Node:
        """A constant that is not part of the state dict."""
        return self._tensor(f"constant.{len(self._tensors)}_{name.strip('_')}", tensor, False)

    def _tensor(self, name: str, tensor: torch.Tensor, persistent: bool) -> fx.Node:
        full = f"{tensor_prefix(self.pass_name, self.number)}.{_spelled(name)}"
        if self._names.setdefault(full, name) != name:
            raise PlanError(
                f"`{self.pass_name}` makes `{name}` and `{self._names[full]}`, which become one tensor `{full}`",
                where=self.pass_name,
                hint="names differ in letters, digits, dots and underscores",
            )
        if full not in self._tensors:
            try:
                self.program.set_tensor(full, tensor, added_by=self.pass_name, persistent=persistent)
            except KeyError as error:
                raise PlanError(
                    f"`{self.pass_name}` cannot make `{full}`: a tensor and a group of tensors have one name",
                    where=self.pass_name,
                    hint="a name may not continue another one behind a dot",
                ) from error
            self._tensors[full] = self._fetch(full)
        return self._tensors[full]

    def drop_tensor(self, name: str) -> None:
        """Remove a tensor that nothing reads any more (a weight that was replaced) under this one of its names."""
        for node in [n for n in self.graph.nodes if n.op == "get_attr" and n.target == name]:
            self.graph.erase_node(node)  # refuses while the value has users
        *path, leaf = name.split(".")
        module = self.program.tree
        for part in path:
            module = cast("torch.nn.Module", module._modules[part])
        for tensors in (module._parameters, module._buffers):
            tensors.pop(leaf, None)
        module._non_persistent_buffers_set.discard(leaf)
        self.program.origin.pop(name, None)
        self.program.stored.pop(name, None)

    def existing(self, name: str) -> fx.Node:
        """The node that fetches a tensor the Program already has."""
        node = next((n for n in self.graph.nodes if n.op == "get_attr" and n.target == name), None)
        return node if node is not None else self._fetch(name)

    def _fetch(self, name: str) -> fx.Node:
        first = next(n for n in self.graph.nodes if n.op not in ("placeholder", "get_attr"))
        with self.graph.inserting_before(first):
            node = self.graph.get_attr(name)
        rename(self.graph, node, name)
        with self.fake_mode:
            node.meta["val"] = stand_in(self.program, self.fake_mode, name)
        self.mark(node)
        return node

    def reduced_mean(self, streams: fx.Node, count: int) -> fx.Node:
        """Insert the mean over the streams of a boundary."""
        weights = self.constant("mean", torch.full((count,), 1.0 / count, device=streams.meta["val"].device))
        with self.after(max(streams, weights), role=REDUCE):
            return self.call(torch.ops.hcx.stream_read.default, streams, weights)

    # ---- rewiring

    def redirect(self, old: fx.Node, new: fx.Node, only: Callable[[fx.Node], bool] | None = None) -> int:
        """Make users of one value read another; returns how many did.

        Users that the new value is made from keep the old one, else it would read itself.
        """
        makers = _ancestors(new)
        users = [u for u in old.users if u not in makers and (only is None or only(u))]
        for user in users:
            user.replace_input_with(old, new)
        self.counts["redirected"] += len(users)
        return len(users)


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """A node and everything it is made from."""
    seen, pending = {node}, [node]
    while pending:
        for operand in pending.pop().all_input_nodes:
            if operand not in seen:
                seen.add(operand)
                pending.append(operand)
    return seen


def _spelled(name: str) -> str:
    """A name as module paths allow it; numbers of calls, loops and branches in addresses stay apart."""
    name = re.sub(r"@(\d+)", r"_call\1", name)
    name = re.sub(r"~(\d+)", r"_loop\1", name)
    name = re.sub(r"(/[A-Za-z-]+)\.(\d+)", r"\1_\2", name)
    return re.sub(r"[^A-Za-z0-9_.]", "_", name)
