"""GPT blocks and trunks whose skips are not plain ``x + f(norm(x))``."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .base import DEPTH, HIDDEN, INNER, VOCAB
from .text_nets import GPT, Attention, Block, Mlp


class DeepNormBlock(Block):
    """Post-norm with a scaled skip: ``norm(alpha * x + f(x))``."""

    alpha = 1.7

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.ln_1(self.alpha * x + self.attn(x))
        return self.ln_2(self.alpha * x + self.mlp(x))


class SkipAfterNormBlock(Block):
    """The skip starts after the norm: ``n + f(n)`` with ``n = norm(x)``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.ln_1(x)
        x = x + self.attn(x)
        x = self.ln_2(x)
        return x + self.mlp(x)


class GatedBlock(Block):
    """A gate of the form ``sigmoid(n + f(n))`` inside the branch: no residual."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = self.ln_1(x)
        x = x + torch.sigmoid(n + self.gate(n)) * self.attn(n)
        return x + self.mlp(self.ln_2(x))


class SandwichBlock(Block):
    """Norms on both sides of a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1_post, self.ln_2_post = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.ln_1_post(self.attn(self.ln_1(x)))
        return x + self.ln_2_post(self.mlp(self.ln_2(x)))


class LayerScaleBlock(Block):
    """A learned scale per channel at the end of each branch."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma_1, self.gamma_2 = nn.Parameter(torch.full((HIDDEN,), 0.5)), nn.Parameter(torch.full((HIDDEN,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.gamma_1 * self.attn(self.ln_1(x))
        return x + self.gamma_2 * self.mlp(self.ln_2(x))


class ReZeroBlock(Block):
    """A learned scalar for each branch, no norm."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.Identity(), nn.Identity()
        self.rescale = nn.Parameter(torch.full((2,), 0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.rescale[0] * self.attn(x)
        return x + self.rescale[1] * self.mlp(x)


class AveragedBlock(Block):
    """The mean of skip and branch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x + self.attn(self.ln_1(x))) / 2
        return (x + self.mlp(self.ln_2(x))) / 2


class AlphaBlock(Block):
    """The branch is scaled by the add's own ``alpha``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.add(x, self.attn(self.ln_1(x)), alpha=0.5)
        return torch.add(x, self.mlp(self.ln_2(x)), alpha=0.5)


class HighwayLayer(nn.Module):
    """``g * f(x) + (1 - g) * x`` with a gate computed from x: no residual add."""

    def __init__(self) -> None:
        super().__init__()
        self.transform, self.gate = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(self.gate(x))
        return gate * F.gelu(self.transform(x)) + (1 - gate) * x


class ConcatLayer(nn.Module):
    """Narrows x and f(x), then concatenates them: no residual add."""

    def __init__(self) -> None:
        super().__init__()
        self.keep, self.new = nn.Linear(HIDDEN, HIDDEN // 2), nn.Linear(HIDDEN, HIDDEN // 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.keep(x), F.gelu(self.new(x))], dim=-1)


class EinsumMoE(nn.Module):
    """Dense mixture: each token goes through all experts, 3-D weights through einsum, weighted by the router."""

    def __init__(self, experts: int = 4):
        super().__init__()
        self.router = nn.Linear(HIDDEN, experts, bias=False)
        self.w_in = nn.Parameter(0.2 * torch.randn(experts, HIDDEN, INNER))
        self.w_out = nn.Parameter(0.2 * torch.randn(experts, INNER, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        inner = F.gelu(torch.einsum("bsh,ehf->bsef", x, self.w_in))
        return torch.einsum("bsef,efh,bse->bsh", inner, self.w_out, weights)


class MoEBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = EinsumMoE()


class Residual(nn.Module):
    """``x + f(norm(x))`` around any branch."""

    def __init__(self, branch: nn.Module):
        super().__init__()
        self.norm, self.branch = nn.LayerNorm(HIDDEN), branch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.branch(self.norm(x))


class WrapperGPT(GPT):
    """A Sequential of residual wrappers, attention and MLP in turn."""

    def __init__(self) -> None:
        super().__init__([])
        del self.h
        self.layers = nn.Sequential(*(Residual(make()) for _ in range(DEPTH) for make in (Attention, Mlp)))

    def trunk(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class AttributeGPT(GPT):
    """Blocks as attributes ``layer1`` to ``layer4``, in no container."""

    def __init__(self) -> None:
        super().__init__([])
        del self.h
        self.layer1, self.layer2, self.layer3, self.layer4 = Block(), Block(), Block(), Block()

    def trunk(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer4(self.layer3(self.layer2(self.layer1(x))))


class SharedMiddleGPT(GPT):
    """A wide first block, one block called three times, a wide last block."""

    def __init__(self) -> None:
        super().__init__([Block(96), Block(), Block(96)])

    def trunk(self, x: torch.Tensor) -> torch.Tensor:
        first, shared, last = self.h
        x = first(x)
        for _ in range(3):
            x = shared(x)
        return last(x)


class PreviewBlock(Block):
    """The MLP reads ``x + attn(x)``, but the stream goes on from x: one add, as in the hybrid layers of Zamba."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.ln_2(x + self.attn(self.ln_1(x))))


class OneBranch(Block):
    """A layer with one residual, an attention or an MLP."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.attn(self.ln_1(x)) if self.kind == "attn" else self.mlp(self.ln_2(x)))


class HybridGPT(GPT):
    """Layers of one residual each, in turns that hold one kind twice."""

    def __init__(self) -> None:
        super().__init__(OneBranch(kind) for kind in ("mlp", "attn", "mlp") * 2)


class EntryBlock(Block):
    """The MLP also reads what a table holds for this layer."""

    def forward(self, x: torch.Tensor, entry: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x) * entry)


class TableGPT(GPT):
    """One embedding makes the entries of all layers, each layer takes its own (Gemma's per-layer inputs)."""

    def __init__(self) -> None:
        super().__init__(EntryBlock() for _ in range(DEPTH))
        self.entries = nn.Embedding(VOCAB, DEPTH * HIDDEN)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x, entries = self.embed(input_ids), self.entries(input_ids).unflatten(-1, (DEPTH, HIDDEN))
        for number, block in enumerate(self.h):
            x = block(x, entries[:, :, number, :])
        return self.lm_head(self.ln_f(x))
