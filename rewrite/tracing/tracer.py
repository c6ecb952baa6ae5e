"""The front end: one call of an eager model becomes a Program.

``torch.export`` in non-strict mode gives the graph. The example is prepared first (sizes of 1 enlarged, masks and caches
put in), and the graph must give what eager gives before it is accepted.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from hcx.rewrite.collection import young_only
from hcx.rewrite.errors import HcxError, TraceError, let_through
from hcx.rewrite.ir.copies import copied
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.signature import CACHE, Argument, CallSignature, Fill, InputSpec
from hcx.rewrite.ir.structure import Structure, kinds

from .agreement import free_constants, limits_of, must_agree, must_be_pure
from .attempt import Attempt, Probe, attempts_for, probe
from .caches import OWN
from .capture import (
    PAST,
    CachedCalls,
    Call,
    bind_call,
    buffers_kept,
    eager_outputs,
    enlarged,
    separate,
    sizes_by_probe,
    with_mask,
)
from .explain import first_line, last_frame, raised_by_model
from .exporting import Wrapper, exported_flat
from .modes import record_modes
from .normalize import flat_graph
from .reference import EagerReference
from .shapes import input_values, shapes_of


def trace(
    model: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    cache: bool | None = None,
) -> Program:
    """Trace a model into a :class:`Program`. The model is never touched; its tensors are copied.

    Args:
        model: any module that torch.export can trace.
        args: example positional arguments. Sizes of 2 or more become dynamic where the model allows it.
        kwargs: example keyword arguments.
        cache: trace a decoder with an optional cache: True requires it, False leaves it out, None tries.

    Raises:
        TraceError: the model decides on tensor values, or the graph does not reproduce eager.
        UsageError: the example does not fit the model.
    """
    with young_only(), buffers_kept(model):
        return _trace(model, args, kwargs, cache)


def _trace(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None, cache: bool | None) -> Program:
    call, others = bind_call(model, tuple(args), dict(kwargs or {}))
    try:
        eager_outputs(model, call)
    except Exception as error:  # any type: the user's model
        let_through(error)
        if isinstance(error, HcxError):
            raise
        raise TraceError(
            f"the model itself fails on the example: {type(error).__name__}: {error}",
            where=last_frame(error),
            hint="check the example inputs by calling the model",
        ) from error
    call = enlarged(model, separate(call))
    call, masks = with_mask(model, call, others)
    others = {n: d for n, d in others.items() if n not in masks}
    attempts = attempts_for(model, call, others, masks, cache)
    for number, attempt in enumerate(attempts):
        try:
            return _trace_once(model, attempt, others)
        except Exception as error:
            # findings about this way of tracing, and what the user's model raises; an error of hcx is not one of them
            if number == len(attempts) - 1 or not (isinstance(error, HcxError) or raised_by_model(error)):
                raise
            attempts[number + 1].notes.append(f"traced without {attempt.what}: {first_line(error)}")
    raise AssertionError("unreachable")


def _trace_once(model: torch.nn.Module, attempt: Attempt, others: dict[str, str]) -> Program:
    call, probes = (attempt.call, None) if attempt.cached is None else _cached_call(attempt.call, attempt.cached)
    flat, structure = call.flat()
    wrapper = Wrapper(model, structure, call.positions, attempt.cached.cache if attempt.cached else None)
    exported = exported_flat(model, wrapper, flat)
    outputs = wrapper.seen.outputs
    assert outputs is not None
    shapes = shapes_of(exported, structure.names, attempt, probes)
    fill_of = {name: fill for n, fill in attempt.fills.items() for name in structure.names if name.split(".")[0] == n}
    names = [_flat_cache_name(n, attempt.cached.cache, CACHE) if attempt.cached else n for n in structure.names]
    graph, root = flat_graph(exported, names)
    must_be_pure(graph, type(model).__name__)
    inputs = [
        InputSpec(name, t.dtype, shape, fill_of.get(old))
        for name, old, t, shape in zip(names, structure.names, flat, shapes, strict=True)
    ]
    arguments = _arguments(model, call, structure, attempt, others)
    if attempt.cached is not None:
        outputs.names = [_flat_cache_name(n, attempt.cached.cache, "present") for n in outputs.names]
    signature = CallSignature(
        type(model).__name__,
        arguments,
        {n: d for n, d in others.items() if n not in call.values},
        inputs,
        outputs,
        attempt.notes,
    )
    optional = {n: fill == Fill.EMPTY for n, fill in attempt.fills.items() if fill in (Fill.EMPTY, Fill.POSITIONS)}
    growing = frozenset(i for i, s in enumerate(inputs) if s.fill == Fill.EMPTY and "past" in s.shape)
    empty = attempt.cached.empty if attempt.cached else None
    reference = EagerReference(model, structure, call.positions, optional, growing, empty)
    if {"int", "float"} & set(kinds(outputs.spec)):
        reference.outputs = outputs
    examples = [[t.detach().clone() for t in flat]]
    program = Program.build(graph, copied(root), signature, examples=examples, reference=reference)
    must_agree(program, reference, attempt)
    signature.limits = limits_of(program, reference, input_values(exported), shapes)
    record_modes(program, reference)
    free_constants(model, call, outputs, arguments)
    return program


def _cached_call(call: Call, cached: CachedCalls) -> tuple[Call, list[Probe]]:
    """A call with a cache in it, and the sizes of such calls at three sizes."""
    length = next(v for n, v in call.values.items() if n == cached.ids).shape[1]
    sizes = [(2, max(length, 3), max(2, length // 2)), (3, max(2, length - 1), max(length - 2, 4)), (2, 3, 5)]
    probes = [probe(cached, *size) for size in sizes]
    call = cached.make(sizes[0][2], *sizes[0][:2])
    own = {n for n in call.flat()[1].names if n.split(".")[0] == cached.cache}
    probed = dict(zip(call.flat()[1].names, sizes_by_probe(probes), strict=True))
    if not all(PAST in probed[n] for n in own):
        # models work through states in chunks of an even length: only a graph that pads the last one fits all
        cached.check()
        sizes[0] = (2, max(length, 3) | 1, max(2, length // 2))
        probes[0] = probe(cached, *sizes[0])
        call = cached.make(sizes[0][2], *sizes[0][:2])
    return call, probes


def _arguments(
    model: torch.nn.Module, call: Call, structure: Structure, attempt: Attempt, others: dict[str, str]
) -> list[Argument]:
    """What the signature says about each argument of the call."""
    defaults = {
        n: "an error" if p.default is p.empty else repr(p.default)
        for n, p in inspect.signature(model.forward).parameters.items()
        if n not in others and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    return [
        Argument(name, _position(model, name, call.positions), spec, name in attempt.fills, defaults.get(name))
        for name, spec in zip(structure.spec["keys"], structure.spec["items"], strict=True)
    ]


def _position(model: torch.nn.Module, name: str, positions: dict[str, int]) -> int | None:
    if name in positions:
        return positions[name]
    parameters = list(inspect.signature(model.forward).parameters.values())
    for index, parameter in enumerate(parameters):
        if parameter.name == name and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            return index
    return None


def _flat_cache_name(name: str, cache: str, prefix: str) -> str:
    """``past_key_values.0.key`` in and ``present.0.key`` out, whatever the model calls its cache."""
    if not name.startswith(cache + "."):
        return name
    return f"{prefix}.{name.removeprefix(cache + '.').removeprefix(OWN + '.')}"


def from_exported(exported: torch.export.ExportedProgram) -> Program:
    """A Program of a torch.export archive, through the example inputs it holds.

    Raises:
        TraceError: the archive holds no example inputs.
    """
    if exported.example_inputs is None:
        raise TraceError("the archive holds no example inputs", hint="export the model again with torch.export.export")
    args, kwargs = exported.example_inputs
    module = exported.module(check_guards=False)
    module._forward_pre_hooks.clear()  # shape constraints of the archive; the graph itself holds what is really fixed
    return trace(module, tuple(args), dict(kwargs))
