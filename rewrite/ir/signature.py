"""How a Program is called: the model's own argument names in, the model's own structure out."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from hcx.rewrite.errors import UsageError

from .structure import Structure, extract, rebuild_constant, tensor_indices

CACHE = "past_key_values"
"""Prefix of flat cache inputs, and a name that the argument may always be given by."""

Dim = int | str
"""A fixed size, or an expression over named sizes such as ``batch`` or ``past+sequence``."""


class Fill(StrEnum):
    """What an input is filled with where a call leaves it out."""

    ONES = "ones"
    """A mask that hides nothing."""
    POSITIONS = "positions"
    """past, past + 1, ..."""
    EMPTY = "empty"
    """Caches of length 0, and zeros for states of fixed size."""


@dataclass(frozen=True)
class Count:
    """An input that a call may leave out and that is a number then; in files and texts ``=3``."""

    number: int

    def __str__(self) -> str:
        return f"={self.number}"


def fill_of(text: str | None) -> Fill | Count | None:
    """The rule behind its text.

    >>> fill_of("ones"), fill_of("=3"), fill_of(None)
    (<Fill.ONES: 'ones'>, Count(number=3), None)

    Raises:
        ValueError: no rule.
    """
    if text is None:
        return None
    return Count(int(text[1:])) if text.startswith("=") else Fill(text)


@dataclass(frozen=True)
class InputSpec:
    """One flat tensor input.

    Attributes:
        name: path in the call, e.g. ``input_ids`` or ``past_key_values.0.key``.
        dtype: dtype when traced.
        shape: one entry a dimension; equal names are equal sizes.
        fill: what an omitted input is filled with, or None when it must be given.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[Dim, ...]
    fill: Fill | Count | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "dtype": str(self.dtype).removeprefix("torch."),
            "shape": list(self.shape),
            "fill": None if self.fill is None else str(self.fill),
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> InputSpec:
        dtype = getattr(torch, data["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{data['dtype']!r} is not a dtype")
        return InputSpec(data["name"], dtype, tuple(data["shape"]), fill_of(data["fill"]))


@dataclass
class Argument:
    """One argument of the model's ``forward`` that is part of the graph."""

    name: str
    position: int | None
    spec: dict[str, Any]
    fill: bool = False
    left_out: str | None = None
    """What the source model would take where a call leaves the argument out, as text; None where that is not asked."""

    def to_json(self) -> dict[str, Any]:
        return {**vars(self)}


@dataclass
class CallSignature:
    """Binds calls to flat inputs and rebuilds the model's output structure.

    Attributes:
        model: class name of the source model, for messages.
        arguments: what the graph takes, in the order of the flat inputs.
        others: arguments of ``forward`` that the trace did not use, with their defaults (as text).
        inputs: the flat inputs.
        outputs: structure of the model's output over the flat outputs.
        limits: least and largest size of named dimensions beyond which the graph is not the model; None for an open end.
    """

    model: str
    arguments: list[Argument]
    others: dict[str, str]
    inputs: list[InputSpec]
    outputs: Structure
    notes: list[str] = field(default_factory=list)
    limits: dict[str, list[int | None]] = field(default_factory=dict)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Flat inputs of a call.

        Args:
            args: positional arguments, as for the source model.
            kwargs: keyword arguments, in any order.

        Raises:
            UsageError: an argument that was not traced, has another kind, or does not fit a fixed dimension.
        """
        given = self._named(args, kwargs)
        flat: list[torch.Tensor | None] = [None] * len(self.inputs)
        for argument in self.arguments:
            indices = list(tensor_indices(argument.spec))
            if argument.name in given and not (argument.fill and given[argument.name] is None):
                value = given[argument.name]
                if any(isinstance(self.inputs[i].fill, Count) for i in indices):
                    value = _count(argument.name, value)
                for index, tensor in zip(indices, extract(argument.spec, value, argument.name), strict=True):
                    flat[index] = tensor
            elif not argument.fill and indices:
                raise UsageError(
                    f"argument `{argument.name}` of {self.model} is missing",
                    where=argument.name,
                    hint="this program was traced with it; give a tensor",
                )
            elif argument.left_out is not None and not indices:
                traced = rebuild_constant(argument.spec)
                if repr(traced) != argument.left_out:
                    raise UsageError(
                        f"argument `{argument.name}` was {traced!r} when traced and is part of the graph; "
                        f"left out it means {argument.left_out}",
                        where=argument.name,
                        hint=f"pass {argument.name}={traced!r}, or trace the model again without it",
                    )
        self._broadcast(flat)
        sizes = self.sizes(flat)
        return [t if t is not None else _filled(spec, sizes, flat) for t, spec in zip(flat, self.inputs, strict=True)]

    def _broadcast(self, flat: list[torch.Tensor | None]) -> None:
        """Positions and masks of one row stand for every row of the batch, as in eager."""
        batch = next((t.shape[0] for t, s in zip(flat, self.inputs, strict=True)
                      if t is not None and s.fill is None and s.shape and s.shape[0] == "batch"), None)  # fmt: skip
        for i, (tensor, spec) in enumerate(zip(flat, self.inputs, strict=True)):
            if (
                tensor is not None
                and spec.fill in (Fill.ONES, Fill.POSITIONS)
                and batch
                and tensor.dim()
                and tensor.shape[0] == 1
            ):
                flat[i] = tensor.expand(batch, *tensor.shape[1:])

    def complete(self, flat: list[torch.Tensor]) -> list[torch.Tensor]:
        """Flat inputs with the ones that a pass has added filled in (they come last).

        Of a longer list, made before a pass took cache slots out, the caches are made again: all of them empty.
        """
        more: list[torch.Tensor | None] = [*flat, *[None] * (len(self.inputs) - len(flat))]
        if len(flat) > len(self.inputs):
            more = [None if s.fill == Fill.EMPTY else t for t, s in zip(flat, self.inputs, strict=False)]
        sizes = self.sizes(more)
        return [t if t is not None else _filled(spec, sizes, more) for t, spec in zip(more, self.inputs, strict=True)]

    def by_name(self, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Flat inputs of a call from tensors by flat name; what may be left out is filled in, names unknown ignored.

        Raises:
            UsageError: an input is missing, or does not fit the others.
        """
        missing = [s.name for s in self.inputs if s.fill is None and s.name not in given]
        if missing:
            raise UsageError(
                f"the program also needs the input `{missing[0]}`",
                where=self.model,
                hint="it takes " + ", ".join(s.name for s in self.inputs if s.fill != Fill.EMPTY),
            )
        flat = [given[s.name].to(s.dtype) if s.name in given else None for s in self.inputs]
        sizes = self.sizes(flat)
        return [t if t is not None else _filled(s, sizes, flat) for t, s in zip(flat, self.inputs, strict=True)]

    @property
    def tokens(self) -> str | None:
        """Name of the input whose tokens a decoder continues, or None."""
        names = [spec.name for spec in self.inputs]
        return next((n for n in ("decoder_input_ids", "input_ids") if n in names), None)

    def rebuild(self, flat_outputs: list[Any]) -> Any:
        """The model's own output structure."""
        return self.outputs.rebuild(flat_outputs)

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        by_position = {a.position: a.name for a in self.arguments if a.position is not None}
        given: dict[str, Any] = {}
        for index, value in enumerate(args):
            name = by_position.get(index)
            if name is None:
                if value is None:
                    continue
                raise self._unsupported(f"positional argument {index}")
            given[name] = value
        known = {a.name for a in self.arguments}
        cache = next(
            (a.name for a in self.arguments if any(self.inputs[i].fill == Fill.EMPTY for i in tensor_indices(a.spec))),
            CACHE,
        )
        for name, value in kwargs.items():
            name = cache if name == CACHE else name
            if name in given:
                raise UsageError(f"argument `{name}` is given twice", where=name)
            if name in known:
                given[name] = value
            elif name in self.others and (value is None or repr(value) == self.others[name]):
                continue
            else:
                raise self._unsupported(f"argument `{name}`")
        return given

    def _unsupported(self, what: str) -> UsageError:
        return UsageError(
            f"{what} was not part of the call that was traced",
            where=self.model,
            hint="trace(model, args, kwargs) with an example that passes it; this program takes "
            + ", ".join(a.name for a in self.arguments),
        )

    def sizes(self, flat: Sequence[torch.Tensor | None]) -> dict[str, int]:
        """The named sizes of flat inputs, those included that only a mask tells.

        Args:
            flat: None for what a call leaves out.

        Raises:
            UsageError: inputs that do not fit each other or the graph.
        """
        sizes: dict[str, int] = {}
        given = [(s, t) for s, t in zip(self.inputs, flat, strict=True) if t is not None]
        for spec, tensor in given:
            if tensor.dim() != len(spec.shape):
                raise UsageError(
                    f"input `{spec.name}` has {tensor.dim()} dimensions, traced with {len(spec.shape)}", where=spec.name
                )
            for axis, dim in enumerate(spec.shape):
                size = tensor.shape[axis]
                if isinstance(dim, int):
                    if size != dim:
                        raise UsageError(
                            f"dimension {axis} of `{spec.name}` is fixed to {dim}, got {size}",
                            where=spec.name,
                            hint="the model fixes this size, or the example had size 1 there: trace with another example",
                        )
                elif "+" not in dim and sizes.setdefault(dim, size) != size:
                    raise UsageError(
                        f"dimension {axis} of `{spec.name}` is {size}, but `{dim}` is {sizes[dim]} in another input",
                        where=spec.name,
                    )
        for spec, tensor in given:
            for axis, dim in enumerate(spec.shape):
                parts = dim.split("+") if isinstance(dim, str) else []
                unknown = [n for n in parts if n not in sizes]
                if len(unknown) == 1:  # a cache of fixed-size states does not tell how long the past is; a mask does
                    known = sum(sizes[n] for n in parts if n in sizes)
                    sizes[unknown[0]] = max(0, tensor.shape[axis] - known)
        if "past" in self.dims:
            sizes.setdefault("past", 0)
        self.refuse(sizes)
        for spec, tensor in given:
            for axis, dim in enumerate(spec.shape):
                if isinstance(dim, str) and "+" in dim and tensor.shape[axis] != size_of(dim, sizes):
                    raise UsageError(
                        f"dimension {axis} of `{spec.name}` is {tensor.shape[axis]}, must be {dim} = {size_of(dim, sizes)}",
                        where=spec.name,
                    )
        return sizes

    def refuse(self, sizes: dict[str, int]) -> None:
        """Refuse sizes for which the model decides otherwise than it did for the example.

        Raises:
            UsageError: named dimension beyond its limits.
        """
        for name, (least, largest) in self.limits.items():
            size = sizes.get(name)
            if size is not None and not (least or 0) <= size <= (largest or size):
                span = f"{least or 1} to {largest}" if largest else f"{least} and more"
                raise UsageError(
                    f"`{name}` is {size}, and this graph is {self.model} for {span} only: the model decides by that size",
                    where=name,
                    hint=f"trace the model with an example where `{name}` is {size}",
                )

    @property
    def dims(self) -> list[str]:
        """Names of the dynamic dimensions, in order of appearance."""
        names: dict[str, None] = {}
        for spec in self.inputs:
            for dim in spec.shape:
                if isinstance(dim, str):
                    names.update(dict.fromkeys(dim.split("+")))
        return list(names)

    @property
    def has_cache(self) -> bool:
        """Whether the graph takes a cache that may be empty."""
        return any(spec.fill == Fill.EMPTY for spec in self.inputs)

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "arguments": [a.to_json() for a in self.arguments],
            "others": self.others,
            "inputs": [i.to_json() for i in self.inputs],
            "outputs": self.outputs.to_json(),
            "notes": self.notes,
            "limits": self.limits,
        }

    def copied(self) -> CallSignature:
        """Another one of the same content; templates of outputs, which are objects of the model's own, are shared."""
        new = CallSignature.from_json(copy.deepcopy(self.to_json()))
        new.outputs.templates = self.outputs.templates
        return new

    @staticmethod
    def from_json(data: dict[str, Any]) -> CallSignature:
        return CallSignature(
            data["model"],
            [Argument(**a) for a in data["arguments"]],
            dict(data["others"]),
            [InputSpec.from_json(i) for i in data["inputs"]],
            Structure.from_json(data["outputs"]),
            list(data["notes"]),
            dict(data.get("limits", {})),
        )


