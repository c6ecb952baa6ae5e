"""Loops over state-space blocks: every pass keeps a recurrent state of its own. Right values: loops written by hand."""

from __future__ import annotations

import pytest
import torch
from hcx.rewrite.run.generation import decode
from hcx.rewrite.run.inputs import check_inputs

from tests import loops_by_hand
from tests.test_caches import full_forward, model_of, padded, program_of

NETS = {"mamba2": ("backbone", 3), "bamba": ("model", 2)}
"""Where the blocks are, and how many. Bamba: one state-space block and one of attention, both inside the window."""


@pytest.mark.parametrize("mix", ["input", "output"])
@pytest.mark.parametrize("family", NETS)
def test_decoding_through_states_of_three_passes_is_the_loop_by_hand(family, mix):
    """24 tokens behind prompts, two of them padded on the left."""
    program = program_of(family).rewrite(f"looped{{start=0,end=2,steps=3,scalar=0.3,mix={mix}}}", check=False)
    model, (place, depth) = model_of(family), NETS[family]
    prompt, mask = padded(3, 7)
    tokens, got = decode(program.signature, program.run_flat, program.output_names, prompt, 24, attention_mask=mask)
    mask = torch.cat([mask, mask.new_ones(3, 24)], 1)
    original = full_forward(model, program.signature, tokens, mask, {"use_cache": False})[:, 6:-1]
    with loops_by_hand.looped(getattr(model, place).layers, 0, 2, 3, mix, 0.3):
        expected = full_forward(model, program.signature, tokens, mask, {"use_cache": False})[:, 6:-1]
    got, scale = torch.stack(got, 1), expected.double().square().mean().sqrt().item()
    assert got.shape == expected.shape and (got - expected).abs().max() <= 1e-4 * scale
    assert torch.equal(got.argmax(-1), expected.argmax(-1))
    assert (original - expected).abs().max() > 0.1 * scale
    assert {s.name.split(".")[1] for s in program.inputs if s.fill == "empty"} == {str(n) for n in range(depth + 4)}


@pytest.mark.parametrize("steps", [2, 4])
@pytest.mark.parametrize("family", NETS)
def test_neutral_loops_leave_outputs_and_states_bitwise(family, steps):
    base = program_of(family)
    program, depth = base.rewrite(f"looped{{start=0,end=2,steps={steps}}}", check=False), NETS[family][1]
    for flat in check_inputs(base):
        with torch.no_grad():
            got, expected = program.run_flat(program.signature.complete(flat)), base.run_flat(flat)
        names = program.output_names
        found = dict(zip(names, got, strict=True))
        assert all(torch.equal(found[n], t) for n, t in zip(base.output_names, expected, strict=True))
        for name in names:  # states of a later pass over the same input are those of the first
            _, slot, *rest = [*name.split("."), ""]
            if name.startswith("present.") and int(slot) >= depth:
                assert torch.equal(found[name], found[".".join(["present", str((int(slot) - depth) % 2), *rest[:-1]])])


def test_passes_away_from_neutral_hold_different_states():
    program = program_of("mamba2").rewrite("looped{start=1,end=3,steps=2,scalar=0.3}", check=False)
    with torch.no_grad():
        found = dict(zip(program.output_names, program.run_flat(check_inputs(program)[0]), strict=True))
    for first, second in ((1, 3), (2, 4)):
        a, b = (found[f"present.{n}.recurrent_states.0"] for n in (first, second))
        assert a.shape == b.shape and (a - b).abs().max() > 1e-2


def test_the_past_of_a_cache_of_states_alone_is_empty_in_check_inputs():
    """Its length is in the mask only."""
    program = program_of("mamba2")
    names = [s.name for s in program.inputs]
    assert "past+sequence" in program.inputs[names.index("attention_mask")].shape
    sets = check_inputs(program)
    assert len(sets) == 2
    for flat in sets:
        assert flat[names.index("attention_mask")].shape == flat[names.index("input_ids")].shape
