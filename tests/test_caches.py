"""Caches of every kind: windows, states, encoders. Right values come from eager full forwards and eager ``generate``."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hcx.rewrite import trace  # noqa: E402
from hcx.rewrite.errors import TraceError, UsageError  # noqa: E402
from hcx.rewrite.run.generation import decode  # noqa: E402

VOCABULARY = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
WINDOW = {"sliding_window": 5, "head_dim": 8, "query_pre_attn_scalar": 8}
"""A window shorter than the prompts, so that it matters from the first token on."""
CODERS: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
CHUNKED = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mistral": ("MistralConfig", "MistralForCausalLM", {**SIZES, "num_hidden_layers": 2, "sliding_window": 5}),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {**SIZES, **WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM", {**SIZES, "layer_types": ["conv", "full_attention"] * 2}),
    "bamba": (
        "BambaConfig",
        "BambaForCausalLM",
        {**SIZES, **CHUNKED, "num_hidden_layers": 2, "attn_layer_indices": [1]},
    ),
    "mamba2": (
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {
            "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "num_heads": 8, "head_dim": 8,
            "n_groups": 1, "state_size": 8, "chunk_size": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        },
    ),
    "mamba": ("MambaConfig", "MambaForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}),
    "jamba": (
        "JambaConfig",
        "JambaForCausalLM",
        {
            **SIZES, "num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2,
            "num_experts_per_tok": 1, "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False,
        },
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4,
            "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
        },
    ),
    "bart": ("BartConfig", "BartForConditionalGeneration", {**CODERS, "max_position_embeddings": 128}),
    "whisper": (
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {**CODERS, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 128},
    ),
}  # fmt: skip
DECODERS, ENCODERS = ["mistral", "gemma3", "lfm2", "bamba", "mamba2"], ["t5", "bart", "whisper"]


def ids(batch: int, length: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def sources(family: str, batch: int) -> dict[str, torch.Tensor]:
    """Inputs of the encoder, some of them padded on the left."""
    if family in DECODERS:
        return {}
    if family == "whisper":
        return {"input_features": torch.randn(batch, 8, 40, generator=torch.Generator().manual_seed(2))}
    mask = torch.ones(batch, 10, dtype=torch.int64)
    mask[0, :4] = 0
    return {"input_ids": ids(batch, 10, 8), "attention_mask": mask}


@cache
def model_of(family: str):
    """A random model whose blocks all matter."""
    config, model, options = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = getattr(transformers, model)(getattr(transformers, config)(**options)).eval()
        for name, parameter in net.named_parameters():
            if parameter.dim() > 1 and "A_log" not in name:
                parameter.data.normal_(0, 0.2)
    net.generation_config.eos_token_id, net.generation_config.pad_token_id = None, 0
    return net


def example(family: str) -> tuple[tuple, dict[str, torch.Tensor]]:
    if family in ENCODERS:
        given = {n: t for n, t in sources(family, 2).items() if n != "attention_mask"}
        return (), {**given, "decoder_input_ids": ids(2, 7, 5)}
    return (ids(2, 11),), {}


@cache
def program_of(family: str):
    args, kwargs = example(family)
    return trace(model_of(family), args, kwargs, cache=True)


def padded(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts, and a mask that pads the first rows of a larger batch on the left."""
    prompt, mask = ids(batch, length, 11), torch.ones(batch, length, dtype=torch.int64)
    if batch > 1:
        mask[0, :3], mask[1, :1] = 0, 0
    return prompt, mask


def full_forward(call, signature, tokens: torch.Tensor, mask: torch.Tensor, given: dict) -> torch.Tensor:
    """Logits of one call without a cache."""
    prefix = signature.tokens.removesuffix("input_ids")
    own = {signature.tokens: tokens, f"{prefix}attention_mask": mask}
    names = {s.name for s in signature.inputs}
    if f"{prefix}position_ids" in names:
        own[f"{prefix}position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        return call(**own, **given).logits


def assert_decodes(program, call, batch: int, steps: int, given: dict, prompt=None) -> None:
    """Every step through the cache is the full forward to 1e-4 of its rms, with the same likeliest token."""
    prompt, mask = padded(batch, 7) if prompt is None else (prompt, torch.ones_like(prompt))
    tokens, got = decode(
        program.signature, program.run_flat, program.output_names, prompt, steps, attention_mask=mask, inputs=given
    )
    mask = torch.cat([mask, mask.new_ones(batch, steps)], 1)
    expected = full_forward(call, program.signature, tokens, mask, given)[:, prompt.shape[1] - 1 : -1]
    got = torch.stack(got, 1)
    rms = expected.double().square().mean().sqrt().item()
    assert (got - expected).abs().max().item() <= 1e-4 * rms
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


# ---- against eager


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", DECODERS + ENCODERS)
def test_64_tokens_through_the_cache_are_the_full_forward(family, batch):
    model = model_of(family)
    given = sources(family, batch)
    assert_decodes(program_of(family), lambda **c: model(**c, use_cache=False), batch, 64, given)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("family", DECODERS + ENCODERS)
def test_generate_gives_the_tokens_of_the_original(family, beams):
    model, ours = model_of(family), program_of(family).as_pretrained()
    (inputs, mask), call = padded(3, 9), {"do_sample": False, "max_new_tokens": 20, "num_beams": beams}
    if family == "whisper":  # its own generate is for long recordings
        inputs = sources(family, 3)["input_features"]
        expected = transformers.GenerationMixin.generate(model, inputs, **call)
        assert torch.equal(ours.generate(inputs, **call), expected)
    else:
        call["attention_mask"] = mask
        assert torch.equal(ours.generate(inputs, **call), model.generate(inputs, **call))


def test_states_are_zeros_before_the_first_token():
    program = program_of("lfm2")
    state = next(s for s in program.inputs if s.name == "past_key_values.0.conv_states.0")
    assert state.shape == ("batch", 32, 3) and state.fill == "empty"
    with torch.no_grad():
        got, expected = program(ids(2, 9)).logits, model_of("lfm2")(ids(2, 9), use_cache=False).logits
    assert (got - expected).abs().max().item() <= 1e-5 * expected.square().mean().sqrt().item() * 10


@pytest.mark.parametrize("family", ["mamba", "jamba"])
def test_a_model_that_cannot_go_on_with_several_tokens_says_so(family):
    program = trace(model_of(family), (ids(2, 6),))
    assert not program.signature.has_cache
    assert any("does not go on from its own cache" in note for note in program.signature.notes)
    with pytest.raises(TraceError, match="does not go on from its own cache"):
        trace(model_of(family), (ids(2, 6),), cache=True)


@pytest.mark.parametrize("chunk", [8, pytest.param(64, marks=pytest.mark.full)])
def test_a_model_that_loops_over_chunks_says_so(chunk, monkeypatch):
    """Qwen3-Next repeats code for every 64 tokens: a graph of a short call is silently wrong for a longer one."""
    from transformers.models.qwen3_next import modeling_qwen3_next as module

    # export unrolls every step inside a chunk; 64 is the default
    monkeypatch.setattr(
        module, "torch_chunk_gated_delta_rule", partial(module.torch_chunk_gated_delta_rule, chunk_size=chunk)
    )
    options = {
        **SIZES, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "head_dim": 8,
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "mlp_only_layers": [0, 1],
    }  # fmt: skip
    model = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**options)).eval()
    with pytest.raises(TraceError, match="repeats code for every chunk"):
        trace(model, (ids(2, 6),), cache=True)


