"""Loops back to dense blocks: gone where they change nothing, else with weights of their own, bitwise either way."""

from __future__ import annotations

import json

import pytest
import torch
from hcx.export import to_onnx, to_pt2
from hcx.passes import Unloop
from hcx.rewrite import NoMatchError, PlanError, UsageError, load, trace
from hcx.rewrite.pipeline.plan import Plan
from hcx.rewrite.run.generation import greedy
from hcx.rewrite.testing import tiny_decoder

from tests import loops_by_hand, zoo
from tests.test_caches import program_of

LOOP = "looped{start=2,end=4,steps=3}"
MOVED = "looped{start=2,end=4,steps=3,scalar=0.4,mix=output}"


def text_of(program) -> list[str]:
    return [f"{n.op} {n.target}" for n in program.graph.nodes if n.op != "get_attr"]


@pytest.mark.parametrize("mix", ["input", "input_rms", "input_linear", "output", "output_vector", "damped"])
def test_a_neutral_loop_disappears_without_a_trace(llama, mix):
    looped = llama.program.rewrite(f"{LOOP[:-1]},mix={mix},readout=steps,gate=ouro}}", check=False)
    program = looped.rewrite("unloop")
    assert text_of(program) == text_of(llama.program)
    assert program.taps == [] and not program.new_parameters()
    assert [vars(i) for i in program.inputs] == [vars(i) for i in llama.program.inputs]
    assert program.output_names == llama.program.output_names
    ids = llama.ids(2, 9)
    with torch.no_grad():
        assert torch.equal(program(ids).logits, llama.model(ids).logits)
        assert len(program(ids).past_key_values.layers) == 6
    assert torch.equal(greedy(program, ids, 8), greedy(llama.program, ids, 8))
    assert len(looped.inputs) > len(program.inputs) and looped.new_parameters(), "the one before was changed"


def test_the_middle_one_of_three_loops_leaves_the_caches_of_the_others_in_place(llama, max_diff):
    program = llama.program.rewrite(
        "looped{start=0,end=1,scalar=0.3},looped{start=1,end=3,steps=3},looped{start=4,end=6,scalar=0.2,mix=output}", check=False
    ).rewrite("unloop{separate=false}", allow_partial=True)  # fmt: skip
    expected = llama.program.rewrite(
        "looped{start=0,end=1,scalar=0.3},looped{start=4,end=6,scalar=0.2,mix=output}", check=False
    )
    assert [vars(i) for i in program.inputs] == [vars(i) for i in expected.inputs]
    ids = llama.ids(2, 9)
    with torch.no_grad():
        assert torch.equal(program(ids).logits, expected(ids).logits)
    assert torch.equal(greedy(program, ids, 12), greedy(expected, ids, 12))


@pytest.mark.parametrize("name", ["mamba2", "bamba", "gemma2", "vit"])
def test_other_architectures(name):
    program = zoo.traced(name)[3]
    looped = program.rewrite("looped{start=0,end=2,steps=2}", check=False)
    assert text_of(looped.rewrite("unloop", check=False)) == text_of(program)


def test_separate_weights_compute_the_same_and_train_apart(llama, max_diff, tmp_path):
    looped = llama.program.rewrite(MOVED, check=False)
    program = looped.rewrite("unloop")
    assert program.history[-1]["contract"]["contract"] == "Exact"
    ids, model = llama.ids(2, 9), llama.model
    with torch.no_grad():
        assert torch.equal(program(ids).logits, looped(ids).logits)
    new = {n: p for n, p in program.new_parameters().items() if "unloop_0" in n}
    window = [p for i in (2, 3) for p in model.model.layers[i].parameters()]
    assert sum(p.numel() for p in new.values()) == 2 * sum(p.numel() for p in window) and len(new) == 2 * len(window)
    with torch.no_grad():  # the second pass over block 3 alone gets another weight
        name = next(n for n in new if "layers.3.mlp.up_proj.weight" in n and n.endswith("loop2"))
        new[name].mul_(0.5)
        got = program(ids).logits
        weight, calls = model.model.layers[3].mlp.up_proj.weight, []

        def hook(module, args):  # runs once a pass over the block
            calls.append(0)
            weight.data.mul_(0.5 if len(calls) == 2 else 2 if len(calls) == 3 else 1)

        handle = model.model.layers[3].mlp.register_forward_pre_hook(hook)
        with loops_by_hand.looped(model.model.layers, 2, 4, 3, "output", 0.4):
            expected = model(ids, use_cache=False).logits
        handle.remove()
    assert len(calls) == 3 and max_diff(got, expected) <= 1e-4 and max_diff(got, looped(ids).logits) > 1e-3
    program.save(tmp_path / "a.hcx")
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "a.hcx")(ids).logits, got)
    with pytest.raises(NoMatchError):
        program.rewrite("unloop")  # no loop is left


