"""Names of the dimensions of a trace."""

from __future__ import annotations

from typing import Any

import torch
from hcx.rewrite.errors import TraceError
from hcx.rewrite.ir.signature import Fill

from .attempt import Attempt
from .capture import PAST, SEQUENCE, sizes_by_probe


def shapes_of(
    exported: torch.export.ExportedProgram, names: list[str], attempt: Attempt, probes: list[Any] | None
) -> list[tuple[int | str, ...]]:
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
    for mask in (n for n, fill in attempt.fills.items() if fill == Fill.ONES):
        ids = mask.removesuffix("attention_mask") + "input_ids"
        shapes[names.index(mask)] = shapes[names.index(ids)] if ids != cached.ids else shapes[names.index(mask)]
    return shapes


def _exported_shapes(
    exported, names: list[str], fills: dict[str, str], taken: set[str] = frozenset()
) -> list[tuple[int | str, ...]]:
    """Dimension expressions of the flat inputs from torch.export's symbols, with readable names that are not taken."""
    user = input_values(exported)
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
    for mask in (n for n, fill in fills.items() if fill == Fill.ONES):  # a mask has the shape of its tokens
        shapes[names.index(mask)] = shapes[names.index(mask.removesuffix("attention_mask") + "input_ids")]
    return shapes


def _hint(size: torch.SymInt) -> int | None:
    """The size in the example."""
    return size.node.hint


def input_values(exported: torch.export.ExportedProgram) -> list[Any]:
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