def test_a_cache_that_keeps_a_window_is_refused():
    with torch.no_grad():
        theirs = model_of("mistral")(ids(1, 9)).cache
    with pytest.raises(UsageError, match="DynamicSlidingWindowLayer"):
        program_of("mistral").as_pretrained()(ids(1, 1), cache=theirs)


# ---- after rewrites, away from neutral


@pytest.mark.parametrize(
    ("family", "pipeline", "slots"),
    [
        ("gemma3", "looped{start=1,end=3,steps=3,scalar=0.3},exits{at=[2]}", 4 + 2 * 2),
        ("lfm2", "looped{start=1,end=3,steps=2,scalar=0.3}", 4 + 2),
        ("t5", "looped{stack=decoder.block,start=1,end=2,steps=2,scalar=0.3}", 3 + 1),
        ("mistral", "hc{init=replicate}", 2),
    ],
)
def test_a_rewritten_decoder_steps_as_its_own_full_forward(family, pipeline, slots):
    program = program_of(family).rewrite(pipeline)
    with torch.no_grad():
        for name in program.new_parameters():
            if name.startswith("hcx.") and "exits" not in name:
                dict(program.named_parameters())[name].add_(0.05)
    given = sources(family, 3)
    assert_decodes(program, program, 3, 24, given)
    with torch.no_grad():
        before = full_forward(program_of(family), program.signature, *padded(3, 7), given)
        after = full_forward(program, program.signature, *padded(3, 7), given)
    assert (before - after).abs().max().item() > 1e-3 * before.abs().max().item()
    numbers = {s.name.split(".")[1] for s in program.inputs if s.fill == "empty"}
    assert numbers == {str(n) for n in range(slots)}


def test_generate_after_a_loop_over_states_uses_slots_of_its_own():
    program = program_of("lfm2").rewrite("looped{start=1,end=3,steps=2,scalar=0.3}")
    tokens = program.as_pretrained().generate(ids(1, 6), do_sample=False, max_new_tokens=12)
    for length in range(6, 18):  # each token again from a full forward
        with torch.no_grad():
            logits = program(tokens[:, :length]).logits[0, -1]
        assert logits[tokens[0, length]] >= logits.max() - 1e-4


# ---- export, trained weights


@pytest.mark.parametrize("family", ["gemma3", "lfm2", "t5"])
def test_onnx_steps_through_the_cache(family, tmp_path):
    pytest.importorskip("onnxruntime")
    from hcx.export import to_onnx
    from hcx.export.session import OnnxSession

    program = program_of(family)
    to_onnx(program, tmp_path / "model.onnx")
    session = OnnxSession(tmp_path / "model.onnx")
    given = sources(family, 2)
    prompt, mask = padded(2, 7)
    got = session.greedy(prompt, 12, attention_mask=mask, inputs=given)
    expected, _ = decode(
        program.signature, program.run_flat, program.output_names, prompt, 12, attention_mask=mask, inputs=given
    )
    assert torch.equal(got, expected)


def test_64_tokens_of_smollm2_are_the_full_forward(smollm2):
    for batch in (1, 3):
        prompt = smollm2.ids(batch, 12, 40)
        mask = torch.ones_like(prompt)
        if batch > 1:
            mask[0, :5], mask[1, :2] = 0, 0
        program, steps = smollm2.program, 64
        tokens, got = decode(
            program.signature, program.run_flat, program.output_names, prompt, steps, attention_mask=mask
        )
        mask = torch.cat([mask, mask.new_ones(batch, steps)], 1)
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        with torch.no_grad():
            expected = smollm2.model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
        expected, got = expected[:, 11:-1], torch.stack(got, 1)
        rms = expected.double().square().mean().sqrt().item()
        assert (got - expected).abs().max().item() <= 1e-4 * rms
        assert torch.equal(got.argmax(-1), expected.argmax(-1))
