"""Exits that whole sequences take, against the layers of Transformers' own CTC encoders and formulas written out here."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hcx.passes import Exits
from hcx.passes.exits import Compact, calibrate, exit_costs, fit, losses, measure, set_thresholds, split
from hcx.passes.exits.insert.padding import find_valid
from hcx.passes.exits.insert.sequences import averaged
from hcx.rewrite import NoMatchError, UsageError, load, trace
from torch import nn
from torch.nn import functional as F

from tests.conftest import tiny_llama, token_ids

NEAR = 1e-5
PLACES = (1, 2, 4)
"""The positional convolution is the first block, so that ``hidden_states[k - 1]`` is the stream after k blocks."""


@dataclass
class Speech:
    """A CTC encoder, its Program, and waveforms of several lengths; ``frames`` of each row count."""

    model: Any
    program: Any
    call: dict[str, torch.Tensor]
    frames: list[int]

    def readings(self, *places: int, view=lambda x: x) -> list[torch.Tensor]:
        """Logits after some blocks, then the model's own."""
        with torch.no_grad():
            output = self.model(**self.call, output_hidden_states=True)
            norm = self.model.base_model.encoder.layer_norm if self.model.config.do_stable_layer_norm else nn.Identity()
            early = [self.model.lm_head(norm(view(output.hidden_states[k - 1]))) for k in places]
        return [*early, output.logits]

    def mean(self, figures: torch.Tensor) -> torch.Tensor:
        """Over the frames that count, row by row."""
        return torch.stack([row[:n].mean() for row, n in zip(figures.double(), self.frames, strict=True)])


