"""What a rewrite costs in CPU seconds and memory, apart from the runs of the model that its checks need.

    python bench/rewrite_cost.py             # all, about 4 minutes; goes on where it was stopped; exit code 1 if a bar is missed
    python bench/rewrite_cost.py --layers 8  # one size of the 8B-shaped model on ``meta``

SmolLM2-135M needs the assets (``python -m tests.assets``). Every measurement has a process of its own. Graph work is
the CPU time of one checked ``rewrite("looped,exits")`` outside of model runs, comparisons of outputs and copies of
weights, plus one run of the finder. Bars: 1.8 s on SmolLM2; 3 s and 100 MB above the peak of the export at 8B; growth
in proportion to the layers; saving and loading 3 s each beyond writing and reading the tensors.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIPELINE = "looped,exits"
LAYERS = (8, 16, 32, 64)
BARS = {"smollm2 graph work": 1.8, "8B graph work": 3.0, "8B MB above export": 100.0, "save": 3.0, "load": 3.0}
GROWTH = 1.5
"""Largest cost a layer at 64 layers, relative to that at 8."""


class Clock:
    """CPU seconds by category; inside ``measure`` the patched functions of ``apart`` count for themselves only."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._stack: list[str] = []
        self._last = 0.0

    @contextlib.contextmanager
    def measure(self, name: str):
        self._switch()
        self._stack.append(name)
        try:
            yield
        finally:
            self._switch()
            self._stack.pop()

    def _switch(self) -> None:
        now = time.process_time()
        if self._stack:
            self.spent[self._stack[-1]] += now - self._last
        self._last = now

    def apart(self, owner: object, attribute: str, name: str) -> None:
        """Count a function under a category of its own."""
        original = getattr(owner, attribute)

        def timed(*args, **kwargs):
            with self.measure(name):
                return original(*args, **kwargs)

        setattr(owner, attribute, timed)


def watched(clock: Clock) -> None:
    """Take model runs, comparisons and copies of weights out of the graph work."""
    import torch
    from hcx.passes.looped import window
    from hcx.rewrite.ir import moving, program
    from hcx.rewrite.pipeline import contracts
    from hcx.rewrite.tracing import tracer

    compiled = program.Program._function

    def function(self, taps):
        run = compiled(self, taps)

        def timed(*args):
            with clock.measure("runs"):
                return run(*args)

        return timed

    program.Program._function = function
    clock.apart(tracer.EagerReference, "__call__", "runs")
    clock.apart(torch.Tensor, "backward", "runs")
    clock.apart(window, "stream_rms", "runs")
    clock.apart(torch.optim.AdamW, "step", "runs")
    clock.apart(contracts, "compare", "comparing")
    clock.apart(torch.nn.Parameter, "__deepcopy__", "copying")
    clock.apart(torch.Tensor, "__deepcopy__", "copying")
    clock.apart(torch.nn.Module, "to", "copying")
    clock.apart(moving, "_widest", "copying")
    clock.apart(torch, "equal", "comparing")


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def graph_work(program, repeat: int = 3) -> dict:
    """Finder, plan, apply and checks, with what is not graph work apart; the best of some repetitions."""
    clock = Clock()
    watched(clock)
    tries = [_graph_work(program, clock) for _ in range(repeat)]
    return {name: min(one[name] for one in tries) for name in tries[0]}


def _graph_work(program, clock: Clock) -> dict:
    clock.spent.clear()
    with clock.measure("finder"):
        program.sites()
    with clock.measure("plan"):
        program.plan(PIPELINE)
    with clock.measure("plan and apply"):
        program.rewrite(PIPELINE, check=False)
    for name in ("runs", "comparing", "copying"):
        clock.spent[name] = 0.0
    with clock.measure("rewrite"):
        rewritten = program.rewrite(PIPELINE)
        rewritten._function(taps=True)  # the generated code, which a model on meta is not asked for otherwise
    spent = dict(clock.spent)
    return spent | {"graph work": spent["finder"] + spent["rewrite"]}


