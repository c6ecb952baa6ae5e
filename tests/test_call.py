"""Calling a Program: the model's own arguments in, its own output structure out, and errors that name the argument."""

from __future__ import annotations

from collections import namedtuple
from typing import NamedTuple

import pytest
import torch
from hcx.rewrite import UsageError, trace
from torch import nn

from .conftest import tiny_llama


def equal(one, other) -> bool:
    return torch.equal(one, other) and one.dtype == other.dtype


class Many(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, left, right, *, scale=None, flag: bool = False, mode: str = "a"):
        total = self.fc(left) + 2 * right
        total = total if scale is None else total * scale
        return total + 1 if flag else total


@pytest.fixture(scope="module")
def many():
    model = Many().eval()
    return model, trace(model, (torch.randn(3, 4), torch.randn(3, 4)), {"scale": torch.randn(4)})


def test_arguments_by_name_in_any_order_and_by_position(many):
    model, program = many
    left, right, scale = torch.randn(2, 4), torch.randn(2, 4), torch.randn(4)
    expected = model(left, right, scale=scale)
    assert equal(program(left, right, scale=scale), expected)
    assert equal(program(scale=scale, right=right, left=left), expected)
    assert equal(program(left, scale=scale, right=right), expected)
    assert equal(program(left, right, scale=scale, flag=False, mode="a"), expected)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"flag": True}, "flag"),
        ({"bogus": 1}, "bogus"),
        ({"right": None}, "right"),
        ({"scale": 3.0}, "scale"),
        ({"scale": None}, "scale"),
        ({"right": torch.randn(2, 4, 1)}, "right"),
        ({"left": torch.randn(2, 5)}, "left"),
        ({"left": torch.randn(7, 4)}, "right"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_an_argument_that_does_not_fit_is_named(many, change, named):
    _, program = many
    with pytest.raises(UsageError) as caught:
        program(**{"left": torch.randn(2, 4), "right": torch.randn(2, 4), "scale": torch.randn(4), **change})
    assert f"`{named}`" in caught.value.what


def test_missing_doubled_and_surplus_arguments_are_named(many):
    _, program = many
    x = torch.randn(2, 4)
    for args, kwargs, named in [((x,), {"scale": x[0]}, "`right`"), ((x, x), {"left": x}, "`left`")]:
        with pytest.raises(UsageError, match=named):
            program(*args, **kwargs)
    with pytest.raises(UsageError, match="positional argument 2"):
        program(x, x, x[0])


def test_an_omitted_mask_is_ones_and_a_wrong_length_is_refused(llama):
    ids = llama.ids(2, 6)
    with torch.no_grad():
        assert equal(llama.program(ids).logits, llama.program(ids, attention_mask=torch.ones_like(ids)).logits)
        assert equal(llama.program(ids).logits, llama.program(input_ids=ids, attention_mask=None).logits)
    with pytest.raises(UsageError, match="attention_mask"):
        llama.program(ids, attention_mask=torch.ones(2, 5, dtype=torch.int64))
    with pytest.raises(UsageError, match="labels"):
        llama.program(ids, labels=ids)


def test_one_row_of_positions_serves_every_row(llama):
    ids, positions = llama.ids(3, 6), torch.arange(6)[None]
    with torch.no_grad():
        expected = llama.model(ids, position_ids=positions).logits
        assert equal(llama.program(ids, position_ids=positions).logits, expected)


def test_one_tensor_given_for_two_arguments_stays_two_inputs(many):
    model, _ = many
    x = torch.randn(3, 4)
    program = trace(model, (x, x))
    left, right = torch.randn(2, 4), torch.randn(2, 4)
    assert equal(program(left, right), model(left, right)) and equal(program(x, x), model(x, x))


def test_views_of_one_tensor_stay_two_inputs(many):
    model, _ = many
    whole = torch.randn(6, 4)
    program = trace(model, (whole[:3], whole[3:]))
    left, right = torch.randn(2, 4), torch.randn(2, 4)
    assert equal(program(left, right), model(left, right))


def test_a_size_the_model_fixes_is_said_to_be_fixed():
    class Fixed(nn.Module):
        def forward(self, x):
            return x.reshape(x.shape[0], 3, 4) * torch.arange(12.0).reshape(3, 4)

    program = trace(Fixed(), (torch.randn(2, 12),))
    assert equal(program(torch.ones(5, 12)), Fixed()(torch.ones(5, 12)))
    with pytest.raises(UsageError, match="dimension 1 of `x` is fixed to 12, got 13"):
        program(torch.randn(2, 13))


# ---- what it returns

Pair = namedtuple("Pair", "total half")


class Nested(NamedTuple):
    first: torch.Tensor
    rest: dict


class Returning(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.fc, self.make = nn.Linear(4, 4), make

    def forward(self, x):
        return self.make(self.fc(x))


@pytest.mark.parametrize(
    "make",
    [
        lambda y: {"a": y, "b": {"c": y * 2, "n": None}},
        lambda y: Pair(y, y / 2),
        lambda y: Nested(y, {"x": [y + 1, (y - 1, 3, "text")]}),
        lambda y: (y,),
        lambda y: [y, y],
        lambda y: y.argmax(-1),
    ],
    ids=["dict", "namedtuple", "nested", "tuple", "same-twice", "integers"],
)
def test_the_output_has_the_models_structure(make):
    model = Returning(make)
    program = trace(model, (torch.randn(3, 4),))
    x = torch.randn(2, 4)

    def same(one, other):
        assert type(one) is type(other)
        if isinstance(one, torch.Tensor):
            return equal(one, other)
        if isinstance(one, dict):
            return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
        if isinstance(one, list | tuple):
            return len(one) == len(other) and all(map(same, one, other))
        return one == other

    assert same(program(x), model(x))


def test_transformers_output_class_with_its_attributes_and_no_taps_unless_asked(llama):
    output = llama.program(llama.ids(2, 4))
    assert type(output) is type(llama.model(llama.ids(2, 4)))
    assert output.loss is None and output["logits"] is output.logits is output[0]
    again, taps = llama.program(llama.ids(2, 4), taps=True)
    assert type(again) is type(output) and taps == {}


def test_a_constant_may_be_left_out_where_eager_then_gives_the_same_values(many):
    model, _ = many
    pair = torch.randn(3, 4), torch.randn(3, 4)
    assert equal(trace(model, pair, {"mode": "b"})(*pair), model(*pair)), "`mode` is never read"
    with pytest.raises(UsageError, match="flag"):
        trace(model, pair, {"flag": True})(*pair)


def test_a_language_model_traced_without_a_cache_is_called_by_its_ids():
    model, ids = tiny_llama(1), torch.arange(10).reshape(2, 5)
    program = trace(model, (ids,), {"use_cache": False})
    assert equal(program(ids).logits, model(ids).logits)
