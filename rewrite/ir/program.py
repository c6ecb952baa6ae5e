"""The graph Program: one graph, its tensors, and how it is called. It can be run and copied, not rewritten or saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self, cast

import hcx.kernels  # noqa: F401  registers the ops that graphs may hold
import torch
from torch import fx

from .autocast import suit_autocast
from .belongings import Belongings, StoredTensor
from .compiled import compiled
from .control import copy_graph
from .copies import copied
from .dataflow import results_of
from .graphs import drop_values, is_impure, prune
from .history import Entry
from .lowering import as_operators
from .modes import switch
from .moving import move
from .oracle import Oracle
from .signature import CallSignature, InputSpec
from .tensors import fetch, set_tensor
from .values import fake_mode_of

_OWN = frozenset({"graph", "tree", "signature", "examples", "reference", "belongings", "training"})


class Program(torch.nn.Module):
    """A graph with its tensors: what passes see and change.

    An ``nn.Module``: ``parameters()``, ``state_dict()``, ``to()``, ``train()`` and ``torch.compile`` work as usual.
    Users hold the Program of :mod:`hcx.rewrite.api`, which adds the verbs.

    Attributes:
        graph: ATen graph; one placeholder an input tensor, one output tuple: the model's outputs, then the taps.
        tree: plain modules that hold the tensors under their names; generated code runs on it, so that no attribute of
            this class can hide a parameter of the model.
        signature: binds calls, rebuilds outputs.
        examples: flat example inputs.
        reference: the eager source model over flat tensors, while it is in memory.
        belongings: what travels with every copy: history, origin of tensors, companions, ...
    """

    graph: fx.Graph
    tree: torch.nn.Module
    signature: CallSignature
    examples: list[list[torch.Tensor]]
    reference: Oracle | None
    belongings: Belongings
    _compiled: dict[tuple[bool, bool], Callable[..., Any]]

    @classmethod
    def build(
        cls,
        graph: fx.Graph,
        tree: torch.nn.Module,
        signature: CallSignature,
        *,
        examples: list[list[torch.Tensor]],
        reference: Oracle | None = None,
        belongings: Belongings | None = None,
        training: bool = False,
    ) -> Self:
        """A Program over the tensors of a plain module tree, which it shares."""
        self = cls()
        self.__dict__["_compiled"] = {}
        self.adopt(tree)
        self.graph, self.signature = graph, signature
        self.examples, self.reference = examples, reference
        self.belongings = belongings or Belongings()
        self.training = training
        return self

    @classmethod
    def over(cls, program: Program) -> Self:
        """A Program of this class that is the given one: the same graph, tensors and belongings, not copies."""
        return cls.build(
            program.graph,
            program.tree,
            program.signature,
            examples=program.examples,
            reference=program.reference,
            belongings=program.belongings,
            training=program.training,
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:  # a model may call a layer `graph` or a parameter `examples`
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def become(self, other: Program) -> None:
        """Take everything of another Program, which is not used any more."""
        self.adopt(other.tree)
        self.graph, self.signature = other.graph, other.signature
        self.examples, self.reference = other.examples, other.reference
        self.belongings, self.training = other.belongings, other.training

    def adopt(self, tree: torch.nn.Module) -> None:
        """Share the tensor dictionaries of a plain module tree."""
        self.tree = tree
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = tree.__dict__[name]
        self.forget_compiled()

    # ---- belongings

    @property
    def history(self) -> list[Entry]:
        """One entry a pass: pipeline, plan and certificate."""
        return self.belongings.history

    @property
    def origin(self) -> dict[str, str]:
        """Parameter or buffer name -> name of the pass that added it; base tensors are not listed."""
        return self.belongings.origin

    @property
    def companions(self) -> dict[str, bytes]:
        """Small files that belong to the model (tokenizer, config), by name."""
        return self.belongings.companions

    @property
    def stored(self) -> dict[str, StoredTensor]:
        """Name -> place in a file, of tensors that are on ``meta`` because nobody has read them yet."""
        return self.belongings.stored

    @property
    def trace_exact(self) -> bool | None:
        """Whether the fresh trace gave eager's outputs bitwise; None where nothing was run."""
        return self.belongings.trace_exact

    @property
    def golden(self) -> Any:
        """Recorded inputs and outputs of the artefact it came from; see :mod:`hcx.rewrite.check.golden`."""
        return self.belongings.golden

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
        return list(self._function(taps)(self.tree, *inputs))

    def _function(self, taps: bool) -> Callable[..., Any]:
        ambient = any(torch.is_autocast_enabled(d) for d in ("cpu", "cuda"))
        if (taps, ambient) not in self._compiled:
            graph = self._executable(taps)
            if ambient:
                suit_autocast(graph)
            self._compiled[taps, ambient] = compiled(graph, self.signature.model)
        return self._compiled[taps, ambient]

    def _executable(self, taps: bool) -> fx.Graph:
        """A copy of the graph that computes the outputs, and the taps only when asked for."""
        graph = copy_graph(self.graph)
        if not taps:
            output = graph.output_node()
            output.args = (tuple(results_of(graph))[: len(self.output_names)],)
            prune(graph, is_impure)
        return graph

    def flat_module(self, taps: bool = False) -> fx.GraphModule:
        """A plain GraphModule over flat tensors that shares this Program's tensors; for exporters and compilers."""
        fake_mode_of(self)
        graph = self._executable(taps)
        root = as_operators(graph, self.tree)
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
        return fetch(self.tree, name)

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

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every (name, tensor), tied tensors under each of their names, constants included."""
        yield from self.tree.named_parameters(remove_duplicate=False)
        yield from self.tree.named_buffers(remove_duplicate=False)

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

    def forget_compiled(self) -> None:
        """Call after a change to the graph."""
        self._compiled.clear()

    def drop_values(self) -> None:
        """Forget the shapes and dtypes of all nodes; they are computed again when needed."""
        drop_values(self.graph)
        self.forget_compiled()

    # ---- nn.Module manners

    def train(self, mode: bool = True) -> Self:
        """Switch dropout on or off, in the graph itself; see :func:`hcx.rewrite.ir.modes.switch`.

        Raises:
            UsageError: the source model computes something else in train mode than the graph can.
        """
        if self.training is not mode:  # trainers ask for the mode before every step
            switch(self.graph, mode)
            self.forget_compiled()
        for module in self.children():
            module.train(mode)
        self.training = mode
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move to a device, or cast to float64, in place; see :func:`hcx.rewrite.ir.moving.move`."""
        move(self, *args, **kwargs)
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Devices and dtypes reach the plain tree too, whose dictionaries are shared."""
        tied = self.tied_groups()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for first, *others in tied:
            for name in others:
                path, _, leaf = name.rpartition(".")
                owner = cast("torch.nn.Module", fetch(self.tree, path)) if path else self.tree
                if leaf in owner._buffers:
                    owner._buffers[leaf] = self.tensor(first)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = self.build(
            copy_graph(self.graph),
            copied(self.tree),
            self.signature,
            examples=list(self.examples),
            reference=self.reference,
            belongings=self.belongings.copied(golden=True),
            training=self.training,
        )
        memo[id(self)] = new
        return new

    def extra_repr(self) -> str:
        return f"{self.signature.model}, {len(self.graph.nodes)} nodes, {len(self.history)} rewrites"

    def set_tensor(self, name: str, tensor: torch.Tensor, *, added_by: str, persistent: bool = True) -> None:
        """Register a new parameter or buffer that belongs to a pass."""
        set_tensor(self.tree, name, tensor, persistent=persistent)
        self.origin[name] = added_by
