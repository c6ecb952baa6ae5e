"""Passes that begin again and hear from the one before: Transformers' own gates, and a loop over modules by hand."""

from __future__ import annotations

import pytest
import torch
from hcx.passes.looped import restart
from hcx.rewrite import UsageError, load
from hcx.rewrite.run.generation import decode

from tests import loops_by_hand, zoo

LOOP = "looped{start=2,end=4,steps=3,mix=restart}"


def filled(program, scale: float = 0.2) -> dict[str, torch.Tensor]:
    """Random tensors for all gates and queries, by name without the pass."""
    generator, found = torch.Generator().manual_seed(6), {}
    with torch.no_grad():
        for name, parameter in program.new_parameters().items():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            found[name.removeprefix("hcx.looped_0.")] = parameter.detach()
    return found


def test_message_and_gate_are_those_of_transformers(max_diff):
    theirs = pytest.importorskip("transformers.models.inkling2_loop.modeling_inkling2_loop")
    config = theirs.Inkling2LoopTextConfig(
        hidden_size=16, loop_gate_rank=4, loop_layer_index_start=6, loop_layer_index_end=12, rms_norm_eps=1e-6
    )
    config._attn_implementation = "eager"
    generator = torch.Generator().manual_seed(0)
    x, states = (torch.randn(2, 5, *rest, 16, generator=generator) for rest in ((), (3,)))
    with torch.no_grad():
        gate, reader = theirs.Inkling2LoopMessageGate(config), theirs.Inkling2LoopMessageAttentionResidual(config)
        reader.query.copy_(torch.randn(reader.query.shape, generator=generator))
        messages = reader(states[..., :2, :], states[..., 2, :], 1)
        down, forget, inject = gate.down_proj.weight, gate.forget_gate_proj.weight, gate.message_gate_proj.weight
        for number in range(4):
            query = reader.query[1, number]
            got = restart.message(query, *states.unbind(-2))
            assert max_diff(got, messages[..., number, :]) <= 1e-5
            mixed = restart.received(x, query, down, forget, inject, *states.unbind(-2))
            assert max_diff(mixed, gate(x, messages[..., number, :])) <= 1e-5 and max_diff(mixed, x) > 1e-2


def by_hand(model, tensors, ids, steps=3) -> torch.Tensor:
    """Blocks [2, 4) begun again; the input of each norm, which opens a branch, is gated from pass 2 on."""
    layers, calls, states, heard = model.model.layers, {}, [], []

    def gated(index, kind):
        own = [tensors[f"block{index}.{kind}.{n}"] for n in ("query", "down", "forget", "inject")]
        return lambda module, args: (restart.received(args[0], *own, *heard),)

    def remember(number):
        return lambda module, args, kwargs: calls.update({number: (args, kwargs)})

    def again(module, args, kwargs, output):
        states.append(output)
        hooks = []
        for number in (2, 3):
            hooks.append(layers[number].input_layernorm.register_forward_pre_hook(gated(number, "attn")))
            hooks.append(layers[number].post_attention_layernorm.register_forward_pre_hook(gated(number, "mlp")))
        for _ in range(steps - 1):
            heard[:], states[:] = list(states), []
            x = calls[2][0][0]
            for number in (2, 3):
                x = layers[number].forward(x, **calls[number][1])
                states.append(x)
        for hook in hooks:
            hook.remove()
        return x

    handles = [layers[n].register_forward_pre_hook(remember(n), with_kwargs=True) for n in (2, 3)]
    handles.append(layers[2].register_forward_hook(lambda m, a, k, out: states.append(out), with_kwargs=True))
    handles.append(layers[3].register_forward_hook(again, with_kwargs=True))
    try:
        with torch.no_grad():
            return model(ids, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()


def test_exact_at_the_start_and_the_loop_by_hand_away_from_it(llama, max_diff, tmp_path):
    program, ids = llama.program.rewrite(LOOP), llama.ids(2, 9)
    checks = {c["name"]: c for c in program.history[0]["checks"]}
    assert checks["contract of looped"]["note"] == "contract exact" and all(c["holds"] for c in checks.values())
    (step,) = program.history[0]["plan"]["steps"]
    assert step["estimate"]["new parameters"] == 4 * (32 + 4 * 32 * 32)
    with torch.no_grad():
        assert torch.equal(program(ids).logits, llama.model(ids).logits)
    tensors = filled(program)
    assert sum(t.numel() for t in tensors.values()) == 4 * (32 + 4 * 32 * 32), "all passes share them"
    expected = by_hand(llama.model, tensors, ids)
    with torch.no_grad():
        assert max_diff(program(ids).logits, expected) <= 1e-4
        assert max_diff(expected, llama.model(ids).logits) > 1e-2
        program.save(tmp_path / "a.hcx")
        assert torch.equal(load(tmp_path / "a.hcx")(ids).logits, program(ids).logits)


def test_cached_decoding(llama, max_diff):
    program = llama.program.rewrite(LOOP, check=False)
    tensors, ids = filled(program), llama.ids(2, 5)
    tokens, steps = decode(program.signature, program.run_flat, program.output_names, ids, 16)
    expected, got = by_hand(llama.model, tensors, tokens[:, :-1])[:, 4:], torch.stack(steps, 1)
    assert max_diff(got, expected) <= 1e-4 and torch.equal(got.argmax(-1), expected.argmax(-1))


def test_gates_learn_from_the_start_and_queries_once_they_have_moved(llama):
    program, ids = llama.program.rewrite(LOOP, check=False), llama.ids(2, 9)
    program(ids).logits.square().mean().backward()
    live = {n for n, p in program.new_parameters().items() if p.grad is not None and bool(p.grad.any())}
    assert live == {n for n in program.new_parameters() if n.endswith((".forget", ".inject"))}
    with torch.no_grad():
        for name, parameter in program.new_parameters().items():
            if name in live:
                parameter.add_(0.01)
    program(ids).logits.square().mean().backward()
    assert all(bool(p.grad.any()) for p in program.new_parameters().values())


@pytest.mark.parametrize("name", ["gpt2", "olmo2"])
def test_other_architectures_start_exact_and_move(name, max_diff):
    model, args, kwargs, base = zoo.traced(name)
    program = base.rewrite("looped{start=1,end=3,mix=restart}", check=False)
    first = loops_by_hand.first_of
    with torch.no_grad():
        expected = first(model(*args, **kwargs))
        assert torch.equal(first(program(*args, **kwargs)), expected)
        filled(program)
        assert max_diff(first(program(*args, **kwargs)), expected) > 1e-3


def test_unloop_takes_silent_gates_out_and_keeps_others(llama):
    program, ids = llama.program.rewrite(LOOP, check=False), llama.ids(2, 9)
    out = program.rewrite("unloop")
    assert not out.new_parameters() and len(out.inputs) == len(llama.program.inputs)
    filled(program)
    kept = program.rewrite("unloop")
    with torch.no_grad():
        assert torch.equal(kept(ids).logits, program(ids).logits)


@pytest.mark.parametrize("options", ["scalar=0.1,start=2,end=4", "start=auto"])
def test_there_is_no_scalar(llama, options):
    with pytest.raises(UsageError, match="no scalar"):
        llama.program.plan(f"looped{{mix=restart,{options}}}")
