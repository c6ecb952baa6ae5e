"""The river: cheap copies of the later blocks, which tokens that have left go on through (River-LLM).

The copies write keys and values (or states) into the cache slots that the model's own blocks write into, so a later token
attends to this one as to any other, in each block. Weights are quantised, without training; norms, heads and all else are
the model's own. Where nobody leaves nothing of the river runs; where everybody leaves at once the model is the one with
quantised later blocks.

Source: Shen and Zou 2026, arXiv 2604.18396; docs/sources.md, river. The paper's text was not at hand, so this is a
reading of its summary.
"""

from __future__ import annotations

from typing import Any

import torch
from hcx.rewrite.driver import rewrite
from hcx.rewrite.errors import UsageError
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.signature import CACHE, InputSpec

from .segments import Named, Piece, Segments, without_cache

RIVER = "quantize{bits=4,group=32}"
"""Pipeline of the default river: codes rounded to nearest, one scale and zero point for 32 inputs."""


class River:
    """Cheap segments over the caches of the model's own.

    Args:
        pieces: the model's, which also count what runs.
        river: the same Program with cheaper blocks, or the pipeline that makes it from the model's.

    Raises:
        UsageError: a river of another model, with other exits, values or cache slots; or a cache without rows.
        NoMatchError: the pipeline finds nothing to change.
    """

    def __init__(self, pieces: Segments, river: Program | str = RIVER):
        self.pieces = pieces
        made = rewrite(pieces.program, river, check=False) if isinstance(river, str) else river
        cheap = Segments(made)
        if (cheap.places, cheap.depth) != (pieces.places, pieces.depth):
            raise _misfit(f"it has exits at {cheap.places} of {cheap.depth} blocks, the model at {pieces.places} of "
                          f"{pieces.depth}")  # fmt: skip
        for own, other in zip(pieces.segments[1:], cheap.segments[1:], strict=True):
            _check(own, other)
        _check_tensors(pieces.program, made, cheap)
        self.segments: list[Piece | None] = [None, *cheap.segments[1:]]
        """Every token runs the first segment of the model."""

    def run(self, number: int, given: Named, positions: torch.Tensor, seen: torch.Tensor, left: torch.Tensor) -> Named:
        """Run a segment on the next tokens: the rows that have left through the river, the others through the model.

        Args:
            given: what the segment takes, for all rows; ``positions``, ``seen``: as :meth:`Segments.call` takes them.
            left: ``[batch]``.
        """
        pieces, own, cheap = self.pieces, self.pieces.segments[number], self.segments[number]
        if not bool(left.any()):
            return pieces.run(number, given, positions, seen)
        if bool(left.all()):
            found = pieces.call(cheap, given, positions, seen, own.cache)
        else:
            axes = {s.name: _rows(s) for s in own.slots}
            parts = []
            for piece, chosen in ((own, ~left), (cheap, left)):
                rows = chosen.nonzero()[:, 0]
                cache = {n: t.index_select(axes[n], rows) for n, t in own.cache.items()}
                part = pieces.call(piece, {n: given[n][rows] for n in own.takes}, positions[rows], seen[rows], cache)
                parts.append((rows, part))
            found = {name: _joined(name, parts, axes) for name in parts[0][1]}
        own.keep(found, positions.shape[1])
        return without_cache(found)


def _joined(name: str, parts: list[tuple[torch.Tensor, Named]], axes: dict[str, int]) -> torch.Tensor:
    """One value for all rows from those of two parts, each in its rows."""
    axis = axes[CACHE + name.removeprefix("present")] if name.startswith("present.") else 0
    order = torch.cat([rows for rows, _ in parts]).argsort()
    return torch.cat([part[name] for _, part in parts], axis).index_select(axis, order)


def _rows(spec: InputSpec) -> int:
    """Axis of a cache slot that counts rows of the batch."""
    if "batch" not in spec.shape:
        raise UsageError(f"`{spec.name}` of shape {list(spec.shape)} is one for all rows, which may be on either way",
                         where="kv", hint="kv=recompute")  # fmt: skip
    return spec.shape.index("batch")


def _check(own: Piece, other: Piece) -> None:
    """Whether a segment of the river can take the place of the model's."""
    for spec in own.slots:
        _rows(spec)
    for kind, found, wanted in (
        ("takes", _inputs(other.program), _inputs(own.program)),
        ("gives", other.program.output_names, own.program.output_names),
    ):
        if differing := [x for x in found if x not in wanted] or [x for x in wanted if x not in found]:
            raise _misfit(f"only one of the two {kind} `{differing[0]}`")


def _check_tensors(program: Program, river: Program, cheap: Segments) -> None:
    """What has not been quantised must be the model's: its own tensors, and parameters of passes in the river's blocks."""
    used = {n for piece in cheap.segments[1:] for n, _ in piece.program.named_parameters(remove_duplicate=False)}
    own = dict(program.named_tensors())
    for name, tensor in river.named_tensors():
        mine = own.get(name, tensor)
        if mine is not tensor and (name in used or name not in river.origin) and not torch.equal(mine, tensor):
            raise _misfit(f"`{name}` has other values")


def _inputs(program: Program) -> list[Any]:
    return [f"{s.name} {str(s.dtype).removeprefix('torch.')}{list(s.shape)}" for s in program.inputs]


def _misfit(what: str) -> UsageError:
    return UsageError(
        f"this river does not belong to the model: {what}",
        where="river",
        hint=f"rewrite the model itself, exits included: {RIVER}",
    )
