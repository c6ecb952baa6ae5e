"""More decoder-only models: other skips, other projections, other ways to call the same layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .base import HEADS, HIDDEN, INNER, OTHER_BATCH, OTHER_SEQ, Inputs, ZooModel, ids, images, seeded
from .decoders import GEMMA, MIXTRAL, decoder, moe
from .hf import TINY, TINY_DECODER, causal_lm

GPTJ: dict[str, Any] = {
    "n_embd": HIDDEN,
    "n_layer": 4,
    "n_head": HEADS,
    "n_inner": INNER,
    "n_positions": 64,
    "rotary_dim": 4,
}
BLOOM: dict[str, Any] = {"n_layer": 4, "n_head": HEADS, "apply_residual_connection_post_layernorm": True}
GRANITE: dict[str, Any] = {
    "residual_multiplier": 0.5,
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.25,
    "logits_scaling": 2.0,
}
OPT: dict[str, Any] = {"ffn_dim": INNER, "word_embed_proj_dim": HIDDEN, "init_std": 0.1}
MIXED = ["sliding_attention", "full_attention"] * 2
IMAGE_TOKEN, IMAGE_TOKENS = 125, 16


class SideAdapter(nn.Module):
    """A linear with a low-rank side path, written as PEFT's LoRA layers are."""

    def __init__(self, base: nn.Linear, rank: int = 4, scale: float = 2.0):
        super().__init__()
        self.base_layer, self.scale = base, scale
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x)) * self.scale


class ImageText(nn.Module):
    """Token ids and pixels to logits."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=input_ids, pixel_values=pixel_values)[0]


def add_lora(model: nn.Module) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_proj = SideAdapter(layer.self_attn.q_proj)
        layer.self_attn.v_proj = SideAdapter(layer.self_attn.v_proj)


def eager_attention(model: nn.Module) -> None:
    model.set_attn_implementation("eager")


def left_padding(batch: int, seq: int) -> torch.Tensor:
    """Attention mask int64[batch, seq] whose first row lacks its first two tokens."""
    mask = torch.ones(batch, seq, dtype=torch.int64)
    mask[0, :2] = 0
    return mask


def masked_llama() -> tuple[nn.Module, tuple, dict]:
    model, args, _ = causal_lm("Llama")()
    return model, args, {"attention_mask": left_padding(*args[0].shape)}


def other_masked() -> Inputs:
    tokens = ids(OTHER_BATCH, OTHER_SEQ, seed=2)
    return (tokens,), {"attention_mask": left_padding(*tokens.shape)}


def image_text(batch: int, text: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row: one image in place of 16 tokens, then text."""
    places = torch.full((batch, IMAGE_TOKENS), IMAGE_TOKEN)
    return torch.cat([places, ids(batch, text, seed=seed)], dim=1), images(batch, seed=seed)


def llava() -> tuple[nn.Module, tuple, dict]:
    def make() -> nn.Module:
        from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

        small = {key: TINY[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")}
        config = LlavaConfig(
            vision_config=CLIPVisionConfig(**small, num_hidden_layers=2, image_size=32, patch_size=8),
            text_config=LlamaConfig(**TINY_DECODER),
            image_token_index=IMAGE_TOKEN,
            image_seq_length=IMAGE_TOKENS,
            vision_feature_layer=-1,
        )
        config.text_config.use_cache = False
        return ImageText(LlavaForConditionalGeneration(config))

    return seeded(make), image_text(2, 8, seed=1), {}


MODELS = (
    decoder("granite", causal_lm("Granite", **GRANITE), 29, note="branches are scaled by residual_multiplier"),
    decoder("cohere", causal_lm("Cohere", logit_scale=1.0), 29, parallel=True, note="both branches read one norm"),
    # FalconLinear multiplies with weight.T: 4 matmul a layer, the head is the one linear
    decoder("falcon", causal_lm("Falcon", alibi=False), 1, parallel=True, note="16 matmul on transposed weights"),
    # q, k, v, out, fc_in, fc_out: 6 a layer
    decoder("gptj", causal_lm("GPTJ", **GPTJ), 25, parallel=True, note="both branches read one norm"),
    decoder("opt", causal_lm("OPT", **OPT), 25, note="the MLP branch and its add work on [batch * seq, hidden]"),
    # qkv, o, gate_up, down: 4 a layer
    decoder("phi3", causal_lm("Phi3"), 17),
    # q, k, v, o, c_fc, c_proj: 6 a layer
    decoder("starcoder2", causal_lm("Starcoder2"), 25),
    decoder("stablelm", causal_lm("StableLm"), 29),
    decoder("olmo", causal_lm("Olmo"), 29, note="norms without parameters"),
    # query_key_value, dense, dense_h_to_4h, dense_4h_to_h: 4 a layer
    decoder(
        "bloom_post", causal_lm("Bloom", **BLOOM), 17, note="the skip starts after the norm: n + f(n), n = norm(x)"
    ),
    decoder(
        "gemma3_mixed",
        causal_lm("Gemma3", config="Gemma3TextConfig", **GEMMA, layer_types=MIXED),
        29,
        note="mask and rotary table alternate, the layers are equal",
    ),
    decoder("llama_eager", causal_lm("Llama", eager_attention), 29, note="no fused attention op"),
    decoder("llama_masked", masked_llama, 29, other=other_masked, note="attention mask with left padding"),
    # 29 and two side linears for q and v of each layer
    decoder("llama_lora", causal_lm("Llama", add_lora), 45, note="LoRA side adds are no residuals"),
    moe(
        "mixtral_grouped",
        causal_lm("Mixtral", **MIXTRAL),
        21,
        note="default experts: exports with the custom op transformers::grouped_mm_fallback",
    ),
    # vision layer: q, k, v, out, fc1, fc2 = 6, two layers; projector 2; Llama 29
    ZooModel(
        "llava",
        llava,
        lambda: (image_text(2, 5, seed=2), {}),
        branches=12,
        adds=12,
        blocks=(2, 4),
        runs=(2, 4),
        kinds={"attn": 6, "mlp": 6},
        linears=43,
        note="vision tower and text model are two trunks; image features replace 16 tokens; export fixes the batch",
    ),
)
