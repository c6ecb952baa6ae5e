"""Inputs of several shapes for checking, made from the example by repeating, cutting and reordering it.

Real inputs stay real: tokens of a text stay tokens of that text, and images keep their statistics.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.signature import Fill, InputSpec, filled, size_of


def check_inputs(program: Program, count: int = 2) -> list[list[torch.Tensor]]:
    """Flat inputs of ``count`` different shapes; caches are empty.

    The first has the example's own sizes. Shapes that the graph does not accept are left out, so that a model with
    fixed sizes gives fewer sets, all of them different in batch where that is free.
    """
    sets = [resized(program, _plain_sizes(program))]
    for number, sizes in enumerate(_variants(_plain_sizes(program))):
        if len(sets) >= count:
            break
        candidate = resized(program, sizes, number + 1)
        if accepts(program, candidate):
            sets.append(candidate)
    return sets


def accepts(program: Program, flat: list[torch.Tensor]) -> bool:
    """Whether the graph runs on these inputs."""
    try:
        with torch.no_grad():
            program.run_flat([t.clone() for t in flat])
    except (RuntimeError, IndexError, ValueError):
        return False
    return True


def _plain_sizes(program: Program) -> dict[str, int]:
    sizes = example_sizes(program)
    return {**sizes, "past": 0} if "past" in sizes else sizes


def example_sizes(program: Program) -> dict[str, int]:
    """The named sizes of the example."""
    return program.signature.sizes(program.signature.complete(program.examples[0]))


def _variants(sizes: dict[str, int]) -> Iterator[dict[str, int]]:
    """Other sizes: everything smaller with a larger batch, then only the batch, then single rows."""
    others = [n for n in sizes if n not in ("batch", "past")]
    if "batch" in sizes:
        yield {**sizes, **{n: max(2, sizes[n] * 3 // 5) for n in others}, "batch": sizes["batch"] + 1}
        yield {**sizes, **{n: max(2, sizes[n] - 1) for n in others}, "batch": 1}
        yield {**sizes, "batch": sizes["batch"] + 1}
        yield {**sizes, "batch": 1}
    for name in others:
        yield {**sizes, name: max(2, sizes[name] * 3 // 5)}


def resized(program: Program, sizes: dict[str, int], seed: int = 0) -> list[torch.Tensor]:
    """The example at other named sizes; another order for each seed."""
    examples = program.signature.complete(program.examples[0])
    shift = [e for e, s in zip(examples, program.inputs, strict=True) if s.fill is None]
    return [
        _one(spec, example, sizes, seed if shift else 0) for spec, example in zip(program.inputs, examples, strict=True)
    ]


def _one(spec: InputSpec, example: torch.Tensor, sizes: dict[str, int], seed: int) -> torch.Tensor:
    shape = [size_of(dim, sizes) for dim in spec.shape]
    if spec.fill == Fill.POSITIONS:
        return torch.arange(shape[-1], dtype=spec.dtype).expand(shape).contiguous()
    if spec.fill is not None:
        return filled(spec, shape, example.device)
    if seed and example.dim() and isinstance(spec.shape[0], str) and example.shape[0]:
        example = example.roll(seed, 0)
    if (
        seed
        and spec.shape
        and isinstance(spec.shape[-1], str)
        and example.dim() == 2
        and not example.is_floating_point()
    ):
        example = example.roll(seed, 1)
    for axis, size in enumerate(shape):
        repeats = -(-size // max(1, example.shape[axis]))
        if repeats > 1:
            example = torch.cat([example] * repeats, axis)
        example = example.narrow(axis, 0, size)
    return example.contiguous()