def size_of(dim: Dim, sizes: dict[str, int]) -> int:
    """Value of a dimension expression."""
    return dim if isinstance(dim, int) else sum(sizes[name] for name in dim.split("+"))


def _filled(spec: InputSpec, sizes: dict[str, int], flat: Sequence[torch.Tensor | None]) -> torch.Tensor:
    first = next(t for t in flat if t is not None)
    missing = [n for d in spec.shape if isinstance(d, str) for n in d.split("+") if n not in sizes]
    if missing:
        raise UsageError(
            f"cannot fill the omitted input `{spec.name}`: size `{missing[0]}` is unknown", where=spec.name
        )
    shape = [size_of(dim, sizes) for dim in spec.shape]
    if spec.fill == Fill.POSITIONS:
        start = sizes.get("past", 0)
        return torch.arange(start, start + shape[-1], device=first.device, dtype=spec.dtype).expand(shape).contiguous()
    return filled(spec, shape, first.device)


def filled(spec: InputSpec, shape: list[int], device: torch.device) -> torch.Tensor:
    """What stands for an input that is left out, positions apart."""
    value = spec.fill.number if isinstance(spec.fill, Count) else int(spec.fill == Fill.ONES)
    return torch.full(shape, value, dtype=spec.dtype, device=device)


def _count(name: str, value: Any) -> torch.Tensor:
    """A count that a pass has made an argument: an int, or an integer tensor without dimensions."""
    tensor = torch.tensor(value) if isinstance(value, int) else value
    whole = isinstance(tensor, torch.Tensor) and not tensor.dim() and tensor.dtype in (torch.int32, torch.int64)
    if not whole or (not tensor.is_meta and int(tensor) < 1):
        raise UsageError(f"`{name}` is a whole number from 1 on, not {value!r}", where=name, hint=f"e.g. {name}=2")
    return tensor.to(torch.int64)