def smollm2() -> dict:
    """Everything on the trained model, saving and loading included."""
    sys.path.append(str(ROOT))
    from tests import trained_nets

    sys.path.remove(str(ROOT))  # transformers would take our folder `kernels` for a package it knows
    import torch
    from hcx.rewrite import load, trace
    from safetensors import safe_open
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    model, tokenizer = trained_nets.smollm2()
    ids = torch.tensor(tokenizer(trained_nets.hamlet(400))[:24]).reshape(2, 12)
    start = time.process_time()
    program = trace(model, (ids,))
    result = {"export": time.process_time() - start, "nodes": len(program.graph.nodes)}
    rewritten = program.rewrite(PIPELINE, check=False)
    with tempfile.TemporaryDirectory() as folder:
        tensors = {id(t): (n, t) for n, t in reversed(list(rewritten.named_tensors()))}
        start = time.process_time()
        save_file({n: t.detach().contiguous() for n, t in tensors.values()}, f"{folder}/plain.safetensors")
        writing = time.process_time() - start
        start = time.process_time()
        rewritten.save(f"{folder}/a.hcx")
        result["save"] = time.process_time() - start - writing
        start = time.process_time()
        with safe_open(f"{folder}/plain.safetensors", "pt") as file:
            total = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118  no mapping
        reading = time.process_time() - start
        start = time.process_time()
        load(f"{folder}/a.hcx")
        result["load"] = time.process_time() - start - reading
        result |= {"writing": writing, "reading": reading, "tensors MB": total / 2**20}
    return result | graph_work(program)


def eight_b(layers: int) -> dict:
    """A Llama of the shape of Llama-3-8B without memory for its weights."""
    import torch
    from hcx.rewrite import trace
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).eval()
        ids = torch.zeros(2, 12, dtype=torch.int64)
    start = time.process_time()
    program = trace(model, (ids,))
    exported = time.process_time() - start
    peak = peak_mb()
    result = {"export": exported, "export peak MB": peak, "nodes": len(program.graph.nodes)} | graph_work(program)
    return result | {"MB above export": max(0.0, peak_mb() - peak)}


def elsewhere(*arguments: str) -> dict:
    """Figures of one measurement in a process of its own."""
    kept = Path(tempfile.gettempdir()) / f"rewrite_cost_{_sources()}_{'_'.join(arguments).strip('-')}.json"
    if kept.exists():
        return json.loads(kept.read_text())
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HCX_DIST": os.environ.get("HCX_DIST", str(ROOT / ".assets"))}
    command = [sys.executable, "-P", __file__, *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    kept.write_text(done.stdout.splitlines()[-1])
    return json.loads(kept.read_text())


def _sources() -> str:
    """Names the figures of one state of the code, so that a stopped run is taken up and an old one is not."""
    files = sorted(f for folder in ("rewrite", "passes", "kernels", "bench") for f in (ROOT / folder).rglob("*.py"))
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:12]


def report(title: str, figures: dict) -> None:
    print(
        f"{title}: " + ", ".join(f"{k} {v:.0f}" if v > 50 else f"{k} {v:.2f}" for k, v in figures.items()), flush=True
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, help="only the 8B-shaped model with so many layers, as JSON")
    parser.add_argument("--smollm2", action="store_true", help="only SmolLM2, as JSON")
    options = parser.parse_args()
    if options.layers or options.smollm2:
        print(json.dumps(eight_b(options.layers) if options.layers else smollm2()))
        return 0
    trained = elsewhere("--smollm2")
    report("SmolLM2-135M", trained)
    sizes = {layers: elsewhere("--layers", str(layers)) for layers in LAYERS}
    for layers, figures in sizes.items():
        report(f"8B shape, {layers} layers", figures)
    growth = (sizes[64]["graph work"] / 64) / (sizes[8]["graph work"] / 8)
    measured = {
        "smollm2 graph work": trained["graph work"],
        "8B graph work": sizes[32]["graph work"],
        "8B MB above export": sizes[32]["MB above export"],
        "save": trained["save"],
        "load": trained["load"],
        "growth a layer from 8 to 64": growth,
    }
    missed = [name for name, value in measured.items() if value > BARS.get(name, GROWTH)]
    for name, value in measured.items():
        print(f"{'MISS' if name in missed else 'ok  '} {name}: {value:.2f} (bar {BARS.get(name, GROWTH):g})")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
