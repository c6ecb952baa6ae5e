"""Plans and pipeline strings: edited, stored, replayed, and refused where they cannot be meant."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hcx.passes import Exits, Looped
from hcx.rewrite import NoMatchError, Plan, PlanError, UsageError, load, trace
from hcx.rewrite.ir.graph_text import text
from hcx.rewrite.pipeline.registry import homes, passes
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn


class Net(nn.Module):
    """Four residual blocks; enough to loop and to exit."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return trace(Net(), (torch.randn(3, 5, 8),))


def test_a_site_taken_out_of_a_plan_leaves_every_other_site_as_it_is(net):
    plan = net.plan("exits{at=[1,2,3],head=affine}")
    data = json.loads(json.dumps(plan.to_json()))
    removed = data["steps"][0]["sites"].pop(1)
    assert removed["address"].endswith("@2")
    edited, full = net.rewrite(Plan.from_json(json.dumps(data))), net.rewrite(plan)
    assert set(full.new_parameters()) - set(edited.new_parameters()) == {
        n for n in full.new_parameters() if ".2." in n.removeprefix("hcx.")
    }
    assert [t for t in full.taps if not t.startswith("exits.2.")] == edited.taps
    assert text(edited.graph) == text(net.rewrite("exits{at=[1,3],head=affine}").graph)


def test_a_plan_without_sites_is_a_recipe_for_any_model(net, llama):
    data = net.plan("looped{start=1,end=3},exits{at=[2]}").to_json()
    for step in data["steps"]:
        step["sites"] = None
    recipe = Plan.from_json({**data, "fingerprint": None})
    for program in (net, llama.program):
        rewritten = program.rewrite(recipe, check=False)
        assert [e["pass"] for e in rewritten.history] == ["looped", "exits"]


def test_a_plan_for_another_model_is_refused(net, llama):
    plan = net.plan("exits{at=[2]}")
    with pytest.raises(PlanError, match="another program"):
        llama.program.rewrite(plan)
    with pytest.raises(PlanError, match="another program"):
        net.rewrite("looped{start=1,end=3}").rewrite(plan)
    plan.fingerprint = None
    with pytest.raises(PlanError, match="no site"):
        llama.program.rewrite(plan)


def test_a_plan_fits_the_model_at_another_example_shape_and_after_a_round_trip(net, tmp_path):
    plan = net.plan("exits{at=[2]}")
    torch.manual_seed(0)
    assert trace(Net(), (torch.randn(2, 9, 8),)).rewrite(plan).taps
    net.save(tmp_path / "a.hcx")
    assert load(tmp_path / "a.hcx").rewrite(plan).taps


@pytest.mark.parametrize("text", ["", "{}", "[]", "3", '{"schema_version": 99, "steps": []}', '{"schema_version": 1}'])
def test_what_is_no_plan_is_refused(text):
    with pytest.raises(PlanError):
        Plan.from_json(text)


@pytest.mark.parametrize(
    "detail",
    [
        {"at": 99},
        {"head": "bogus"},
        {"score": "bogus"},
        {"threshold": "high"},
        None,
    ],
    ids=str,
)
def test_a_detail_that_cannot_be_is_refused_by_name(net, detail):
    plan = net.plan("exits{at=[2]}").to_json()
    site = plan["steps"][0]["sites"][0]
    site["detail"] = {} if detail is None else {**site["detail"], **detail}
    with pytest.raises(PlanError):
        net.rewrite(Plan.from_json(plan), check=False)


def test_a_changed_detail_changes_its_own_site_only(net):
    plan = net.plan("exits{at=[1,2]}").to_json()
    plan["steps"][0]["sites"][0]["detail"]["threshold"] = -1.0
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        _, taps = net.rewrite(Plan.from_json(plan))(x, taps=True)
    assert bool((taps["exits.depth"] == 1).all())


# ---- pipeline strings

labels = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.]{0,8}(#[0-9])?", fullmatch=True)
windows = st.one_of(st.just({}), st.tuples(st.integers(0, 99), st.integers(0, 99)).map(lambda w: dict(zip(("start", "end"), w, strict=True))))  # fmt: skip
loops = st.builds(
    lambda window, **rest: Looped(**window, **rest),
    windows,
    steps=st.integers(1, 9),
    scalar=st.floats(allow_nan=False, allow_infinity=False),
    mix=st.sampled_from(["input", "input_rms", "output"]),
    stack=st.none() | labels,
)
exits = st.builds(
    Exits,
    at=st.none() | st.lists(st.integers(0, 99), max_size=5).map(tuple),
    head=st.sampled_from(["auto", "shared", "affine", "classifier"]),
    score=st.sampled_from(["max_prob", "margin"]),
    threshold=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    stack=st.none() | labels,
)


@settings(max_examples=150, deadline=None)
@given(st.lists(loops | exits, min_size=1, max_size=4))
@example([Looped(scalar=1e-300), Exits(threshold=-0.0), Exits(at=(3,))])
def test_a_pipeline_is_parsed_and_printed_without_loss(steps):
    printed = ",".join(map(str, steps))
    assert passes(printed) == steps
    assert ",".join(map(str, passes(printed))) == printed
    spaced = printed.replace(",", " , ").replace("=", " = ").replace("{", " { ").replace("}", " } ")
    assert passes(spaced) == steps


AWKWARD = ["x=1", "'quoted'", "#1", "", "none", "a,b", "a}b", " padded "]


@pytest.mark.parametrize("label", AWKWARD)
def test_awkward_text_is_printed_so_that_it_can_be_read(label):
    assert passes(str(Exits(stack=label))) == [Exits(stack=label)]


def test_an_infinite_threshold_is_printed_so_that_it_can_be_read():
    assert passes(str(Exits(threshold=math.inf))) == [Exits(threshold=math.inf)]


def test_an_empty_list_of_places_is_not_the_default():
    assert passes("exits{at=[]}") == [Exits(at=())] != passes("exits")


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("exits{treshold=0.5}", "`treshold`", "`threshold`"),
        ("looped{step=3}", "`step`", "`steps`"),
        ("looped{zzz=3}", "`zzz`", "start, end, steps"),
        ("lopped", "`lopped`", "`looped`"),
        ("quack", "`quack`", "exits"),
        ("looped{steps=many}", "many", "int"),
        ("looped{steps=2.5}", "2.5", "int"),
        ("looped{steps=true}", "true", "int"),
        ("looped{mix=sideways}", "sideways", "input_rms"),
        ("exits{at=[1,x]}", "`x`", "14~1"),
        ("exits{at=1.5}", "1.5", "int"),
        ("exits{at=[1,2}", "match", ""),
        ("exits{threshold=0.5,threshold=0.6}", "twice", ""),
        ("exits{threshold}", "no value", "option=value"),
        ("exits{at=[1]", "match", ""),
        ("", "empty", "looped,exits"),
        (",", "empty", "looped,exits"),
        ("exits}", "match", ""),
        ("1exits", "1exits", "name{"),
    ],
)
def test_a_mistake_in_a_pipeline_is_named_and_the_nearest_word_suggested(net, text, message, hint):
    with pytest.raises(UsageError) as caught:
        net.plan(text)
    assert message in caught.value.what and hint in (caught.value.hint or "")
    assert "\n" not in caught.value.what


