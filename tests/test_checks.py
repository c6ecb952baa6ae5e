"""The driver against passes that lie: nothing a pass claims is believed, and the caller's Program stays as it was."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hcx.rewrite import ContractError, Exact, Metric, Pass, Rounding, Site, Structural, trace
from hcx.rewrite.ir.graph_text import text
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


@pytest.fixture
def net():
    torch.manual_seed(0)
    return trace(Net(), (torch.randn(3, 5, 8),))


@dataclass(frozen=True)
class Test(Pass):
    """A pass with one site that puts ``change`` of the answer in the answer's place."""

    __test__: ClassVar[bool] = False
    name: ClassVar[str] = "test"
    promise: object = Exact()

    def plan(self, program):
        return self.new_plan(sites=[Site("answer", "value")])

    def options(self):
        return {}

    def preserves(self, program, plan):
        return self.promise

    def apply(self, program, plan, editor):
        answer = program.graph.output_node().args[0][0]
        users = set(answer.users)
        with editor.after(answer):
            new = self.change(program, editor, answer)
        if new is not None:
            editor.redirect(answer, new, only=users.__contains__)


class Honest(Test):
    """Adds a trainable shift that starts at zero."""

    def change(self, program, editor, answer):
        return editor.inline(lambda a, s: a + s, answer, editor.parameter("shift", torch.zeros(8)))


class Adds(Honest):
    """Moves the answer by one millionth."""

    def change(self, program, editor, answer):
        return editor.inline(lambda a: a + 1e-6, super().change(program, editor, answer))


class OnlySmall(Honest):
    """Moves the answer for batches of one row only: a single shape would not show it."""

    def change(self, program, editor, answer):
        shifted = super().change(program, editor, answer)
        return editor.inline(lambda a: a + 1e-3 * (a.std(0, unbiased=False, keepdim=True) == 0), shifted)


class Nan(Honest):
    def change(self, program, editor, answer):
        return editor.inline(lambda a: a + (a - a) / (a - a), super().change(program, editor, answer))


class Unused(Test):
    """Adds a parameter that nothing reads."""

    def change(self, program, editor, answer):
        editor.parameter("shift", torch.zeros(8))


class TimesZero(Test):
    """Adds a parameter whose effect is multiplied away."""

    def change(self, program, editor, answer):
        return editor.inline(lambda a, s: a + 0 * s, answer, editor.parameter("shift", torch.zeros(8)))


class NoGradient(Test):
    """Adds a live parameter, and one that moves the answer but gets no gradient."""

    def change(self, program, editor, answer):
        live, dead = editor.parameter("live", torch.zeros(8)), editor.parameter("dead", torch.zeros(8))
        return editor.inline(lambda a, s, d: a + s + d.detach(), answer, live, dead)


class WritesInPlace(Honest):
    """Scales a base parameter in place; it promises nothing about the function."""

    def change(self, program, editor, answer):
        with torch.no_grad():
            program.tensor("blocks.0.weight").mul_(1.5)
        return super().change(program, editor, answer)


class Replaces(Honest):
    """Puts another parameter in the place of a base parameter."""

    def change(self, program, editor, answer):
        old = program.tensor("blocks.0.weight")
        program.set_tensor("blocks.0.weight", nn.Parameter(1.5 * old.detach()), added_by="test")
        return super().change(program, editor, answer)


class Widens(Honest):
    def change(self, program, editor, answer):
        return editor.inline(lambda a: a.double(), super().change(program, editor, answer))


class DropsGradient(Honest):
    """The same numbers without gradients recorded, others with them."""

    def change(self, program, editor, answer):
        return editor.call(torch.ops.test_checks.mode.default, super().change(program, editor, answer))


class Nothing(Test):
    """Reports a site and changes nothing at all."""

    def change(self, program, editor, answer):
        return None


def failure(program, step: Test) -> str:
    with pytest.raises(ContractError) as caught:
        program.rewrite(step)
    assert caught.value.hint
    return caught.value.what


def test_an_honest_pass_passes_every_check(net):
    rewritten = net.rewrite(Honest())
    checks = {check["name"]: check for check in rewritten.history[-1]["checks"]}
    assert all(check["holds"] for check in checks.values()) and not rewritten.history[-1]["owed"]
    assert {"contract of test", "not vacuous: test", "live gradients", "against the source model in eager",
            "with gradients recorded", "base parameters untouched"} <= set(checks)  # fmt: skip
    assert checks["contract of test"]["measured"]["bitwise"] and checks["not vacuous: test"]["measured"]["moved"] > 0


@pytest.mark.parametrize("step", [Adds(), OnlySmall(), Nan(), Widens()], ids=lambda s: type(s).__name__)
def test_a_pass_that_claims_exact_and_moves_the_output_is_caught(net, step):
    assert "contract of test" in failure(net, step)


@pytest.mark.parametrize("step", [Unused(), TimesZero()], ids=lambda s: type(s).__name__)
def test_a_vacuous_pass_is_caught(net, step):
    assert "not vacuous: test" in failure(net, step)


def test_a_pass_that_reports_a_site_and_changes_nothing_is_caught(net):
    assert "not vacuous: test" in failure(net, Nothing())


def test_a_parameter_without_a_gradient_is_listed_as_dead(net):
    (live,) = (c for c in net.rewrite(NoGradient()).history[-1]["checks"] if c["name"] == "live gradients")
    assert not live["holds"] and live["measured"]["dead"] == 1
    assert "hcx.test_0.dead" in live["note"] and "hcx.test_0.live" not in live["note"]


