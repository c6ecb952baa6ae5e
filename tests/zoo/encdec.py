"""Encoder-decoder models of Transformers, four layers on each side.

An encoder layer has an attention and an MLP branch, a decoder layer a
cross-attention branch too: 4 * 2 + 4 * 3 = 20 branches.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from .base import (
    BATCH,
    DEPTH,
    HEADS,
    HIDDEN,
    INNER,
    OTHER_BATCH,
    OTHER_SEQ,
    SEQ,
    VOCAB,
    Inputs,
    ZooModel,
    floats,
    ids,
    seeded,
)
from .hf import DECODER_SEQ, OTHER_DECODER_SEQ, TINY_DECODER, Seq2Seq, from_config, other_pair, pair

T5: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": HIDDEN,
    "d_kv": 8,
    "d_ff": INNER,
    "num_layers": DEPTH,
    "num_decoder_layers": DEPTH,
    "num_heads": HEADS,
    "decoder_start_token_id": 0,
}
BART: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": HIDDEN,
    "encoder_layers": DEPTH,
    "decoder_layers": DEPTH,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": INNER,
    "decoder_ffn_dim": INNER,
    "max_position_embeddings": 64,
    "init_std": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
WHISPER: dict[str, Any] = {**BART, "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 64}
T5GEMMA: dict[str, Any] = {
    **TINY_DECODER,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 6,
    "tie_word_embeddings": True,
}
MEL_FRAMES = 24


def encdec(name: str, make: Any, linears: int, **rest: Any) -> ZooModel:
    expected: dict[str, Any] = {
        "branches": 20,
        "adds": 20,
        "blocks": (4, 4),
        "runs": (4, 4),
        "kinds": {"attn": 8, "cross-attn": 4, "mlp": 8},
        "build": lambda: (make(), pair(), {}),
        "other": other_pair,
    }
    return ZooModel(name=name, linears=linears, **{**expected, **rest})


def whisper() -> tuple:
    wrap = partial(Seq2Seq, source="input_features")
    make = from_config("Whisper", "ForConditionalGeneration", wrap, **WHISPER)
    return make(), (floats(BATCH, 8, MEL_FRAMES), ids(seq=DECODER_SEQ)), {}


def whisper_other() -> Inputs:
    return (floats(OTHER_BATCH, 8, MEL_FRAMES, seed=2), ids(OTHER_BATCH, OTHER_DECODER_SEQ, seed=2)), {}


def t5gemma() -> nn.Module:
    def make() -> nn.Module:
        from transformers import T5GemmaConfig, T5GemmaForConditionalGeneration, T5GemmaModuleConfig

        sides = {side: T5GemmaModuleConfig(**T5GEMMA) for side in ("encoder", "decoder")}
        return Seq2Seq(T5GemmaForConditionalGeneration(T5GemmaConfig(**sides, vocab_size=VOCAB, bos_token_id=1)))

    return seeded(make)


def torch_transformer() -> tuple[nn.Module, tuple, dict]:
    def make() -> nn.Module:
        model = nn.Transformer(HIDDEN, HEADS, DEPTH, DEPTH, INNER, batch_first=True)
        model.encoder.enable_nested_tensor = False
        return model

    return seeded(make), (floats(BATCH, SEQ, HIDDEN), floats(BATCH, DECODER_SEQ, HIDDEN, seed=3)), {}


def other_states() -> Inputs:
    source = floats(OTHER_BATCH, OTHER_SEQ, HIDDEN, seed=2)
    return (source, floats(OTHER_BATCH, OTHER_DECODER_SEQ, HIDDEN, seed=4)), {}


MODELS = (
    # encoder layer: 4 attention + wi, wo = 6; decoder layer: 8 attention + 2 = 10; head 1: 24 + 40 + 1
    encdec(
        "t5",
        from_config("T5", "ForConditionalGeneration", Seq2Seq, **T5),
        65,
        # the relative position bias is an outside value of every block: where its table is stored makes no block differ
        note="the first block of each side holds the relative position bias",
    ),
    encdec("bart", from_config("Bart", "ForConditionalGeneration", Seq2Seq, **BART), 65),
    encdec(
        "whisper",
        None,
        65,
        build=whisper,
        other=whisper_other,
        note="the number of mel frames is fixed by the encoder's position table",
    ),
    encdec("pegasus", from_config("Pegasus", "ForConditionalGeneration", Seq2Seq, **BART), 65),
    # encoder layer 4 + 3, decoder layer 8 + 3, head 1
    encdec("t5gemma", t5gemma, 73, note="norms before and after each branch; attention masks alternate"),
    # encoder layer: packed qkv, out, linear1, linear2 = 4; decoder layer: also q, packed kv, out = 7
    encdec(
        "nn_transformer",
        None,
        44,
        build=torch_transformer,
        other=other_states,
        note="without grad, eager takes a fused path in the encoder that differs by 1e-6",
    ),
)