def speech(kind: str, stable: bool) -> Speech:
    from transformers import HubertConfig, HubertForCTC, Wav2Vec2Config, Wav2Vec2ForCTC

    config, net = {"wav2vec2": (Wav2Vec2Config, Wav2Vec2ForCTC), "hubert": (HubertConfig, HubertForCTC)}[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = net(
            config(
                vocab_size=12, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64,
                conv_dim=(16, 16, 16), conv_stride=(5, 4, 4), conv_kernel=(10, 8, 4), num_feat_extract_layers=3,
                num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, do_stable_layer_norm=stable,
                feat_extract_norm="layer", initializer_range=0.15, mask_time_prob=0,
            )
        ).eval()  # fmt: skip
        waves = torch.randn(6, 2000)
    lengths = torch.tensor([2000, 1500, 900, 1999, 400, 1200])
    mask = (torch.arange(2000) < lengths[:, None]).long()
    frames = model._get_feat_extract_output_lengths(lengths).tolist()
    call = {"input_values": waves, "attention_mask": mask}
    example = {n: t[:3] for n, t in call.items()}
    return Speech(model, trace(model, (), example), call, frames)


@pytest.fixture(scope="module")
def wav2vec2() -> Speech:
    """Pre-norm, with a norm at the end of the stack."""
    return speech("wav2vec2", True)


@pytest.fixture(scope="module")
def hubert() -> Speech:
    """Post-norm: the head reads the stream as it is."""
    return speech("hubert", False)


BOTH = pytest.mark.parametrize("net", ["wav2vec2", "hubert"])


def entropy(logits: torch.Tensor) -> torch.Tensor:
    p = logits.double().softmax(-1)
    return 1 + (p * p.log()).sum(-1) / math.log(logits.shape[-1])


def posterior(logits: torch.Tensor) -> torch.Tensor:
    return logits.double().softmax(-1).max(-1).values.log()


def rows_at(readings: list[torch.Tensor], numbers: list[int]) -> torch.Tensor:
    """Row r of reading ``numbers[r]``."""
    return torch.stack([readings[n][row] for row, n in enumerate(numbers)])


def middle(scores: torch.Tensor) -> float:
    """A threshold in the widest gap of the inner scores, so that rounding decides nothing."""
    ordered = scores.sort().values[1:-1]
    gap = int((ordered[1:] - ordered[:-1]).argmax())
    assert ordered[gap + 1] - ordered[gap] > 1e-3
    return float(ordered[gap] + ordered[gap + 1]) / 2


# ---- scores and selection


@BOTH
@pytest.mark.parametrize(("score", "by_hand"), [("entropy", entropy), ("posterior", posterior)])
def test_a_row_leaves_whole_where_its_mean_over_frames_says(net, score, by_hand, request, max_diff):
    own = request.getfixturevalue(net)
    readings = own.readings(*PLACES)
    scores = [own.mean(by_hand(r)) for r in readings[:-1]]
    thresholds = [middle(s) for s in scores]
    program = own.program.rewrite(Exits(at=PLACES, per="sequence", score=score), check=False)
    program = set_thresholds(program, dict(zip(PLACES, thresholds, strict=True)))
    with torch.no_grad():
        output, taps = program(**own.call, taps=True)
    assert taps["exits.valid"].sum(1).tolist() == own.frames
    for place, expected, reading in zip(PLACES, scores, readings, strict=False):
        assert max_diff(taps[f"exits.{place}.score"].double(), expected) <= NEAR
        assert max_diff(by_hand(reading).mean(1), expected) > 1e-3, "padding does not matter here"
    fired = [[s >= t for s in row] for row, t in zip(torch.stack(scores).tolist(), thresholds, strict=True)]
    taken = [next((k for k in range(3) if fired[k][row]), 3) for row in range(6)]
    assert len(set(taken)) >= 3
    assert taps["exits.depth"].tolist() == [(*PLACES, 5)[k] for k in taken]
    assert max_diff(output.logits, rows_at(readings, taken)) <= NEAR


@BOTH
@pytest.mark.parametrize("head", ["shared", "own", "affine", "classifier"])
def test_below_every_score_the_output_is_bitwise_the_first_exit(net, head, request):
    own = request.getfixturevalue(net)
    program = own.program.rewrite(
        Exits(at=PLACES, head=head, per="sequence", score="posterior", threshold=-math.inf), check=False
    )
    output, taps = program(**own.call, taps=True)
    assert torch.equal(output.logits, taps["exits.1.logits"])
    assert taps["exits.depth"].tolist() == [1] * 6


@BOTH
@pytest.mark.parametrize("options", ["rule=first", "rule=max", "head=own,rule=max", "score=cosine"])
def test_without_a_threshold_the_model_is_bitwise_itself(net, options, request):
    own = request.getfixturevalue(net)
    program = own.program.rewrite(f"exits{{at=[1,2,4],per=sequence,{options}}}")  # with all checks of the driver
    for rows in (6, 1):
        call = {n: t[:rows] for n, t in own.call.items()}
        with torch.no_grad():
            assert torch.equal(program(**call).logits, own.model(**call).logits)


@BOTH
@pytest.mark.parametrize("per", ["sequence", "position"])
def test_the_surest_of_exits_and_model_is_taken(net, per, request, max_diff):
    own = request.getfixturevalue(net)
    readings = own.readings(*PLACES)
    scores = torch.stack([own.mean(entropy(r)) if per == "sequence" else entropy(r) for r in readings])
    program = own.program.rewrite(
        Exits(at=PLACES, per=per, score="entropy", rule="max", threshold=-math.inf), check=False
    )
    output, taps = program(**own.call, taps=True)
    assert max_diff(taps["exits.score"].double(), scores[-1]) <= NEAR
    places = torch.tensor([*PLACES, 5])
    assert torch.equal(taps["exits.depth"], places[scores.argmax(0)]) and len(taps["exits.depth"].unique()) >= 2
    expected = torch.stack(readings).gather(
        0, scores.argmax(0).reshape(1, 6, -1, 1).expand(1, 6, readings[0].shape[1], 12)
    )[0]
    assert max_diff(output.logits, expected) <= NEAR
    # only exits that reach their threshold take part
    limits = dict(zip(PLACES, [math.inf, -math.inf, float(scores[2].median()) + 1e-4], strict=True))
    allowed = torch.stack([torch.full_like(scores[0], -9), *scores[1:]])
    allowed[2][allowed[2] < limits[4]] = -9
    again = set_thresholds(program, limits)(**own.call, taps=True)[1]["exits.depth"]
    assert torch.equal(again, places[allowed.argmax(0)]) and not torch.equal(again, taps["exits.depth"])


def test_of_equally_sure_exits_the_first_is_taken(wav2vec2):
    program = copy.deepcopy(wav2vec2.program).rewrite(
        Exits(at=(2, 4), head="classifier", per="sequence", rule="max", threshold=-math.inf), check=False
    )
    with torch.no_grad():  # both uniform, and so is the model's own answer
        program.tensor("lm_head.weight").zero_()
        program.tensor("lm_head.bias").zero_()
        assert program(**wav2vec2.call, taps=True)[1]["exits.depth"].tolist() == [2] * 6


def test_rows_do_not_depend_on_each_other(wav2vec2, max_diff):
    scores = wav2vec2.mean(entropy(wav2vec2.readings(2)[0]))
    program = wav2vec2.program.rewrite(
        Exits(at=(2,), per="sequence", score="entropy", threshold=middle(scores)), check=False
    )
    with torch.no_grad():
        together, taps = program(**wav2vec2.call, taps=True)
        for row in range(6):
            alone, own = program(**{n: t[row : row + 1] for n, t in wav2vec2.call.items()}, taps=True)
            assert own["exits.depth"].item() == taps["exits.depth"][row].item()
            assert max_diff(alone.logits[0], together.logits[row]) <= NEAR


def test_a_row_without_frames_has_no_score_and_stays():
    score = averaged(torch.tensor([[1.0, 2.0, 9.0], [1.0, 2.0, 9.0]]), torch.tensor([[True, True, False], [False] * 3]))
    assert score[0] == 1.5 and score[1].isnan()
    _, program, x, mask = padded("kept")
    mask[1] = 0
    program = program.rewrite("exits{at=[1],per=sequence,score=posterior,threshold=-1e9}", check=False)
    assert program(x, mask, taps=True)[1]["exits.depth"].tolist() == [1, 3, 1]


# ---- heads


def test_own_heads_start_as_the_models_and_are_trained_by_ctc_while_the_model_stays_bitwise(wav2vec2, max_diff):
    program = wav2vec2.program.rewrite(Exits(at=(1, 2), head="own", per="sequence", score="entropy"), check=False)
    names = {n.removeprefix("hcx.exits_0.") for n in program.new_parameters()}
    own = ("lm_head.bias", "lm_head.weight", "wav2vec2.encoder.layer_norm.bias", "wav2vec2.encoder.layer_norm.weight")
    assert names == {f"{k}.{n}" for k in (1, 2) for n in own}
    readings = wav2vec2.readings(1, 2)
    taps = program(**wav2vec2.call, taps=True)[1]
    assert all(max_diff(taps[f"exits.{k}.logits"].detach(), r) <= NEAR for k, r in zip((1, 2), readings, strict=False))
    optimizer = torch.optim.AdamW(program.new_parameters().values(), lr=1e-2)
    targets = torch.tensor([[3, 4, 4], [5, 3, -100], [6, -100, -100], [7, 8, 9], [3, -100, -100], [4, 5, -100]])
    found = []
    for _ in range(6):
        taps = program(**wav2vec2.call, taps=True)[1]
        loss = losses.ctc(losses.taps_of(taps), targets, taps["exits.valid"].sum(1))
        optimizer.zero_grad()
        loss.backward()
        assert all(bool(p.grad.any()) for p in program.new_parameters().values())
        optimizer.step()
        found.append(loss.item())
    assert found[-1] < 0.8 * found[0]
    with torch.no_grad():
        assert torch.equal(program(**wav2vec2.call).logits, wav2vec2.model(**wav2vec2.call).logits)
        taps, output = (
            program(**wav2vec2.call, taps=True)[1],
            wav2vec2.model(**wav2vec2.call, output_hidden_states=True),
        )
        own = {n.removeprefix("hcx.exits_0.2."): p for n, p in program.new_parameters().items() if ".2." in n}
        norm = [own[f"wav2vec2.encoder.layer_norm.{n}"] for n in ("weight", "bias")]
        x = F.layer_norm(output.hidden_states[1], (32,), *norm)
        expected = F.linear(x, own["lm_head.weight"], own["lm_head.bias"])
    assert max_diff(taps["exits.2.logits"], expected) <= NEAR < max_diff(expected, readings[1])


def test_classifiers_at_each_frame_are_fitted_to_the_models_answers(hubert, max_diff):
    program = hubert.program.rewrite(Exits(at=(2, 4), head="classifier", per="sequence"), check=False)
    batches = [program.signature.bind((), {n: t[i : i + 2] for n, t in hubert.call.items()}) for i in (0, 2, 4)]
    fitted, report = fit(program, batches)
    assert report.positions["heads"] == sum(hubert.frames[:4]), "padding is left out"
    with torch.no_grad():
        hidden = hubert.model(**hubert.call, output_hidden_states=True)
        taps = fitted(**hubert.call, taps=True)[1]
    weight, bias = (fitted.tensor(f"hcx.exits_0.4.{n}").detach() for n in ("weight", "bias"))
    assert weight.shape == (12, 32)
    assert max_diff(taps["exits.4.logits"], F.linear(hidden.hidden_states[3], weight, bias)) <= NEAR
    right = [
        (taps["exits.4.logits"].argmax(-1) == hidden.logits.argmax(-1))[row, :n].float()
        for row, n in enumerate(hubert.frames)
    ]
    assert torch.cat(right[:4]).mean() > 0.8, "fitted rows"
    assert "exits.4.logits" in taps and hidden.logits.argmax(-1).unique().numel() >= 5


# ---- which positions count


class Padded(nn.Module):
    """Blocks over ``[B, T, 16]`` with a mask of positions, hidden from attention the way round that is asked for."""

    def __init__(self, way: str):
        super().__init__()
        self.way = way
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(3))
        self.head = nn.Linear(16, 7)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.way == "of rows":
            x = x * mask.sum(1)[:, None, None]
        for block in self.blocks:
            hidden = None if self.way != "dropped" else mask == 0
            x = block(x, src_key_padding_mask=hidden)
            if self.way == "kept":
                x = x * (mask > 0)[..., None]
        logits = self.head(x)
        return logits.transpose(0, 1) if self.way == "time first" else logits


