"""The finder against structure that was counted by hand (``tests/zoo``), and addresses that survive re-tracing."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from hcx.rewrite import TraceError, load, trace
from hcx.rewrite.ir.dataflow import resolve
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from tests.conftest import tiny_llama, token_ids
from tests.zoo import ZOO, available, build, traced

LIKE = {
    **dict.fromkeys(["qwen3", "granite", "olmo", "starcoder2", "phi3"], ("llama",)),
    **dict.fromkeys(["gptj", "phi", "falcon"], ("gpt_neox", "cohere")),  # parallel branches
    "qwen3_moe": ["mixtral"],
    "gemma3": ["gemma2", "gemma3_mixed"],
    "mamba": ["mamba2", "jamba"],
    "bamba": ["mamba2", "jamba"],
    "falcon_h1": ["mamba2", "cohere"],  # state space and attention as parallel branches
    "pegasus": ["bart"],
    "t5gemma": ["t5", "gemma2"],
    "electra": ["bert"],
    "hubert": ["wav2vec2"],
    "deit": ["vit"],
}
"""Models that the finder sees as it sees those named here; their structure is counted in the full matrix."""

NAMES = [
    pytest.param(name, marks=[pytest.mark.xdist_group(f"zoo-{name}"), *([pytest.mark.full] if name in LIKE else [])])
    for name in available(traceable=True)
    if not ZOO[name].assets
]

INEXACT = {
    # the chunked scan sums over a length of its own choice: other sizes, other order of sums
    "qwen3_next": 1e-5,
}
"""Zoo model -> largest allowed difference at another shape, relative to the rms; all others are bitwise."""


def structure(sites) -> dict:
    stacks = [stack for stack in sites.stacks if stack.residual]
    blocks = [block for stack in stacks for block in stack.blocks]
    branches = [b for block in blocks for residual in block.residuals for b in residual.branches]
    return {
        "branches": len(branches),
        "adds": sum(len(block.residuals) for block in blocks),
        "blocks": tuple(len(stack.blocks) for stack in stacks),
        "runs": tuple(len(run) for stack in stacks for run in stack.runs),
        "kinds": dict(Counter(branch.kind for branch in branches)),
    }


def addresses(sites) -> list:
    return [
        (
            stack.label,
            [(block.address, block.index, [b.address for r in block.residuals for b in r.branches])
             for block in stack.blocks],
            [(run.start, run.end, run.period, run.roles) for run in stack.runs],
        )
        for stack in sites.stacks
    ]  # fmt: skip


def counted(name: str) -> dict:
    return {key: getattr(ZOO[name], key) for key in ("branches", "adds", "blocks", "runs", "kinds")}


def linears(program) -> int:
    return sum("aten.linear" in str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize("name", ["smollm2", "minilm"])
def test_structure_of_trained_models_is_what_was_counted(name, request):
    program = request.getfixturevalue(name).program
    assert structure(program.sites()) == counted(name) and linears(program) == ZOO[name].linears


@pytest.mark.parametrize("name", NAMES)
def test_structure_is_what_was_counted_and_another_shape_is_bitwise_eager(name, request):
    model, _, _, program = traced(name)
    other_args, other_kwargs = ZOO[name].other()
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # nn.TransformerEncoder's fused path is another computation
    try:
        with torch.no_grad():
            got, wanted = (tree_leaves(m(*other_args, **other_kwargs)) for m in (program, model))
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    for one, other in zip(got, wanted, strict=True):
        limit = INEXACT.get(name, 0.0) * other.double().square().mean().sqrt().item()
        assert one.shape == other.shape and one.dtype == other.dtype
        assert torch.equal(one, other) or (one.double() - other.double()).abs().max().item() <= limit
    assert structure(program.sites()) == counted(name) and linears(program) == ZOO[name].linears


@pytest.mark.parametrize("name", available(traceable=False))
def test_what_cannot_be_traced_is_refused(name):
    model, args, kwargs = build(name)
    with pytest.raises(TraceError) as caught:
        trace(model, args, kwargs)
    assert caught.value.where and caught.value.hint


# ---- addresses

STABLE = ["llama", "bert", "gpt_neox", "nanogpt_tied_wte", "shared_block", "attribute_blocks", "mixer", "resnet_tv"]
"""One of each way that blocks get their names: module lists, one object called again, attributes, stages."""


def to_bf16(value):
    return tree_map(lambda t: t.bfloat16() if isinstance(t, torch.Tensor) and t.is_floating_point() else t, value)


@pytest.mark.parametrize("name", STABLE)
def test_addresses_are_equal_at_another_shape_in_bf16_and_after_a_round_trip(name, tmp_path):
    model, args, kwargs, program = traced(name)
    expected = addresses(program.sites())
    assert expected and all(len(stack[1]) for stack in expected)
    other_args, other_kwargs = ZOO[name].other()
    assert addresses(trace(model, other_args, other_kwargs).sites()) == expected
    half = trace(copy.deepcopy(model).bfloat16(), *to_bf16((args, kwargs)))
    assert addresses(half.sites()) == expected
    program.save(tmp_path / "net.hcx")
    assert addresses(load(tmp_path / "net.hcx").sites()) == expected


def test_addresses_are_equal_with_and_without_a_cache(llama):
    plain = trace(llama.model, (llama.ids(2, 7),), cache=False)
    assert llama.program.signature.has_cache and not plain.signature.has_cache

    def without_roles(program):
        return [(label, blocks, [run[:3] for run in runs]) for label, blocks, runs in addresses(program.sites())]

    assert without_roles(plain) == without_roles(llama.program)
    assert llama.program.sites().main.blocks[4].address == "model.layers.4"


def test_addresses_are_equal_after_rewrites_and_a_round_trip_of_them(llama, tmp_path):
    rewritten = llama.program.rewrite("looped{start=2,end=4,steps=3,scalar=0.3},exits{at=[3,5]}", check=False)
    blocks = rewritten.sites().main.blocks
    assert [(b.index, b.iteration) for b in blocks] == [
        *((0, 1), (1, 1)),
        *((i, t) for t in (1, 2, 3) for i in (2, 3)),
        *((4, 1), (5, 1)),
    ]
    branches = [branch.address for b in blocks for r in b.residuals for branch in r.branches]
    assert len(set(branches)) == len(branches), "an address names two branches"
    original = [b.address for r in llama.program.sites().main.blocks for s in r.residuals for b in s.branches]
    assert set(original) <= set(branches), "a branch of the model lost its address"
    rewritten.save(tmp_path / "looped.hcx")
    assert addresses(load(tmp_path / "looped.hcx").sites()) == addresses(rewritten.sites())


# ---- what sites say


def test_boundaries_are_the_models_hidden_states(llama):
    from hcx.rewrite.run.reading import observe

    ids = llama.ids(2, 9)
    stack = llama.program.sites().main
    inputs = llama.program.signature.bind((ids,), {})
    values = observe(llama.program, [boundary.node for boundary in stack.boundaries], inputs)
    with torch.no_grad():
        hidden = llama.model(ids, output_hidden_states=True).hidden_states
        last = llama.model.model(ids).last_hidden_state
    assert [b.index for b in stack.boundaries] == list(range(len(values))) == list(range(len(hidden)))
    assert all(torch.equal(one, other) for one, other in zip(values[:-1], hidden[:-1], strict=True))
    assert torch.equal(llama.model.model.norm(values[-1]), last)


def test_roles_of_outside_values_tell_shared_tables_from_caches_and_alternating_masks(llama):
    (run,) = llama.program.sites().main.runs
    assert set(run.roles) == {"invariant", "cache"} and run.roles.count("cache") == 2
    (run,) = traced("gemma2")[3].sites().main.runs
    assert any(role in ("periodic(2)", "varying") for role in run.roles)


def test_a_branch_is_computed_from_its_skip_alone_and_its_value_is_added(llama):
    for block in llama.program.sites().main.blocks:
        for residual in block.residuals:
            (branch,) = residual.branches
            assert {resolve(operand) for operand in residual.add.args} == {residual.skip, resolve(branch.value)}
            assert branch.body[-1] is resolve(branch.value) and residual.skip not in branch.body


@pytest.fixture(scope="module")
def stages():
    """Of PlainCNN, three stages (conv, conv, pool) with 8, 16 and 32 channels, then a classifier."""
    (stack,) = traced("plain_cnn")[3].sites().stacks
    assert not stack.residual and stack.label == "stages"
    return stack


def convolutions(block) -> int:
    return sum("conv2d" in str(node.target) for node in block.body)


def test_a_model_without_residuals_has_stages_between_cut_vertices(stages):
    assert [int(boundary.node.meta["val"].shape[1]) for boundary in stages.boundaries[1:]] == [8, 16, 32]
    assert [convolutions(block) for block in stages.blocks[:-1]] == [2, 2]
    assert len({block.address for block in stages.blocks}) == 3, "an address names two stages"


def test_the_last_stage_ends_where_the_classifier_begins(stages):
    assert convolutions(stages.blocks[-1]) == 2


def test_blocks_without_module_names_are_found_by_repetition():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(torch.randn(8, 8) / 4) for _ in range(6))

        def forward(self, x):
            for w1, w2 in zip(self.weights[::2], self.weights[1::2], strict=True):
                x = x + torch.tanh(x @ w1)
                x = x + torch.relu(x @ w2)
            return x

    sites = trace(Functional(), (torch.randn(3, 5, 8),)).sites()
    assert [len(block.residuals) for block in sites.main.blocks] == [2, 2, 2]
    assert [(run.start, run.end) for run in sites.main.runs] == [(0, 3)]


def test_two_sizes_of_one_model_have_equal_block_keys():
    keys = {
        block.key
        for layers in (2, 3)
        for block in trace(tiny_llama(layers), (token_ids(8).reshape(2, 4),), cache=False).sites().main.blocks
    }
    assert len(keys) == 1
