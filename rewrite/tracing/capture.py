"""Turning a user's example call into flat, well-sized inputs for tracing.

What a call leaves out is put in where eager itself proves that nothing changes: an attention mask of ones, positions
counted from the cache length, and a cache taken from a real call. All of it goes by argument names and by what the
model returns, never by the kind of model.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from hcx.rewrite.errors import TraceError, UsageError, let_through
from hcx.rewrite.ir.structure import Structure, flatten
from torch.export._trace import _compiling_state_context

from .caches import blank, differs, is_pair, without_encoder

PAST, SEQUENCE = "past", "sequence"


@dataclass
class Call:
    """One call of the model: values by argument name, and the positions they may also be given at."""

    values: dict[str, Any]
    positions: dict[str, int]

    def replaced(self, **changes: Any) -> Call:
        return Call({**self.values, **changes}, self.positions)

    def flat(self) -> tuple[list[torch.Tensor], Structure]:
        return flatten(self.values)


def bind_call(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, dict[str, str]]:
    """Values by argument name, and the arguments of ``forward`` that the example leaves out (name -> default).

    Raises:
        UsageError: the example does not fit the signature of ``forward``.
    """
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(
            f"the example does not fit {type(model).__name__}.forward: {error}",
            where=f"forward{signature}",
            hint="give args and kwargs as you would call the model",
        ) from None
    values: dict[str, Any] = {}
    positions: dict[str, int] = {}
    others: dict[str, str] = {}
    for index, (name, parameter) in enumerate(signature.parameters.items()):
        if parameter.kind is parameter.VAR_POSITIONAL:
            for offset, value in enumerate(bound.arguments.get(name, ())):
                positions[f"{name}.{offset}"] = index + offset
                values[f"{name}.{offset}"] = value
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            values.update(bound.arguments.get(name, {}))
            continue
        if parameter.kind is not parameter.KEYWORD_ONLY:
            positions[name] = index
        if name in bound.arguments:
            values[name] = bound.arguments[name]
        else:
            others[name] = repr(parameter.default)
    return Call(values, positions), others


def invoke(model: torch.nn.Module, call: Call) -> Any:
    """Run the eager model on a call."""
    positional = sorted((p, n) for n, p in call.positions.items() if "." in n and n in call.values)
    if not positional:
        return model(**call.values)
    first = positional[0][0]
    named = {p: n for n, p in call.positions.items() if p < first and n in call.values}
    args = [call.values[named[p]] for p in sorted(named)] + [call.values[n] for _, n in positional]
    used = set(named.values()) | {n for _, n in positional}
    return model(*args, **{k: v for k, v in call.values.items() if k not in used})


@contextlib.contextmanager
def buffers_kept(model: torch.nn.Module) -> Iterator[None]:
    """Undo what calls of the model write to its buffers: own state, running statistics in train mode."""
    saved = [(b, b.clone()) for b in model.buffers() if not b.is_meta and not b.is_inference()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, copy in saved:  # not by version counters: some kernels write without raising them
                if not torch.equal(torch.nan_to_num(buffer), torch.nan_to_num(copy)):
                    buffer.copy_(copy)


def on_meta(model: torch.nn.Module) -> bool:
    """Whether a model has shapes but no values."""
    return any(p.is_meta for p in model.parameters())


@contextlib.contextmanager
def reference_mode(model: torch.nn.Module, *, train: bool = False) -> Iterator[None]:
    """Eager as the reference: fixed mode, no fused fast path for nn.TransformerEncoder; restored afterwards.

    The fast path of ``torch.backends.mha`` differs from the ordinary path by 1e-6 and cannot be traced. A model on
    ``meta`` is run as if it were being exported.
    """
    modes = {module: module.training for module in model.modules()}
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        for module in modes:
            module.training = train
        torch.backends.mha.set_fastpath_enabled(False)
        # without values nothing can be decided on them: models then take the way that they take while exported
        with _compiling_state_context() if on_meta(model) else contextlib.nullcontext():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, mode in modes.items():
            module.training = mode


def eager_outputs(model: torch.nn.Module, call: Call) -> list[torch.Tensor]:
    """Flat tensor outputs of the eager model, without gradients."""
    with reference_mode(model), torch.no_grad():
        return flatten(invoke(model, _fresh(call)))[0]


def _fresh(call: Call) -> Call:
    """A call whose cache objects may be written to without changing the original."""
    tensors, structure = call.flat()
    return Call(structure.rebuild([t.clone() for t in tensors]), call.positions)


def separate(call: Call) -> Call:
    """Clone tensors that are given twice: torch.export would take two inputs for one."""
    tensors, structure = call.flat()
    seen: set[int] = set()
    for i, tensor in enumerate(tensors):
        if id(tensor) in seen:
            tensors[i] = tensor.clone()
        seen.add(id(tensors[i]))
    return Call(structure.rebuild(tensors), call.positions)


def enlarged(model: torch.nn.Module, call: Call) -> Call:
    """The call with every batch of 1 repeated to 2 (and lengths of 1 in 2-D integer inputs): a size of 1 would be
    traced as a constant. The example is kept as it is where eager does not accept the larger one."""
    tensors, structure = call.flat()
    batched = [t for t in tensors if t.dim()]
    if not batched or min(t.shape[0] for t in batched) > 1:
        wider = tensors
    elif all(t.shape[0] == 1 for t in batched):
        wider = [t.repeat(2, *[1] * (t.dim() - 1)) if t.dim() else t for t in tensors]
    else:
        wider = tensors
    ids = [t for t in wider if t.dim() == 2 and not t.is_floating_point()]
    if ids and all(t.shape[1] == 1 for t in ids):
        wider = [t.repeat(1, 2) if t.dim() == 2 and not t.is_floating_point() else t for t in wider]
    if wider is tensors:
        return call
    candidate = Call(structure.rebuild(wider), call.positions)
    try:
        eager_outputs(model, candidate)
    except Exception as error:  # noqa: BLE001  the model does not take the larger example, whatever it says
        let_through(error)
        return call
    return candidate


def with_mask(model: torch.nn.Module, call: Call, others: dict[str, str]) -> tuple[Call, list[str]]:
    """Add ``X_attention_mask`` of ones beside ``X_input_ids`` where eager proves that it changes nothing.

    Returns:
        the call, and the names of the masks added.
    """
    added: list[str] = []
    for name, value in list(call.values.items()):
        if not (name.endswith("input_ids") and isinstance(value, torch.Tensor) and value.dim() == 2):
            continue
        mask = name.removesuffix("input_ids") + "attention_mask"
        if mask not in others or call.values.get(mask) is not None:
            continue
        candidate = call.replaced(**{mask: torch.ones_like(value, dtype=torch.int64)})
        if _same_outputs(model, call, candidate):
            call = candidate
            added.append(mask)
    return call, added


def _same_outputs(model: torch.nn.Module, one: Call, other: Call) -> bool:
    try:
        left, right = eager_outputs(model, one), eager_outputs(model, other)
    except Exception as error:  # noqa: BLE001  the model does not take one of the calls, whatever it says
        let_through(error)
        return False
    return len(left) == len(right) and all(close(a, b) for a, b in zip(left, right, strict=True))


TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Largest difference between a graph and eager at tracing time, relative to the rms of the reference."""


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal up to :data:`TOLERANCE`; NaN where NaN is expected; integers and booleans exactly."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    if got.is_meta or not got.is_floating_point():
        return got.is_meta or torch.equal(got, expected)
    if torch.equal(got, expected):
        return True
    finite = expected.isfinite()
    if not torch.equal(finite, got.isfinite()):
        return False
    reference = expected[finite].double()
    if not reference.numel():
        return True
    limit = TOLERANCE.get(expected.dtype, 1e-5) * max(1e-6, reference.square().mean().sqrt().item()) * 10
    return (got[finite].double() - reference).abs().max().item() <= limit


