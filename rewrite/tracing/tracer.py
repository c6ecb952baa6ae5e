"""The front end: one call of an eager model becomes a Program.

``torch.export`` in non-strict mode gives the graph. The example is prepared first (sizes of 1 enlarged, masks and caches
put in), and the graph must give what eager gives before it is accepted.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import logging
import re
import traceback
from typing import Any

import torch
from hcx.rewrite.collection import young_only
from hcx.rewrite.errors import HcxError, TraceError
from hcx.rewrite.ir.dataflow import op_name
from hcx.rewrite.ir.mutation import Aliases, mutated
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.signature import CACHE, Argument, CallSignature, InputSpec, tensor_indices
from hcx.rewrite.ir.structure import Structure, flatten, kinds, outputs_of, rebuild_constant
from hcx.rewrite.run.inputs import example_sizes, resized
from torch import fx

from .caches import OWN
from .capture import (
    GOES_ON,
    PAST,
    SEQUENCE,
    CachedCalls,
    Call,
    bind_call,
    buffers_kept,
    cached_calls,
    close,
    eager_outputs,
    enlarged,
    invoke,
    own_cache,
    reference_mode,
    separate,
    sizes_by_probe,
    with_mask,
)
from .limits import find_limits
from .modes import record_modes
from .normalize import flat_graph


class _Seen:
    """Keeps what a traced forward found out; torch.export resets plain attributes of the module it traces."""

    outputs: Structure | None = None


class _Wrapper(torch.nn.Module):
    """Takes flat tensors, returns flat tensors; remembers the structure of the output."""

    def __init__(self, model: torch.nn.Module, structure: Structure, positions: dict[str, int], cache: str | None):
        super().__init__()
        self.m = model
        self._structure, self._positions, self.seen = [structure], positions, _Seen()
        self._cache = cache

    def forward(self, *flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        call = Call(self._structure[0].rebuild(list(flat)), self._positions)
        tensors, outputs = flatten(own_cache(invoke(self.m, call), self._cache))
        self.seen.outputs = outputs
        return tuple(tensors)


class EagerReference:
    """The source model behind the Program's flat interface: the oracle of every check.

    A call with empty caches goes to the model as the user would make it, without caches; where the graph keeps more in
    its cache than the model does, with an empty cache of that kind.

    Args:
        optional: arguments that calls may leave out -> whether it is the cache (else positions).
        growing: flat inputs of the cache that get longer with every token; the rest of it has a fixed size.
        empty: the empty cache of that kind, or None.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        structure: Structure,
        positions: dict[str, int],
        optional: dict[str, bool],
        growing: frozenset[int] = frozenset(),
        empty: Any = None,
    ):
        self.model, self.structure, self.positions, self.optional = model, structure, positions, optional
        self.growing, self.empty = growing, empty
        self.outputs: Structure | None = None

    def __call__(self, flat: list[torch.Tensor], *, grad: bool = False) -> list[torch.Tensor]:
        return self.flat(self.result(flat, grad=grad))

    def named(self, flat: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The outputs by name. Only those outside the cache are sure to have the names that they have in a Program: a
        model may keep its cache in other tensors than the graph does."""
        result = self.result(flat)
        if self.outputs is not None:
            return dict(zip(self.outputs.names, self.flat(result), strict=True))
        tensors, structure = flatten(result)
        return dict(zip(structure.names, tensors, strict=True))

    def result(self, flat: list[torch.Tensor], *, grad: bool = False) -> Any:
        """The output as the model gives it."""
        values = dict(self.structure.rebuild(list(flat)))
        cache = next((n for n, is_cache in self.optional.items() if is_cache), None)
        if cache is not None and self._starts(flat, cache):
            for name, is_cache in self.optional.items():
                if is_cache and self.empty is not None:
                    values[name] = copy.deepcopy(self.empty)
                elif is_cache or _counts_from_zero(values[name]):
                    del values[name]
        with reference_mode(self.model), torch.set_grad_enabled(grad):
            return own_cache(invoke(self.model, Call(values, self.positions)), cache)

    def flat(self, result: Any) -> list[torch.Tensor]:
        """The model's output as flat tensors; numbers that follow the input's sizes are among them."""
        return flatten(result)[0] if self.outputs is None else outputs_of(self.outputs.spec, result, [])

    def _starts(self, flat: list[torch.Tensor], cache: str) -> bool:
        """Whether the cache is that before the first token: nothing in what grows, zeros in the rest."""
        own = [i for i, n in enumerate(self.structure.names) if n.split(".")[0] == cache]
        return all(flat[i].numel() == 0 if i in self.growing else not flat[i].any() for i in own)


def _counts_from_zero(positions: torch.Tensor) -> bool:
    return torch.equal(positions, torch.arange(positions.shape[-1], device=positions.device).expand_as(positions))


def trace(
    model: torch.nn.Module, args: tuple = (), kwargs: dict | None = None, *, cache: bool | None = None
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


def _trace(model: torch.nn.Module, args: tuple, kwargs: dict | None, cache: bool | None) -> Program:
    call, others = bind_call(model, tuple(args), dict(kwargs or {}))
    try:
        eager_outputs(model, call)
    except HcxError:
        raise
    except Exception as error:
        raise TraceError(
            f"the model itself fails on the example: {type(error).__name__}: {error}",
            where=_last_frame(error),
            hint="check the example inputs by calling the model",
        ) from error
    call = enlarged(model, separate(call))
    call, masks = with_mask(model, call, others)
    others = {n: d for n, d in others.items() if n not in masks}
    attempts = _attempts(model, call, others, masks, cache)
    for number, attempt in enumerate(attempts):
        try:
            return _trace_once(model, attempt, others)
        except Exception as error:
            last = number == len(attempts) - 1
            if last:
                raise
            attempts[number + 1].notes.append(f"traced without {attempt.what}: {_first_line(error)}")
    raise AssertionError("unreachable")


class _Attempt:
    """One way of tracing: the call, and what may be omitted in calls of the result."""

    def __init__(self, call: Call, fills: dict[str, str], what: str, cached: CachedCalls | None = None):
        self.call, self.fills, self.what, self.cached = call, fills, what, cached
        self.notes: list[str] = []


def _attempts(model, call: Call, others: dict[str, str], masks: list[str], cache: bool | None) -> list[_Attempt]:
    fills = dict.fromkeys(masks, "ones")
    attempts: list[_Attempt] = []
    notes: list[str] = []
    maker, why = None, "the model does not return a cache that it also takes"
    if cache is not False:
        try:
            maker = cached_calls(model, call, others)
        except Exception as error:  # any error of the model's own: it is then traced without a cache
            why = _first_line(error)
            notes.append(f"traced without a cache: {why}")
    if maker is not None:
        own = {maker.cache: "empty", **({maker.positions: "positions"} if maker.positions else {})}
        if "use_cache" in others:
            maker.call = call.replaced(use_cache=True)
        attempts.append(_Attempt(maker.call, {**fills, **own}, "a cache", maker))
    if cache is True:
        if not attempts:
            raise TraceError(why, where=type(model).__name__, hint="leave out cache=True")
        return attempts
    if "use_cache" in others and maker is not None:
        call = call.replaced(use_cache=False)
    attempts.append(_Attempt(call, fills, "anything left out"))
    attempts[-1].notes += notes
    return attempts


def _trace_once(model: torch.nn.Module, attempt: _Attempt, others: dict[str, str]) -> Program:
    probes = None
    call = attempt.call
    if attempt.cached is not None:
        length = next(v for n, v in call.values.items() if n == attempt.cached.ids).shape[1]
        sizes = [(2, max(length, 3), max(2, length // 2)), (3, max(2, length - 1), max(length - 2, 4)), (2, 3, 5)]
        probes = [_probe(attempt.cached, *size) for size in sizes]
        call = attempt.cached.make(sizes[0][2], *sizes[0][:2])
        own = {n for n in call.flat()[1].names if n.split(".")[0] == attempt.cached.cache}
        probed = dict(zip(call.flat()[1].names, sizes_by_probe(probes), strict=True))
        if not all(PAST in probed[n] for n in own):
            # models work through states in chunks of an even length: only a graph that pads the last one fits all
            attempt.cached.check()
            sizes[0] = (2, max(length, 3) | 1, max(2, length // 2))
            probes[0] = _probe(attempt.cached, *sizes[0])
            call = attempt.cached.make(sizes[0][2], *sizes[0][:2])
    flat, structure = call.flat()
    wrapper = _Wrapper(model, structure, call.positions, attempt.cached.cache if attempt.cached else None)
    exported = _export(model, wrapper, flat)
    outputs = wrapper.seen.outputs
    assert outputs is not None
    shapes = _shapes(exported, structure.names, attempt, probes)
    fill_of = {name: fill for n, fill in attempt.fills.items() for name in structure.names if name.split(".")[0] == n}
    names = [_flat_cache_name(n, attempt.cached.cache, CACHE) if attempt.cached else n for n in structure.names]
    graph, root = flat_graph(exported, names)
    _must_be_pure(graph, type(model).__name__)
    inputs = [
        InputSpec(name, t.dtype, shape, fill_of.get(old))
        for name, old, t, shape in zip(names, structure.names, flat, shapes, strict=True)
    ]
    defaults = {
        n: "an error" if p.default is p.empty else repr(p.default)
        for n, p in inspect.signature(model.forward).parameters.items()
        if n not in others and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    arguments = [
        Argument(name, call.positions.get(name), spec, name in attempt.fills, defaults.get(name))
        for name, spec in zip(structure.spec["keys"], structure.spec["items"], strict=True)
    ]
    if attempt.cached is not None:
        outputs.names = [_flat_cache_name(n, attempt.cached.cache, "present") for n in outputs.names]
    positions = {n: p for n, p in call.positions.items()}
    for argument in arguments:
        argument.position = _position(model, argument.name, positions)
    signature = CallSignature(
        type(model).__name__,
        arguments,
        {n: d for n, d in others.items() if n not in call.values},
        inputs,
        outputs,
        attempt.notes,
    )
    optional = {n: fill == "empty" for n, fill in attempt.fills.items() if fill in ("empty", "positions")}
    growing = frozenset(i for i, s in enumerate(inputs) if s.fill == "empty" and "past" in s.shape)
    empty = attempt.cached.empty if attempt.cached else None
    reference = EagerReference(model, structure, call.positions, optional, growing, empty)
    if {"int", "float"} & set(kinds(outputs.spec)):
        reference.outputs = outputs
    program = Program._build(graph, root, signature, examples=[[t.detach().clone() for t in flat]], reference=reference)
    _must_agree(program, reference, attempt)
    signature.limits = _limits(program, reference, _input_values(exported), shapes)
    record_modes(program, reference)
    _free_constants(model, call, outputs, arguments)
    return program


def _probe(cached: CachedCalls, batch: int, sequence: int, past: int) -> tuple[list[torch.Tensor], dict[str, int]]:
    tensors = cached.make(past, batch, sequence).flat()[0]
    return tensors, {"batch": batch, SEQUENCE: sequence, PAST: past}


def _free_constants(model: torch.nn.Module, call: Call, outputs: Structure, arguments: list[Argument]) -> None:
    """Let calls leave out a constant where eager then gives the same values (and maybe more, such as a cache)."""
    for argument in arguments:
        if argument.left_out in (None, "an error") or any(True for _ in tensor_indices(argument.spec)):
            continue
        if repr(rebuild_constant(argument.spec)) == argument.left_out:
            continue
        without = separate(Call({n: v for n, v in call.values.items() if n != argument.name}, call.positions))
        try:
            with reference_mode(model), torch.no_grad():
                wanted = dict(zip(outputs.names, flatten(invoke(model, separate(call)))[0], strict=True))
                result, names = flatten(invoke(model, without))
        except Exception:  # whatever a model raises without it, the argument is needed
            continue
        got = dict(zip(names.names, result, strict=True))
        if all(n in got and torch.equal(got[n], t) for n, t in wanted.items()):
            argument.left_out = None


_RANDOM = {
    "rand",
    "rand_like",
    "randn",
    "randn_like",
    "randint",
    "randint_like",
    "randperm",
    "normal",
    "normal_functional",
    "bernoulli",
    "bernoulli_",
    "multinomial",
    "uniform",
    "uniform_",
    "normal_",
    "exponential_",
    "poisson",
}


def _must_be_pure(graph: fx.Graph, model: str) -> None:
    """Refuse a graph whose answer depends on more than its inputs and weights.

    Raises:
        TraceError: it draws random numbers in eval mode, or writes to a parameter or buffer.
    """
    aliases = Aliases(graph)
    for node in graph.nodes:
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        where = (stack[-1][0] if stack else "") or model
        if op_name(node) in _RANDOM:
            raise TraceError(
                f"the model draws random numbers ({op_name(node)}) in eval mode",
                where=where,
                hint="pass the noise as an argument",
            )
        for target in mutated(node):
            if aliases.root(target).op == "get_attr":
                raise TraceError(
                    f"the model writes to its own tensor `{aliases.root(target).target}` in every call",
                    where=where,
                    hint="pass that state as an argument and return the new one",
                )


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


def _export(model: torch.nn.Module, wrapper: _Wrapper, flat: list[torch.Tensor]):
    auto = torch.export.Dim.AUTO
    dynamic = (tuple({axis: auto for axis in range(t.dim())} for t in flat),)
    try:
        with reference_mode(model), _quiet():
            wrapper.training = False
            return torch.export.export(wrapper, tuple(flat), dynamic_shapes=dynamic, strict=False)
    except HcxError:
        raise
    except Exception as error:
        raise _explain(error, model) from error


@contextlib.contextmanager
def _quiet():
    """torch.export logs the whole graph when it fails; what matters of it goes into our own message."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _explain(error: Exception, model: torch.nn.Module) -> TraceError:
    """An error a user can act on, with the line of the model that caused it."""
    name, text = type(error).__name__, str(error)
    where = _last_frame(error) or _frame_in_text(text) or type(model).__name__
    if "GuardOnDataDependent" in name or "data-dependent" in text.lower():
        return TraceError(
            "the model decides on a tensor's value, so one graph cannot stand for it",
            where=where,
            hint="rewrite the branch with torch.where or torch.cond",
        )
    if "Constraints violated" in text:
        return TraceError(
            f"a dimension was fixed by the model: {_first_line(error)}",
            where=where,
            hint="give examples with sizes of 2 or more",
        )
    return TraceError(
        f"torch.export cannot trace the model: {name}: {_first_line(error)}",
        where=where,
        hint="see the line above; -vv shows the whole traceback",
    )


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]