def padded(way: str):
    torch.manual_seed(0)
    model = Padded(way).train(False)
    x, mask = torch.randn(3, 8, 16), torch.ones(3, 8, dtype=torch.long)
    return model, trace(model, (x, mask)), x, mask


@pytest.mark.parametrize(("way", "inverted"), [("kept", False), ("dropped", True)])
def test_the_mask_is_found_either_way_round(way, inverted):
    _, program, x, mask = padded(way)
    answer = program.graph.output_node().args[0][0]
    node, dropped = find_valid(program, answer)
    mask[1, 5:] = 0
    _, taps = program.rewrite("exits{at=[1],per=sequence}", check=False)(x, mask, taps=True)
    assert taps["exits.valid"].sum(1).tolist() == [8, 5, 8]
    assert dropped == inverted, node.name


@pytest.mark.parametrize("way", ["time first", "of rows"])
def test_where_it_is_not_known_what_a_row_or_its_positions_are_sequences_do_not_leave(way):
    _, program, *_ = padded(way)
    with pytest.raises(NoMatchError) as caught:
        program.rewrite("exits{at=[1],per=sequence}")
    assert {"time first": "batch", "of rows": "mask"}[way] in caught.value.where


def test_a_cache_holds_no_whole_sequences():
    program = trace(tiny_llama(3), (token_ids(24).reshape(2, 12),))
    with pytest.raises(NoMatchError) as caught:
        program.rewrite("exits{at=[1],per=sequence}")
    assert "cache=False" in caught.value.where


