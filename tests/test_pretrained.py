"""A rewritten decoder behind the Transformers interface, against the model it came from."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hcx.rewrite import load, trace  # noqa: E402

from tests.conftest import tiny_llama  # noqa: E402


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
    _, program = pair
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


def log_likelihood(model, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[float, bool]]:
    """Sum of log-probabilities of each continuation, and whether it is the greedy one; one right-padded batch."""
    rows = [torch.cat(pair) for pair in pairs]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(r) for r in rows], batch_first=True)
    with torch.no_grad():
        scores = model(input_ids=ids, attention_mask=mask).logits.log_softmax(-1)
    found = []
    for row, (context, continuation) in enumerate(pairs):
        at = torch.arange(len(context) - 1, len(context) + len(continuation) - 1)
        chosen = scores[row, at].gather(-1, continuation[:, None])
        found.append((chosen.sum().item(), bool((scores[row, at].argmax(-1) == continuation).all())))
    return found


def test_a_log_likelihood_scorer_runs_on_it(smollm2):
    text = smollm2.text
    pairs = [(text[a : a + n], text[a + n : a + n + k]) for a, n, k in ((0, 9, 3), (50, 17, 1), (200, 4, 8))]
    with torch.no_grad():
        greedy = smollm2.model(text[None, 300:320]).logits[0, -1].argmax()
    pairs.append((text[300:320], greedy[None]))
    expected = log_likelihood(smollm2.model, pairs)
    neutral = log_likelihood(smollm2.program.rewrite("looped,exits", check=False).as_pretrained(), pairs)
    moved = log_likelihood(smollm2.program.rewrite("looped{mix=output,scalar=0.5}", check=False).as_pretrained(), pairs)
    assert expected[-1][1] and not all(g for _, g in expected)
    for one, other, away in zip(neutral, expected, moved, strict=True):
        assert one[0] == pytest.approx(other[0], abs=1e-4) and one[1] == other[1]
        assert abs(away[0] - other[0]) > 1e-3


def test_tokenizer_and_chat_template_travel(tmp_path):
    from hcx.cli.opening import open_program
    from hcx.rewrite.source import tokenizer_from
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(["<unk>", "user", "hello", "world", "says"])}, "<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }} says {{ m['content'] }}{% endfor %}"
    tiny_llama(2).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    program = open_program(str(tmp_path / "model")).program
    program.rewrite("exits{at=[1]}", check=False).save(tmp_path / "a.hcx")
    again = tokenizer_from(load(tmp_path / "a.hcx").companions)
    messages = [{"role": "user", "content": "hello world"}]
    got = again.apply_chat_template(messages, tokenize=True)
    assert got == tokenizer.apply_chat_template(messages, tokenize=True)
    assert again.apply_chat_template(messages, tokenize=False) == "user says hello world"


def test_default_experts_are_saved_loaded_elsewhere_and_generate(tmp_path):
    """A mixture of experts as Transformers loads it: grouped products by an op of its own."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config).eval()
    ids = torch.randint(1, 64, (2, 6))
    program = trace(model, (ids,)).rewrite("exits{at=[1]}", check=False)
    assert any("grouped_mm" in str(n.target) for n in program.graph.nodes)
    program.save(tmp_path / "m.hcx")
    code = ("import sys, torch; from hcx.rewrite import load; p = load('m.hcx'); ids = torch.load('ids.pt');"
            "torch.save(p(ids).logits, 'out.pt')")  # fmt: skip
    torch.save(ids, tmp_path / "ids.pt")
    subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, check=True)
    mask = torch.ones_like(ids)
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        assert torch.equal(torch.load(tmp_path / "out.pt"), model(ids).logits)
        assert torch.equal(program.as_pretrained().generate(ids, **options), model.generate(ids, **options))
