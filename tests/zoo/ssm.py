"""State-space models and hybrids of Transformers."""

from __future__ import annotations

from typing import Any

from .base import OTHER_BATCH, SEQ, Inputs, ZooModel, ids
from .hf import ShortChunks, batched_experts, causal_lm, other_ids

MAMBA: dict[str, Any] = {"state_size": 4, "time_step_rank": 4, "use_associative_scan": False}
# 12 is no multiple of the chunk: with no padding needed, an exported graph would ask for that at each length
MAMBA2: dict[str, Any] = {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8, "chunk_size": 5}
MAMBA2_MIXER: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 5}
JAMBA: dict[str, Any] = {
    "mamba_d_state": 4,
    "mamba_dt_rank": 4,
    "use_mamba_kernels": False,
    "use_associative_scan": False,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
FALCON_H1: dict[str, Any] = {
    **MAMBA2_MIXER,
    "mamba_d_ssm": 64,
    "ssm_out_multiplier": 0.5,
    "attention_out_multiplier": 2.0,
}
LFM2: dict[str, Any] = {"layer_types": ["conv", "conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}
QWEN3_NEXT: dict[str, Any] = {
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
UNROLLED = "the scan is unrolled, so an exported graph fixes the sequence length"


def same_time_ids() -> Inputs:
    return (ids(OTHER_BATCH, SEQ, seed=2),), {}


def state_space(name: str, builder: Any, linears: int, **rest: Any) -> ZooModel:
    """Four blocks of one state-space branch."""
    expected: dict[str, Any] = {
        "branches": 4,
        "adds": 4,
        "blocks": (4,),
        "runs": (4,),
        "kinds": {"ssm": 4},
        "other": other_ids,
    }
    return ZooModel(name=name, build=builder, linears=linears, **{**expected, **rest})


def hybrid(
    name: str, builder: Any, linears: int, kinds: dict[str, int], runs: tuple[int, ...], **rest: Any
) -> ZooModel:
    """Four blocks of a mixer and an MLP, mixers of two sorts."""
    expected: dict[str, Any] = {"branches": sum(kinds.values()), "adds": 8, "runs": runs, "kinds": kinds}
    return state_space(name, builder, linears, **{**expected, **rest})


MODELS = (
    # in_proj, x_proj, out_proj: 3 a layer (dt_proj's weight is used in a matmul), and the head
    state_space("mamba", causal_lm("Mamba", **MAMBA), 13, other=same_time_ids, note=UNROLLED),
    # in_proj, out_proj: 2 a layer, and the head
    state_space("mamba2", causal_lm("Mamba2", **MAMBA2), 9),
    # Mamba layer 3 + MLP 3, attention layer 4 + router 1, two of each, and the head
    hybrid(
        "jamba",
        causal_lm("Jamba", batched_experts, **JAMBA),
        23,
        {"ssm": 2, "attn": 2, "mlp": 2, "moe": 2},
        (4,),
        other=same_time_ids,
        note=f"Mamba with MLP and attention with MoE alternate; {UNROLLED}",
    ),
    # Mamba-2 layer 2 + MLP 3, three of them; attention layer 4 + 3; head
    hybrid(
        "bamba",
        causal_lm("Bamba", **MAMBA2_MIXER, attn_layer_indices=[2]),
        23,
        {"ssm": 3, "attn": 1, "mlp": 4},
        (2,),
        note="layer 2 is the attention layer",
    ),
    # mamba 2, attention 4, MLP 3: 9 a layer, and the head
    hybrid(
        "falcon_h1",
        causal_lm("FalconH1", **FALCON_H1),
        37,
        {"ssm": 4, "attn": 4, "mlp": 4},
        (4,),
        note="x + a * mamba(n) + b * attn(n) is one add with two branches",
    ),
    # short convolution 2 + MLP 3, three of them; attention 4 + 3; head
    hybrid(
        "lfm2",
        causal_lm("Lfm2", **LFM2),
        23,
        {"conv": 3, "attn": 1, "mlp": 4},
        (2,),
        note="layer 2 is attention, the others are gated short convolutions between two linears",
    ),
    # delta net 3, three of them; attention 4; MoE router, shared gate, up, down and its gate = 5 a layer; head
    hybrid(
        "qwen3_next",
        causal_lm("Qwen3Next", batched_experts, wrap=ShortChunks, **QWEN3_NEXT),
        34,
        {"ssm": 3, "attn": 1, "moe": 4},
        (3,),
        note="three gated delta nets and one gated attention; MoE with a shared expert. Under export the model itself "
        "replaces a triangular solve by a loop, so outputs agree to rounding only",
    ),
)