@pytest.mark.parametrize(
    "options",
    [
        "per=sequence,score=patience",
        "per=sequence,score=probe",
        "rule=max,score=cosine",
        "rule=max,form=cond",
        *(f"score={s},candidates=5" for s in ("cosine", "probe", "gate", "palbert")),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, wav2vec2):
    with pytest.raises(UsageError) as caught:
        wav2vec2.program.plan(f"exits{{at=[1],{options}}}")
    assert caught.value.where and caught.value.hint


# ---- forms that save


def test_rows_that_left_are_computed_no_further_in_every_form(wav2vec2, max_diff, tmp_path):
    scores = [wav2vec2.mean(posterior(r)) for r in wav2vec2.readings(*PLACES)]
    program = wav2vec2.program.rewrite(Exits(at=PLACES, per="sequence", score="posterior"), check=False)
    program = set_thresholds(program, {k: middle(s) for k, s in zip(PLACES, scores, strict=False)})
    with torch.no_grad():
        expected, taps = program(**wav2vec2.call, taps=True)
    depth = taps["exits.depth"]
    found = Compact(program)(**wav2vec2.call)
    assert torch.equal(found.depth, depth) and max_diff(found.logits, expected.logits) <= NEAR
    assert found.rows == [n for k in (0, *PLACES) if (n := int((depth > k).sum()))] and found.rows[-1] < found.rows[1]
    fast = program.rewrite("skipping", check=False)
    with torch.no_grad():
        output, skipped = fast(**wav2vec2.call, taps=True)
    assert torch.equal(output.logits, expected.logits) and torch.equal(skipped["exits.depth"], depth)
    program.save(tmp_path / "a.hcx")
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "a.hcx")(**wav2vec2.call).logits, expected.logits)


