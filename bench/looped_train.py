"""A loop of SmolLM2-135M trained for a little while, against the dense model trained on the same tokens.

    python bench/looped_train.py [FOLDER]    # default looped-train; about 60 CPU minutes; goes on where it was stopped

Blocks [8, 22) run twice (``mix=output``, scalar from 0: the start is the dense model), trained with the smoothed exit loss
on both readouts; the dense model with plain cross entropy. Three draws of 100 steps of 128 tokens from an encyclopaedia's
article, AdamW at 1e-5 (new parameters at 1e-3), held-out loss on 2,048 tokens of its end. Needs ``python -m tests.assets``.
Every finished arm is a file in FOLDER; within an arm the state is kept every 25 steps. The table is printed at the end,
whatever it says.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIPELINE = "looped{start=8,end=22,steps=2,mix=output,readout=steps,gate=ouro}"
DRAWS, STEPS, TOKENS, HELD = 3, 100, 128, 2048
RATE, NEW_RATE, EPSILON, BETA, KEEP = 1e-5, 1e-3, 0.2, 0.05, 25


def setup():
    """(traced model, token ids of the article)."""
    os.environ.setdefault("HCX_DIST", str(ROOT / ".assets"))
    sys.path.append(str(ROOT))
    from tests import trained_nets

    sys.path.remove(str(ROOT))  # transformers would take our folder `kernels` for a package it knows
    import torch
    from hcx.rewrite import trace

    torch.set_num_threads(1)
    model, tokenizer = trained_nets.smollm2()
    text = torch.tensor(tokenizer(trained_nets.prose(250_000, start=2_000)))
    return trace(model, (text[:24].reshape(2, 12),)), text


def loss_of(program, ids):
    """Training loss: plain cross entropy, or the smoothed exit loss where there are readouts."""
    from hcx.passes.looped.losses import smoothed_exit, step_losses

    output, taps = program(ids, taps=True)
    if not taps:
        return step_losses([output.logits], ids).mean()
    losses = step_losses([taps["looped.1.logits"], taps["looped.2.logits"]], ids)
    return smoothed_exit(losses, taps["looped.gate"][:, :-1], EPSILON, BETA)


def held_out(program, text) -> dict[str, float]:
    """Nats a token on the held-out text: of the answer, and of the first pass and its mean gate where there is a loop."""
    import torch
    from hcx.passes.looped.losses import step_losses

    sums: dict[str, list[float]] = {}
    for ids in text[-HELD:].reshape(-1, 1, 256):
        with torch.no_grad():
            output, taps = program(ids, taps=True)
        logits = {"loss": output.logits, "first_pass": taps.get("looped.1.logits")}
        for name, values in logits.items():
            if values is not None:
                sums.setdefault(name, []).append(step_losses([values], ids).mean().item())
        if taps:
            sums.setdefault("gate", []).append(taps["looped.gate"][..., 0].mean().item())
    return {name: statistics.mean(values) for name, values in sums.items()}


def train(program, text, draw: int, place: Path) -> dict:
    """One arm of one draw, from the beginning or from the state that an interrupted run has left."""
    import torch

    rows = text[: (len(text) - HELD) // TOKENS * TOKENS].reshape(-1, 1, TOKENS)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(draw))[:STEPS]
    optimizer = torch.optim.AdamW(program.param_groups("all", new_lr=NEW_RATE), lr=RATE)
    kept, done, seconds = place.with_suffix(".state"), 0, 0.0
    if kept.is_file():
        state = torch.load(kept, weights_only=True, mmap=True)
        program.load_state_dict(state["tensors"])
        optimizer.load_state_dict(state["optimizer"])
        done, seconds = state["done"], state["seconds"]
    else:
        before = held_out(program, text)
        print(f"  before: {before}", flush=True)
    clock = time.process_time()
    for number in range(done, STEPS):
        loss = loss_of(program, rows[order[number]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if number % 10 == 0:
            print(f"  step {number:3d}: loss {loss.item():.3f}, {time.process_time() - clock:.0f} CPU s", flush=True)
        if (number + 1) % KEEP == 0 and number + 1 < STEPS:
            state = {"tensors": program.state_dict(), "optimizer": optimizer.state_dict(), "done": number + 1,
                     "seconds": seconds + time.process_time() - clock}  # fmt: skip
            torch.save(state, kept.with_suffix(".partial"))
            os.replace(kept.with_suffix(".partial"), kept)
    result = {**held_out(program, text), "cpu_seconds": seconds + time.process_time() - clock}
    scalar = program.new_parameters().get("hcx.looped_0.scalar")
    result |= {"scalar": scalar.item()} if scalar is not None else {}
    kept.unlink(missing_ok=True)
    return result


def main(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    base = text = None
    results: dict[str, list[dict]] = {"dense": [], "looped": []}
    for draw in range(DRAWS):
        for arm, found in results.items():
            place = folder / f"{arm}_{draw}.json"
            if not place.is_file():
                base, text = (base, text) if base is not None else setup()
                print(f"draw {draw + 1} of {DRAWS}, {arm}", flush=True)
                program = base.rewrite(PIPELINE, check=False) if arm == "looped" else copy.deepcopy(base)
                result = train(program, text, draw, place)
                place.with_suffix(".partial").write_text(json.dumps(result))
                os.replace(place.with_suffix(".partial"), place)
            found.append(json.loads(place.read_text()))
            print(f"draw {draw + 1}, {arm}: {found[-1]}", flush=True)
    gaps = [b["loss"] - a["loss"] for a, b in zip(results["dense"], results["looped"], strict=True)]
    for name, values in {**{a: [r["loss"] for r in rs] for a, rs in results.items()}, "looped - dense": gaps}.items():
        print(f"{name:15s} held-out loss {statistics.mean(values):.4f} nats, deviation {statistics.stdev(values):.4f}")
    for name in ("first_pass", "scalar", "gate"):
        values = [r[name] for r in results["looped"]]
        print(f"looped {name:10s} {statistics.mean(values):.4f}, deviation {statistics.stdev(values):.4f}")
    print(f"CPU minutes {sum(r['cpu_seconds'] for rs in results.values() for r in rs) / 60:.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "looped-train")))
