"""The Program: one graph, its tensors, and how it is called."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import hcx.kernels  # noqa: F401  registers the ops that graphs may hold
import torch
from hcx.rewrite.tracing.normalize import fetch, set_tensor
from torch import fx

from .control import as_operators, change_bodies, copy_graph, prune
from .copies import copied
from .signature import CallSignature, InputSpec

if TYPE_CHECKING:
    from hcx.rewrite.source.stored import Stored

Reference = Callable[[list[torch.Tensor]], list[torch.Tensor]]


class Program(torch.nn.Module):
    """A traced model: called like it, with its parameter names, and open to rewriting.

    A Program is an ``nn.Module``: ``parameters()``, ``state_dict()``, ``to()``, ``train()`` and ``torch.compile`` work
    as usual. Made by :func:`hcx.rewrite.trace` or :func:`hcx.rewrite.load`, never directly.

    Attributes:
        graph: ATen graph; one placeholder an input tensor, one output tuple: the model's outputs, then the taps.
        signature: binds calls, rebuilds outputs.
        history: one entry a rewrite: pipeline, plan and certificate.
        origin: parameter or buffer name -> name of the pass that added it; base tensors are not listed.
        examples: flat example inputs.
        reference: the eager source model over flat tensors, while it is in memory.
        stored: name -> place in a file, of tensors that are on ``meta`` because nobody has read them yet.
        companions: small files that belong to the model (tokenizer, config), by name.
    """

    graph: fx.Graph
    signature: CallSignature
    history: list[dict[str, Any]]
    origin: dict[str, str]
    examples: list[list[torch.Tensor]]
    reference: Reference | None
    companions: dict[str, bytes]
    trace_exact: bool | None
    stored: dict[str, Stored]

    @classmethod
    def _build(
        cls,
        graph: fx.Graph,
        root: torch.nn.Module,
        signature: CallSignature,
        *,
        examples: list[list[torch.Tensor]],
        reference: Reference | None = None,
        copy_tensors: bool = True,
    ) -> Program:
        self = cls()
        self._adopt(copied(root) if copy_tensors else root)
        self.__dict__.update(
            graph=graph,
            signature=signature,
            history=[],
            origin={},
            examples=examples,
            reference=reference,
            companions={},
            trace_exact=None,
            golden=None,
            stored={},
            _compiled={},
        )
        self.training = False
        return self

    def _adopt(self, root: torch.nn.Module) -> None:
        """Share the tensor dictionaries of a plain module tree, which generated code runs on: no attribute of this
        class can then hide a parameter of the model."""
        self.__dict__["_root"] = root
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = root.__dict__[name]

    # ---- calling

    def forward(self, *args: Any, taps: bool = False, **kwargs: Any) -> Any:
        """Run the program with the source model's own arguments.

        Args:
            taps: also return the auxiliary outputs.

        Returns:
            the model's output structure; with taps, ``(output, {tap name: tensor})``.

        Raises:
            UsageError: an argument that was not traced or does not fit.
        """
        flat = self.run_flat(self.signature.bind(args, kwargs), taps=taps)
        count = len(self.output_names)
        output = self.signature.rebuild(flat[:count])
        return (output, dict(zip(self.taps, flat[count:], strict=True))) if taps else output

    def run_flat(self, inputs: list[torch.Tensor], *, taps: bool = False) -> list[torch.Tensor]:
        """Run on flat tensors: outputs, then (with taps) the taps."""
        return list(self._function(taps)(self._root, *inputs))

    def _function(self, taps: bool) -> Callable:
        ambient = any(torch.is_autocast_enabled(d) for d in ("cpu", "cuda"))
        if (taps, ambient) not in self._compiled:
            graph = self._executable(taps)
            if ambient:
                suit_autocast(graph)
            code = graph.python_code("self")
            scope = dict(code.globals)
            exec(compile(code.src, f"<hcx {self.signature.model}>", "exec"), scope)
            self._compiled[taps, ambient] = scope["forward"]
        return self._compiled[taps, ambient]

    def _executable(self, taps: bool) -> fx.Graph:
        """A copy of the graph that computes the outputs, and the taps only when asked for."""
        graph = copy_graph(self.graph)
        if not taps:
            output = graph.output_node()
            output.args = (tuple(output.args[0])[: len(self.output_names)],)
            prune(graph, _impure)
        return graph

    def flat_module(self, taps: bool = False) -> fx.GraphModule:
        """A plain GraphModule over flat tensors that shares this Program's tensors; for exporters and compilers."""
        from .values import fake_mode_of

        fake_mode_of(self)
        graph = self._executable(taps)
        root = as_operators(graph, self._root)
        if any(hasattr(fx.GraphModule, n) for n in (*root._modules, *root._parameters, *root._buffers)):
            holder = torch.nn.Module()  # a model may call a layer `graph` or `code`
            holder.add_module("model", root)
            for node in graph.nodes:
                if node.op == "get_attr":
                    node.target = f"model.{node.target}"
            root = holder
        return fx.GraphModule(root, graph, class_name="HcxProgram")

    # ---- what it is made of

    @property
    def inputs(self) -> list[InputSpec]:
        """The flat inputs."""
        return self.signature.inputs

    @property
    def output_names(self) -> list[str]:
        """Names of the flat outputs."""
        return self.signature.outputs.names

    @property
    def taps(self) -> list[str]:
        """Names of the auxiliary outputs, in order."""
        return list(self.graph.output_node().meta.get("taps", ()))

    def tensor(self, name: str) -> torch.Tensor:
        """A parameter, buffer or constant by its name."""
        return fetch(self._root, name)

    def read(self, name: str) -> torch.Tensor:
        """A tensor with its values: read from its file where it still lies there. For passes that look at weights.

        Raises:
            ArtefactError: the file is not what it was.
        """
        tensor = self.tensor(name)
        return self.stored[name].read() if tensor.is_meta and name in self.stored else tensor

    def home(self, name: str) -> torch.device:
        """Device of what belongs beside a tensor: its own, or the CPU for one that still lies in a file."""
        tensor = self.tensor(name)
        return torch.device("cpu") if tensor.is_meta and name in self.stored else tensor.device

    def tied_groups(self) -> list[list[str]]:
        """Groups of names that share one tensor."""
        groups: dict[int, list[str]] = {}
        for name, tensor in self.named_tensors():
            groups.setdefault(id(tensor), []).append(name)
        return [names for names in groups.values() if len(names) > 1]

    def named_tensors(self):
        """Every (name, tensor), tied tensors under each of their names, constants included."""
        yield from self._root.named_parameters(remove_duplicate=False)
        yield from self._root.named_buffers(remove_duplicate=False)

    def new_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Parameters that passes have added."""
        return {n: p for n, p in self.named_parameters() if n in self.origin}

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of most parameter entries."""
        counts: dict[torch.dtype, int] = {}
        for p in self.parameters():
            if p.is_floating_point():
                counts[p.dtype] = counts.get(p.dtype, 0) + p.numel()
        return max(counts, key=counts.__getitem__) if counts else torch.float32

    def _forget_compiled(self) -> None:
        self._compiled.clear()

    # ---- rewriting, saving (implemented beside, so that each file holds one idea)

    def plan(self, passes: Any, **options: Any):
        """What a pipeline would do, without doing it; see :func:`hcx.rewrite.pipeline.walk.plan`."""
        from hcx.rewrite.pipeline.walk import plan

        return plan(self, passes, **options)

    def rewrite(self, passes: Any, **options: Any) -> Program:
        """A new Program with the passes applied and checked; see :func:`hcx.rewrite.driver.rewrite`."""
        from hcx.rewrite.driver import rewrite

        return rewrite(self, passes, **options)

    def save(self, path: str, **options: Any) -> None:
        """Write a ``.hcx`` folder; see :func:`hcx.rewrite.store.saving.save`."""
        from hcx.rewrite.store.saving import save

        save(self, path, **options)

    def as_pretrained(self, **options: Any):
        """A Transformers model over the same tensors; see :func:`hcx.rewrite.host.pretrained.as_pretrained`."""
        from hcx.rewrite.host.pretrained import as_pretrained

        return as_pretrained(self, **options)

    def as_module(self, checkpoint: str | None = None):
        """An ordinary module over the same parameters, for training; see :func:`hcx.rewrite.host.module.as_module`."""
        from hcx.rewrite.host.module import as_module

        return as_module(self, checkpoint)

    def load_checkpoint(self, path: str, **options: Any) -> None:
        """Take over weights that training has written; see :func:`hcx.rewrite.store.checkpoints.load_checkpoint`."""
        from hcx.rewrite.store.checkpoints import load_checkpoint

        load_checkpoint(self, path, **options)

    def check_inputs(self, count: int = 2) -> list[list[torch.Tensor]]:
        """Flat inputs of several shapes for checking; see :mod:`hcx.rewrite.run.inputs`."""
        from hcx.rewrite.run.inputs import check_inputs

        return check_inputs(self, count)

    def sites(self):
        """Stacks, blocks, branches and boundaries; see :func:`hcx.rewrite.sites.finder.find`."""
        from hcx.rewrite.sites.finder import find

        return find(self)

    # ---- nn.Module manners

    def train(self, mode: bool = True) -> Program:
        """Switch dropout on or off; see :func:`hcx.rewrite.host.optimiser.set_mode`."""
        from hcx.rewrite.host.optimiser import set_mode

        set_mode(self, mode)
        return self

    def to(self, *args: Any, **kwargs: Any) -> Program:
        """Move or cast in place; see :func:`hcx.rewrite.host.optimiser.move`."""
        from hcx.rewrite.host.optimiser import move

        return move(self, *args, **kwargs)

    def _apply(self, fn, recurse=True):
        """Devices and dtypes reach the plain tree too, whose dictionaries are shared."""
        tied = self.tied_groups()
        super()._apply(fn, recurse)
        for first, *others in tied:
            for name in others:
                path, _, leaf = name.rpartition(".")
                owner = fetch(self._root, path) if path else self._root
                if leaf in owner._buffers:
                    owner._buffers[leaf] = self.tensor(first)
        return self

    def param_groups(self, train: str = "all", **options: Any) -> list[dict]:
        """Groups for an optimiser; see :func:`hcx.rewrite.host.optimiser.param_groups`."""
        from hcx.rewrite.host.optimiser import param_groups

        return param_groups(self, train, **options)

    def __deepcopy__(self, memo: dict) -> Program:
        new = Program._build(
            copy_graph(self.graph), self._root, self.signature, examples=list(self.examples), reference=self.reference
        )
        new.__dict__.update(
            history=copy.deepcopy(self.history),
            origin=dict(self.origin),
            companions=dict(self.companions),
            trace_exact=self.trace_exact,
            golden=self.golden,
            stored=dict(self.stored),
            training=self.training,
        )
        memo[id(self)] = new
        return new

    def extra_repr(self) -> str:
        return f"{self.signature.model}, {len(self.graph.nodes)} nodes, {len(self.history)} rewrites"

    def set_tensor(self, name: str, tensor: torch.Tensor, *, added_by: str, persistent: bool = True) -> None:
        """Register a new parameter or buffer that belongs to a pass."""
        set_tensor(self._root, name, tensor, persistent=persistent)
        self.origin[name] = added_by


