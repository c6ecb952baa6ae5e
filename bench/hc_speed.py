"""Cost of hyper-connections in SmolLM2-135M against the plain Program, and of the mixes alone.

    python bench/hc_speed.py [SAMPLES]     # default 15; exit code 1 if a bar is missed

One thread, process CPU time, all models in turn in one process; a ratio is to the plain sample of the same turn, the
table shows median and quartiles. ``pypi`` is the package hyper-connections (its static-and-dynamic HC and its mHC) in
the same SmolLM2, where it is installed. Sequences of 128 tokens without a cache, and one token behind none.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MIXERS = {
    "hc static": ("hc{init=replicate}", 1.15, 1.25),
    "hc dynamic": ("hc{dynamic=true,init=replicate}", 1.15, 1.25),
    "ohc": ("hc{mixer=ohc,init=mean}", 1.3, 1.6),
    "mhc": ("hc{mixer=mhc,init=mean}", 1.3, 1.6),
    "ihc": ("hc{mixer=ihc,init=mean}", None, None),
    "mhc_lite": ("hc{mixer=mhc_lite,init=mean}", None, None),
    "shc": ("hc{mixer=shc,init=mean}", None, None),
    "jpmhc": ("hc{mixer=jpmhc,init=mean}", None, None),
}
"""Name -> pipeline, and the bars at 128 tokens and at one."""

SIZES = (128, 1)


def cpu(call) -> float:
    """CPU seconds of one call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def interleaved(calls: dict, samples: int) -> dict[str, list[float]]:
    """Seconds of every call, taken in turn; one turn is thrown away."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(samples + 1):
        for name, call in calls.items():
            seconds = cpu(call)
            if turn:
                taken[name].append(seconds)
    return taken


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """25 %, median and 75 %."""
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


def rival(model, kind: str):
    """SmolLM2 with the package's hyper-connections around each branch; None where it is not installed."""
    try:
        from hyper_connections import get_init_and_expand_reduce_stream_functions as functions
        from hyper_connections.manifold_constrained_hyper_connections import (
            get_init_and_expand_reduce_stream_functions as constrained,
        )
    except ImportError:
        return None
    import copy

    import torch

    net = copy.deepcopy(model.model)
    make, expand, reduce = (constrained if kind == "mhc" else functions)(4)
    width = net.config.hidden_size

    class Attention(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.norm, self.inner = layer.input_layernorm, layer.self_attn

        def forward(self, x, **kwargs):
            return self.inner(self.norm(x), **kwargs)[0]

    branches = []
    for number, layer in enumerate(net.layers):
        mlp = torch.nn.Sequential(layer.post_attention_layernorm, layer.mlp)
        branches.append((make(dim=width, branch=Attention(layer), layer_index=2 * number),
                         make(dim=width, branch=mlp, layer_index=2 * number + 1)))  # fmt: skip

    def run(ids):
        x = net.embed_tokens(ids)
        positions = torch.arange(ids.shape[1])[None]
        angles = net.rotary_emb(x, positions)
        x = expand(x)
        for attention, mlp in branches:
            x = mlp(attention(x, position_embeddings=angles, attention_mask=None))
        return model.lm_head(net.norm(reduce(x)))

    return run


def networks(samples: int) -> bool:
    """The table of whole networks; whether all bars hold."""
    os.environ.setdefault("HCX_DIST", str(ROOT / ".assets"))
    sys.path.append(str(ROOT))
    from tests import trained_nets

    sys.path.remove(str(ROOT))  # transformers would take our folder `kernels` for a package it knows
    import torch
    from hcx.rewrite import trace

    model, tokenizer = trained_nets.smollm2()
    text = torch.tensor(tokenizer(trained_nets.hamlet(4000)))
    base = trace(model, (text[:24].reshape(2, 12),), cache=False)
    programs = {name: base.rewrite(pipeline, check=False) for name, (pipeline, *_) in MIXERS.items()}
    ours = {"plain": base, **programs}
    others = {f"pypi {kind}": run for kind in ("hc", "mhc") if (run := rival(model, kind)) is not None}
    holds = True
    for size in SIZES:
        ids = text[None, :size]
        with torch.no_grad():
            calls = {name: partial(program, input_ids=ids) for name, program in ours.items()}
            calls |= {name: partial(run, ids) for name, run in others.items()}
            taken = interleaved(calls, samples if size > 1 else 3 * samples)
        print(
            f"\n{size} token(s): plain {statistics.median(taken['plain']) * 1e3:.0f} ms CPU, load {os.getloadavg()[0]:.1f}"
        )
        for name in list(taken)[1:]:
            low, middle, high = quartiles([a / b for a, b in zip(taken[name], taken["plain"], strict=True)])
            bar = MIXERS.get(name, (None, None, None))[1 + SIZES.index(size)]
            missed = bar is not None and low > bar
            holds = holds and not missed
            print(f"  {name:12} {middle:5.2f} x  ({low:.2f}-{high:.2f})" + (f"  bar {bar}: {'MISSED' if missed else 'ok'}" if bar else ""))  # fmt: skip
    return holds


def mixes(samples: int) -> bool:
    """H of 4,096 tokens at n = 4: rotations against the fastest exact Sinkhorn form we have."""
    import hcx.kernels  # noqa: F401  registers the ops
    import torch

    ops, n, tokens = torch.ops.hcx, 4, 4096
    torch.manual_seed(0)
    rotation, square = torch.randn(8, 1, tokens), torch.randn(n, n, 1, tokens)

    def both(function, logits):
        def run():
            leaf = logits.clone().requires_grad_()
            function(leaf).square().sum().backward()

        return run

    with torch.no_grad():
        forward = interleaved(
            {"ohc": lambda: ops.rotation(rotation, n), "mhc": lambda: ops.sinkhorn(square, 20, False)}, 10 * samples
        )
    backward = interleaved(
        {
            "ohc": both(lambda t: ops.rotation(t, n), rotation),
            "mhc": both(lambda t: ops.sinkhorn(t, 20, False), square),
        },
        10 * samples,
    )
    holds = True
    print(f"\nH of {tokens} tokens, n = {n}: Sinkhorn (20 steps, exact gradient) / rotation")
    for name, taken in (("forward", forward), ("forward + backward", backward)):
        low, middle, high = quartiles([a / b for a, b in zip(taken["mhc"], taken["ohc"], strict=True)])
        holds = holds and high >= 20
        print(
            f"  {name:18} {middle:5.1f} x  ({low:.1f}-{high:.1f})  bar 20: {'ok' if high >= 20 else 'MISSED'};"
            f" rotation {statistics.median(taken['ohc']) * 1e3:.2f} ms, Sinkhorn {statistics.median(taken['mhc']) * 1e3:.2f} ms"
        )
    return holds


def main() -> int:
    import torch

    torch.set_num_threads(1)
    samples = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    return 0 if all([mixes(samples), networks(samples)]) else 1


if __name__ == "__main__":
    sys.exit(main())