def _last_frame(error: Exception) -> str | None:
    """The innermost source line outside torch itself."""
    inside = (f"{torch.__path__[0]}/",)
    own = __file__.rsplit("/", 1)[0] + "/"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*inside, own, "<")):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return None


def _frame_in_text(text: str) -> str | None:
    found = re.findall(r'File "([^"]+)", line (\d+)', text)
    for file, line in reversed(found):
        if not file.startswith(torch.__path__[0]):
            return f"{file}:{line}"
    return None


def _shapes(exported, names: list[str], attempt: _Attempt, probes: list | None) -> list[tuple[int | str, ...]]:
    """Dimension expressions of the flat inputs.

    Raises:
        TraceError: a graph with a cache is fixed to one number of tokens.
    """
    if not probes:
        return _exported_shapes(exported, names, attempt.fills)
    cached = attempt.cached
    shapes, traced = sizes_by_probe(probes), _exported_shapes(exported, names, {}, {"batch", SEQUENCE, PAST})
    tokens = names.index(cached.ids)
    if not isinstance(traced[tokens][1], str):
        raise TraceError(
            f"the graph is fixed to {traced[tokens][1]} tokens a call: the model repeats code for every token",
            where=cached.ids,
        )
    mask = cached.ids.removesuffix("input_ids") + "attention_mask"
    for index, name in enumerate(names):
        if name.split(".")[0] not in (cached.ids, cached.cache, cached.positions, mask):  # the probes kept its sizes
            pairs = zip(shapes[index], traced[index], strict=True)
            shapes[index] = tuple(t if isinstance(s, int) else s for s, t in pairs)
    for mask in (n for n, fill in attempt.fills.items() if fill == "ones"):
        ids = mask.removesuffix("attention_mask") + "input_ids"
        shapes[names.index(mask)] = shapes[names.index(ids)] if ids != cached.ids else shapes[names.index(mask)]
    return shapes


