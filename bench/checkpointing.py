"""Peak memory and time of a training step, with and without activation checkpointing of the blocks.

    python bench/checkpointing.py [--model MODEL.hcx] [--batch 8] [--length 256]

On the CPU, memory is what torch's MemTracker counts (parameters and inputs included); on a GPU, what the allocator saw.
Gradients are compared bit by bit.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from hcx.rewrite import load, trace
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.functional import cross_entropy


def step(module, ids: torch.Tensor) -> None:
    """Forward and backward of next-token cross entropy."""
    logits = module(ids).logits.float()
    cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()


def peak(module, ids: torch.Tensor) -> int:
    """Bytes at the highest point of one step."""
    module.zero_grad()
    if ids.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step(module, ids)
        return torch.cuda.max_memory_allocated()
    tracker = MemTracker()
    tracker.track_external(module, ids)
    with tracker:
        step(module, ids)
    return tracker.get_tracker_snapshot("peak")[ids.device]["Total"]


def measure(program, ids: torch.Tensor) -> dict[str, dict[str, float]]:
    """``{variant: {peak_mib, seconds}}`` for the Program, its module, and the module with checkpointing.

    Raises:
        AssertionError: gradients that are not bitwise those of the Program.
    """
    results: dict[str, dict[str, float]] = {}
    expected: dict[str, torch.Tensor] | None = None
    modules = {"program": program, "module": program.as_module(), "checkpointed": program.as_module("blocks")}
    for name, module in modules.items():
        step(module, ids)  # warm: code is compiled on the first call
        module.zero_grad()
        start = time.perf_counter()
        step(module, ids)
        seconds = time.perf_counter() - start
        gradients = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        expected = expected or gradients
        assert gradients.keys() == expected.keys()
        assert all(torch.equal(g, expected[n]) for n, g in gradients.items()), f"{name}: other gradients"
        del gradients
        results[name] = {"peak_mib": peak(module, ids) / 2**20, "seconds": seconds}
        module.zero_grad()
    return results


def small_program():
    """A Llama of 12 blocks with a loop, of random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=12,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    program = trace(LlamaForCausalLM(config).eval(), (torch.randint(0, 512, (2, 16)),))
    return program.rewrite("looped{start=4,end=8,steps=2}", check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="artefact of a decoder; default: a small Llama of random weights")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    program = (load(options.model) if options.model else small_program()).to(device)
    ids = torch.randint(0, 512, (options.batch, options.length), device=device)
    results = measure(program, ids)
    print(f"{'':14}{'peak MiB':>10}{'s a step':>10}")
    for name, row in results.items():
        print(f"{name:14}{row['peak_mib']:10.1f}{row['seconds']:10.2f}")
    saved = 1 - results["checkpointed"]["peak_mib"] / results["program"]["peak_mib"]
    print(f"checkpointing saves {saved:.0%}; gradients are bitwise equal")


if __name__ == "__main__":
    main()
