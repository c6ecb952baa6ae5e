"""Exits at run time on SmolLM2-135M: what each cache policy keeps, what self-speculation gives, what never leaving costs.

    python bench/exits_runtime.py agreement     # cache policies: agreement with the model, net operations
    python bench/exits_runtime.py river         # the same one row at a time: bytes of weights and seconds a token
    python bench/exits_runtime.py speculation   # 20 prompts x 64 tokens against greedy decoding
    python bench/exits_runtime.py cost          # never leaving, scores on: seconds a token against the plain Program

Translators are fitted on the start of the 1911 Britannica's article on Shakespeare and used on Milton's Areopagitica and
Much Ado About Nothing (``python -m tests.assets``). Operations are counted while the pieces run, heads included. Exit code
1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from exits_frontier import LENGTH, Log, texts
from hcx.passes.exits import Decoder, fit, speculate, token_batches
from hcx.rewrite import trace
from hcx.rewrite.run.generation import greedy

PLACES = (20, 25, 28)
DRAWS = [("20,25,28", 0.5), ("25", 0.3), ("20,25,28", 0.3)]
"""Exits and thresholds of max_prob."""
ROWS, TOKENS = 4, 128
WAYS = {
    "recompute": {"kv": "recompute"},
    "propagate": {"kv": "propagate"},
    "mask": {"kv": "mask"},
    "river": {"kv": "river"},
    "river, answer=exit": {"kv": "river", "answer": "exit"},
    "river of 8 bits": {"kv": "river", "river": "quantize{bits=8,group=32}"},
}
"""Policies for tokens that leave."""


def fitted(base, article, at: str, score: str, windows: int):
    """Exits with translators."""
    raw = base.rewrite(f"exits{{at=[{at}],head=affine,score={score}}}", check=False)
    return fit(raw, token_batches(raw, article, LENGTH)[:windows], skip=1)[0]


def set_thresholds(program, value: float) -> None:
    for name, tensor in program.named_buffers():
        if name.endswith("threshold"):
            tensor.fill_(value)


def agreement(log: Log, base, works, windows: int, quick: bool) -> None:
    """Teacher forcing, one token after another; the first token of a row never leaves."""
    whole = fitted(base, works[0], "20,25,28", "max_prob", windows)
    ids = works[1][2560 : 2560 + ROWS * TOKENS].reshape(ROWS, TOKENS)
    want = base.run_flat(base.signature.by_name({"input_ids": ids}))[0].argmax(-1)
    for places, threshold in DRAWS[:1] if quick else DRAWS:
        set_thresholds(whole, float("inf"))
        for k in places.split(","):
            whole.tensor(f"hcx.exits_0.{k}.threshold").fill_(threshold)
        shares = {}
        for name, options in WAYS.items():
            decoder = Decoder(whole, count=True, **options)
            steps = [decoder.feed(ids[:, t : t + 1], leave=t > 0) for t in range(TOKENS)]
            same = torch.stack([s.logits.argmax(-1) for s in steps], 1) == want
            depth = torch.stack([s.depth for s in steps], 1)[:, 1:].double()
            shares[name] = same[:, 1:].double().mean().item()
            stay = same[:, 1:][depth == 30].double().mean().item()
            net = decoder.pieces.flops / plain(decoder, ids)
            log.say(f"exits {places} at {threshold}: {name:18s} agreement {shares[name]:.1%} (of tokens that stay {stay:.1%}), "
                    f"mean depth {depth.mean():.2f}, net operations {net:.3f}")  # fmt: skip
        log.bar(
            shares["recompute"] > shares["propagate"] >= shares["mask"],
            f"exits {places} at {threshold}: recompute > propagate >= mask",
        )
        log.bar(shares["river"] > shares["propagate"], f"exits {places} at {threshold}: river > propagate")


def river(log: Log, base, works, windows: int, quick: bool) -> None:
    """One row at a time, the ways in turn; CPU seconds, since machines may be shared."""
    whole = fitted(base, works[0], "20,25,28", "max_prob", windows)
    set_thresholds(whole, 0.5)
    rows = works[1][2560 : 2560 + ROWS * TOKENS].reshape(ROWS, TOKENS)[: 1 if quick else ROWS]
    cheap = base.rewrite("quantize{bits=4,group=32}", check=False)
    one, other = (p.run_flat(p.signature.by_name({"input_ids": rows}))[0].argmax(-1)[:, 1:] for p in (base, cheap))
    log.say(f"the whole model quantised to 4 bits: agreement {(one == other).double().mean():.1%}")
    decoders = {name: Decoder(whole, **WAYS[name]) for name in ("recompute", "propagate", "river")}
    seconds, depths = dict.fromkeys(["never leaving", *decoders], 0.0), {name: [] for name in decoders}
    for row in rows:
        for name in seconds:
            decoder = decoders.get(name, decoders["recompute"])
            decoder.reset()
            read, start = decoder.pieces.weight_bytes, time.process_time()
            steps = [decoder.feed(i.reshape(1, 1), leave=t > 0 and name in decoders) for t, i in enumerate(row)]
            seconds[name] += time.process_time() - start
            if name in decoders:
                depths[name] += [int(s.depth) for s in steps[1:]]
            else:
                decoder.pieces.weight_bytes = read
    count = rows.numel()
    log.say(f"never leaving, no scores: {1e3 * seconds['never leaving'] / count:.0f} ms of CPU a token")
    for name, decoder in decoders.items():
        read, whole_model = decoder.pieces.weight_bytes / count, decoder.pieces.plain_bytes
        log.say(f"{name}: mean depth {statistics.mean(depths[name]):.2f}, weights read {read / whole_model:.3f} of "
                f"{whole_model / 1e6:.0f} MB a token, {1e3 * seconds[name] / count:.0f} ms of CPU")  # fmt: skip


def plain(decoder: Decoder, ids: torch.Tensor) -> int:
    """Operations of teacher forcing without exits."""
    return decoder.plain_flops(ids[:, :1], ids.shape[1])


def speculation(log: Log, base, works, windows: int, quick: bool) -> None:
    exits = fitted(base, works[0], "20,25,28", "probe", windows)
    prompts = [works[1 + n % 2][400 * n + 300 : 400 * n + 316][None] for n in range(20)]
    decoder = Decoder(exits, count=True)
    for at, draft, chosen in ((28, 4, prompts), (25, 3, prompts[:5]), (20, 2, prompts[:5]))[: 1 if quick else 3]:
        drafted = accepted = flops = usual = equal = 0
        seconds = [0.0, 0.0]
        for number, ids in enumerate(chosen):
            start = time.perf_counter()
            want = greedy(base, ids, 64)
            middle = time.perf_counter()
            made = speculate(decoder, ids, 64, draft=draft, at=at)
            seconds = [seconds[0] + middle - start, seconds[1] + time.perf_counter() - middle]
            drafted, accepted = drafted + made.drafted, accepted + made.accepted
            flops, usual = flops + made.flops, usual + made.plain
            if torch.equal(made.tokens, want):
                equal += 1
                continue
            place = int((made.tokens != want)[0].int().argmax())
            top = made.logits[0, place - ids.shape[1]].topk(2).values
            gap = (top[0] - top[1]).item()
            log.bar(
                gap < 1e-3, f"prompt {number} differs first at new token {place - ids.shape[1]}, top-2 gap {gap:.2g}"
            )
        log.say(f"exit {at}, {draft} drafts: {equal} of {len(chosen)} texts equal to greedy; acceptance "
                f"{accepted / drafted:.1%}; operations {flops / usual:.3f} x plain; {seconds[1]:.1f} s against "
                f"{seconds[0]:.1f} s of greedy decoding (counting included)")  # fmt: skip


def cost(log: Log, base, works, windows: int, quick: bool) -> None:
    """Interleaved decode steps with the same past."""
    places = str(list(PLACES)).replace(" ", "")
    options = f"exits{{at={places},head=affine,score=probe"
    select = base.rewrite(options + "}", check=False)
    decoder = Decoder(select)
    prompt = works[1][:64][None]
    with torch.no_grad():
        past = dict(zip(base.output_names, base.run_flat(base.signature.by_name({"input_ids": prompt})), strict=True))
    cache = {"past_key_values" + n.removeprefix("present"): t for n, t in past.items() if n.startswith("present")}
    token = works[1][64:65][None]
    decoder.feed(prompt)

    runs = {
        "plain": lambda: base.run_flat(base.signature.by_name({"input_ids": token, **cache})),
        "pieces": lambda: decoder.feed(token),
    }
    if not quick:
        cond = base.rewrite(options + ",form=cond,kv=propagate}", check=False)
        runs["cond"] = lambda: cond.run_flat(cond.signature.by_name({"input_ids": token, **cache}))
    seen: dict[str, list[float]] = {name: [] for name in runs}
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    with torch.no_grad():
        for number in range(42):
            for name, run in runs.items():
                start, used = time.perf_counter(), time.process_time()
                run()
                if number > 1:
                    seen[name].append(time.perf_counter() - start)
                    cpu[name].append(time.process_time() - used)
                decoder.crop(64)
    for name in list(runs)[1:]:
        walls = statistics.median(a / b for a, b in zip(seen[name], seen["plain"], strict=True))
        low, cpus, high = statistics.quantiles((a / b for a, b in zip(cpu[name], cpu["plain"], strict=True)), n=4)
        text = f"never leaving with probes, {name}: {walls:.3f} x the plain step (wall), {cpus:.3f} x (CPU time, {low:.3f} to {high:.3f})"
        log.bar(low <= 1.05, text + f"; plain {1e3 * statistics.median(seen['plain']):.1f} ms")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["agreement", "river", "speculation", "cost"])
    parser.add_argument("--windows", type=int, default=16, help="of 256 tokens to fit on")
    parser.add_argument("--quick", action="store_true", help="the first setting of each part only")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    log = Log()
    model, works = texts()
    base = trace(model, (works[0][:24].reshape(2, 12),))
    {"agreement": agreement, "river": river, "speculation": speculation, "cost": cost}[arguments.part](
        log, base, works, arguments.windows, arguments.quick
    )
    print(f"{len(log.missed)} bars missed")
    return bool(log.missed)


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