def _exported_shapes(
    exported, names: list[str], fills: dict[str, str], taken: set[str] = frozenset()
) -> list[tuple[int | str, ...]]:
    """Dimension expressions of the flat inputs from torch.export's symbols, with readable names that are not taken."""
    user = _input_values(exported)
    symbols: dict[str, str] = {}
    shapes, batch = [], None
    for name, value in zip(names, user, strict=True):
        dims: list[int | str] = []
        for axis, size in enumerate(value.shape):
            if isinstance(size, int) or size.node.expr.is_number:
                dims.append(int(size))
                continue
            symbol = str(size.node.expr)
            if symbol not in symbols and axis == 0 and name.endswith("mask") and _hint(size) == batch:
                symbols[symbol] = "batch"  # nothing in the graph ties its rows to the data's
            if symbol not in symbols:
                symbols[symbol] = _dim_name(name, axis, value, taken | set(symbols.values()))
                batch = _hint(size) if symbols[symbol] == "batch" else batch
            dims.append(symbols[symbol])
        shapes.append(tuple(dims))
    for mask in (n for n, fill in fills.items() if fill == "ones"):  # a mask has the shape of its tokens
        shapes[names.index(mask)] = shapes[names.index(mask.removesuffix("attention_mask") + "input_ids")]
    return shapes