def suit_autocast(graph: fx.Graph) -> None:
    """Make a copy of a graph ready for the caller's autocast.

    What the model computes with autocast off (rotary angles) stays so. A mask filled with the least number of the dtype
    that was traced is filled with the least one of the dtype that autocast gives, as the model would.
    """
    change_bodies(graph, suit_autocast)
    for node in graph.nodes:
        tag = (node.meta.get("custom") or {}).get("hcx", {})
        if tag.get("autocast") == "off" and isinstance(node.target, torch._ops.OpOverload):
            node.target = _plainly(node.target)
        elif node.target is torch.ops.aten.masked_fill.Scalar:
            node.target = _fill


def _fill(values: torch.Tensor, mask: torch.Tensor, value: float) -> torch.Tensor:
    if values.is_floating_point() and not math.isinf(value):
        limits = torch.finfo(values.dtype)
        value = min(max(value, limits.min), limits.max)
    return torch.ops.aten.masked_fill.Scalar(values, mask, value)


def _plainly(op: Callable) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return op(*args, **kwargs)

    call.__name__ = op.__name__.replace(".", "_")
    return call


def _impure(node: fx.Node) -> bool:
    """Only placeholders and the output must stay; random ops and mutation are never dead while used."""
    return node.op in ("placeholder", "output") or (node.op == "call_function" and is_mutation(node))


def is_mutation(node: fx.Node) -> bool:
    """Whether an op writes to one of its arguments."""
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)
