"""Decoding with exits that skip: a token runs through the pieces of the model until an exit is sure.

Later tokens attend to keys and values of this one in every block, also in those that it skipped:

- ``recompute``: the streams of tokens that left are kept, and run through the later blocks in one batch when a token goes
  on. Exact: logits are those of the select form.
- ``propagate``: keys and values of skipped blocks come from the stream at the exit, as in ``exits{form=cond}``.
- ``mask``: skipped blocks get nothing; later tokens do not see this one there.
- ``river``: a token that left goes on through cheap copies of the later blocks, which write into the same cache; see
  :mod:`hcx.passes.exits.run.river`. What comes at their end is its answer.

Rows of a batch do not depend on each other. A batch goes on while one of its rows does.

Sources: docs/sources.md, skipped-caches; docs/sources.md, row-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from hcx.rewrite.errors import UsageError
from hcx.rewrite.ir.program import Program

from .river import RIVER, River
from .segments import Named, Segments, without_cache

KV = ("recompute", "propagate", "mask", "river")
Policy = Literal["recompute", "propagate", "mask", "river"]


@dataclass
class Step:
    """What one call of :meth:`Decoder.feed` gives.

    Attributes:
        logits: of the last token, ``[batch, classes]``.
        depth: blocks that each row's last token took, ``[batch]``; with a river those in full precision.
        scores: of each exit that was asked, by its number of blocks, ``[batch]`` each.
    """

    logits: torch.Tensor
    depth: torch.Tensor
    scores: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass
class Generated:
    """Text of a decoder, and what it took.

    Attributes:
        tokens: prompt and new tokens, ``[batch, length]``.
        depths: blocks of each new token, ``[batch, new]``.
        logits: that each new token was chosen from, ``[batch, new, classes]``.
        flops: operations counted, and ``plain``: those of the same calls without exits; 0 where they are not counted.
        weight_bytes, plain_bytes: of the weights that calls read as they are stored, counted or not. A call reads a weight
            once for all its rows.
    """

    tokens: torch.Tensor
    depths: torch.Tensor
    logits: torch.Tensor
    flops: int = 0
    plain: int = 0
    weight_bytes: int = 0
    plain_bytes: int = 0

    @property
    def net(self) -> float | None:
        """Operations over those without exits."""
        return self.flops / self.plain if self.plain else None

    @property
    def net_bytes(self) -> float:
        """Bytes of weights over those without exits."""
        return self.weight_bytes / self.plain_bytes


class Decoder:
    """Decodes a batch of sequences; see the module for the policies.

    Args:
        program: takes ``input_ids`` and a cache; with exits in select form. Tensors, thresholds too, are shared.
        kv: what later blocks get of tokens that left.
        count: count floating-point operations while running, which takes some time itself.
        river: of ``kv=river``: the same Program with cheaper blocks, or the pipeline that makes it; default:
            :data:`~hcx.passes.exits.run.river.RIVER`, int4 codes rounded to nearest.
        answer: of ``kv=river``: a token that left is answered by the model's head at the river's ``end`` (default), or by
            its ``exit``.
        decay: thresholds fall along a text of so many new tokens (CALM), see :func:`decayed`: a wrong token matters less
            the later it is, as fewer tokens build on it. None keeps them.

    Raises:
        UsageError: no tokens, cache or exits, a cache that the policy cannot have, or a river that does not fit.
        NoMatchError: the pipeline of the river finds nothing to change.
    """

    def __init__(
        self,
        program: Program,
        kv: Policy = "recompute",
        *,
        count: bool = False,
        river: Program | str | None = None,
        answer: Literal["end", "exit"] | None = None,
        decay: int | None = None,
    ):
        if kv not in KV:
            raise UsageError(f"there is no policy `{kv}`", where="kv", hint="one of " + ", ".join(KV))
        if kv != "river" and (river is not None or answer is not None):
            raise UsageError(f"`{kv}` has no river", where="river" if river is not None else "answer", hint="kv=river")
        if answer not in (None, "end", "exit"):
            raise UsageError(f"there is no answer at the `{answer}`", where="answer", hint="end or exit")
        if decay is not None and decay < 1:
            raise UsageError(f"decay={decay}", where="decay", hint="the most tokens that are added, 1 or more")
        self.decay = decay
        self.kv, self.at_exit = kv, kv != "river" or answer == "exit"
        self.pieces = Segments(program, count=count, fill=kv == "propagate")
        self.river = River(self.pieces, RIVER if river is None else river) if kv == "river" else None
        self.places, self.depth = self.pieces.places, self.pieces.depth
        if kv == "mask" and (states := self.pieces.states()):
            raise UsageError(f"`{states[0]}` is a state: it cannot lack a token", where="kv", hint="kv=recompute")
        self.reset()

    def reset(self) -> None:
        """Forget all tokens; what has been counted stays."""
        for piece in self.pieces.segments:
            piece.forget()
        self.mask = self.positions = torch.zeros(0, 0, dtype=torch.int64)
        self.prompt = 0
        """Length of the first call."""
        self.stock: dict[str, tuple[int, torch.Tensor]] = {}
        self.seen: list[torch.Tensor | None] = [None] * len(self.pieces.segments)

    @property
    def length(self) -> int:
        """Tokens of each row so far."""
        return self.mask.shape[1]

    def feed(self, ids: torch.Tensor, *, mask: torch.Tensor | None = None, leave: bool | None = None) -> Step:
        """The next tokens of each row.

        Args:
            ids: ``[batch, n]``.
            mask: ``[batch, n]``, 0 where a token is padding; positions count the others.
            leave: whether the last token may leave. By default it may; with other policies than ``recompute`` the first
                call, the prompt, runs in full, and only calls of one token leave.
        """
        exact = self.kv == "recompute"
        leave = (exact or self.length > 0) if leave is None else leave
        if mask is not None and not bool(mask[:, -1].all()):
            raise UsageError("the last token of a row is padding", where="mask", hint="pad prompts on the left")
        self.prompt = self.prompt or ids.shape[1]
        self.extend(ids, mask)
        known: Named = {self.pieces.tokens: ids}
        left = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
        step = Step(torch.empty(0), torch.full_like(left, self.depth, dtype=torch.int64))
        logits = None
        for number in range(len(self.places) + 1):
            self._advance(number, known, left)
            if number == len(self.places):
                if logits is None or not bool(left.all()):
                    late = self.pieces.tell(number, known)[:, -1]
                    logits = late if logits is None else torch.where(left[:, None], logits, late)
            elif leave and (exact or ids.shape[1] == 1) and not bool(left.all()):
                k = self.places[number]
                known |= self.pieces.ask(number, known)
                step.scores[k] = known[f"score.{k}"][:, -1]
                fire = (step.scores[k] >= self._threshold(number)) & ~left
                if bool(fire.any()):
                    if self.at_exit:
                        early = self.pieces.tell(number, known)[:, -1]
                        logits = early if logits is None else torch.where(fire[:, None], early, logits)
                    step.depth, left = torch.where(fire, k, step.depth), left | fire
                if bool(left.all()) and self.river is None:
                    self._skip(number + 1, known)
                    break
        step.logits = logits
        return step

    def _threshold(self, number: int) -> float:
        limit = self.pieces.threshold(number)
        return limit if self.decay is None else decayed(limit, self.length - self.prompt, self.decay)

    def extend(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Count tokens in: their mask and positions."""
        mask = torch.ones_like(ids) if mask is None else mask.to(ids.dtype)
        self.mask = torch.cat([self.mask, mask], 1) if self.length else mask
        self.positions = (self.mask.cumsum(1) - 1).clamp_min(0)

    def crop(self, length: int) -> None:
        """Forget the tokens behind the first ``length`` ones."""
        for piece in self.pieces.segments:
            piece.crop(length)
        self.mask, self.positions = self.mask[:, :length], self.positions[:, :length]
        self.stock = {n: (start, t[:, : max(0, length - start)]) for n, (start, t) in self.stock.items()}
        self.seen = [s if s is None else s[:, :length] for s in self.seen]

    # ---- one segment

    def _advance(self, number: int, known: Named, left: torch.Tensor) -> None:
        if self.kv == "recompute":
            self.catch_up(number, known)
        elif self.kv == "propagate":
            self._propagated(number, known, left)
        elif self.river is not None:
            new = known[self.pieces.tokens].shape[1]
            known |= self.river.run(number, known, self.positions[:, -new:], self.mask, left)
        else:
            self._masked(number, known, left)

    def catch_up(self, number: int, known: Named) -> None:
        """Run a segment on all tokens that it has not seen; what they give is in ``known`` afterwards."""
        pieces, done = self.pieces, self.pieces.segments[number].length
        if number == 0:
            self._stock({pieces.tokens: known[pieces.tokens]}, done)
        given = {n: t[:, done - start :] for n, (start, t) in self.stock.items()}
        found = pieces.run(number, given, self.positions[:, done:], self.mask)
        known |= found
        self._stock(found, done)
        if number == len(self.places):
            self.stock = {}  # every segment has seen every token

    def _stock(self, found: Named, start: int) -> None:
        for name in found.keys() & (self.pieces.crossing | {self.pieces.tokens}):
            first, before = self.stock.get(name, (start, found[name][:, :0]))
            self.stock[name] = (first, torch.cat([before, found[name]], 1))

    def _propagated(self, number: int, known: Named, left: torch.Tensor) -> None:
        pieces, piece = self.pieces, self.pieces.segments[number]
        new = known[pieces.tokens].shape[1]
        positions = self.positions[:, -new:]
        if not bool(left.any()):
            known |= pieces.run(number, known, positions, self.mask)
            return
        before = known[pieces.streams[number - 1]]
        found = pieces.call(piece, known, positions, self.mask)
        for name, kept in self._fill(number, known, positions).items():
            found[name] = torch.where(over(left, kept), kept, found[name])
        stream = pieces.streams[number]
        found[stream] = torch.where(over(left, before), before, found[stream])
        piece.keep(found, new)
        known |= without_cache(found)

    def _fill(self, number: int, known: Named, positions: torch.Tensor) -> Named:
        """The cache of a segment with what the stream at its start leaves in each block."""
        fill = self.pieces.fills[number]
        own = self.pieces.segments[number].cache
        fill.cache = {s.name: own[s.name] for s in fill.slots if s.name in own}
        return self.pieces.call(fill, known, positions, self.mask)

    def _masked(self, number: int, known: Named, left: torch.Tensor) -> None:
        new = known[self.pieces.tokens].shape[1]
        fresh, before = self.mask[:, -new:], self.seen[number]
        seen = fresh if before is None else torch.cat([before, fresh], 1)
        known |= self.pieces.run(number, known, self.positions[:, -new:], seen)
        if bool(left.any()):
            seen = seen.clone()
            seen[left, -1] = 0
        self.seen[number] = seen

    def _skip(self, number: int, known: Named) -> None:
        """All rows have left: what the segments from here on get."""
        if self.kv == "mask":
            self._leave_out(number, known[self.pieces.tokens])
        if self.kv != "propagate":
            return
        pieces, stream = self.pieces, known[self.pieces.streams[number - 1]]
        for later in range(number, len(self.places) + 1):
            known = known | {pieces.streams[later - 1]: stream}
            found = self._fill(later, known, self.positions[:, -stream.shape[1] :])
            pieces.segments[later].keep(found, stream.shape[1])

    def _leave_out(self, number: int, ids: torch.Tensor) -> None:
        """Zeros that nobody sees, in the place of the last token: a window counts places, whoever shares the batch."""
        rows, new = ids.shape
        for later in range(number, len(self.places) + 1):
            piece, before = self.pieces.segments[later], self.seen[later]
            for spec in piece.slots:
                shape = [rows if d == "batch" else new if d == "past" else d for d in spec.shape]
                empty = torch.zeros(shape, dtype=spec.dtype, device=ids.device)
                parts = [piece.cache[spec.name], empty] if spec.name in piece.cache else [empty]
                piece.cache[spec.name] = torch.cat(parts, spec.shape.index("past"))
            piece.length += new
            hidden = self.mask[:, -new:].clone()
            hidden[:, -1] = 0
            self.seen[later] = hidden if before is None else torch.cat([before, hidden], 1)

    # ---- text

    def generate(
        self,
        ids: torch.Tensor,
        steps: int,
        *,
        mask: torch.Tensor | None = None,
        stop: int | None = None,
        pick: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> Generated:
        """Go on from prompts.

        Args:
            ids: ``[batch, length]``, padded on the left where ``mask`` says so.
            steps: most tokens to add.
            stop: token that ends a row; the rest of the row is filled with it.
            pick: from logits ``[batch, classes]`` to tokens ``[batch]``; default: the likeliest. See :func:`sampler`.
        """
        if steps < 1:
            raise UsageError(f"cannot add {steps} tokens", where="steps", hint="1 or more")
        if ids.dim() != 2 or not ids.numel():
            raise UsageError(
                f"prompts are [batch, length], not {list(ids.shape)}", where="ids", hint="ids[None] for one row"
            )
        self.reset()
        before, read = self.pieces.flops, self.pieces.weight_bytes
        tokens, done, depths, logits = ids, torch.zeros(ids.shape[0], dtype=torch.bool), [], []
        step = self.feed(ids, mask=mask)
        while True:
            new = step.logits.argmax(-1) if pick is None else pick(step.logits)
            if stop is not None:
                new = torch.where(done, torch.full_like(new, stop), new)
                done |= new == stop
            tokens = torch.cat([tokens, new[:, None]], 1)
            depths.append(step.depth), logits.append(step.logits)
            if len(depths) == steps or bool(done.all()):
                break
            step = self.feed(new[:, None])
        made = Generated(
            tokens,
            torch.stack(depths, 1),
            torch.stack(logits, 1),
            flops=self.pieces.flops - before,
            weight_bytes=self.pieces.weight_bytes - read,
            plain_bytes=len(depths) * self.pieces.plain_bytes,
        )
        made.plain = self.plain_flops(ids, len(depths)) if self.pieces.count else 0
        return made

    def plain_flops(self, ids: torch.Tensor, steps: int) -> int:
        """Operations of the same calls without exits: one head a call, in the prompt too.

        Counted on the prompt and on two further tokens; the rest follows, as each token adds the same attention.
        """
        self.reset()
        counted = []
        for part in (ids, ids[:, :1], ids[:, :1])[: min(steps, 3)]:
            before = self.pieces.flops
            self.feed(part, leave=False)
            counted.append(self.pieces.flops - before)
        self.reset()
        if steps < 3:
            return sum(counted)
        first, second = counted[1:]
        more = steps - 1
        return counted[0] + more * first + (second - first) * (more * (more - 1) // 2)


def decayed(threshold: float, token: int, most: int) -> float:
    """CALM's falling threshold for new token 0, 1, ... of ``most``: ``tau (0.9 + 0.1 exp(-4 token / most))``.

    Thresholds of at most 0 stay: everybody leaves there, or they are logarithms.

    >>> decayed(0.5, 0, 100), round(decayed(0.5, 50, 100), 4)
    (0.5, 0.4568)
    """
    return threshold * (0.9 + 0.1 * math.exp(-4 * token / most)) if threshold > 0 else threshold


def over(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``[batch]`` in the dimensions of a value that starts with it."""
    return rows.reshape(-1, *[1] * (like.dim() - 1))


def sampler(temperature: float, generator: torch.Generator | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    """Draw from the softmax of logits over a temperature.

    Raises:
        UsageError: a temperature that is not above 0.
    """
    if not temperature > 0:
        raise UsageError(
            f"temperature {temperature}", where="temperature", hint="above 0; greedy is the default `pick`"
        )

    def pick(logits: torch.Tensor) -> torch.Tensor:
        shares = (logits.float() / temperature).softmax(-1)
        return torch.multinomial(shares, 1, generator=generator)[:, 0]

    return pick
