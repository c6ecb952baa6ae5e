"""All changes to a graph go through here: provenance, metadata and counts come with them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from hcx.rewrite.errors import PlanError, UsageError
from hcx.rewrite.ir.graph_text import target_name
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.signature import CACHE, Argument, InputSpec, tensor_indices
from hcx.rewrite.ir.values import fake_mode_of, stand_in
from hcx.rewrite.tracing.normalize import rename
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

if TYPE_CHECKING:
    from .regions import Region


class Editor:
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
        self._tensors: dict[str, fx.Node] = {}
        self._names: dict[str, str] = {}  # tensor -> the name it was asked for by
        self._traced: dict[tuple, fx.GraphModule] = {}
        self.moved: dict[str, str] = {}  # outputs that have another name now: cache slots that moved up

    # ---- where and as what

    @contextlib.contextmanager
    def after(self, node: fx.Node, **tag: Any):
        """Insert what follows right after a node; ``tag`` is recorded on every inserted node."""
        with self._insert(self.graph.inserting_before(node.next), node, tag):
            yield self

    @contextlib.contextmanager
    def before(self, node: fx.Node, **tag: Any):
        """Insert what follows right before a node."""
        with self._insert(self.graph.inserting_before(node), node, tag):
            yield self

    @contextlib.contextmanager
    def _insert(self, point, node: fx.Node, tag: dict[str, Any]):
        saved = self._anchor, self._tag
        self._anchor, self._tag = node, tag
        try:
            with point:
                yield
        finally:
            self._anchor, self._tag = saved

    # ---- inserting

    def call(self, op: Callable, *args: Any, **kwargs: Any) -> fx.Node:
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
        self._mark(node)
        self.counts["inserted"] += 1
        return node

    def inline(self, function: Callable, *nodes: fx.Node) -> Any:
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
                self._mark(new)
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
        env, tracer, known = {}, fx.proxy.GraphAppendingTracer(self.graph), set(self.graph.nodes)
        for node in self.graph.find_nodes(op="placeholder"):
            for axis, dim in enumerate(node.meta["val"].shape):
                if isinstance(dim, torch.SymInt) and dim.node.expr in size.node.expr.free_symbols - env.keys():
                    env[dim.node.expr] = fx.Proxy(self.call(torch.ops.aten.sym_size.int, node, axis), tracer)
        if missing := size.node.expr.free_symbols - env.keys():
            raise PlanError(f"the size {missing.pop()} is not a size of an input", where=self.pass_name)
        result = sympy_interp(PythonReferenceAnalysis, env, size.node.expr).node
        for node in [n for n in self.graph.nodes if n not in known and "val" not in n.meta]:
            node.meta["val"] = node.target(*fx.map_arg(node.args, lambda n: n.meta["val"]))
            self._mark(node)
            self.counts["inserted"] += 1
        return result

    def clone(self, nodes: Iterable[fx.Node], mapping: dict[fx.Node, fx.Node], **tag: Any) -> dict[fx.Node, fx.Node]:
        """Copy nodes at the current point with some operands replaced; parameters stay shared.

        Args:
            nodes: in graph order.
            mapping: operand -> replacement, for values from outside; extended with the copies.
        """
        for node in nodes:
            new = self.graph.node_copy(node, lambda n: mapping.get(n, n))
            new.meta = {k: v for k, v in node.meta.items() if k != "custom"}
            custom = dict(node.meta.get("custom", {}))
            own = {k: v for k, v in custom.get("hcx", {}).items() if k != "closes"}  # a copy of a loop ends no loop
            custom["hcx"] = {**own, "pass": self.pass_name, "of": own.get("of", node.name), **tag}
            new.meta["custom"] = custom
            mapping[node] = new
            self.counts["cloned"] += 1
        return mapping

    def cond(self, predicate: fx.Node, then: Region, otherwise: Region) -> tuple[fx.Node, ...]:
        """Run one of two parts of the graph: their nodes move into the bodies of a branch.

        Build both in the graph first, as if both ran: ``otherwise`` is usually what the model computes, ``then`` what
        stands for it. Whoever read a result of ``otherwise`` then reads the branch. Weights and other values from
        outside become operands.

        Args:
            predicate: a single bool; true runs ``then``.
            then, otherwise: with as many results, of the same shapes and dtypes.

        Returns:
            the results.

        Raises:
            PlanError: regions that overlap, write in place, or hold a value that is read outside and is no result.
        """
        from .regions import insert_cond

        return insert_cond(self, predicate, then, otherwise)

    def repeat(self, trips: fx.Node, body: Region, carried: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
        """Run a part of the graph as often as a tensor says: its nodes move into the body of a loop.

        Args:
            trips: int64 without dimensions; 0 gives ``carried`` unchanged.
            body: one iteration, built in the graph as the first one: where it reads a value of ``carried``, a later
                iteration reads the result of the one before.
            carried: one value a result.

        Returns:
            the results of the last iteration.

        Raises:
            PlanError: as for :meth:`cond`.
        """
        from .regions import insert_repeat

        return insert_repeat(self, trips, body, carried)

    def _need_place(self) -> None:
        if self._anchor is None:
            raise UsageError(
                f"pass `{self.pass_name}` inserts without saying where",
                where="Editor",
                hint="with editor.after(node): ...",
            )

    def _mark(self, node: fx.Node) -> None:
        stack = dict(self._anchor.meta.get("nn_module_stack") or {}) if self._anchor is not None else {}
        stack.setdefault("L__self__", ("", self.program.signature.model))
        stack[f"hcx_{self.pass_name}_{self.number}"] = (
            f"hcx.{self.pass_name}_{self.number}",
            f"hcx.passes.{self.pass_name}",
        )
        node.meta["nn_module_stack"] = stack
        node.meta["custom"] = {"hcx": {"pass": self.pass_name, **self._tag}}

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
        full = f"hcx.{self.pass_name}_{self.number}.{_spelled(name)}"
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
        module = self.program._root
        for part in path:
            module = module._modules[part]
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
        self._mark(node)
        return node

    def reduced_mean(self, streams: fx.Node, count: int) -> fx.Node:
        """Insert the mean over the streams of a boundary."""
        weights = self.constant("mean", torch.full((count,), 1.0 / count, device=streams.meta["val"].device))
        with self.after(max(streams, weights), role="reduce"):
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

    def tap(self, name: str, node: fx.Node) -> None:
        """Add an auxiliary output."""
        output = self.graph.output_node()
        output.args = ((*output.args[0], node),)
        output.meta["taps"] = [*output.meta.get("taps", ()), name]

    def drop_taps(self, prefix: str) -> None:
        """Remove the auxiliary outputs whose names begin so."""
        output = self.graph.output_node()
        count, names = len(self.program.output_names), list(output.meta.get("taps", ()))
        taps = [(n, v) for n, v in zip(names, output.args[0][count:], strict=True) if not n.startswith(prefix)]
        output.args = ((*output.args[0][:count], *(v for _, v in taps)),)
        output.meta["taps"] = [n for n, _ in taps]

    def drop_cache_slots(self, inputs: set[fx.Node]) -> None:
        """Take whole slots out of the cache, inputs and outputs; later slots move up.

        Args:
            inputs: cache placeholders of the slots. What reads them must be dead by then but for the outputs.
        """
        signature, structure = self.program.signature, self.program.signature.outputs
        placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        gone = {placeholders.index(n) for n in inputs}
        slots = {signature.inputs[i].name.split(".")[1] for i in gone}
        results = {i for i, n in enumerate(structure.names) if n.startswith("present.") and n.split(".")[1] in slots}
        output = self.graph.output_node()
        output.args = (tuple(n for i, n in enumerate(output.args[0]) if i not in results),)
        for argument in signature.arguments:
            argument.spec = without_items(argument.spec, gone)
        structure.spec = without_items(structure.spec, results)
        kept = [i for i in range(len(structure.names)) if i not in results]
        names = {structure.names[i]: _moved_up(structure.names[i], slots) for i in kept}
        before = {now: old for old, now in self.moved.items()}
        self.moved = {before.get(n, n): new for n, new in names.items()}
        structure.names[:] = names.values()
        structure.spec = renumber(structure.spec, {old: new for new, old in enumerate(kept)})
        left = [i for i in range(len(signature.inputs)) if i not in gone]
        for argument in signature.arguments:
            argument.spec = renumber(argument.spec, {old: new for new, old in enumerate(left)})
        self.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
        specs = [signature.inputs[i] for i in left]
        for index in sorted(gone, reverse=True):
            self.graph.erase_node(placeholders[index])
        for number, (spec, index) in enumerate(zip(specs, left, strict=True)):
            name = _moved_up(spec.name, slots)
            if name != spec.name:
                specs[number] = InputSpec(name, spec.dtype, spec.shape, spec.fill)
                rename(self.graph, placeholders[index], name)
                placeholders[index].meta["hcx_name"] = name
        signature.inputs[:] = specs
        self.program.examples[:] = [[t for i, t in enumerate(flat) if i not in gone] for flat in self.program.examples]

    def add_cache_slots(self, inputs: list[fx.Node]) -> dict[fx.Node, fx.Node]:
        """Extend the cache by copies of the slots that some placeholders belong to.

        Args:
            inputs: cache placeholders of whole slots (a layer's key and value).

        Returns:
            old placeholder -> new placeholder.
        """
        signature = self.program.signature
        placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        indices = {placeholders.index(n): n for n in inputs}
        mapping: dict[fx.Node, fx.Node] = {}
        last = placeholders[-1]
        for argument in signature.arguments:
            for slot, siblings in list_items(argument.spec, set(indices)):
                number = len(siblings)
                renumbered: dict[int, int] = {}
                for index in tensor_indices(slot):
                    old = signature.inputs[index]
                    node = self._new_placeholder(
                        last, placeholders[index], f"{CACHE}.{number}.{old.name.split('.', 2)[2]}"
                    )
                    renumbered[index] = len(signature.inputs)
                    signature.inputs.append(InputSpec(node.meta["hcx_name"], old.dtype, old.shape, old.fill))
                    mapping[placeholders[index]] = last = node
                siblings.append(renumber(slot, renumbered))
        return mapping

    def input(self, name: str, number: int) -> fx.Node:
        """A new input of the call: a count from 1 on, int64 without dimensions.

        Args:
            name: of the argument; a number is appended where the model has one of that name.
            number: what it is where a call leaves it out.
        """
        signature = self.program.signature
        taken = {a.name for a in signature.arguments} | {i.name for i in signature.inputs} | set(signature.others)
        name = next(n for n in (name, *(f"{name}_{k}" for k in range(1, 1 + len(taken)))) if n not in taken)
        last = [n for n in self.graph.nodes if n.op == "placeholder"][-1]
        with self.graph.inserting_before(last.next):
            node = self.graph.placeholder(name)
        rename(self.graph, node, name)
        with self.fake_mode:
            node.meta = {"val": torch.zeros((), dtype=torch.int64, device=last.meta["val"].device), "hcx_name": name}
        signature.arguments.append(Argument(name, None, {"kind": "tensor", "index": len(signature.inputs)}, fill=True))
        signature.inputs.append(InputSpec(name, torch.int64, (), f"={int(number)}"))
        return node

    def _new_placeholder(self, last: fx.Node, like: fx.Node, name: str) -> fx.Node:
        with self.graph.inserting_before(last.next):
            node = self.graph.placeholder(name.replace(".", "_"))
        rename(self.graph, node, name)
        node.meta = {"val": like.meta["val"], "hcx_name": name}
        return node

    def add_cache_outputs(self, outputs: dict[fx.Node, fx.Node]) -> None:
        """Return new cache slots beside existing ones.

        Args:
            outputs: for whole slots: node that is an output now -> node of the new slot.
        """
        structure = self.program.signature.outputs
        output = self.graph.output_node()
        flat = list(output.args[0])
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


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """A node and everything it is made from."""
    seen, pending = {node}, [node]
    while pending:
        for operand in pending.pop().all_input_nodes:
            if operand not in seen:
                seen.add(operand)
                pending.append(operand)
    return seen


def list_items(spec: dict, wanted: set[int]) -> list[tuple[dict, list]]:
    """(item, list it is in) of the innermost list items that hold some of the wanted tensors."""
    found = []
    for item in spec.get("items", ()):
        inner = list_items(item, wanted)
        if (
            not inner
            and spec["kind"] in ("list", "tuple")
            and wanted & set(tensor_indices(item))
            and item["kind"] != "tensor"
        ):
            inner = [(item, spec["items"])]
        found += inner
    return found


def renumber(spec: dict, mapping: dict[int, int]) -> dict:
    """A structure description with other tensor indices."""
    new = dict(spec)
    if "index" in new:
        new["index"] = mapping[new["index"]]
    if "items" in new:
        new["items"] = [renumber(s, mapping) for s in new["items"]]
    return new


def without_items(spec: dict, gone: set[int]) -> dict:
    """A structure description without the innermost list items that hold some tensors."""
    new = dict(spec)
    if "items" in new:
        lost = [item for item, siblings in list_items(spec, gone) if siblings is spec["items"]]
        new["items"] = [without_items(s, gone) for s in spec["items"] if not any(s is item for item in lost)]
    return new


def _moved_up(name: str, gone: set[str]) -> str:
    """The name of a cache tensor once some slots before its own are gone."""
    head, number, *rest = [*name.split("."), "", ""][: max(2, name.count(".") + 1)]
    if head not in (CACHE, "present") or not number.isdigit():
        return name
    return ".".join([head, str(int(number) - sum(int(g) < int(number) for g in gone)), *rest])


def _spelled(name: str) -> str:
    """A name as module paths allow it; numbers of calls, loops and branches in addresses stay apart."""
    name = re.sub(r"@(\d+)", r"_call\1", name)
    name = re.sub(r"~(\d+)", r"_loop\1", name)
    name = re.sub(r"(/[A-Za-z-]+)\.(\d+)", r"\1_\2", name)
    return re.sub(r"[^A-Za-z0-9_.]", "_", name)
