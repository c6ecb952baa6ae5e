"""Self-speculation: an exit drafts some tokens, and the rest of the model checks them in one batch.

The text is the model's own greedy text. Blocks before the exit run once a token, drafts included: their streams and caches
are those that the check goes on from, and what it refuses is taken back.

Source: LayerSkip, Elhoushi et al. 2024, arXiv 2404.16710; docs/sources.md, self-speculation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hcx.rewrite.errors import UsageError
from hcx.rewrite.ir.program import Program

from .runtime import Decoder
from .segments import Named


@dataclass
class Speculated:
    """Text, and how the drafts did.

    Attributes:
        tokens: prompt and new tokens, ``[1, length]``; ``logits``: the model's own, of each new one, ``[1, new, classes]``.
        drafted, accepted: tokens; ``rounds``: how often the rest of the model ran.
        flops: operations counted, and ``plain``: those of decoding without exits; 0 where they are not counted.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    drafted: int
    accepted: int
    rounds: int
    flops: int = 0
    plain: int = 0

    @property
    def acceptance(self) -> float:
        """Share of the drafted tokens that the model would have chosen."""
        return self.accepted / self.drafted

    @property
    def net(self) -> float | None:
        """Operations over those without exits."""
        return self.flops / self.plain if self.plain else None


def speculate(
    program: Program | Decoder,
    ids: torch.Tensor,
    steps: int,
    *,
    draft: int = 4,
    at: int | None = None,
    stop: int | None = None,
    count: bool = False,
) -> Speculated:
    """Greedy text with drafts from an exit, whatever its score.

    Args:
        program: with exits in select form, or its :class:`Decoder` with ``kv=recompute``.
        ids: ``[1, length]``: rows accept different numbers of drafts, so one row at a time.
        steps: most tokens to add.
        draft: tokens to draft before the rest of the model runs.
        at: blocks before the exit that drafts; default: the last exit.
        stop: token that ends the text.
        count: count floating-point operations; of a Decoder given, whether it counts.

    Raises:
        UsageError: several rows, no such exit, or a cache that cannot be taken back.
    """
    decoder = program if isinstance(program, Decoder) else Decoder(program, count=count)
    number = _exit(decoder, ids, steps, draft, at)
    decoder.reset()
    before = decoder.pieces.flops
    result = Speculated(ids, torch.empty(0), 0, 0, 0)
    new, logits = ids, []
    while (left := steps - (result.tokens.shape[1] - ids.shape[1])) > 0:
        drafts = _drafted(decoder, number, new, min(draft, left))
        checked = _checked(decoder, number, drafts.shape[1])
        chosen = checked.argmax(-1)
        agree = int((drafts == chosen)[0].int().cumprod(0).sum())
        accepted = min(agree + 1, drafts.shape[1])  # the model's own token stands where the first draft is refused
        decoder.crop(decoder.length - drafts.shape[1] + accepted)
        result.drafted, result.accepted, result.rounds = (
            result.drafted + drafts.shape[1], result.accepted + agree, result.rounds + 1)  # fmt: skip
        chosen = chosen[:, :accepted]
        ended = stop is not None and stop in (found := chosen[0].tolist())
        if ended:
            chosen = chosen[:, : found.index(stop) + 1]
        result.tokens = torch.cat([result.tokens, chosen], 1)
        logits.append(checked[:, : chosen.shape[1]])
        new = chosen[:, -1:]
        if ended:
            break
    result.logits = torch.cat(logits, 1)
    if decoder.pieces.count:
        result.flops = decoder.pieces.flops - before
        result.plain = decoder.plain_flops(ids, result.tokens.shape[1] - ids.shape[1])
    return result


def _exit(decoder: Decoder, ids: torch.Tensor, steps: int, draft: int, at: int | None) -> int:
    """Number of the exit that drafts."""
    places = decoder.places
    if decoder.kv != "recompute":
        raise UsageError("speculation is exact, so it needs exact caches", where="kv", hint="kv=recompute")
    if ids.shape[0] != 1:
        raise UsageError(f"speculation takes one row, not {ids.shape[0]}", where="ids", hint="run the rows in turn")
    if steps < 1:
        raise UsageError(f"cannot add {steps} tokens", where="steps", hint="1 or more")
    if draft < 1:
        raise UsageError(f"cannot draft {draft} tokens", where="draft", hint="draft=4")
    if at is not None and at not in places:
        raise UsageError(f"there is no exit after {at} blocks", where="at", hint=f"one of {places}")
    if states := decoder.pieces.states():
        raise UsageError(f"`{states[0]}` is a state, from which a draft cannot be taken back", where="cache",
                         hint="decode with kv=recompute")  # fmt: skip
    return len(places) - 1 if at is None else places.index(at)


def _drafted(decoder: Decoder, number: int, new: torch.Tensor, count: int) -> torch.Tensor:
    """So many tokens in a row that the exit would choose, ``[1, count]``; the last one has not been run."""
    drafts = []
    while True:
        decoder.extend(new)
        known: Named = {decoder.pieces.tokens: new}
        for segment in range(number + 1):
            decoder.catch_up(segment, known)
        for asked in _asked(decoder, number):
            known |= decoder.pieces.ask(asked, known)
        new = decoder.pieces.tell(number, known).argmax(-1)
        drafts.append(new)
        if len(drafts) == count:
            return torch.cat(drafts, 1)


def _asked(decoder: Decoder, number: int) -> range:
    """Exits whose scores must be asked for the logits of this one: where they are made together, or the head reads what
    the score has made (a translated stream), also those before that the score builds on."""
    head, score = decoder.pieces.heads[number], decoder.pieces.scores[number]
    if head is not None and not set(head.takes) & set(score.program.output_names):
        return range(0)
    chained = any(name.startswith(("score.", "logits.")) for name in decoder.pieces.scores[number].takes)
    return range(0 if chained else number, number + 1)


def _checked(decoder: Decoder, number: int, count: int) -> torch.Tensor:
    """The model's own logits where the drafts were chosen, ``[1, count, classes]``."""
    known: Named = {}
    for segment in range(number + 1, len(decoder.places) + 1):
        decoder.catch_up(segment, known)
    return decoder.pieces.tell(len(decoder.places), known, count)