def test_a_loop_is_found_again_after_saving_and_behind_other_passes(llama, tmp_path):
    looped = llama.program.rewrite(f"{LOOP},exits{{at=[3,5]}},lora,quantize{{bits=8}}", check=False)
    looped.save(tmp_path / "a.hcx")
    program = load(tmp_path / "a.hcx").rewrite("unloop", check=False)
    ids = llama.ids(2, 9)
    with torch.no_grad():
        assert torch.equal(program(ids).logits, looped(ids).logits)
    assert len(program.inputs) == len(llama.program.inputs) and len(text_of(program)) < len(text_of(looped))
    output = llama.program.rewrite(f"{LOOP[:-1]},mix=output}},exits{{at=[3]}}", check=False)
    (skip,) = output.plan("unloop{separate=false}").steps[0].skips
    assert skip.reason == "value-used-outside"  # the exit reads F(F(x)) up to block 2, which is not F(x)


def test_edited_plans_and_options_that_cannot_be_meant_are_refused(llama):
    looped = llama.program.rewrite(MOVED, check=False)
    plan = looped.plan("unloop").to_json()
    plan["steps"][0]["sites"][0]["detail"]["action"] = "remove"
    with pytest.raises(PlanError, match="not neutral"):
        looped.rewrite(Plan.from_json(json.dumps(plan)))
    with pytest.raises(UsageError):
        Unloop(neutral=False, separate=False)


# ---- export


def test_a_neutral_loop_is_left_out_of_exported_files(llama, tmp_path):
    base, sizes = llama.program, {}
    for name, options in {"none": "", "neutral": LOOP, "moved": MOVED}.items():
        program = base.rewrite(options, check=False) if options else base
        report = to_onnx(program, tmp_path / f"{name}.onnx")
        sizes[name] = (tmp_path / f"{name}.onnx").stat().st_size, report.nodes
        assert any("left out" in n for n in report.notes) == (name == "neutral")
    assert sizes["neutral"][1] == sizes["none"][1] and abs(sizes["neutral"][0] - sizes["none"][0]) < 2000
    assert sizes["moved"][1] > sizes["none"][1]
    made = to_pt2(base.rewrite(LOOP, check=False), tmp_path / "neutral.pt2")
    assert any("left out" in n for n in made.notes)


def test_the_fourth_pass_costs_no_weights_in_the_artefact_and_in_onnx(llama, tmp_path):
    bytes_of = {}
    for steps in (1, 4):
        program = llama.program.rewrite(f"looped{{start=2,end=4,steps={steps},scalar=0.3}}", check=False)
        program.save(tmp_path / f"{steps}.hcx")
        to_onnx(program, tmp_path / f"{steps}.onnx", verify=False)
        bytes_of[steps] = [(tmp_path / f"{steps}.hcx" / "weights.safetensors").stat().st_size,
                           (tmp_path / f"{steps}.onnx").stat().st_size]  # fmt: skip
    weights, onnx = (b - a for a, b in zip(*bytes_of.values(), strict=True))
    window = sum(p.numel() for i in (2, 3) for p in llama.model.model.layers[i].parameters()) * 4
    assert 0 < weights < 500 and 0 < onnx < window  # nodes of three more passes, not one copy of the weights


# ---- one cache for all passes


