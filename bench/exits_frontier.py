"""Agreement of early exits with the whole model against net floating-point operations, on SmolLM2-135M and prose.

    python bench/exits_frontier.py [WINDOWS]     # default 32 windows of 256 tokens to fit on; exit code 1 if a bar is missed

Heads and probes are fitted on the start of the 1911 Britannica's article on Shakespeare. Translators are tested on a far
part of the same article, thresholds are chosen on a third part and held out on Milton's Areopagitica (both prose; the
texts and the model come with ``python -m tests.assets``). Operations are counted from the graph and hold every score and
head. "raw" reads the stream with the model's own final norm and head, "fitted" translates it first.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACES, LENGTH, BUDGETS = (15, 20, 25, 28), 256, (28, 26, 24, 22, 20)
WORKS = {
    "Britannica 1911, Shakespeare": "britannica-11th.txt",
    "Areopagitica": "areopagitica.txt",
    "Much Ado": "much_ado_about_nothing_gut.txt",
}
"""Works to fit on, to calibrate on, and to hold out."""
FAR, CALIBRATION, HELD_OUT = (220, 232), (10, 20), (20, 30)
"""Windows of the first work that translators are tested on, of the second, and of the third."""
ROWS, SCORES = 1024, ("max_prob", "margin", "candidates", "probe")
"""Rows of the head under the score ``candidates``, which is max_prob over these; all scores."""
BARS = {25: (0.50, 1.1), 28: (0.65, None)}
"""Exit -> least agreement, largest KL in nats, on the far part."""


def texts():
    """The model, and token ids of each work."""
    os.environ.setdefault("HCX_DIST", str(ROOT / ".assets"))
    sys.path.append(str(ROOT))
    from tests import trained_nets

    sys.path.remove(str(ROOT))  # transformers would take our folder `kernels` for a package it knows
    import torch

    model, tokenizer = trained_nets.smollm2()
    found = {}
    for name, file in WORKS.items():
        text = trained_nets.file_of("shakespeare", file).read_text(encoding="latin-1").replace("\r\n", "\n")
        found[name] = torch.tensor(tokenizer(text))
    return model, list(found.values())


def collect(program, batches, rows):
    """Trials under each score, and the mean KL of each exit from the model, in nats; ``rows`` are the candidates."""
    import torch
    from hcx.passes.exits import Trials
    from hcx.passes.exits.applied import applied
    from hcx.passes.exits.insert.scores import FROM_LOGITS
    from hcx.rewrite.run.reading import reader

    exits = applied(program)
    read = reader(program, exits.graph, [*exits.scores, *exits.logits, exits.answer])
    count = len(exits.places)
    figures = {name: [] for name in SCORES}
    answers, kl, positions = [], torch.zeros(count, dtype=torch.float64), 0
    for flat in batches:
        values = [
            v[0, 1:] for v in read(exits.program.signature.complete(flat))
        ]  # the first token is an attention sink
        logits = values[count:]
        figures["probe"].append(torch.stack(values[:count]))
        for name in ("max_prob", "margin"):
            figures[name].append(torch.stack([FROM_LOGITS[name](v) for v in logits[:-1]]))
        figures["candidates"].append(torch.stack([FROM_LOGITS["max_prob"](v[:, rows]) for v in logits[:-1]]))
        answers.append(torch.stack([v.argmax(-1) for v in logits]))
        full = logits[-1].log_softmax(-1)
        kl += torch.stack([(full.exp() * (full - v.log_softmax(-1))).sum().double() for v in logits[:-1]])
        positions += len(full)
    every = torch.cat(answers, 1)
    trials = {n: Trials(exits.places, exits.depth, torch.cat(s, 1), every) for n, s in figures.items()}
    return trials, (kl / positions).tolist()


class Log:
    """Prints what is measured, and remembers missed bars."""

    def __init__(self) -> None:
        self.start, self.missed = time.perf_counter(), []

    def say(self, text: str) -> None:
        print(f"{time.perf_counter() - self.start:7.0f} s  {text}", flush=True)

    def bar(self, holds: bool, text: str) -> None:
        self.say(f"{'ok  ' if holds else 'MISS'} {text}")
        if not holds:
            self.missed.append(text)


def main(windows: int) -> int:
    """Print the figures; 1 where a bar is missed."""
    import torch
    from hcx.passes.exits import exit_costs, fit, token_batches
    from hcx.rewrite import trace

    torch.set_num_threads(1)
    log = Log()
    model, (article, second, third) = texts()
    base = trace(model, (article[:24].reshape(2, 12),))
    places = str(list(PLACES)).replace(" ", "")
    raw = base.rewrite(f"exits{{at={places},head=affine,score=probe}}", check=False)
    calls = token_batches(raw, article, LENGTH)
    fitted, report = fit(raw, calls[:windows], skip=1)
    log.say(
        f"fitted on {report.positions} positions of {next(iter(WORKS))}; before {report.before}, after {report.agreement}"
    )

    costs = {}
    for score, options in (("max_prob", ""), ("candidates", f",candidates={ROWS}"), ("probe", ",score=probe")):
        for head in ("shared", "affine"):
            program = base.rewrite(f"exits{{at={places},head={head}{options}}}", check=False)
            costs[head, score] = exit_costs(program, calls[0])
            ways = ", ".join(f"{c:.3f}" for c in costs[head, score].relative())
            log.say(f"operations over the plain model's, leaving at {PLACES} and never: {head} {score:10s} {ways}")
    costs |= {(head, "margin"): costs[head, "max_prob"] for head in ("shared", "affine")}
    log.bar(
        costs["affine", "probe"].relative()[-1] <= 1.05,
        "never leaving with probes takes <= 1.05 x the plain operations",
    )

    ratio = decode_ratio(base, raw, article[None, :32])
    log.bar(
        ratio <= 1.05, f"never leaving with probes takes {ratio:.3f} x the plain seconds of a decode step, bar 1.05"
    )
    programs, rows = {"raw": raw, "fitted": fitted}, common(base, calls[: windows // 3])
    far = {name: collect(p, calls[FAR[0] : FAR[1]], rows) for name, p in programs.items()}
    agrees = {name: t["probe"].agrees.double().mean(1).tolist() for name, (t, _) in far.items()}
    for number, k in enumerate(PLACES):
        log.say(
            f"far part, exit {k}: agreement raw {100 * agrees['raw'][number]:.1f} %, fitted "
            f"{100 * agrees['fitted'][number]:.1f} %; KL raw {far['raw'][1][number]:.2f}, fitted {far['fitted'][1][number]:.2f}"
        )
        if k in BARS:
            least, most = BARS[k]
            log.bar(agrees["fitted"][number] >= least, f"exit {k} agrees on >= {100 * least:.0f} % of a far part")
            if most is not None:
                log.bar(far["fitted"][1][number] <= most, f"exit {k} has KL <= {most} there")

    chosen_on = token_batches(raw, second, LENGTH)[CALIBRATION[0] : CALIBRATION[1]]
    calibration = {name: collect(p, chosen_on, rows)[0] for name, p in programs.items()}
    held = token_batches(raw, third, LENGTH)[HELD_OUT[0] : HELD_OUT[1]]
    held_out = {name: collect(p, held, rows) for name, p in programs.items()}
    for number, k in enumerate(PLACES):
        shares = [100 * held_out[n][0]["probe"].agrees[number].double().mean().item() for n in programs]
        log.say(f"{list(WORKS)[2]}, exit {k}: agreement raw {shares[0]:.1f} %, fitted {shares[1]:.1f} %")
    test = {name: trials for name, (trials, _) in held_out.items()}
    budgets(log, calibration, test, costs)
    frontier(log, calibration["fitted"], test["fitted"], costs)
    print(f"{len(log.missed)} bars missed")
    return bool(log.missed)


def common(program, batches):
    """The tokens that the model chooses most often on some text, and then the first ones of the vocabulary."""
    import torch

    chosen = torch.cat([program.run_flat(flat)[0].argmax(-1).flatten() for flat in batches])
    counts = torch.bincount(chosen, minlength=ROWS).double()
    return (counts - torch.arange(len(counts)) / 1e9).argsort(descending=True)[:ROWS]


def decode_ratio(plain, exits, prompt, tokens: int = 16, samples: int = 7) -> float:
    """Median over samples, taken in turn, of the seconds of greedy decoding with exits over those without."""
    from hcx.rewrite.run.generation import greedy

    def seconds(program) -> float:
        start = time.perf_counter()
        greedy(program, prompt, tokens)
        return time.perf_counter() - start

    seconds(plain), seconds(exits)
    return statistics.median(seconds(exits) / seconds(plain) for _ in range(samples))


def budgets(log: Log, calibration, test, costs) -> None:
    """Mean depth for a budget, and fitted heads against raw ones, chosen on the same tokens."""
    from hcx.passes.exits.fitting.rules import for_budget

    for score in SCORES:
        for budget in BUDGETS:
            rows = {}
            for name, head in (("raw", "shared"), ("fitted", "affine")):
                thresholds = for_budget(calibration[name][score], budget)
                rows[name] = test[name][score].figures(thresholds, costs[head, score])
            raw, fitted = rows["raw"], rows["fitted"]
            if score == "probe":  # the probes were fitted for the translated heads: no raw figures to compare with
                text = f"{score:10s} budget {budget}: "
            else:
                text = f"{score:10s} budget {budget}: raw {raw['mean_depth']:.2f} blocks, agreement {100 * raw['agreement']:.1f} %; "
            text += (
                f"fitted {fitted['mean_depth']:.2f}, {100 * fitted['agreement']:.1f} %, net operations "
                f"{fitted['net_flops']:.3f}, useless {fitted['useless']}, {fitted['positions']} positions"
            )
            if score == "probe":
                log.bar(abs(fitted["mean_depth"] - budget) <= 1, text)
            else:
                better = fitted["agreement"] > raw["agreement"]
                log.bar(better and abs(fitted["mean_depth"] - budget) <= 1, text)


def frontier(log: Log, calibration, test, costs) -> None:
    """Held-out agreement and net operations along the path of thresholds, under each score."""
    from hcx.passes.exits.fitting.rules import path

    best = 1.0
    for score in SCORES:
        points = [test[score].figures(t, costs["affine", score]) for t in path(calibration[score])]
        for point in points[:: len(points) // 10]:
            log.say(
                f"frontier {score:10s} depth {point['mean_depth']:.2f} agreement {100 * point['agreement']:.1f} % "
                f"net operations {point['net_flops']:.3f}"
            )
        good = [p for p in points if p["agreement"] >= 0.9]
        least = min(p["net_flops"] for p in good)
        best = min(best, least)
        log.say(f"frontier {score:10s} least net operations at >= 90 % agreement: {least:.3f}")
    log.bar(best < 1, f"net operations saved at >= 90 % agreement: {100 * (1 - best):.1f} %")


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 32))