def test_the_pieces_of_an_encoder_that_shortens_its_input(wav2vec2, max_diff):
    first, second, rest = split(wav2vec2.program, at=(2, 4))
    with torch.no_grad():
        known = dict(first(**wav2vec2.call))
        for piece in (second, rest):
            known |= piece(**{i.name: {**known, **wav2vec2.call}[i.name] for i in piece.inputs})
        output = wav2vec2.model(**wav2vec2.call, output_hidden_states=True)
    assert max_diff(known["stream.2"], output.hidden_states[1]) <= NEAR
    assert max_diff(known["logits"], output.logits) <= NEAR
    shapes = [i.shape for i in second.inputs if i.name == "stream.2"]
    assert shapes[0][0] == "batch" and isinstance(shapes[0][1], str) and shapes[0][2] == 32


def test_what_needs_every_exit_is_not_cut_or_skipped(wav2vec2):
    program = wav2vec2.program.rewrite(Exits(at=(1, 2), rule="max", per="sequence"), check=False)
    batch = program.signature.bind((), wav2vec2.call)
    for refused in (lambda: Compact(program), lambda: calibrate(program, [batch], [batch], budget=3)):
        with pytest.raises(UsageError) as caught:
            refused()
        assert "rule=" in caught.value.hint
    with pytest.raises(NoMatchError):
        program.rewrite("skipping")
    costs = exit_costs(program, batch)
    single = exit_costs(wav2vec2.program.rewrite("exits{at=[1,2],per=sequence}", check=False), batch)
    head = 2 * 32 * 12
    assert costs.leave == pytest.approx((single.plain + 2 * head,) * 3) and costs.plain == single.plain


# ---- calibration


def collapsed(classes: list[int]) -> tuple[int, ...]:
    said = [c for i, c in enumerate(classes) if i == 0 or c != classes[i - 1]]
    return tuple(c for c in said if c != 0)


@pytest.mark.parametrize("blank", [0, None])
def test_sequences_agree_where_their_hypotheses_do(hubert, blank):
    program = copy.deepcopy(hubert.program).rewrite(Exits(at=(2, 4), per="sequence", score="entropy"), check=False)
    with torch.no_grad():  # a stream that hardly changes, so that some hypotheses agree and others do not
        for name, parameter in program.named_parameters():
            inner = any(layer in name for layer in ("layers.1", "layers.2", "layers.3"))
            if inner and name.endswith(("v_proj.weight", "output_dense.weight")):
                parameter.mul_(0.3)
        taps = program(**hubert.call, taps=True)
    readings = [taps[1]["exits.2.logits"], taps[1]["exits.4.logits"], taps[0].logits]
    said = [
        [(collapsed if blank == 0 else tuple)(r[row, :n].argmax(-1).tolist()) for row, n in enumerate(hubert.frames)]
        for r in readings
    ]
    batches = [program.signature.bind((), {n: t[i : i + 3] for n, t in hubert.call.items()}) for i in (0, 3)]
    width = max(len(s) for s in said[1])
    truth = torch.tensor([[*s, *[-100] * (width - len(s))] for s in said[1]])  # what the second exit says
    trials = measure(program, batches, blank=blank, labels=list(truth.split(3)))
    assert [[trials.hypotheses[n] for n in row] for row in trials.answers.tolist()] == said
    figures = trials.figures([math.inf, -math.inf])
    assert figures["positions"] == 6 and figures["accuracy"] == 1
    assert figures["agreement"] == pytest.approx(sum(a == b for a, b in zip(said[1], said[2], strict=True)) / 6)
    assert trials.scores[1].tolist() == pytest.approx(hubert.mean(entropy(readings[1])).tolist(), abs=1e-5)


