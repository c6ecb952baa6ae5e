"""A rewritten decoder behind the Transformers interface, against the model it came from."""

from __future__ import annotations

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hcx.rewrite import trace  # noqa: E402


@pytest.fixture(scope="module")
def pair():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, 0, 0.2)
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
        ids = torch.randint(1, 128, (2, 12))
    return model, trace(model, (ids,))


@pytest.mark.parametrize("pipeline", [None, "looped,exits"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 20}, {"assist": True}], ids=str)
def test_generate_gives_the_tokens_of_the_original(pair, pipeline, options):
    model, program = pair
    ours = (program.rewrite(pipeline, check=False) if pipeline else program).as_pretrained()
    ids = torch.randint(1, 128, (3, 9), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    call = dict(options)
    if call.pop("assist", False):
        ids, mask, call["assistant_model"] = ids[2:], mask[2:], copy.deepcopy(model)
    call = {"do_sample": False, **call, "max_new_tokens": 16, "attention_mask": mask}
    torch.manual_seed(1)
    expected = model.generate(ids, **call)
    torch.manual_seed(1)
    assert torch.equal(ours.generate(ids, **call), expected)


def test_loss_hidden_states_and_keys(pair):
    model, program = pair
    ours = program.rewrite("hc{init=replicate},looped,exits", check=False).as_pretrained()
    ids = torch.randint(1, 128, (2, 7), generator=torch.Generator().manual_seed(5))
    got, expected = (m(ids, labels=ids, output_hidden_states=True) for m in (ours, model))
    assert torch.equal(got.loss, expected.loss)
    assert len(got.hidden_states) == len(expected.hidden_states)
    assert all(torch.equal(a, b) for a, b in zip(got.hidden_states[:-1], expected.hidden_states[:-1], strict=True))
    assert set(model.state_dict()) < set(ours.state_dict())


def test_generation_with_a_loop_that_changes_the_function_uses_its_own_cache_slots(pair):
    model, program = pair
    looped = program.rewrite("looped{start=2,end=4,steps=3,scalar=0.3}")
    ours = looped.as_pretrained()
    ids = torch.randint(1, 128, (1, 6), generator=torch.Generator().manual_seed(6))
    tokens = ours.generate(ids, do_sample=False, max_new_tokens=12)
    for length in range(6, 18):  # each token again from a full forward without a cache
        logits = looped(tokens[:, :length]).logits[0, -1]
        assert logits[tokens[0, length]] >= logits.max() - 1e-4
    assert len(ours(ids, use_cache=True).cache.layers) == 6 + 2 * 2


@pytest.mark.parametrize("train", ["all", "new", "looped"])
def test_param_groups_train_what_they_say(pair, train):
    program = copy.deepcopy(pair[1].rewrite("looped,exits{head=affine}", check=False))
    groups = program.param_groups(train)
    chosen = {id(p) for g in groups for p in g["params"]}
    names = {n for n, p in program.named_parameters() if id(p) in chosen}
    expected = {"all": {n for n, _ in program.named_parameters()}, "new": set(program.new_parameters())}
    assert names == expected.get(train, {"hcx.looped_0.scalar"})
    assert all(p.requires_grad == (n in names) for n, p in program.named_parameters())
    assert all(
        g["weight_decay"] == 0
        for g in groups
        if any(n in program.origin for n, p in program.named_parameters() if id(p) in {id(q) for q in g["params"]})
    )
