"""Wrappers that give Transformers models plain tensors as outputs, and tiny config values they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .base import DEPTH, HEADS, HIDDEN, INNER, OTHER_BATCH, OTHER_SEQ, VOCAB, Inputs, ids, images, seeded

DECODER_SEQ, OTHER_DECODER_SEQ = 9, 5
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY_DECODER: dict[str, Any] = {**TINY, "use_cache": False, "num_key_value_heads": 2, "tie_word_embeddings": False}


class Tokens(nn.Module):
    """Token ids to the first output (logits or last hidden state); the Transformers model is ``inner``."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.inner(input_ids=input_ids, attention_mask=attention_mask)[0]


class ShortChunks(Tokens):
    """Passes ``chunk_size=16`` down: 64, the default, would be unrolled into 63 steps a layer at export."""

    def forward(self, input_ids, attention_mask=None):
        return self.inner(input_ids=input_ids, attention_mask=attention_mask, chunk_size=16)[0]


class Pooled(Tokens):
    """Token ids to (last hidden state, pooled output)."""

    def forward(self, input_ids, attention_mask=None):
        output = self.inner(input_ids=input_ids, attention_mask=attention_mask)
        return output.last_hidden_state, output.pooler_output


class Pixels(nn.Module):
    """Pixels to the first output."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.inner(pixel_values=pixel_values)[0]


class FixedPixels(Pixels):
    """Pixels of one size. With height and width left open, Swin's window arithmetic takes export 50 CPU s."""

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        torch._check(pixel_values.shape[2] == 32 and pixel_values.shape[3] == 32)
        return super().forward(pixel_values)


class Speech(nn.Module):
    """Waveform to the first output."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, input_values: torch.Tensor) -> torch.Tensor:
        return self.inner(input_values=input_values)[0]


class Seq2Seq(nn.Module):
    """Encoder input and decoder ids to logits; ``source`` names the encoder's argument."""

    def __init__(self, inner: nn.Module, source: str = "input_ids"):
        super().__init__()
        self.inner, self.source = inner, source

    def forward(self, source: torch.Tensor, decoder_input_ids: torch.Tensor) -> torch.Tensor:
        return self.inner(**{self.source: source}, decoder_input_ids=decoder_input_ids, use_cache=False)[0]


Wrap = Callable[[nn.Module], nn.Module]


def causal_lm(
    family: str,
    prepare: Callable[[nn.Module], Any] | None = None,
    *,
    config: str = "",
    wrap: type[Tokens] = Tokens,
    head: str = "ForCausalLM",
    **options: Any,
) -> Callable:
    """A builder for ``{family}{head}`` over ``{config or family + "Config"}(**TINY_DECODER, **options)``."""

    def make() -> nn.Module:
        import transformers

        settings = getattr(transformers, config or f"{family}Config")(**{**TINY_DECODER, **options})
        model = getattr(transformers, f"{family}{head}")(settings)
        if prepare is not None:
            prepare(model)
        return wrap(model)

    return lambda: (seeded(make), (ids(),), {})


def from_config(family: str, head: str, wrap: Wrap, **options: Any) -> Callable[[], nn.Module]:
    """A factory for ``{family}{head}`` over ``{family}Config(**options)``."""

    def make() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{family}Config")(**options)
        return wrap(getattr(transformers, f"{family}{head}")(config))

    return lambda: seeded(make)


def batched_experts(model: nn.Module) -> None:
    """Experts as batched matrix products: exports without a custom op."""
    model.set_experts_implementation("batched_mm")


def other_ids() -> Inputs:
    return (ids(OTHER_BATCH, OTHER_SEQ, seed=2),), {}


def other_pixels(height: int = 32, width: int = 32) -> Callable[[], Inputs]:
    return lambda: ((images(OTHER_BATCH, height, width, seed=2),), {})


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    return ids(), ids(seq=DECODER_SEQ, seed=3)


def other_pair() -> Inputs:
    return (ids(OTHER_BATCH, OTHER_SEQ, seed=2), ids(OTHER_BATCH, OTHER_DECODER_SEQ, seed=4)), {}
