"""Encoder-only text and speech models of Transformers."""

from __future__ import annotations

from typing import Any

from .base import BATCH, OTHER_BATCH, ZooModel, floats, ids
from .hf import TINY, Speech, Tokens, from_config, other_ids

DEBERTA: dict[str, Any] = {
    **TINY,
    "relative_attention": True,
    "max_relative_positions": 16,
    "position_buckets": 8,
    "pos_att_type": ["c2p", "p2c"],
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "type_vocab_size": 0,
}
SPEECH: dict[str, Any] = {
    **TINY,
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "layerdrop": 0.0,
}
MODERN: dict[str, Any] = {
    **TINY,
    "local_attention": 8,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
}
POSITIONS = "positions are a residual branch of their own, x + conv(x), before the four layers"


def encoder(name: str, make: Any, linears: int, **rest: Any) -> ZooModel:
    """Four equal blocks of attention and MLP over token ids."""
    expected: dict[str, Any] = {
        "build": lambda: (make(), (ids(),), {}),
        "branches": 8,
        "adds": 8,
        "blocks": (4,),
        "runs": (4,),
        "kinds": {"attn": 4, "mlp": 4},
        "other": other_ids,
    }
    return ZooModel(name=name, linears=linears, **{**expected, **rest})


def speech(name: str, make: Any, **rest: Any) -> ZooModel:
    """Waveform float32[batch, samples]; q, k, v, out, two dense: 6 a layer, feature projection, head."""
    return encoder(
        name,
        make,
        26,
        build=lambda: (make(), (floats(BATCH, 400),), {}),
        other=lambda: ((floats(OTHER_BATCH, 301, seed=2),), {}),
        branches=9,
        adds=9,
        blocks=(5,),
        kinds={"conv": 1, "attn": 4, "mlp": 4},
        **rest,
    )


MODELS = (
    # query, key, value, dense, intermediate, output: 6 a layer; head: transform and decoder
    encoder("bert", from_config("Bert", "ForMaskedLM", Tokens, **TINY), 26),
    # Wqkv, Wo, Wi, Wo: 4 a layer; head: dense and decoder
    encoder(
        "modernbert",
        from_config("ModernBert", "ForMaskedLM", Tokens, **MODERN),
        18,
        runs=(3,),
        note="layer 0 has no attention norm",
    ),
    # BERT's layers; the projection from the narrower embedding; head: dense and generator_lm_head
    encoder("electra", from_config("Electra", "ForMaskedLM", Tokens, **TINY, embedding_size=16), 27),
    # query and key project the relative positions too: 8 a layer; head: transform and decoder
    encoder(
        "deberta_v2",
        from_config("DebertaV2", "ForMaskedLM", Tokens, **DEBERTA),
        34,
        note="attention as bmm with gathered relative positions",
    ),
    speech("wav2vec2", from_config("Wav2Vec2", "ForCTC", Speech, **SPEECH), note=f"post-norm; {POSITIONS}"),
    speech(
        "hubert",
        from_config("Hubert", "ForCTC", Speech, **SPEECH, do_stable_layer_norm=True, feat_extract_norm="layer"),
        note=f"pre-norm; {POSITIONS}",
    ),
)