def test_every_registered_pass_calls_itself_by_its_key():
    assert {"looped", "exits"} <= set(homes())
    for name in homes():
        (step,) = passes(name)
        assert step.name == name


# ---- what may follow what, and what is too little


def test_an_order_that_cannot_be_is_refused_with_both_passes_named(net, tmp_path):
    with pytest.raises(PlanError) as caught:
        net.plan("exits{at=[3]},looped{start=0,end=2}")
    assert "`looped` cannot follow `exits`" in caught.value.what and "put looped before exits" in caught.value.hint
    net.rewrite("exits{at=[3]}").save(tmp_path / "a.hcx")
    for later in (net.rewrite("exits{at=[3]}"), load(tmp_path / "a.hcx")):
        with pytest.raises(PlanError, match="`looped` cannot follow `exits`"):
            later.rewrite("looped{start=0,end=2}")


def test_nothing_matched_is_an_error_with_the_reason():
    program = trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), (torch.randn(2, 4),))
    with pytest.raises(NoMatchError) as caught:
        program.rewrite("looped")
    assert "`looped` found nothing" in caught.value.what and "no-residual-stream" in caught.value.where


def test_more_than_half_skipped_is_an_error_unless_allowed():
    class Narrowing(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.down = nn.Linear(8, 4)
            self.narrow = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x):
            for block in self.wide:
                x = x + torch.tanh(block(x))
            x = self.down(x)
            for block in self.narrow:
                x = x + torch.tanh(block(x))
            return x

    program = trace(Narrowing(), (torch.randn(2, 3, 8),))
    stacks = {stack.label: stack.depth for stack in program.sites().stacks}
    if len(stacks) > 1:
        pytest.skip(f"the finder sees {stacks}")
    plan = program.plan("exits{at=[1,2,4],head=affine}")
    assert len(plan.steps[0].skips) == 2 and len(plan.steps[0].sites) == 1
    assert {skip.reason.value for skip in plan.steps[0].skips} == {"head-does-not-fit"}
    with pytest.raises(NoMatchError, match="would skip 2 of 3 sites") as caught:
        program.rewrite("exits{at=[1,2,4],head=affine}")
    assert "--allow-partial" in caught.value.hint
    assert program.rewrite("exits{at=[1,2,4],head=affine}", allow_partial=True).taps[-1] == "exits.depth"


def test_an_empty_selection_is_an_error(net):
    plan = net.plan("exits{at=[1,2]}")
    plan.steps[0].sites.clear()
    with pytest.raises(NoMatchError):
        net.rewrite(plan)


def test_planning_changes_nothing(net):
    before, history = text(net.graph), list(net.history)
    net.plan("looped{start=1,end=3},exits{at=[2]}")
    net.rewrite("looped{start=1,end=3},exits{at=[2]}")
    assert text(net.graph) == before and net.history == history and not net.new_parameters()


@pytest.mark.parametrize(
    ("pipeline", "where"),
    [
        ("exits{at=[]}", "at"),
        ("exits{threshold=nan}", "threshold"),
        ("exits{candidates=1}", "candidates"),
        ("normformer{gate=nan}", "gate"),
        ("scale_vectors{form=direction,target=[blocks.0]}", "target"),
        ("lora{per_iteration=true}", "per_iteration"),
        ("looped{start=1,end=3,cache=last}", "cache"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(net, pipeline, where):
    with pytest.raises(UsageError) as caught:
        net.rewrite(pipeline)
    assert caught.value.where == where and caught.value.hint


def test_an_infinite_threshold_is_none(net):
    assert net.rewrite("exits{at=[2],threshold=inf}").history[-1]["contract"]["contract"] == "Exact"


def test_an_order_that_options_forbid_says_so(net):
    with pytest.raises(PlanError) as caught:
        net.rewrite("looped{start=1,end=3,runtime=true},exits{at=[2]}")
    assert "with these options looped moves blocks" in caught.value.hint