@pytest.mark.parametrize("promise", [Exact(), Structural()], ids=str)
@pytest.mark.parametrize("kind", [Replaces, WritesInPlace])
def test_writing_a_base_parameter_is_caught_and_does_not_reach_the_caller(net, kind, promise):
    before = copy.deepcopy(net.state_dict())
    try:
        message = failure(net, kind(promise))
    finally:
        changed = [n for n, t in net.state_dict().items() if not torch.equal(t, before[n])]
    assert not changed, "the caller's Program was changed"
    assert "base parameters untouched" in message or "contract of test" in message


def test_rounding_allows_what_it_says_and_no_more(net):
    assert net.rewrite(Adds(Rounding(64))).history
    assert "contract of test" in failure(net, Adds(Rounding(0.5)))


def test_a_metric_is_measured(net):
    assert net.rewrite(Adds(Metric("kl", 1e-3))).history
    assert "contract of test" in failure(net, Nan(Metric("kl", 1e-3)))


def test_structural_keeps_shapes_and_dtypes(net):
    assert net.rewrite(Adds(Structural())).history
    assert "contract of test" in failure(net, Widens(Structural()))


def test_the_function_must_be_the_same_with_gradients_recorded(net):
    library = torch.library.Library("test_checks", "FRAGMENT")
    if not hasattr(torch.ops.test_checks, "mode"):
        library.define("mode(Tensor x) -> Tensor")
        library.impl("mode", lambda x: x.clone(), "CPU")
        library.impl("mode", lambda x: x + 1e-2 if torch.is_grad_enabled() else x.clone(), "Autograd")
        torch.library.register_fake("test_checks::mode", lambda x: torch.empty_like(x), lib=library)
    assert "with gradients recorded" in failure(net, DropsGradient())


def test_a_lie_in_the_middle_of_a_pipeline_is_caught_and_the_program_stays(net):
    before, state = text(net.graph), copy.deepcopy(net.state_dict())
    x = torch.randn(2, 3, 8)
    expected = net(x)
    with pytest.raises(ContractError, match="contract of test") as caught:
        net.rewrite(["looped{start=1,end=3}", Adds(), "exits{at=[3]}"])
    (done,) = caught.value.after
    assert done.startswith("looped{start=1,end=3") and f"after: {done}" in str(caught.value)
    assert caught.value.as_dict()["after"] == [done]
    assert text(net.graph) == before and not net.history and not net.origin
    assert all(torch.equal(t, state[n]) for n, t in net.state_dict().items())
    assert torch.equal(net(x), expected)


def test_a_pass_object_that_is_not_registered_can_be_followed_by_others(net):
    assert [e["pass"] for e in net.rewrite([Honest(), "exits{at=[2]}"]).history] == ["test", "exits"]


def test_a_rewrite_by_an_unregistered_pass_object_can_be_rewritten_again(net):
    assert len(net.rewrite(Honest()).rewrite("exits{at=[2]}").history) == 2


@pytest.mark.parametrize("trained", ["base", "new"])
def test_a_program_that_was_trained_can_be_rewritten_again(net, trained):
    looped = net.rewrite("looped{start=1,end=3}")
    with torch.no_grad():
        for name, parameter in looped.named_parameters():
            if (name in looped.new_parameters()) == (trained == "new"):
                parameter.add_(0.1)
    x = torch.randn(2, 3, 8)
    rewritten = looped.rewrite("exits{at=[2]}")
    assert torch.equal(rewritten(x), looped(x)) and not torch.equal(looped(x), net(x))


def test_unchecked_rewrites_say_what_they_owe(net):
    (entry,) = net.rewrite(Adds(), check=False).history
    assert entry["owed"] and not entry["checks"]


def test_a_cached_decode_that_differs_from_the_full_forward_is_caught(llama):
    class Position(Test):
        """Reads the length of this call instead of the position: right in full forwards only."""

        def change(self, program, editor, answer):
            shift = editor.parameter("shift", torch.zeros(1))

            def by_length(logits, shift):
                steps = torch.arange(logits.shape[1], dtype=logits.dtype).unsqueeze(-1)
                return logits + shift + torch.where(steps > 0, torch.roll(logits, 1, -1), torch.zeros_like(logits))

            return editor.inline(by_length, answer, shift)

    with pytest.raises(ContractError, match="cached decoding equals the full forward"):
        llama.program.rewrite(Position(Structural()))


def test_long_graph_work_keeps_the_collector_off_old_objects_and_leaves_it_as_it_was(monkeypatch):
    import gc

    from hcx.rewrite import driver, trace
    from hcx.rewrite.testing import tiny_decoder

    seen = []
    monkeypatch.setattr(driver, "walk", lambda *a, real=driver.walk: (seen.append(gc.get_freeze_count()), real(*a)))
    model, ids = tiny_decoder()
    program = trace(model, (ids,))
    program.rewrite("looped", check=False)
    assert seen[0] > 1000 and gc.get_freeze_count() == 0 and gc.isenabled()
    gc.freeze()  # a process that has frozen its objects, before a fork say
    try:
        frozen = gc.get_freeze_count()
        program.rewrite("looped", check=False)
        assert 0 <= frozen - gc.get_freeze_count() < 100  # a few frozen objects may die meanwhile; none joins them
    finally:
        gc.unfreeze()
