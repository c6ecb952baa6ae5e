"""A fresh graph must give what eager gives."""

from __future__ import annotations

from typing import Any

import torch
from hcx.rewrite.errors import TraceError, let_through
from hcx.rewrite.ir.aliases import Aliases, mutated
from hcx.rewrite.ir.dataflow import op_name
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.signature import Argument, Fill
from hcx.rewrite.ir.structure import Structure, flatten, rebuild_constant, tensor_indices
from hcx.rewrite.run.inputs import example_sizes, resized
from torch import fx

from .attempt import Attempt
from .capture import GOES_ON, CachedCalls, Call, close, invoke, reference_mode, separate
from .explain import first_line
from .limits import find_limits
from .reference import EagerReference


def free_constants(model: torch.nn.Module, call: Call, outputs: Structure, arguments: list[Argument]) -> None:
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
        except Exception as error:  # noqa: BLE001  whatever a model raises without it, the argument is needed
            let_through(error)
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


def must_be_pure(graph: fx.Graph, model: str) -> None:
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


def limits_of(
    program: Program, reference: EagerReference, values: list[Any], shapes: list[Any]
) -> dict[str, list[Any]]:
    """Limits of the named sizes, see :mod:`hcx.rewrite.tracing.limits`; none are known of a model without values."""

    def agrees(sizes: dict[str, int]) -> bool:
        flat = resized(program, sizes)
        try:
            expected = reference([t.clone() for t in flat])
        except Exception as error:  # noqa: BLE001  whatever a model raises at a size it does not take: nobody asks for it
            let_through(error)
            return True
        try:
            with torch.no_grad():
                return all(map(close, program.run_flat([t.clone() for t in flat]), expected))
        except (RuntimeError, IndexError, ValueError):
            return False

    if any(t.is_meta for t in program.parameters()):
        return {}
    return find_limits(values, shapes, example_sizes(program), agrees)


def must_agree(program: Program, reference: EagerReference, attempt: Attempt) -> None:
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
    if attempt.cached is not None and len(reference.growing) < sum(s.fill == Fill.EMPTY for s in program.inputs):
        _must_step(program, reference, attempt.cached)
        _must_chunk(program, reference, attempt.cached)
    program.belongings.trace_exact = exact


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
    except Exception as error:  # noqa: BLE001  the model has no positions for so many
        let_through(error)
        return
    what = f"the model repeats code for every chunk of tokens, so its graph does not stand for calls of {MANY} tokens"
    try:
        with torch.no_grad():
            got = program.run_flat(flat)
    except RuntimeError as error:
        raise TraceError(f"{what}: {first_line(error)}", where=program.signature.model) from error
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