def test_calibrated_for_a_budget_rows_take_that_many_blocks(wav2vec2):
    program = wav2vec2.program.rewrite(Exits(at=PLACES, per="sequence", score="entropy"), check=False)
    generator = torch.Generator().manual_seed(1)
    waves = torch.randn(40, 2000, generator=generator) * torch.rand(40, 1, generator=generator) * 3
    batches = [
        program.signature.bind((), {"input_values": w, "attention_mask": m})
        for w, m in zip(waves.split(10), wav2vec2.call["attention_mask"][[0, 1, 2, 3, 5] * 8].split(10), strict=True)
    ]
    ready, report = calibrate(program, batches[:3], batches[3:], budget=3.5, method="quantile")
    assert report.calibration["positions"] == 30 and report.calibration["mean_depth"] == pytest.approx(3.5, abs=0.15)
    with torch.no_grad():
        depth = torch.cat([
            ready(input_values=b[0], attention_mask=b[1], taps=True)[1]["exits.depth"] for b in batches[:3]
        ])  # fmt: skip
    assert depth.double().mean().item() == pytest.approx(report.calibration["mean_depth"])
    shares = report.calibration["shares"]
    relative = exit_costs(program, batches[0]).relative()
    assert report.calibration["net_flops"] == pytest.approx(
        sum(s * c for s, c in zip(shares.values(), relative, strict=True))
    )


@pytest.mark.parametrize("rule", ["first", "max"])
def test_onnx_chooses_the_same_exits(rule, hubert, max_diff, tmp_path):
    pytest.importorskip("onnxruntime")
    from hcx.export import OnnxSession, to_onnx

    program = hubert.program.rewrite(Exits(at=PLACES, per="sequence", score="entropy", rule=rule), check=False)
    scores = [hubert.mean(entropy(r)) for r in hubert.readings(*PLACES)[:-1]]
    limits = [middle(s) for s in scores] if rule == "first" else [-math.inf] * 3
    program = set_thresholds(program, dict(zip(PLACES, limits, strict=True)))
    with torch.no_grad():
        output, taps = program(**hubert.call, taps=True)
    assert len(taps["exits.depth"].unique()) > 1
    session = OnnxSession(to_onnx(program, tmp_path / "m.onnx").path)
    assert max_diff(session(**hubert.call).logits, output.logits) <= NEAR


def test_options_that_would_do_nothing_are_refused(hubert):
    whole = hubert.program.rewrite("exits{at=[2,4],per=sequence}", check=False)
    single = hubert.program.rewrite("exits{at=[2,4]}", check=False)
    batch = [whole.signature.bind((), hubert.call)]
    for call, where in (
        (lambda: measure(whole, batch, skip=6), "skip"),
        (lambda: measure(whole, batch, blank=12), "blank"),
        (lambda: measure(whole, batch, blank=-1), "blank"),
        (lambda: calibrate(single, batch, batch, budget=4, blank=0), "blank"),
        (lambda: calibrate(whole, batch, batch, budget=4, confidence=0.9), "confidence"),
        (lambda: calibrate(whole, batch, batch, risk=0.1, confidence=1), "confidence"),
        (lambda: calibrate(whole, batch, batch, risk=0.1, confidence=math.nan), "confidence"),
        (lambda: set_thresholds(whole, {2: math.nan}), "thresholds"),
        (lambda: fit(whole, batch, ridge=math.nan), "ridge"),
        (lambda: fit(whole, batch, ridge=-1), "ridge"),
    ):
        with pytest.raises(UsageError) as caught:
            call()
        assert caught.value.where == where and caught.value.hint
    assert measure(whole, batch, blank=11).hypotheses


def test_a_risk_that_nothing_meets_is_said_so(hubert):
    program = hubert.program.rewrite("exits{at=[2,4],per=sequence}", check=False)
    batch = [program.signature.bind((), hubert.call)]  # six sentences can show no risk of 1 %
    _, report = calibrate(program, batch, batch, risk=0.01)
    assert set(report.thresholds.values()) == {None}
    assert "no thresholds passed" in report.note and "p = 1" not in report.note and "0.95" in report.note


@pytest.mark.parametrize(
    ("command", "options", "where"),
    [
        ("fit", {"ridge": math.nan}, "--ridge"),
        ("fit", {"ridge": -1.0}, "--ridge"),
        ("calibrate", {"budget": 3.0, "confidence": 0.9}, "--confidence"),
        ("calibrate", {"risk": 0.1, "confidence": 1.0}, "--confidence"),
    ],
)
def test_the_command_line_refuses_the_same_before_it_opens_anything(command, options, where):
    from hcx.cli import cmd_exits

    with pytest.raises(UsageError) as caught:
        getattr(cmd_exits, command)("no.hcx", text="no.txt", **options)
    assert caught.value.where == where and caught.value.hint
