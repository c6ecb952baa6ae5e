"""Coefficients from and to deepseek_v4, glm5_next and hy_v4: tiny random models of Transformers, non-neutral parameters."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hcx.passes.hyper_connections import transformers_form as form
from hcx.rewrite import UsageError

from tests.test_composition import FAR, NEAR, distance, llama, randomise, traced

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 4,
    "num_attention_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "q_lora_rank": 16, "index_n_heads": 2,
    "index_head_dim": 16, "index_topk": 16, "pad_token_id": 0, "hc_eps": 0.0, "rms_norm_eps": 1e-5,
}  # fmt: skip
HEADS = {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 2}
MODELS = {
    "deepseek_v4": ("DeepseekV4", {"num_key_value_heads": 1, "head_dim": 32, "o_groups": 2, "o_lora_rank": 16}),
    "glm5_next": ("Glm5NextText", {**HEADS, "linear_head_dim": 16, "linear_num_heads": 2}),
    "hy_v4": ("HYV4", {**HEADS, "qk_rope_head_dim": 16}),
}


@cache
def tiny(kind: str, seed: int = 0):
    """A whole model of Transformers, every parameter of its hyper-connections away from its start."""
    import importlib

    name, more = MODELS[kind]
    package = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    configs = importlib.import_module(f"transformers.models.{kind}.configuration_{kind}")
    model = getattr(package, f"{name}Model")(getattr(configs, f"{name}Config")(**SMALL, **more)).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "_hc." in key or "hc_head" in key:
                spread = 0.3 if key.endswith("fn") else 1.0
                parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))
    return model


def theirs(kind: str, model, ids: torch.Tensor, hc) -> torch.Tensor:
    """The small Llama with the hyper-connections of a Transformers model around its branches, as that model calls them."""

    def run(blocks, x, head):
        streams = x.unsqueeze(2).expand(-1, -1, hc.config.hc_mult, -1).contiguous()
        for layer, block in zip(hc.layers, blocks, strict=True):
            for module, (branch, _) in zip((layer.attn_hc, layer.ffn_hc), block, strict=True):
                post, *comb, collapsed = module(streams)
                mixed = torch.matmul(comb[0].transpose(-1, -2), streams) if comb else streams
                streams = post.unsqueeze(-1) * branch(collapsed).unsqueeze(-2) + mixed
        return head(hc.hc_head(streams))

    return llama(model, ids, run)


def rewritten(kind: str):
    model, args, program = traced("llama")
    return model, args, program.rewrite(form.pipeline_of(tiny(kind).config), check=False)


@pytest.mark.parametrize("kind", MODELS)
def test_imported_coefficients_give_what_transformers_gives(kind):
    model, args, new = rewritten(kind)
    hc = tiny(kind)
    if kind != "glm5_next":  # their head depends on the streams: without that it is ours
        with pytest.raises(UsageError, match="head"):
            form.import_coefficients(new, hc.state_dict(), kind)
    form.import_coefficients(new, hc.state_dict(), kind, static_head=True)
    with torch.no_grad():
        saved = hc.hc_head.hc_fn.clone() if kind != "glm5_next" else None
        if saved is not None:
            hc.hc_head.hc_fn.zero_()
        expected = theirs(kind, model, *args, hc)
        if saved is not None:
            hc.hc_head.hc_fn.copy_(saved)
        got, original = new(*args), model(*args)
    assert distance(got, expected) <= NEAR and distance(got, original) > FAR


@pytest.mark.parametrize("kind", MODELS)
def test_exported_coefficients_give_what_the_program_gives(kind):
    model, args, new = rewritten(kind)
    randomise(new)
    with torch.no_grad():
        new.tensor("hcx.hc_0.0.expand").fill_(1)
        new.tensor("hcx.hc_0.0.reduce").copy_(
            torch.full((4,), 0.25) if kind == "glm5_next" else torch.tensor([0.1, 0.2, 0.3, 0.7])
        )
    entries, hc = form.export_coefficients(new, kind), tiny(kind, 1)
    kept = {n for n, _ in hc.named_parameters() if "_hc." in n or "hc_head" in n}
    assert set(entries) == kept
    missing, unexpected = hc.load_state_dict(entries, strict=False)
    assert not unexpected and not set(missing) & kept
    with torch.no_grad():
        got, expected = new(*args), theirs(kind, model, *args, hc)
    assert distance(got, expected) <= NEAR and distance(got, model(*args)) > FAR


@pytest.mark.parametrize("kind", MODELS)
def test_there_and_back_is_bitwise(kind):
    new, state = rewritten(kind)[2], {f"model.{k}": v for k, v in tiny(kind).state_dict().items()}
    form.import_coefficients(new, state, kind, static_head=True)
    with torch.no_grad():
        sites = {n: t.clone() for n, t in new.named_tensors() if n.startswith("hcx.hc_0.0.") and "reduce" not in n}
    entries = form.export_coefficients(new, kind)
    assert all(torch.equal(v, state[f"model.{k}"]) for k, v in entries.items() if "hc_head" not in k)
    other = rewritten(kind)[2]
    form.import_coefficients(other, entries, kind)
    assert all(torch.equal(other.tensor(n), t) for n, t in sites.items()) and len(sites) > 8
    torch.testing.assert_close(other.tensor("hcx.hc_0.0.reduce"), new.tensor("hcx.hc_0.0.reduce"), rtol=1e-5, atol=1e-7)


def test_the_config_fields_are_those_of_transformers():
    for kind in MODELS:
        fields, config = form.config_of(rewritten(kind)[2]), tiny(kind).config
        assert fields == {k: getattr(config, k) for k in fields} and fields["hc_mult"] == 4
        assert ("hc_sinkhorn_iters" in fields) == (kind != "hy_v4")


def test_options_also_go_by_the_names_of_transformers():
    _, _, program = traced("llama")
    (step,) = program.plan("hc{mixer=mhc,hc_mult=2,hc_sinkhorn_iters=7}").steps
    assert step.options["mult"] == 2 and step.options["sinkhorn_iters"] == 7
    with pytest.raises(UsageError, match="twice"):
        program.plan("hc{hc_mult=2,mult=2}")


def test_what_does_not_fit_is_refused():
    _, _, new = rewritten("deepseek_v4")
    state = dict(tiny("deepseek_v4").state_dict())
    with pytest.raises(UsageError, match="has ihc"):
        form.import_coefficients(new, tiny("hy_v4").state_dict(), "hy_v4")
    with pytest.raises(UsageError, match="known"):
        form.import_coefficients(new, state, "llama")
    fewer = {k: v for k, v in state.items() if not k.startswith("layers.3.")}
    with pytest.raises(UsageError, match="6 sites"):
        form.import_coefficients(new, fewer, "deepseek_v4", static_head=True)
    wider = {k: torch.cat([v, v], 1) if k.endswith("_hc.fn") else v for k, v in state.items()}
    with pytest.raises(UsageError, match="hidden_size"):
        form.import_coefficients(new, wider, "deepseek_v4", static_head=True)
    with torch.no_grad():
        new.tensor("hcx.hc_0.0.expand").add_(0.5)
    with pytest.raises(UsageError, match="copies"):
        form.export_coefficients(new, "deepseek_v4")
    config = type(tiny("hy_v4").config)(**{**SMALL, "hc_magnitude": 3.0})
    with pytest.raises(UsageError, match="hc_magnitude"):
        form.pipeline_of(config)
