"""The zoo's own contract: deterministic builders, both inputs run in eager, the expected counts agree."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from . import ZOO, available, build

NAMES = [pytest.param(name, marks=pytest.mark.slow) if ZOO[name].assets else name for name in available()]


def run(model: nn.Module, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    with torch.no_grad():
        return tree_leaves(model(*args, **kwargs))


@pytest.mark.parametrize("name", NAMES)
def test_builder_is_deterministic(name: str) -> None:
    with torch.random.fork_rng(devices=[]):
        before = torch.random.get_rng_state()
        model, args, kwargs = build(name)
        assert torch.equal(before, torch.random.get_rng_state())
        torch.rand(1)  # another global state must give the same weights
        again, args_again, kwargs_again = build(name)
    assert not any(module.training for module in model.modules())
    state, state_again = model.state_dict(), again.state_dict()
    assert list(state) == list(state_again)
    assert all(torch.equal(state[key], state_again[key]) for key in state)
    expected, outputs = run(model, args, kwargs), run(again, args_again, kwargs_again)
    assert all(torch.equal(left, right) for left, right in zip(expected, outputs, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_both_inputs_run(name: str) -> None:
    model, args, kwargs = build(name)
    other_args, other_kwargs = ZOO[name].other()
    assert list(other_kwargs) == list(kwargs)
    shapes = tree_map(lambda tensor: (tensor.shape, tensor.dtype), (args, kwargs))
    assert shapes != tree_map(lambda tensor: (tensor.shape, tensor.dtype), (other_args, other_kwargs))
    first = run(model, args, kwargs)
    for output in first + run(model, other_args, other_kwargs):
        assert isinstance(output, torch.Tensor)
        assert torch.isfinite(output).all()
        assert output.std() > 1e-3
    after = run(model, args, kwargs)
    assert all(torch.equal(left, right) for left, right in zip(first, after, strict=True)), "depends on call history"


@pytest.mark.parametrize("name", ZOO)
def test_counts_agree(name: str) -> None:
    model = ZOO[name]
    assert model.name == name
    assert model.adds <= model.branches == sum(model.kinds.values())
    assert sum(model.blocks) <= model.adds
    assert sum(model.runs) <= sum(model.blocks)
    assert all(length > 1 for length in model.runs)
    assert set(model.kinds) <= {"attn", "cross-attn", "mlp", "moe", "ssm", "conv", "conv-mlp"}
    assert model.traceable or model.note