GOES_ON = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.05}
"""Largest difference between going on from a cache and starting over, relative to the rms; above it, it is no rounding."""


class CachedCalls:
    """Calls of a decoder with a cache of any length, made from one example without.

    Args:
        model: source model.
        call: the example, with its mask.
        cache: name of the argument that takes the cache; the output has a field of the same name.
        positions: name of the argument for positions, or None.
        empty: what to start from where the model's own empty cache cannot stay as it is in a graph, or None.
    """

    def __init__(
        self, model: torch.nn.Module, call: Call, ids: str, cache: str, positions: str | None, empty: Any = None
    ):
        self.model, self.call, self.ids, self.cache, self.positions = model, call, ids, cache, positions
        self.empty = empty

    def make(self, past: int, batch: int | None = None, length: int | None = None) -> Call:
        """The example's tokens, repeated to ``[batch, length]``, after a cache of ``past`` tokens.

        Other inputs have their rows repeated.
        """
        example = self.call.values[self.ids]
        batch, length = batch or example.shape[0], length or example.shape[1]
        tokens = _tiled(example, batch, past + length)
        call = self._rows(batch)
        changes: dict[str, Any] = {self.ids: tokens[:, past:]}
        plain: dict[str, Any] = {self.ids: tokens[:, :past]}
        mask = self.ids.removesuffix("input_ids") + "attention_mask"
        if self.call.values.get(mask) is not None:
            given = _tiled(self.call.values[mask], batch, length)
            plain[mask] = torch.ones_like(plain[self.ids], dtype=given.dtype)
            changes[mask] = torch.cat([plain[mask], given], 1)
        if self.empty is not None:
            plain[self.cache] = copy.deepcopy(self.empty)
        with reference_mode(self.model), torch.no_grad():
            output = invoke(self.model, call.replaced(**plain))
        changes[self.cache] = without_encoder(returned(output, self.cache))
        if self.positions:
            changes[self.positions] = (
                torch.arange(past, past + length, device=example.device).expand(batch, length).contiguous()
            )
        return call.replaced(**changes)

    def check(self) -> None:
        """Whether eager goes on from its cache as it would have from the start.

        Raises:
            TraceError: it does not, or takes single tokens only. One graph cannot stand for both kinds of call then.
        """
        past, length = 3, 4
        going_on, tokens = self.make(past, 2, length), _tiled(self.call.values[self.ids], 2, past + length)
        mask = self.ids.removesuffix("input_ids") + "attention_mask"
        masks = {mask: going_on.values[mask]} if going_on.values.get(mask) is not None else {}
        start = self._rows(2).replaced(**{self.ids: tokens}, **masks)
        what = "the model does not go on from its own cache with several tokens at once as it does from the start"
        try:
            with reference_mode(self.model), torch.no_grad():
                got, expected = (_without(invoke(self.model, c), self.cache) for c in (going_on, start))
        except Exception as error:  # any type: the user's model
            let_through(error)
            raise TraceError(f"{what}: {error}", where=type(self.model).__name__) from error
        for name, whole in expected.items():
            part = got.get(name)
            if whole.dim() == 3 and part is not None and whole.shape[1] == past + length and part.shape[1] == length:
                gap = (part - whole[:, past:]).abs().max().item()
                if gap > GOES_ON.get(whole.dtype, 1e-3) * whole.square().mean().sqrt().item():
                    raise TraceError(f"{what}: `{name}` differs by {gap:.3g}", where=type(self.model).__name__)

    def _rows(self, batch: int) -> Call:
        tensors, structure = self.call.flat()
        rows = self.call.values[self.ids].shape[0]
        tensors = [_tiled(t, batch) if t.dim() and t.shape[0] == rows else t for t in tensors]
        return Call(structure.rebuild(tensors), self.call.positions)


