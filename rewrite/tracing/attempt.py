"""The ways in which a model is traced, the strongest first."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from hcx.rewrite.errors import HcxError, TraceError
from hcx.rewrite.ir.signature import Fill

from .capture import PAST, SEQUENCE, CachedCalls, Call, cached_calls
from .explain import first_line, raised_by_model

Probe = tuple[list[torch.Tensor], dict[str, int]]
"""Flat tensors of a call, and its named sizes."""


class Attempt:
    """One way of tracing: the call, and what may be omitted in calls of the result."""

    def __init__(self, call: Call, fills: Mapping[str, Fill], what: str, cached: CachedCalls | None = None):
        self.call, self.fills, self.what, self.cached = call, fills, what, cached
        self.notes: list[str] = []


def attempts_for(
    model: torch.nn.Module, call: Call, others: dict[str, str], masks: list[str], cache: bool | None
) -> list[Attempt]:
    fills = dict.fromkeys(masks, Fill.ONES)
    attempts: list[Attempt] = []
    notes: list[str] = []
    maker, why = None, "the model does not return a cache that it also takes"
    if cache is not False:
        try:
            maker = cached_calls(model, call, others)
        except Exception as error:
            if not (isinstance(error, HcxError) or raised_by_model(error)):
                raise
            why = first_line(error)
            notes.append(f"traced without a cache: {why}")
    if maker is not None:
        own = {maker.cache: Fill.EMPTY, **({maker.positions: Fill.POSITIONS} if maker.positions else {})}
        if "use_cache" in others:
            maker.call = call.replaced(use_cache=True)
        attempts.append(Attempt(maker.call, {**fills, **own}, "a cache", maker))
    if cache is True:
        if not attempts:
            raise TraceError(why, where=type(model).__name__, hint="leave out cache=True")
        return attempts
    if "use_cache" in others and maker is not None:
        call = call.replaced(use_cache=False)
    attempts.append(Attempt(call, fills, "anything left out"))
    attempts[-1].notes += notes
    return attempts


def probe(cached: CachedCalls, batch: int, sequence: int, past: int) -> Probe:
    tensors = cached.make(past, batch, sequence).flat()[0]
    return tensors, {"batch": batch, SEQUENCE: sequence, PAST: past}
