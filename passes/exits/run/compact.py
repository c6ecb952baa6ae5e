"""Batches whose rows leave: those that are sure go, and only the others go on, as a smaller batch.

For encoders and classifiers, where a row is an input of its own. A row with several positions (one answer a token) goes on
until the last of them has left; with ``per=sequence`` they leave together. Each row gives what the select form gives, up to
the rounding of other batch sizes.

Source: docs/sources.md, row-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hcx.passes.exits.insert.selection import select
from hcx.rewrite.errors import UsageError
from hcx.rewrite.ir.program import Program

from .segments import Named, Piece, Segments, without_cache

BATCH = "batch"


@dataclass
class Rows:
    """Answers of a batch.

    Attributes:
        logits: ``[batch, ..., classes]``; ``depth``: blocks that each answer took, ``[batch, ...]``,
            of sequences ``[batch]``.
        rows: how many rows ran each segment.
    """

    logits: torch.Tensor
    depth: torch.Tensor
    rows: list[int]


class Compact:
    """Runs batches through the pieces of a Program.

    Args:
        program: with exits in select form; tensors, thresholds too, are shared.

    Raises:
        UsageError: no exits, or a value that crosses from piece to piece whose first dimension is not the batch.
    """

    def __init__(self, program: Program):
        self.program = program
        self.pieces = Segments(program, decodes=False)
        self.places = self.pieces.places
        self._batched: set[str] = set()
        for piece in self._every():
            for spec in piece.program.inputs:
                if BATCH in spec.shape[1:]:
                    raise UsageError(f"`{spec.name}` of shape {list(spec.shape)} does not start with the batch",
                                     where=program.signature.model, hint="use form=select")  # fmt: skip
                if spec.shape[:1] == (BATCH,):
                    self._batched.add(spec.name)

    def _every(self) -> list[Piece]:
        return [p for p in (*self.pieces.segments, *self.pieces.scores, *self.pieces.heads) if p is not None]

    def __call__(self, *args: Any, **kwargs: Any) -> Rows:
        """Run with the model's own arguments."""
        flat = self.program.signature.bind(args, kwargs)
        known: Named = {s.name: t for s, t in zip(self.program.inputs, flat, strict=True)}
        alive = torch.arange(next(t.shape[0] for n, t in known.items() if n in self._batched))
        logits = depth = left = None
        ran: list[int] = []
        for number, segment in enumerate(self.pieces.segments):
            ran.append(len(alive))
            known |= without_cache(self._run(segment, known))
            last = number == len(self.places)
            k = self.pieces.depth if last else self.places[number]
            if not last:
                known |= self._run(self.pieces.scores[number], known)
                score = known[f"score.{k}"]
                fire = score >= self.pieces.threshold(number)
                if left is None:
                    left = torch.zeros((len(alive), *score.shape[1:]), dtype=torch.bool)
                    depth = torch.zeros(left.shape, dtype=torch.int64)
                fire &= ~left[alive]
            else:
                fire = ~left[alive]
            rows = fire.reshape(len(alive), -1).any(1).nonzero()[:, 0]
            if len(rows):
                answers = self._answers(number, self._some(known, rows))
                if logits is None:
                    logits = answers.new_zeros(len(left), *answers.shape[1:])
                places, fired = alive[rows], fire[rows]
                logits[places] = select(fired, answers, logits[places])
                depth[places] = torch.where(fired, k, depth[places])
                left[places] |= fired
            stay = (~left[alive].reshape(len(alive), -1).all(1)).nonzero()[:, 0]
            if not len(stay):
                break
            if len(stay) < len(alive):
                known, alive = self._some(known, stay), alive[stay]
        return Rows(logits, depth, ran)

    def _answers(self, number: int, known: Named) -> torch.Tensor:
        name = self.pieces.answer if number == len(self.places) else f"logits.{self.places[number]}"
        return known[name] if name in known else self._run(self.pieces.heads[number], known)[name]

    def _some(self, known: Named, rows: torch.Tensor) -> Named:
        """The values of some rows."""
        made = {f"logits.{k}" for k in self.places} | {f"score.{k}" for k in self.places}
        return {n: t.index_select(0, rows) if n in self._batched | made else t for n, t in known.items()}

    def _run(self, piece: Piece, known: Named) -> Named:
        flat = piece.program.signature.by_name(known)
        with torch.no_grad():
            return dict(zip(piece.program.output_names, piece.program.run_flat(flat), strict=True))
