"""Peak memory of rewriting a 3-billion-parameter Llama folder whose weights stay in their files.

    python bench/larger_than_memory.py FOLDER      # writes 6.4 GB there, and deletes them afterwards

The folder is random: shards are written one after another from one block of noise, so that making it needs no memory
either. The rewrite runs in a process of its own, and its peak resident memory is what the system reports.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

BAR_GB = 1.0
SHAPE = {
    "vocab_size": 128256,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "dtype": "bfloat16",
}
SHARD_BYTES = 1_000_000_000


def make(folder: Path) -> int:
    """Write config, sharded random weights and their index; returns the number of parameters."""
    import torch
    from accelerate import init_empty_weights
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SHAPE, architectures=["LlamaForCausalLM"])
    config.save_pretrained(folder)
    with init_empty_weights():
        model = LlamaForCausalLM(config)
    model.tie_weights()
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    block = (torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    noise = block.view(torch.int16).numpy().tobytes()
    shards: list[list[str]] = [[]]
    for name, shape in shapes.items():
        if sum(2 * math.prod(shapes[n]) for n in shards[-1]) + 2 * math.prod(shape) > SHARD_BYTES and shards[-1]:
            shards.append([])
        shards[-1].append(name)
    index = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header, offset = {"__metadata__": {"format": "pt"}}, 0
        for name in names:
            size = 2 * math.prod(shapes[name])
            header[name] = {"dtype": "BF16", "shape": list(shapes[name]), "data_offsets": [offset, offset + size]}
            offset, index[name] = offset + size, file
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / file, "wb") as handle:
            handle.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                left = 2 * math.prod(shapes[name])
                while left > 0:
                    left -= handle.write(noise[: min(left, len(noise))])
    total = sum(2 * math.prod(s) for s in shapes.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )
    return total // 2


def ids_file(path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"input_ids": torch.arange(64).reshape(2, 32)}, path)


def rewritten(folder: Path) -> dict:
    """Run the command in this process and measure it."""
    from hcx.cli import rewrite

    start = time.process_time()
    result = rewrite(str(folder / "model"), "looped,exits,lora", output=str(folder / "m.hcx"), lazy=True,
                     inputs=str(folder / "ids.safetensors"),
                     progress=lambda text: print(f"{peak_gb():.2f} GB  {text}", file=sys.stderr))  # fmt: skip
    return {
        "peak GB": peak_gb(),
        "CPU seconds": time.process_time() - start,
        "artefact MB": result.data["output_bytes"] / 1e6,
        "parameters": result.data["before"]["parameters"],
        "owed": all(step["owed"] for step in result.data["passes"]),
        "graph checks": [c["holds"] for step in result.data["passes"] for c in step["checks"]],
    }


def peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a folder to make; it is deleted afterwards")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(rewritten(options.folder)))
        return 0
    options.folder.mkdir(parents=True)
    try:
        if shutil.disk_usage(options.folder).free < 12e9:
            raise SystemExit(f"{options.folder} has less than 12 GB free")
        (options.folder / "model").mkdir()
        print(f"{make(options.folder / 'model') / 1e9:.2f} billion parameters written", flush=True)
        ids_file(options.folder / "ids.safetensors")
        command = [sys.executable, "-P", __file__, str(options.folder), "--measure"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    finally:
        shutil.rmtree(options.folder)
    figures = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(figures))
    holds = figures["peak GB"] <= BAR_GB and figures["owed"] and all(figures["graph checks"])
    print(f"{'ok  ' if holds else 'MISS'} peak {figures['peak GB']:.2f} GB (bar {BAR_GB:g})")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
