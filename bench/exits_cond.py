"""Time and operations that exits{form=cond} saves, in eager and in ONNX Runtime.

    python bench/exits_cond.py language [--threads N]   # SmolLM2: all rows leave after 10 of 30 blocks, and none do
    python bench/exits_cond.py images [--threads N]     # a CNN of four stages on scikit-learn's digits, trained here

Plain and rewritten runs alternate, so that both see the same neighbours; figures are medians of wall and of CPU time.
Operations are counted while the Program runs (products and convolutions, heads included), never estimated.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from hcx.export import to_onnx
from hcx.passes import Exits
from hcx.rewrite import trace
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def flops(run: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def timed(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, tuple[float, float]]:
    """Median wall and CPU milliseconds of each, run in turn; one round of warming up is not counted."""
    seen: dict[str, list] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            if number:
                seen[name].append((1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)))
    return {n: tuple(statistics.median(s) for s in zip(*samples, strict=True)) for n, samples in seen.items()}


def set_thresholds(program, value: float) -> None:
    for name, tensor in program.named_buffers():
        if name.endswith("threshold"):
            tensor.fill_(value)


def report(title: str, plain, other, skipped: float) -> None:
    wall, cpu = (1 - other[i] / plain[i] for i in (0, 1))
    print(f"{title:34} plain {plain[0]:8.2f} ms, cond {other[0]:8.2f} ms; wall saved {wall:6.1%}, CPU saved {cpu:6.1%}, "
          f"operations skipped {skipped:6.1%}; wall/operations {wall / skipped if skipped > 0 else float('nan'):.3f}")  # fmt: skip


def language(rounds: int) -> None:
    from tests import trained_nets

    model, tokenizer = trained_nets.smollm2()
    text = torch.tensor(tokenizer(trained_nets.hamlet(2400)))
    program = trace(model, (text[:24].reshape(2, 12),))
    cached = program.rewrite(Exits(at=(10, 20), form="cond", kv="propagate"), check=False)
    bare = trace(model, (text[:24].reshape(2, 12),), {"use_cache": False})
    whole = bare.rewrite(Exits(at=(10, 20), form="cond"), check=False)

    def step(one, rows: int, past: int, length: int) -> Callable[[], object]:
        flat = one.signature.complete(one.signature.bind((text[: rows * length].reshape(rows, length),), {}))
        if past:
            shape = {"past": past}
            flat = [
                torch.randn([shape.get(d, t.shape[i]) for i, d in enumerate(s.shape)], generator=torch.manual_seed(0))
                if s.fill == "empty" else t
                for s, t in zip(one.inputs, flat, strict=True)
            ]  # fmt: skip
            given = {s.name: t for s, t in zip(one.inputs, flat, strict=True) if s.fill in (None, "empty")}
            flat = one.signature.by_name(given)
        return lambda: one.run_flat(flat)

    cases = [("no cache, 1 x 64 tokens", bare, whole, 1, 0, 64), ("no cache, 8 x 32 tokens", bare, whole, 8, 0, 32),
             ("prefill, 1 x 64 tokens", program, cached, 1, 0, 64), ("decode, 1 row, 64 past", program, cached, 1, 64, 1),
             ("decode, 8 rows, 64 past", program, cached, 8, 64, 1)]  # fmt: skip
    for title, plain, cond, rows, past, length in cases:
        runs = {"plain": step(plain, rows, past, length), "cond": step(cond, rows, past, length)}
        for label, threshold in (("all leave at 10", -1.0), ("none leaves", torch.inf)):
            set_thresholds(cond, threshold)
            skipped = 1 - flops(runs["cond"]) / flops(runs["plain"])
            times = timed(runs, rounds)
            report(f"{title}: {label}", times["plain"], times["cond"], skipped)


class Digits(nn.Module):
    """Four stages of three convolutions, each half as large as the one before: ``[B, 1, 8, 8] -> [B, 10]``.

    ``early`` are the heads of exits, trained with the net: :meth:`losses`.
    """

    def __init__(self, widths: tuple[int, ...] = (1, 24, 64, 160, 256)):
        super().__init__()
        stages = []
        for number, (a, b) in enumerate(itertools.pairwise(widths)):
            layers = []
            for first, wide in ((True, a), (False, b), (False, b)):
                stride = 2 if first and number else 1
                layers += [nn.Conv2d(wide, b, 3, stride, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
            stages.append(nn.Sequential(*layers))
        self.stages, self.head = nn.ModuleList(stages), nn.Linear(widths[-1], 10)
        self.early = nn.ModuleList([nn.Linear(width, 10) for width in widths[1:-1]])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.pooled(x)[-1])

    def pooled(self, x: torch.Tensor) -> list[torch.Tensor]:
        x, found = F.interpolate(x, scale_factor=2.0, mode="nearest"), []
        for stage in self.stages:
            x = stage(x)
            found.append(x.mean((2, 3)))
        return found

    def losses(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        heads = zip([*self.early, self.head], self.pooled(x), strict=True)
        return sum(F.cross_entropy(head(features), labels) for head, features in heads)


def trained(parameters, loss_of: Callable, x: torch.Tensor, y: torch.Tensor, epochs: int) -> None:
    optimizer = torch.optim.AdamW(parameters, lr=2e-3)
    for _ in range(epochs):
        for chosen in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            loss_of(x[chosen], y[chosen]).backward()
            optimizer.step()


def images(rounds: int, epochs: int) -> None:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("this part needs scikit-learn, for its digits: pip install scikit-learn")
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    order = torch.randperm(len(x))
    fit, held, test = order[:1100], order[1100:1400], order[1400:]
    model = Digits()
    model.train()
    trained(model.parameters(), model.losses, x[fit], y[fit], epochs)
    model.eval()
    program = trace(model, (x[:4],))
    places = (2, 3)  # hardly anybody leaves after the first stage
    cond = program.rewrite(Exits(at=places, form="cond"), check=False)
    with torch.no_grad():
        for number, head in [(k, model.early[k - 1]) for k in places]:
            cond.tensor(f"hcx.exits_0.{number}.weight").copy_(head.weight)
            cond.tensor(f"hcx.exits_0.{number}.bias").copy_(head.bias)
        full = (program(x[held]).argmax(1) == y[held]).float().mean().item()
        for threshold in [k / 100 for k in range(50, 100)] + [0.995, 0.999, 2.0]:  # the lowest that costs nothing
            set_thresholds(cond, threshold)
            if (cond_rows(cond, x[held]).argmax(1) == y[held]).float().mean().item() >= full:
                break
        rows = [x[i : i + 1] for i in test]
        accuracy = [(torch.cat([p(r) for r in rows]).argmax(1) == y[test]).float().mean().item() for p in (model, cond)]
        depths = torch.cat([cond(r, taps=True)[1]["exits.depth"] for r in rows])
        print(f"threshold {threshold}; accuracy on {len(test)} test images: plain {accuracy[0]:.2%}, cond {accuracy[1]:.2%}; "
              f"images by depth 1 to 4: {torch.bincount(depths, minlength=5)[1:].tolist()}")  # fmt: skip
        operations = [sum(flops(lambda r=r, p=p: p(r)) for r in rows[:100]) for p in (program, cond)]
        skipped = 1 - operations[1] / operations[0]
        runs = {
            n: (lambda p=p: [p(r) for r in rows[:100]])
            for n, p in (("eager model", model), ("program", program), ("cond", cond))
        }
        times = timed(runs, rounds)
    report("eager, 100 single images", times["program"], times["cond"], skipped)
    print(f"  against the module itself: {times['eager model'][0] / times['cond'][0]:.2f} x faster (wall), "
          f"{times['eager model'][1] / times['cond'][1]:.2f} x (CPU)")  # fmt: skip
    eager = 1 - times["cond"][1] / times["eager model"][1]
    with tempfile.TemporaryDirectory() as folder:
        sessions = {n: session(p, f"{folder}/{n}.onnx") for n, p in (("plain", program), ("cond", cond))}
        feeds = [{s.get_inputs()[0].name: r.numpy() for s in sessions.values()} for r in rows[:100]]
        same = max(
            abs(sessions["cond"].run(None, f)[0] - cond(r).detach().numpy()).max()
            for f, r in zip(feeds, rows, strict=False)
        )
        times = timed({n: (lambda s=s: [s.run(None, f) for f in feeds]) for n, s in sessions.items()}, 4 * rounds)
    report("ONNX Runtime, 100 single images", times["plain"], times["cond"], skipped)
    runtime = 1 - times["cond"][1] / times["plain"][1]
    print(
        f"  largest difference to eager {same:.2g}; share of the time saved in eager that is saved here: {runtime / eager:.2f}"
    )


def cond_rows(program, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([program(row[None]) for row in x])


def session(program, path: str):
    import onnxruntime

    to_onnx(program, path)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["language", "images"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--epochs", type=int, default=12)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.part == "images":
        images(arguments.rounds, arguments.epochs)
    else:
        with torch.no_grad():
            language(arguments.rounds)


if __name__ == "__main__":
    main()
