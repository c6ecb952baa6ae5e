"""Decoding through the cache against full forwards."""

from __future__ import annotations

import copy

import torch
from hcx.rewrite.ir.program import Program
from hcx.rewrite.run.generation import decode

from .report import Check

DECODE_STEPS = 6


DECODE_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 8e-3}
"""Cached decoding against the full forward, largest logit difference relative to the rms of the logits."""


def check_decode(program: Program, flat: list[torch.Tensor]) -> Check | None:
    """Decoding through the cache against full forwards, token by token; None for models without a cache."""
    names, tokens = [i.name for i in program.inputs], program.signature.tokens
    if not program.signature.has_cache or tokens is None or "logits" not in program.output_names:
        return None
    ids = flat[names.index(tokens)][:, :5]
    others = {s.name: t for s, t in zip(program.inputs, flat, strict=False) if s.fill is None and s.name != tokens}
    worst, agree = _decode_gap(program, tokens, ids, others)
    holds = worst <= DECODE_TOLERANCE.get(program.dtype, 1e-4) and agree
    figures = {"tokens": DECODE_STEPS, "max_relative_diff": worst, "argmax_equal": agree}
    note = ""
    if not holds and program.dtype != torch.float64:  # a rough function amplifies rounding; a wrong cache stays wrong
        others = {n: t.double() if t.is_floating_point() else t for n, t in others.items()}
        worst, agree = _decode_gap(copy.deepcopy(program).to(torch.float64), tokens, ids, others)
        holds = worst <= DECODE_TOLERANCE[torch.float64] and agree
        note = f"in float64 {worst:.3g}: {'rounding only' if holds else 'not rounding'}"
    reason = next((e.approximate_cache for e in program.history if e.approximate_cache), None)
    if reason is not None and not holds:  # measured, and meant
        holds, note = True, f"approximate: {reason}"
    return Check("cached decoding equals the full forward", holds, figures, note)


def _decode_gap(program: Program, name: str, ids: torch.Tensor, others: dict[str, torch.Tensor]) -> tuple[float, bool]:
    """Largest logit difference relative to the rms, and whether clear winners agree."""
    signature, logits_at = program.signature, program.output_names.index("logits")
    tokens, cached = decode(signature, program.run_flat, program.output_names, ids, DECODE_STEPS, inputs=others)
    worst, agree = 0.0, True
    for step, logits in enumerate(cached):
        prefix = tokens[:, : ids.shape[1] + step]
        with torch.no_grad():
            full = program.run_flat(signature.by_name({**others, name: prefix}))[logits_at][:, -1]
        scale = full.double().square().mean().sqrt().item()
        worst = max(worst, (full.double() - logits.double()).abs().max().item() / max(scale, 1e-12))
        top2 = full.double().topk(2, -1).values
        clear = (top2[:, 0] - top2[:, 1]) > 1e-3 * max(scale, 1e-12)
        agree &= bool(((full.argmax(-1) == logits.argmax(-1)) | ~clear).all())
    return worst, agree
