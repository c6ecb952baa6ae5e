"""Hand-written GPTs: one trunk, many ways to write a block."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional as F

from .base import DEPTH, HEADS, HIDDEN, INNER, VOCAB


class Attention(nn.Module):
    """Causal self-attention, two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape
        q, k, v = (t.view(batch, seq, HEADS, -1).transpose(1, 2) for t in self.c_attn(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.c_proj(mixed.transpose(1, 2).reshape(batch, seq, HIDDEN)))


class Mlp(nn.Module):
    """Two linears around a GELU."""

    def __init__(self, inner: int = INNER):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(HIDDEN, inner), nn.Linear(inner, HIDDEN)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x))))


class Block(nn.Module):
    """Pre-norm block, the base of the other ones."""

    def __init__(self, inner: int = INNER):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(HIDDEN), Attention()
        self.ln_2, self.mlp = nn.LayerNorm(HIDDEN), Mlp(inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class InPlaceBlock(Block):
    """``x += f(x)``; eager cannot differentiate this."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += self.attn(self.ln_1(x))
        x += self.mlp(self.ln_2(x))
        return x


class DataDependentBlock(Block):
    """Skips its MLP by the value of a tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        if x.mean() > 1e3:
            return x
        return x + self.mlp(self.ln_2(x))


class TupleBlock(Block):
    """Takes a step count and returns a tuple, as older Transformers layers do."""

    def forward(self, x: torch.Tensor, step: int, cache: None = None) -> tuple[torch.Tensor, int, None]:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x)), step + 1, cache


class StochasticIfBlock(Block):
    """Batch-level stochastic depth by a Python branch; eval is the plain block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and torch.rand(()) < 0.2:
            return x
        return super().forward(x)


class StochasticMaskBlock(Block):
    """Sample-level stochastic depth by a mask; eval is the plain block."""

    def drop(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        return x * (torch.rand(x.shape[0], 1, 1) < 0.8) / 0.8

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attn(self.ln_1(x)))
        return x + self.drop(self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    """Token and position embedding, blocks ``h``, final norm, head tied to the embedding."""

    def __init__(self, blocks: Iterable[nn.Module]):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(64, HIDDEN)
        nn.init.normal_(self.wte.weight, std=0.2)
        nn.init.normal_(self.wpe.weight, std=0.2)
        self.h = nn.ModuleList(blocks)
        self.ln_f = nn.LayerNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.lm_head.weight = self.wte.weight

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1], device=input_ids.device))

    def trunk(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.h:
            x = block(x)
        return x

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.ln_f(self.trunk(self.embed(input_ids))))


class TupleGPT(GPT):
    def trunk(self, x: torch.Tensor) -> torch.Tensor:
        step, cache = 0, None
        for block in self.h:
            x, step, cache = block(x, step, cache=cache)
        return x


class TiedGPT(GPT):
    """One block object applied ``passes`` times."""

    def __init__(self, passes: int = DEPTH):
        super().__init__([Block()])
        self.passes = passes

    def trunk(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.passes):
            x = self.h[0](x)
        return x


class UNetLike(nn.Module):
    """Narrow, widen, and add the narrow value back: one skip owned by the root module."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Linear(HIDDEN, 16), nn.Linear(16, 8)
        self.up1, self.up2 = nn.Linear(8, 16), nn.Linear(16, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        narrow = F.gelu(self.down1(x))
        narrower = F.gelu(self.down2(narrow))
        return self.up2(self.up1(narrower) + narrow)