def _tiled(tensor: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Repeat and cut the first dimensions to the given sizes."""
    for axis, size in enumerate(sizes):
        tensor = torch.cat([tensor] * -(-size // tensor.shape[axis]), axis).narrow(axis, 0, size)
    return tensor.contiguous()


def cached_calls(model: torch.nn.Module, call: Call, others: dict[str, str]) -> CachedCalls | None:
    """A maker of cached calls, or None where the model does not return the cache that it takes.

    Raises:
        TraceError: the cache cannot be part of a graph for every length.
    """
    ids = next((n for n in ("decoder_input_ids", "input_ids") if isinstance(call.values.get(n), torch.Tensor)), None)
    if ids is None or call.values[ids].dim() != 2:
        return None
    with reference_mode(model), torch.no_grad():
        output = invoke(model, call)
    for name in others:
        value = returned(output, name)
        if value is not None and not isinstance(value, torch.Tensor) and flatten(value)[0]:
            positions = ids.removesuffix("input_ids") + "position_ids"
            return CachedCalls(
                model,
                call,
                ids,
                name,
                positions if positions in others else None,
                _start(model, call, name, value, output) if differs(value) else None,
            )
    return None


def _start(model: torch.nn.Module, call: Call, name: str, cache: Any, output: Any) -> Any:
    """An empty cache that a graph can start from, with which eager gives what it gave without."""
    empty = blank(cache)
    with reference_mode(model), torch.no_grad():
        other = invoke(model, call.replaced(**{name: copy.deepcopy(empty)}))
    left, right = (_without(o, name) for o in (output, other))
    if left.keys() != right.keys() or not all(close(right[n], t) for n, t in left.items()):
        raise TraceError(
            f"the model gives something else with a cache {type(cache).__name__} that keeps all keys of every layer",
            where=type(model).__name__,
        )
    return empty


def _without(output: Any, name: str) -> dict[str, torch.Tensor]:
    tensors, structure = flatten(output)
    return {n: t for n, t in zip(structure.names, tensors, strict=True) if n.split(".")[0] != name}


def own_cache(output: Any, name: str | None) -> Any:
    """An output whose cache, under this name, holds only what a graph keeps of it."""
    cache = None if name is None else returned(output, name)
    if cache is None or not is_pair(cache):
        return output
    new = copy.copy(output)
    if isinstance(new, dict):
        new[name] = without_encoder(cache)
    else:
        setattr(new, name, without_encoder(cache))
    return new


def returned(output: Any, name: str) -> Any:
    """A part of a model's output by name, None where it has none."""
    return output.get(name) if isinstance(output, dict) else getattr(output, name, None)


def sizes_by_probe(probes: list[tuple[list[torch.Tensor], dict[str, int]]]) -> list[tuple[int | str, ...]]:
    """Dimension expressions of flat inputs, from calls whose named sizes are known.

    Args:
        probes: (flat tensors, sizes) of at least two calls, with sizes that no two names share.

    Raises:
        TraceError: a dimension follows none of the sizes in all probes.
    """
    candidates = ["batch", SEQUENCE, PAST, f"{PAST}+{SEQUENCE}"]
    shapes: list[tuple[int | str, ...]] = []
    for tensors in zip(*[p[0] for p in probes], strict=True):
        dims: list[int | str] = []
        for axis in range(tensors[0].dim()):
            seen = [t.shape[axis] for t in tensors]
            match = next(
                (
                    c
                    for c in candidates
                    if all(
                        size == sum(sizes[n] for n in c.split("+"))
                        for size, (_, sizes) in zip(seen, probes, strict=True)
                    )
                ),
                None,
            )
            if match is None and len(set(seen)) > 1:
                raise TraceError(f"a cache dimension takes sizes {seen}, which follow neither batch nor length")
            dims.append(match if match is not None else seen[0])
        shapes.append(tuple(dims))
    return shapes
