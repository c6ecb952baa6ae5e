"""The record type of the zoo and the helpers its builders share.

Counting rules (all counts are worked out by hand from the modelling code, none is copied from a finder):

1. A residual add joins a value ``x`` (possibly scaled or projected) with a function of ``x`` that carries weights.
   Position and type embeddings, biases, masks, LoRA side paths and adds inside a gate or a scan are none.
2. ``x + attn(x) + mlp(x)`` is one add with two branches. A mixture of experts is one branch, its shared expert
   included.
3. A block is the smallest unit that repeats along the stream; stages of one stream form one stack. Where layers of
   one residual each are mixed in turns that hold a kind twice, every layer is a block. Each call of a shared block counts. A model without residual adds has no blocks.
4. Blocks are isomorphic when equal in code and in parameter shapes; masks or tables from outside may differ.
5. ``linears`` counts ``aten.linear`` calls in the exported graph, so a shared layer counts once a call. Addmm
   (GPT-2), 3-D experts and convolutions are not among them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
VOCAB, HIDDEN, INNER, DEPTH, HEADS = 128, 32, 64, 4, 4
BATCH, SEQ = 2, 12
OTHER_BATCH, OTHER_SEQ = 3, 7


@dataclass(frozen=True)
class ZooModel:
    """One model with the structure a finder has to report.

    Attributes:
        build: returns ``(model, args, kwargs)``; the weights are the same at each call, the model is in eval mode.
        other: returns ``(args, kwargs)`` of another shape that eager accepts, and so does a graph exported with all
            dimensions ``Dim.AUTO``.
        branches: residual branches, see the counting rules above.
        adds: residual adds; fewer than branches where branches run in parallel.
        blocks: blocks per stack.
        runs: lengths of the maximal runs of isomorphic consecutive blocks, in order; length 1 is left out.
        kinds: branches by kind: attn, cross-attn, mlp, moe, ssm, conv, conv-mlp.
        linears: expected ``aten.linear`` calls.
        traceable: whether ``torch.export.export(strict=False)`` takes it.
        assets: needs trained weights under the folder named by ``HCX_DIST``.
    """

    name: str
    build: Callable[[], tuple[nn.Module, tuple, dict]]
    other: Callable[[], Inputs]
    branches: int
    adds: int
    blocks: tuple[int, ...]
    runs: tuple[int, ...]
    kinds: dict[str, int]
    linears: int
    traceable: bool = True
    assets: bool = False
    note: str = ""

    def __post_init__(self) -> None:
        if sum(self.kinds.values()) != self.branches:
            raise ValueError(f"{self.name}: kinds {self.kinds} do not sum to {self.branches} branches")


def ids(batch: int = BATCH, seq: int = SEQ, *, vocab: int = VOCAB, seed: int = 1) -> torch.Tensor:
    """Random token ids int64[batch, seq]; 0 and 1 (padding, bos) and the last ids are avoided."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab - 8, (batch, seq), generator=generator)


def floats(*shape: int, seed: int = 1) -> torch.Tensor:
    """Standard normal float32 of the given shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def images(batch: int = BATCH, height: int = 32, width: int = 32, *, channels: int = 3, seed: int = 1) -> torch.Tensor:
    """Random pixels float32[batch, channels, height, width]."""
    return floats(batch, channels, height, width, seed=seed)


def loosen(model: nn.Module) -> None:
    """Move norm scales, biases and running statistics off their neutral initial values.

    With scales of one and biases of zero a pass that drops them would still look right.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim <= 1 and parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn_like(parameter))
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_var is not None:
                module.running_mean.copy_(0.1 * torch.randn_like(module.running_mean))
                module.running_var.copy_(0.5 + torch.rand_like(module.running_var))


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Build under a private seed, loosen, switch to eval; the global random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make()
        loosen(model)
    return model.eval()
