"""The three spikes of the first issue, kept as tests: a cached decoder; precision and training; other kinds of net."""

from __future__ import annotations

import copy

import pytest
import torch
from hcx.rewrite import NoMatchError, UsageError, trace
from hcx.rewrite.run.generation import greedy
from torch.nn import functional as F

from tests.conftest import SHAPES, adamw_step, assert_same_step, tiny_llama, token_ids
from tests.test_finder import addresses

PIPELINE = "looped{start=2,end=4,steps=2},exits{at=[3,5]}"


@pytest.fixture(scope="module")
def rewritten(llama):
    return llama.program.rewrite(PIPELINE)


# ---- the main job


def test_the_main_job_on_smollm2_is_bitwise_eager_at_every_shape_and_passes_every_check(smollm2):
    program = smollm2.program.rewrite("looped,exits")
    checks = [check for entry in program.history for check in entry["checks"]]
    assert checks and all(check["holds"] for check in checks)
    assert any(check["name"].startswith("cached decoding") for check in checks)
    for shape in SHAPES:
        ids = smollm2.ids(*shape)
        with torch.no_grad():
            assert torch.equal(program(ids).logits, smollm2.model(ids).logits)
    ids = smollm2.ids(1, 8)
    eager = smollm2.model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=2)
    assert torch.equal(greedy(program, ids, 8), eager)


# ---- (a) one graph for prefill and decoding


def test_a_cached_decoder_gives_16_greedy_tokens_of_eager_generate(llama, rewritten):
    for batch, length in [(1, 6), (3, 5), (2, 1)]:
        ids = llama.ids(batch, length)
        expected = llama.model.generate(ids, max_new_tokens=16, do_sample=False)
        assert expected.shape[1] == length + 16
        assert torch.equal(greedy(rewritten, ids, 16), expected)


def test_a_cache_of_any_length_goes_through_one_graph(llama, rewritten, max_diff):
    ids = llama.ids(2, 14)
    with torch.no_grad():
        full, cache, logits = rewritten(ids), None, []
        for start, end in [(0, 1), (1, 4), (4, 13), (13, 14)]:
            given = {} if cache is None else {"past_key_values": cache}
            output = rewritten(ids[:, start:end], **given)
            cache = output.past_key_values
            logits.append(output.logits)
    assert max_diff(torch.cat(logits, 1), full.logits) <= 1e-5
    assert cache.layers[0].keys.shape[2] == 14 and len(cache.layers) == 6 + 2


# ---- (b) precision, autocast, modes, training


@pytest.fixture(scope="module")
def half():
    model = tiny_llama(3, attention_dropout=0.1).bfloat16()
    program = trace(model, (token_ids(24).reshape(2, 12),))
    return model, program, program.rewrite("looped{start=1,end=2,steps=2},exits{at=[1,2]}")


def test_bf16_traced_natively_is_bitwise_eager(half):
    model, program, neutral = half
    for shape in SHAPES[:4]:
        ids = token_ids(600)[: shape[0] * shape[1]].reshape(shape)
        with torch.no_grad():
            expected = model(ids).logits
            assert expected.dtype == torch.bfloat16
            assert torch.equal(program(ids).logits, expected) and torch.equal(neutral(ids).logits, expected)
    assert addresses(program.sites())[0][1] == addresses(trace(model, (ids,), cache=False).sites())[0][1]