def test_a_shared_cache_holds_the_keys_of_the_last_pass_and_is_exact_where_the_mix_is(llama, max_diff):
    base, ids = llama.program, llama.ids(2, 9)
    shared = base.rewrite("looped{start=2,end=4,steps=2,cache=last}")
    assert [vars(i) for i in shared.inputs] == [vars(i) for i in base.inputs]
    assert torch.equal(greedy(shared, ids, 12), greedy(base, ids, 12))
    moved = base.rewrite("looped{start=2,end=4,steps=2,scalar=0.5,cache=last}")
    check = next(c for c in moved.history[0]["checks"] if c["name"].startswith("cached decoding"))
    assert check["holds"] and "approximate" in check["note"] and check["measured"]["max_relative_diff"] > 1e-3
    exact = base.rewrite("looped{start=2,end=4,steps=2,scalar=0.5}", check=False)
    with torch.no_grad():
        got, expected = moved(ids), exact(ids)
        assert torch.equal(got.logits, expected.logits)  # a prompt has no earlier tokens
        for layer in range(6):
            last = layer + 4 if layer in (2, 3) else layer  # slots 6 and 7 hold the second pass over blocks 2 and 3
            assert torch.equal(got.past_key_values.layers[layer].keys, expected.past_key_values.layers[last].keys)
    assert text_of(shared.rewrite("unloop", check=False)) == text_of(base)


def test_states_are_not_shared():
    step = program_of("lfm2").plan("looped{start=1,end=3,cache=last}").steps[0]
    assert not step.sites and step.skips[0].reason == "unsupported" and "state" in step.skips[0].detail


# ---- adapters of each pass


def test_adapters_per_pass_share_the_weights_and_act_in_their_own_pass_alone(llama, max_diff):
    """Relaxed recursion: ``W + B_t A_t`` in pass t, by hand on the module's own weight."""
    program = llama.program.rewrite(
        f"{MOVED},lora{{rank=2,target=[layers.3.mlp.up_proj,layers.5.mlp.up_proj],per_iteration=true}}"
    )
    factors = {n: p for n, p in program.new_parameters().items() if "lora_0" in n}
    assert len(factors) == 2 * (3 + 1), "three passes over block 3, one over block 5"
    ids, generator = llama.ids(2, 9), torch.Generator().manual_seed(1)
    with torch.no_grad():
        assert torch.equal(program(ids).logits, llama.program.rewrite(MOVED, check=False)(ids).logits)
        for factor in factors.values():
            factor.copy_(torch.randn(factor.shape, generator=generator) * 0.3)
        stem, calls = "hcx.lora_0.model.layers.3.mlp.up_proj", []
        layers, original = llama.model.model.layers, llama.model.model.layers[3].mlp.up_proj.weight.clone()
        last = "hcx.lora_0.model.layers.5.mlp.up_proj"

        def hook(module, args):
            calls.append(0)
            end = "" if len(calls) == 1 else f"_loop{len(calls)}"
            module.up_proj.weight.data = original + factors[f"{stem}{end}.B"] @ factors[f"{stem}{end}.A"]

        handle, other = layers[3].mlp.register_forward_pre_hook(hook), layers[5].mlp.up_proj.weight.data
        layers[5].mlp.up_proj.weight.data = other + factors[f"{last}.B"] @ factors[f"{last}.A"]
        with loops_by_hand.looped(layers, 2, 4, 3, "output", 0.4):
            expected = llama.model(ids, use_cache=False).logits
        handle.remove()
        layers[3].mlp.up_proj.weight.data, layers[5].mlp.up_proj.weight.data = original, other
    assert len(calls) == 3 and max_diff(program(ids).logits, expected) <= 1e-4


def test_one_adapter_serves_all_passes_by_default(llama):
    program = llama.program.rewrite(f"{MOVED},lora{{rank=2,target=[layers.3.mlp.up_proj]}}", check=False)
    assert len([n for n in program.new_parameters() if "lora_0" in n]) == 2


@pytest.mark.parametrize("windows", [((0, 3), (1, 2)), ((1, 2), (0, 3))])
def test_neutral_loops_inside_each_other_come_out(windows):
    model, ids = tiny_decoder()
    program = trace(model, (ids,))
    looped = program.rewrite(",".join(f"looped{{start={a},end={b}}}" for a, b in windows), check=False)
    dense = looped.rewrite("unloop")
    with torch.no_grad():
        assert torch.equal(dense(ids)["logits"], program(ids)["logits"])
    assert len(dense.graph.nodes) == len(program.graph.nodes) and set(dense.state_dict()) == set(program.state_dict())
