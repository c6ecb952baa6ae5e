"""Decoder-only language models of Transformers, four layers each.

Linears of a Llama-like layer: q, k, v, o, gate, up, down = 7, plus one head: 4 * 7 + 1 = 29.
"""

from __future__ import annotations

from typing import Any

from .base import HEADS, HIDDEN, ZooModel
from .hf import batched_experts, causal_lm, other_ids

GEMMA: dict[str, Any] = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6, "tie_word_embeddings": True}
GPT2: dict[str, Any] = {
    "n_embd": HIDDEN,
    "n_layer": 4,
    "n_head": HEADS,
    "n_inner": 64,
    "n_positions": 64,
    "tie_word_embeddings": True,
}
QWEN3_MOE: dict[str, Any] = {"head_dim": 8, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
MIXTRAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}


def decoder(name: str, builder: Any, linears: int, *, parallel: bool = False, **rest: Any) -> ZooModel:
    """Four equal blocks of attention and MLP; two adds a block, one when the branches run in parallel."""
    expected: dict[str, Any] = {
        "branches": 8,
        "adds": 4 if parallel else 8,
        "blocks": (4,),
        "runs": (4,),
        "kinds": {"attn": 4, "mlp": 4},
        "other": other_ids,
    }
    return ZooModel(name=name, build=builder, linears=linears, **{**expected, **rest})


def moe(name: str, builder: Any, linears: int, **rest: Any) -> ZooModel:
    return decoder(name, builder, linears, **{"kinds": {"attn": 4, "moe": 4}, **rest})


MODELS = (
    decoder("llama", causal_lm("Llama"), 29),
    decoder("qwen3", causal_lm("Qwen3", head_dim=8), 29),
    # q, k, v, o and the router: 5 a layer; experts are 3-D parameters
    moe("qwen3_moe", causal_lm("Qwen3Moe", batched_experts, **QWEN3_MOE), 21),
    moe("mixtral", causal_lm("Mixtral", batched_experts, **MIXTRAL), 21),
    # c_attn, c_proj, c_fc, c_proj are Conv1D modules, that is addmm; the head is the one linear
    decoder("gpt2", causal_lm("GPT2", head="LMHeadModel", **GPT2), 1, note="16 addmm beside the head"),
    # query_key_value, dense, dense_h_to_4h, dense_4h_to_h: 4 a layer
    decoder("gpt_neox", causal_lm("GPTNeoX"), 17, parallel=True),
    decoder("gemma2", causal_lm("Gemma2", **GEMMA), 29, note="sliding and full attention masks alternate"),
    decoder(
        "gemma3",
        causal_lm("Gemma3", config="Gemma3TextConfig", **GEMMA),
        29,
        note="all four layers slide (every sixth would be full)",
    ),
    decoder("olmo2", causal_lm("Olmo2"), 29, note="norms sit after the branches, none before"),
    # q, k, v, dense, fc1, fc2: 6 a layer
    decoder("phi", causal_lm("Phi"), 25, parallel=True),
)