def test_bf16_takes_the_optimiser_step_of_eager(half):
    """The mask makes the backward of attention another kernel: gradients agree better than bf16 with float32."""
    model, program, neutral = half
    ids = token_ids(24).reshape(2, 12)
    expected, plain, got = (adamw_step(module, ids) for module in (model, program, neutral))
    precise = adamw_step(copy.deepcopy(model).float(), ids)

    def distance(one: torch.Tensor, other: torch.Tensor) -> float:
        return ((one.float() - other.float()).norm() / other.float().norm()).item()

    for name, (parameter, gradient) in expected.items():
        assert torch.equal(got[name][0], plain[name][0]), f"{name}: the rewrite changed the step"
        assert distance(got[name][1], gradient) <= distance(precise[name][1], gradient), name
        assert (got[name][0] == parameter).double().mean().item() >= 0.95, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast_it_is_bitwise_eager_under_autocast(llama, rewritten, dtype):
    for shape in [(2, 12), (3, 7)]:
        ids = llama.ids(*shape)
        with torch.no_grad(), torch.autocast("cpu", dtype):
            expected = llama.model(ids).logits
            assert torch.equal(llama.program(ids).logits, expected)
            assert torch.equal(rewritten(ids).logits, expected)
        with torch.no_grad():
            assert not torch.equal(expected.float(), llama.model(ids).logits), "autocast did nothing"


def test_one_optimiser_step_is_that_of_eager(llama, rewritten):
    ids = llama.ids(2, 12)
    expected, got = adamw_step(llama.model, ids), adamw_step(rewritten, ids)
    assert_same_step(adamw_step(llama.program, ids), expected)
    assert_same_step(got, expected)
    (name,) = rewritten.new_parameters()
    assert got[name][0].abs().item() == pytest.approx(1e-3, rel=1e-3), "the scalar did not learn"