def _hint(size: torch.SymInt) -> int | None:
    """The size in the example."""
    return size.node.hint


def _input_values(exported) -> list:
    """The fake tensors of the flat inputs."""
    placeholders = {n.name: n for n in exported.graph.nodes if n.op == "placeholder"}
    specs = exported.graph_signature.input_specs
    return [placeholders[s.arg.name].meta["val"] for s in specs if s.kind.name == "USER_INPUT"]


def _dim_name(name: str, axis: int, value: Any, taken: set[str]) -> str:
    if axis == 0 and "batch" not in taken:
        return "batch"
    if axis == 1 and value.dim() == 2 and not value.dtype.is_floating_point and "sequence" not in taken:
        return "sequence"
    return f"{name.replace('.', '_').replace('+', '_')}_{axis}"


def _limits(program: Program, reference: EagerReference, values: list, shapes: list) -> dict[str, list]:
    """Limits of the named sizes, see :mod:`hcx.rewrite.tracing.limits`; none are known of a model without values."""

    def agrees(sizes: dict[str, int]) -> bool:
        flat = resized(program, sizes)
        try:
            expected = reference([t.clone() for t in flat])
        except Exception:  # whatever a model raises at a size it does not take: nobody will ask for it
            return True
        try:
            with torch.no_grad():
                return all(map(close, program.run_flat([t.clone() for t in flat]), expected))
        except (RuntimeError, IndexError, ValueError):
            return False

    if any(t.is_meta for t in program.parameters()):
        return {}
    return find_limits(values, shapes, example_sizes(program), agrees)


