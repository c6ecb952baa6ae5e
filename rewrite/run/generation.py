"""Greedy decoding with a Program, through its cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from hcx.rewrite.errors import UsageError
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.signature import CACHE, CallSignature

Runner = Callable[[list[torch.Tensor]], list[torch.Tensor]]
Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""``(tokens so far [batch, length], scores of the next [batch, vocabulary]) -> scores``, as Transformers' logits
processors are."""


def greedy(
    program: Program,
    input_ids: torch.Tensor,
    steps: int,
    *,
    attention_mask: torch.Tensor | None = None,
    stop: int | None = None,
    inputs: dict[str, torch.Tensor] | None = None,
    logits_processor: Sequence[Processor] = (),
    on_taps: Callable[[dict[str, torch.Tensor]], None] | None = None,
) -> torch.Tensor:
    """Prompt and ``steps`` greedy tokens.

    Args:
        input_ids: ``[batch, length]``, padded on the left where a mask says so; of a model with an encoder the
            decoder's tokens.
        steps: number of new tokens.
        attention_mask: ``[batch, length]``; positions then count from each row's first real token.
        stop: token that ends a row; the rest of the row is filled with it.
        inputs: the program's other inputs by name, such as the encoder's.
        logits_processor: change the scores of the next token, in order.
        on_taps: called with the taps of each step before that; without it no taps are computed.

    Raises:
        UsageError: the program takes no tokens, or an input is missing.
    """
    return decode(
        program.signature,
        partial(program.run_flat, taps=on_taps is not None),
        program.output_names,
        input_ids,
        steps,
        attention_mask=attention_mask,
        stop=stop,
        inputs=inputs,
        logits_processor=logits_processor,
        on_taps=None if on_taps is None else lambda values: on_taps(dict(zip(program.taps, values, strict=True))),
    )[0]


def decode(
    signature: CallSignature,
    run: Runner,
    output_names: list[str],
    input_ids: torch.Tensor,
    steps: int,
    *,
    attention_mask: torch.Tensor | None = None,
    stop: int | None = None,
    inputs: dict[str, torch.Tensor] | None = None,
    logits_processor: Sequence[Processor] = (),
    on_taps: Callable[[list[torch.Tensor]], None] | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """As :func:`greedy` for anything that runs flat inputs; also returns the last logits of each step, as they were
    before any processor. ``on_taps`` is given what ``run`` returns behind the outputs."""
    if signature.tokens is None:
        raise UsageError("this model does not take `input_ids`, so it cannot generate text", where=signature.model)
    mask = attention_mask if attention_mask is not None else torch.ones_like(input_ids)
    tokens = input_ids
    cache: dict[str, torch.Tensor] = {}
    logits: list[torch.Tensor] = []
    done = torch.zeros(input_ids.shape[0], dtype=torch.bool)
    for _ in range(steps):
        window = tokens[:, -1:] if cache else tokens
        flat = signature.by_name({**(inputs or {}), **cache, **_tokens(signature.tokens, window, mask)})
        with torch.no_grad():
            values = run(flat)
        outputs = dict(zip(output_names, values, strict=False))
        if on_taps is not None:
            on_taps(values[len(output_names) :])
        last = outputs["logits"][:, -1]
        logits.append(last)
        for process in logits_processor:
            last = process(tokens, last)
        new = last.argmax(-1)
        if stop is not None:
            new = torch.where(done, torch.full_like(new, stop), new)
            done |= new == stop
        tokens = torch.cat([tokens, new[:, None]], 1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        if signature.has_cache:
            cache = {CACHE + n.removeprefix("present"): t for n, t in outputs.items() if n.startswith("present.")}
        if bool(done.all()):
            break
    return tokens, logits


def _tokens(name: str, window: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """The inputs that belong to new tokens: ids, mask of all tokens so far, and positions that skip what is masked."""
    prefix = name.removesuffix("input_ids")
    positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -window.shape[1] :]
    return {name: window, f"{prefix}attention_mask": mask, f"{prefix}position_ids": positions.contiguous()}
