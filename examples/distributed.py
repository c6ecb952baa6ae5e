"""Train a rewritten model on several processes, with torch's own DDP or FSDP2; see docs/training.md.

torchrun --nproc-per-node 2 examples/distributed.py MODEL.hcx --mode fsdp --out TRAINED.hcx
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hcx.rewrite import BlockModule, load
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    options = arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)

    program = load(options.model).to(device)
    program.param_groups(options.train)  # only to freeze: a wrapper may put other parameters in place of these
    module = program.as_module(checkpoint=options.checkpoint)
    if options.mode == "fsdp":
        for block in [m for m in module.modules() if isinstance(m, BlockModule)]:
            fully_shard(block)
        fully_shard(module)
    elif options.mode == "ddp":
        module = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=options.lr)

    done = 0
    if options.resume:
        states = dict(zip(("model", "optim"), get_state_dict(module, optimizer), strict=True)) | {"step": 0}
        dcp.load(states, checkpoint_id=options.resume)
        set_state_dict(module, optimizer, model_state_dict=states["model"], optim_state_dict=states["optim"])
        done = states["step"]

    dataset = TensorDataset(token_rows(options))
    sampler = DistributedSampler(dataset, world, rank, shuffle=False)
    batches = list(DataLoader(dataset, options.batch // world, sampler=sampler, drop_last=True))
    for step in range(done, options.steps):
        (ids,) = batches[step % len(batches)]
        ids = ids.to(device)
        optimizer.zero_grad()
        logits = module(ids)["logits"]
        loss = cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step + 1} loss {shown.item() / world:.7f}", flush=True)

    if options.save:
        model, optim = get_state_dict(module, optimizer)
        dcp.save({"model": model, "optim": optim, "step": options.steps}, checkpoint_id=options.save)
    if options.out:
        whole = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            trained = load(options.model)
            trained.load_state_dict(whole)
            trained.save(options.out)
    dist.barrier()
    dist.destroy_process_group()


def token_rows(options: argparse.Namespace) -> torch.Tensor:
    """Token ids ``[rows, length]``: from a file of torch.save, else random ones."""
    if options.tokens:
        return torch.load(options.tokens, weights_only=True)
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, options.vocabulary, (8 * options.batch, 32), generator=generator)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="an artefact that takes token ids and gives logits")
    parser.add_argument("--mode", choices=["fsdp", "ddp", "none"], default="fsdp")
    parser.add_argument("--train", default="all", help="all, new, or the name of a pass such as lora")
    parser.add_argument("--checkpoint", choices=["blocks"], help="run blocks again instead of keeping activations")
    parser.add_argument("--tokens", type=Path, help="token ids [rows, length], a file of torch.save; default: random")
    parser.add_argument("--vocabulary", type=int, default=40, help="of random token ids")
    parser.add_argument("--batch", type=int, default=4, help="rows a step, over all processes")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--save", type=Path, help="folder for a sharded checkpoint, with the optimizer")
    parser.add_argument("--resume", type=Path, help="sharded checkpoint to go on from")
    parser.add_argument("--out", type=Path, help="artefact to write when done")
    return parser.parse_args()


if __name__ == "__main__":
    main()