def test_train_and_eval_switch_module_dropout_as_in_eager():
    """One seed gives one dropout mask: the graph draws the same random numbers in the same order."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    settings = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=128, n_positions=64, **settings))
    ids = token_ids(24).reshape(2, 12)
    program = trace(model.eval(), (ids,), cache=False)
    assert_same_draws(model, program, ids)


def test_train_switches_dropout_inside_attention_as_in_eager():
    model = tiny_llama(2, attention_dropout=0.3)
    ids = token_ids(24).reshape(2, 12)
    assert_same_draws(model, trace(model, (ids,), cache=False), ids)


def assert_same_draws(model, program, ids: torch.Tensor) -> None:
    outputs = {}
    with torch.no_grad():
        for mode in (True, False):
            for module in (model, program):
                module.train(mode)
                assert module.training is mode
                torch.manual_seed(11)
                outputs[mode, module] = module(ids).logits
    assert not torch.equal(outputs[True, model], outputs[False, model]), "the model has no dropout"
    for mode in (True, False):
        assert torch.equal(outputs[mode, program], outputs[mode, model]), f"train={mode}"


def test_batch_statistics_are_refused_in_train_mode(svhn):
    _, program, _, _ = svhn
    with pytest.raises(UsageError, match="BatchNorm") as caught:
        copy.deepcopy(program).train()
    assert caught.value.where and caught.value.hint


# ---- (c) nothing is named after Llama


def test_minilm_goes_through_the_same_pipeline(minilm):
    program = minilm.program.rewrite("looped,exits")
    assert [entry["pass"] for entry in program.history] == ["looped", "exits"]
    mask = torch.ones(3, 9, dtype=torch.int64)
    mask[1, 5:] = 0
    ids = minilm.ids(3, 9)
    with torch.no_grad():
        got, expected = program(ids, attention_mask=mask), minilm.model(ids, attention_mask=mask)
        assert torch.equal(got.last_hidden_state, expected.last_hidden_state)
        assert torch.equal(got.pooler_output, expected.pooler_output)


def test_minilm_looped_away_from_neutral_is_the_loop_by_hand(minilm, max_diff):
    program = minilm.program.rewrite("looped{start=2,end=4,steps=3,mix=output,scalar=0.25}", check=False)
    ids = minilm.ids(2, 7)
    with torch.no_grad():
        hidden = minilm.model.embeddings(ids)
        for number, layer in enumerate(minilm.model.encoder.layer):
            if number == 2:
                for step in range(3):
                    result = minilm.model.encoder.layer[3](layer(hidden))
                    hidden = result if step == 0 else hidden + 0.25 * (result - hidden)
            elif number != 3:
                hidden = layer(hidden)
        assert max_diff(program(ids).last_hidden_state, hidden) <= 1e-4
        assert max_diff(program(ids).last_hidden_state, minilm.model(ids).last_hidden_state) > 1e-3


def test_the_face_net_goes_through_the_same_pipeline(face):
    net, program, pictures = face
    rewritten = program.rewrite("looped,exits")
    with torch.no_grad():
        got, taps = rewritten(pictures, taps=True)
        assert torch.equal(got, net(pictures)) and torch.equal(rewritten(pictures[:1]), net(pictures[:1]))
    assert bool((taps["exits.depth"] == 14).all())
    stack = program.sites().main
    assert stack.residual and stack.depth == 14
    assert [(run.start, run.end) for run in stack.runs] == [(0, 3), (4, 7), (8, 10), (11, 13)]


@pytest.mark.parametrize(("mix", "scalar"), [("output", 0.25), ("input", 0.3), ("input_rms", 0.3)])
def test_the_face_net_looped_away_from_neutral_is_the_loop_by_hand(face, mix, scalar, max_diff):
    net, program, pictures = face
    rewritten = program.rewrite(f"looped{{start=4,end=7,steps=3,mix={mix},scalar={scalar}}}", check=False)

    def window(x):
        return net.blocks[6](net.blocks[5](net.blocks[4](x)))

    def rms(x):
        return x.square().mean(1, keepdim=True).sqrt()

    with torch.no_grad():
        entry = net.start(pictures)
        for block in net.blocks[:4]:
            entry = block(entry)
        state = window(entry)
        for _ in range(2):
            if mix == "output":
                state = state + scalar * (window(state) - state)
            else:
                fed = state * rms(entry) / rms(state) if mix == "input_rms" else state
                state = window((1 - scalar) * entry + scalar * fed)
        for block in net.blocks[7:]:
            state = block(state)
        assert max_diff(rewritten(pictures), net.finish(state)) <= 1e-4
        assert max_diff(rewritten(pictures), net(pictures)) > 1e-3


def test_svhn_has_no_stream_so_looped_says_why(svhn):
    _, program, _, _ = svhn
    (step,) = program.plan("looped").steps
    assert not step.sites and [skip.reason.value for skip in step.skips] == ["no-residual-stream"]
    assert "feeds a block's output back" in step.skips[0].detail
    with pytest.raises(NoMatchError, match="`looped` found nothing") as caught:
        program.rewrite("looped,exits{at=[1]}")
    assert "no residual stream" in caught.value.where


def test_svhn_gets_an_exit_with_a_classifier_at_a_cut_vertex(svhn):
    net, program, digits, labels = svhn
    rewritten = program.rewrite("exits{at=[1]}")
    with torch.no_grad():
        got, taps = rewritten(digits, taps=True)
        assert torch.equal(got, net(digits)) and got.argmax(1).tolist() == labels
    assert taps["exits.1.logits"].shape == (4, 10) and not bool(taps["exits.1.logits"].any())
    assert all(check["holds"] for check in rewritten.history[0]["checks"])
    optimizer = torch.optim.AdamW(rewritten.new_parameters().values(), lr=0.05)
    for _ in range(30):
        optimizer.zero_grad()
        loss = F.cross_entropy(rewritten(digits, taps=True)[1]["exits.1.logits"], torch.tensor(labels))
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        got, taps = rewritten(digits, taps=True)
        assert taps["exits.1.logits"].argmax(1).tolist() == labels and torch.equal(got, net(digits))
        next(b for n, b in rewritten.named_buffers() if n.endswith("threshold")).fill_(0.2)
        got, taps = rewritten(digits, taps=True)
    assert bool((taps["exits.depth"] == 1).all()) and torch.equal(got, taps["exits.1.logits"])


def test_svhn_gets_exits_by_default(svhn):
    _, program, _, _ = svhn
    assert program.rewrite("exits").taps
