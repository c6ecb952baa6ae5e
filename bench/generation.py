"""Tokens a second through ``program.as_pretrained().generate`` against the source model's own ``generate``.

    python bench/generation.py [SAMPLES]     # default 15, about 4 seconds each; exit code 1 if a bar is missed

SmolLM2-135M (``python -m tests.assets``), one thread, 64 new greedy tokens with the cache. Samples of all models are
taken in turn in one process, so a busy machine slows all of them alike; the ratio of a sample is to the eager sample of
the same turn. Exits in select form compute every head, which costs time that no interpreter can win back: the floating-
point operations of a decode step stand beside its ratio.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOKENS = 64
PIPELINES = {
    "no passes": ("", 0.8),
    "neutral loop": ("looped{start=12,end=16,steps=2}", 0.7),
    "exits": ("exits", None),
}
"""Name -> pipeline, and the least share of the eager tokens a second."""


def models():
    """(prompt, eager model, name -> (Program, model for ``generate``))."""
    os.environ.setdefault("HCX_DIST", str(ROOT / ".assets"))
    sys.path.append(str(ROOT))
    from tests import trained_nets

    sys.path.remove(str(ROOT))  # transformers would take our folder `kernels` for a package it knows
    import torch
    from hcx.rewrite import trace

    model, tokenizer = trained_nets.smollm2()
    model.generation_config.eos_token_id = None  # always so many tokens
    text = torch.tensor(tokenizer(trained_nets.hamlet(400)))
    base = trace(model, (text[:24].reshape(2, 12),))
    programs = {name: base.rewrite(pipeline) if pipeline else base for name, (pipeline, _) in PIPELINES.items()}
    return text[None, :32], model, {name: (program, program.as_pretrained()) for name, program in programs.items()}


def seconds(model, prompt) -> tuple[float, list[int]]:
    """Wall seconds of one generation, and its new tokens."""
    start = time.perf_counter()
    tokens = model.generate(prompt, attention_mask=prompt * 0 + 1, do_sample=False, max_new_tokens=TOKENS)
    return time.perf_counter() - start, tokens[0, prompt.shape[1] :].tolist()


def step_flops(program) -> int:
    """Floating-point operations of one decode step behind 64 cached tokens."""
    import torch
    from hcx.cli.figures import flops
    from hcx.rewrite.ir.signature import size_of

    sizes = {"batch": 1, "sequence": 1, "past": 64}
    flat = [torch.ones([size_of(d, sizes) for d in s.shape], dtype=s.dtype) for s in program.inputs]
    return flops(program, flat)


def spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return f"{middle:.2f} (quartiles {low:.2f} to {high:.2f})"


def main(samples: int) -> int:
    """Print tokens a second and ratios; 1 where a bar is missed."""
    import torch

    torch.set_num_threads(1)
    prompt, eager, ours = models()
    plan = {"eager": eager, **{name: model for name, (_, model) in ours.items()}}
    wanted = seconds(eager, prompt)[1]
    for name, model in plan.items():  # warm, and the same tokens
        if seconds(model, prompt)[1] != wanted:
            print(f"MISS {name}: other tokens than eager")
            return 1
    taken: dict[str, list[float]] = {name: [] for name in plan}
    load = []
    for turn in range(samples):
        names = list(plan)[turn % len(plan) :] + list(plan)[: turn % len(plan)]  # nobody is always first
        for name in names:
            taken[name].append(seconds(plan[name], prompt)[0])
        load.append(os.getloadavg()[0])
    print(f"{samples} samples of {TOKENS} tokens, load {min(load):.1f} to {max(load):.1f} on {os.cpu_count()} cores")
    print(f"eager: {spread([TOKENS / s for s in taken['eager']])} tokens/s")
    missed, plain = 0, step_flops(ours["no passes"][0])
    for name, (program, _) in ours.items():
        ratios = [e / s for e, s in zip(taken["eager"], taken[name], strict=True)]
        bar, share = PIPELINES[name][1], step_flops(program) / plain
        miss = bar is not None and statistics.median(ratios) < bar
        missed += miss
        print(
            f"{'MISS' if miss else 'ok  '} {name}: {spread([TOKENS / s for s in taken[name]])} tokens/s, "
            f"ratio {spread(ratios)}" + (f", bar {bar}" if bar else "") + f", FLOPs a step x {share:.3f}"
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 15))