def _must_agree(program: Program, reference: EagerReference, attempt: _Attempt) -> None:
    """Compare the graph with eager on the example, and for cached graphs at other lengths and without a cache."""
    sets = [program.examples[0]]
    if attempt.cached is not None:
        more = [attempt.cached.make(7, 3, 2).flat()[0], attempt.cached.make(2, 1, 4).flat()[0]]
        sets += more
        given = attempt.call.values
        sets.append(program.signature.bind((), given))
    exact = True
    for flat in sets:
        expected = reference([t.clone() for t in flat])
        if any(t.is_meta for t in expected):
            return
        if flat is sets[0] and not all(map(close, reference([t.clone() for t in flat]), expected)):
            raise TraceError(
                "the model gives something else when called again: a graph does not give what the model gives",
                where=program.signature.model,
                hint="it keeps state between calls or draws random numbers",
            )
        with torch.no_grad():
            got = program.run_flat([t.clone() for t in flat])
        for name, g, e in zip(program.output_names, got, expected, strict=True):
            if not close(g, e):
                diff = (g.double() - e.double()).abs().max().item() if g.shape == e.shape else float("nan")
                raise TraceError(
                    f"the traced graph does not give what the model gives: output `{name}` differs by {diff:.3g}",
                    where=program.signature.model,
                    hint="the model keeps state between calls, draws random numbers, "
                    "or depends on something that is not an argument",
                )
            exact = exact and _equal(g, e)
    if attempt.cached is not None and len(reference.growing) < sum(s.fill == "empty" for s in program.inputs):
        _must_step(program, reference, attempt.cached)
        _must_chunk(program, reference, attempt.cached)
    program.trace_exact = exact


MANY = 300
"""Tokens in one call that take more than one chunk (64 to 256 tokens) of the models that work through states in chunks."""


def _must_chunk(program: Program, reference: EagerReference, cached: CachedCalls) -> None:
    """Compare a call of many tokens: a Python loop over chunks is part of the graph as often as it ran when traced.

    Raises:
        TraceError: the graph stands for short calls only.
    """
    try:
        flat = cached.make(2, 1, MANY).flat()[0]
        expected = reference([t.clone() for t in flat])
    except Exception:  # the model has no positions for so many
        return
    what = f"the model repeats code for every chunk of tokens, so its graph does not stand for calls of {MANY} tokens"
    try:
        with torch.no_grad():
            got = program.run_flat(flat)
    except RuntimeError as error:
        raise TraceError(f"{what}: {_first_line(error)}", where=program.signature.model) from error
    for name, g, e in zip(program.output_names, got, expected, strict=True):
        if not e.is_floating_point() or name.startswith("present."):
            continue
        limit = GOES_ON.get(e.dtype, 1e-3) * e.double().square().mean().sqrt().item()
        if g.shape != e.shape or not (g.double() - e.double()).abs().max().item() <= limit:
            raise TraceError(f"{what}: `{name}` differs", where=program.signature.model)


def _must_step(program: Program, reference: EagerReference, cached: CachedCalls) -> None:
    """Compare one token through the graph with the second of two in eager.

    Eager steps through states with single tokens in code of its own, which need not give what it gives from the start.
    """
    expected = reference(cached.make(7, 3, 2).flat()[0])
    with torch.no_grad():
        got = program.run_flat(cached.make(8, 3, 1).flat()[0])
    for name, one, both in zip(program.output_names, got, expected, strict=True):
        if one.shape != both.shape and one.dim() == both.dim() >= 2 and (one.shape[1], both.shape[1]) == (1, 2):
            both = both[:, 1:]
        if one.shape == both.shape and not close(one, both):
            diff = (one.double() - both.double()).abs().max().item()
            raise TraceError(
                f"the traced graph does not give one token at a time what the model gives: `{name}` differs by {diff:.3g}",
                where=program.signature.model,
            )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal, NaN where NaN is expected."""
    if torch.equal(one, other):
        return True
    return not one.is_complex() and torch.equal(one.nan_to_num(), other.nan_to_num())


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
