"""Exits that skip work: against the models' own layers run by hand, row by row, and counted."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hcx.export import to_onnx, to_pt2
from hcx.passes import Exits
from hcx.rewrite import NoMatchError, PlanError, UsageError, load, trace
from hcx.rewrite.run.generation import decode, greedy
from hcx.rewrite.testing import conformance
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from tests.conftest import token_ids

NEAR = 1e-4
PLACES = (2, 4)


def flops(program, *args, taps: bool = False) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        program(*args, taps=taps)
    return counter.get_total_flops()


def set_thresholds(program, value: float) -> None:
    for name, tensor in program.named_buffers():
        if name.endswith("threshold"):
            tensor.fill_(value)


@pytest.fixture(scope="module")
def plain(llama_without_cache):
    """A Llama without a cache, its Program, and rows of token ids."""
    return llama_without_cache.model, llama_without_cache.program, token_ids(400).reshape(8, 50)


@pytest.fixture(scope="module")
def forms(plain):
    """The same exits in both forms."""
    return tuple(plain[1].rewrite(Exits(at=PLACES, form=form), check=False) for form in ("select", "cond"))


@pytest.mark.parametrize("share", [-1.0, 0.02, 0.3, 0.6, 1.0, 2.0])
def test_both_forms_give_the_same_bitwise(plain, forms, share):
    """Nobody, some, and everybody leave; share is a quantile of the scores at the first exit."""
    select, cond = forms
    for shape in [(2, 12), (1, 1), (3, 33)]:
        ids = plain[2].flatten()[: shape[0] * shape[1]].reshape(shape)
        with torch.no_grad():
            scores = select(ids, taps=True)[1]["exits.2.score"]
            threshold = share if share in (-1.0, 2.0) else scores.flatten().quantile(1 - share).item()
            for program in forms:
                set_thresholds(program, threshold)
            expected, known = select(ids, taps=True)
            got, taps = cond(ids, taps=True)
        assert torch.equal(got.logits, expected.logits) and torch.equal(cond(ids).logits, got.logits)
        assert torch.equal(taps["exits.depth"], known["exits.depth"])
        assert torch.equal(taps["exits.2.score"], known["exits.2.score"])
        skipped = bool((known["exits.depth"] == 2).all())
        assert bool(taps["exits.4.score"].isnan().all()) == skipped
        assert skipped or torch.equal(taps["exits.4.score"], known["exits.4.score"])
        assert skipped or torch.equal(taps["exits.4.logits"], known["exits.4.logits"])


def test_what_is_skipped_is_not_computed(plain, forms):
    _, program, rows = plain
    ids, (_, cond) = rows[:2, :16], forms
    head, block = (2 * ids.numel() * n for n in (32 * 128, 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64))
    whole = flops(program, ids)
    assert whole == head + 6 * block, "attention on the CPU is not counted"
    for threshold, blocks, heads in [(-1.0, 2, 1), (torch.inf, 6, 3)]:
        set_thresholds(cond, threshold)
        assert flops(cond, ids) == blocks * block + heads * head
        assert flops(cond, ids, taps=True) == flops(cond, ids)


def test_never_is_bitwise_the_model_with_all_checks(plain, llama):
    for program, kv in ((plain[1], None), (llama.program, "propagate")):
        never = program.rewrite(Exits(at=PLACES, form="cond", kv=kv))
        for shape in [(2, 12), (1, 1), (3, 33)]:
            ids = llama.ids(*shape)
            with torch.no_grad():
                assert torch.equal(never(ids).logits, llama.model(ids).logits)


# ---- with a cache


def by_hand(model, ids: torch.Tensor, places: tuple[int, ...], threshold: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Every layer on a stream in which positions that have left stay as they were; logits and depths."""
    inner = model.model
    positions = torch.arange(ids.shape[1])[None]
    stream = inner.embed_tokens(ids)
    angles = inner.rotary_emb(stream, positions)
    mask = torch.full((ids.shape[1], ids.shape[1]), -torch.inf).triu(1)[None, None]
    left = torch.zeros(ids.shape, dtype=torch.bool)
    logits, depth = torch.zeros(*ids.shape, model.config.vocab_size), torch.full(ids.shape, len(inner.layers))
    for number, layer in enumerate(inner.layers):
        if number in places:
            here = model.lm_head(inner.norm(stream))
            fire = (here.softmax(-1).amax(-1) >= threshold) & ~left
            logits[fire], depth[fire] = here[fire], number
            left |= fire
        output = layer(stream, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        output = output[0] if isinstance(output, tuple) else output
        stream = torch.where(left[..., None], stream, output)
    logits[~left] = model.lm_head(inner.norm(stream))[~left]
    return logits, depth


@pytest.fixture(scope="module")
def cached(llama):
    return llama.program.rewrite(Exits(at=PLACES, form="cond", kv="propagate"), check=False)


def threshold_for(model, rows: torch.Tensor, share: float) -> float:
    """A score that this share of the positions reaches at the first exit."""
    with torch.no_grad():
        hidden = model(rows, output_hidden_states=True).hidden_states[PLACES[0]]
        return model.lm_head(model.model.norm(hidden)).softmax(-1).amax(-1).flatten().quantile(1 - share).item()


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_skipped_blocks_get_keys_and_values_from_the_stream_at_the_exit(llama, cached, share, max_diff):
    rows = llama.ids(3, 20)
    threshold = threshold_for(llama.model, rows, share)
    set_thresholds(cached, threshold)
    with torch.no_grad():
        expected, depth = by_hand(llama.model, rows, PLACES, threshold)
        output, taps = cached(rows, taps=True)
        plainly = llama.model(rows).logits
    assert len(depth.unique()) == 3
    assert torch.equal(taps["exits.depth"], depth)
    assert max_diff(output.logits, expected) <= NEAR < 1e-2 < max_diff(expected, plainly)


def test_decoding_that_skips_equals_the_forward_by_hand(llama, cached, max_diff):
    """Single steps skip blocks; the cache they leave must be what later steps expect."""
    prompt = llama.ids(1, 12)
    threshold = threshold_for(llama.model, prompt, 0.25)
    set_thresholds(cached, threshold)
    counted = []

    def run(flat):
        with FlopCounterMode(display=False) as counter:
            result = cached.run_flat(flat)
        counted.append(counter.get_total_flops())
        return result

    tokens, logits = decode(cached.signature, run, cached.output_names, prompt, 24)
    with torch.no_grad():
        expected, depth = by_hand(llama.model, tokens, PLACES, threshold)
    for step, got in enumerate(logits):
        assert max_diff(got, expected[:, prompt.shape[1] + step - 1]) <= NEAR, step
    steps = depth[0, prompt.shape[1] : -1]
    assert len(steps.unique()) == 3, "not every depth occurs"
    order = torch.tensor(counted[1:]).argsort()
    assert bool((steps[order].diff() >= 0).all()), "a step that leaves earlier computes no less"


def test_a_batch_equals_its_rows_alone(llama, cached, max_diff):
    """Eight prompts whose last positions leave at three depths, generated together and one by one."""
    rows = llama.ids(8, 10)
    set_thresholds(cached, threshold_for(llama.model, rows, 0.4))
    with torch.no_grad():
        output, taps = cached(rows, taps=True)
    assert len(taps["exits.depth"][:, -1].unique()) == 3
    together = greedy(cached, rows, 16)
    for number, row in enumerate(rows):
        with torch.no_grad():
            alone = cached(row[None])
        assert max_diff(alone.logits[0], output.logits[number]) <= 1e-5
        assert torch.equal(greedy(cached, row[None], 16)[0], together[number])


def test_smollm2_leaves_row_by_row_and_never_is_bitwise(smollm2, max_diff):
    places, rows = (10, 20, 25), smollm2.ids(8, 10)
    program = smollm2.program.rewrite(Exits(at=places, form="cond", kv="propagate"), check=False)
    with torch.no_grad():
        expected, taps = program(rows, taps=True)
        assert torch.equal(expected.logits, smollm2.model(rows).logits)
        scores = torch.stack([taps[f"exits.{k}.score"][:, -1] for k in places])
        set_thresholds(program, spread(scores))
        output, taps = program(rows, taps=True)
        assert len(taps["exits.depth"][:, -1].unique()) >= 3
        for number, row in enumerate(rows):
            alone, known = program(row[None], taps=True)
            assert torch.equal(known["exits.depth"][0], taps["exits.depth"][number])
            assert max_diff(alone.logits[0], output.logits[number]) <= 2e-3, number
    together = greedy(program, rows[:3], 6)
    for number in range(3):
        assert torch.equal(greedy(program, rows[number : number + 1], 6)[0], together[number])


def test_positions_that_left_hold_still_while_others_go_on(llama, cached):
    """The cache of a row must not tell who shared its batch."""
    rows = llama.ids(2, 8)
    set_thresholds(cached, threshold_for(llama.model, rows, 0.5))
    with torch.no_grad():
        pair, alone = (cached.run_flat(cached.signature.bind((r,), {})) for r in (rows, rows[:1]))
    for name, both, one in zip(cached.output_names, pair, alone, strict=True):
        assert (both[:1] - one).abs().max() <= 1e-5, name


def test_a_cache_without_a_rule_for_skipped_blocks_is_refused(llama, plain):
    with pytest.raises(NoMatchError, match="kv=propagate"):
        llama.program.rewrite("exits{at=[2],form=cond}")
    with pytest.raises(UsageError, match="select computes every block"):
        plain[1].rewrite("exits{at=[2],kv=propagate}")


def test_passes_that_look_for_blocks_go_first(plain):
    program = plain[1].rewrite("lora{rank=2},exits{at=[2,4],form=cond}", check=False)
    names = [n for n in program.origin if n.startswith("hcx.lora")]
    assert len(names) == 2 * 6 * 7, "adapters are in the blocks that are skipped too"
    with pytest.raises(PlanError, match="`lora` cannot follow `exits`"):
        program.rewrite("lora{rank=2}")


# ---- encoders and stages


class Stages(nn.Module):
    """Four stages of two convolutions, each wider and smaller, and a linear head: ``[B, 1, 16, 16] -> [B, 4]``."""

    def __init__(self):
        super().__init__()
        widths = (1, 8, 12, 16, 24)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1, stride=1 + (i > 0)), nn.ReLU(), nn.Conv2d(b, b, 3, padding=1),
                          nn.ReLU())
            for i, (a, b) in enumerate(itertools.pairwise(widths))
        )  # fmt: skip
        self.head = nn.Linear(24, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


@pytest.fixture(scope="module")
def stages():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = Stages().eval(), torch.randn(4, 1, 16, 16)
        return model, trace(model, (x,)), torch.randn(8, 1, 16, 16)


def untrained_heads(program, seed: int = 1) -> None:
    """Classifiers of exits start undecided; here they are someone's."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in program.new_parameters().values():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))


def test_stages_of_new_widths_are_skipped(stages):
    _, program, x = stages
    select, cond = (program.rewrite(Exits(at=(1, 2, 3), form=f), check=False) for f in ("select", "cond"))
    for made in (select, cond):
        untrained_heads(made)
    whole, seen = flops(program, x), set()
    with torch.no_grad():
        scores = torch.stack([select(x, taps=True)[1][f"exits.{k}.score"] for k in (1, 2, 3)])
        for threshold in (-1.0, scores[0].min().item() - 1e-3, spread(scores), 2.0):
            for made in (select, cond):
                set_thresholds(made, threshold)
            expected, known = select(x, taps=True)
            got, taps = cond(x, taps=True)
            assert torch.equal(got, expected) and torch.equal(taps["exits.depth"], known["exits.depth"])
            seen.update(known["exits.depth"].tolist())
            for number, row in enumerate(x):
                assert (cond(row[None])[0] - got[number]).abs().max() <= 1e-5
        assert len(seen) >= 3
        set_thresholds(cond, -1.0)
    assert flops(cond, x) < 0.6 * whole


def spread(scores: torch.Tensor) -> float:
    """The threshold at which most exits are used; scores are ``[exits, rows]``."""

    def used(threshold: float) -> int:
        fires = torch.cat([scores >= threshold, torch.ones_like(scores[:1], dtype=torch.bool)])
        return len(fires.int().argmax(0).unique())

    ordered = scores.flatten().sort().values
    return max(((ordered[1:] + ordered[:-1]) / 2).tolist(), key=used)


def tiny_encoder():
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32,
                        max_position_embeddings=32, num_labels=3, initializer_range=0.3)  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BertForSequenceClassification(config).eval()


def tiny_vit():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32, image_size=8,
                       patch_size=4, num_channels=1, num_labels=3, initializer_range=0.3)  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ViTForImageClassification(config).eval()


ENCODERS = {
    "bert": (tiny_encoder, lambda b: token_ids(b * 9, 64).reshape(b, 9)),
    "vit": (tiny_vit, lambda b: torch.randn(b, 1, 8, 8, generator=torch.Generator().manual_seed(2))),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_leave_row_by_row(name):
    make, inputs = ENCODERS[name]
    model = make()
    program, x = trace(model, (inputs(2),)), inputs(8)
    select, cond = (
        program.rewrite(Exits(at=(1, 2, 3), form=f, head="classifier"), check=False) for f in ("select", "cond")
    )
    for made in (select, cond):
        untrained_heads(made)
    with torch.no_grad():
        scores = torch.stack([select(x, taps=True)[1][f"exits.{k}.score"] for k in (1, 2, 3)])
        for threshold in (-1.0, spread(scores), scores[0].min().item() - 1e-3, 2.0):
            for made in (select, cond):
                set_thresholds(made, threshold)
            got, _ = cond(x, taps=True)
            assert torch.equal(got.logits, select(x).logits)
            for number in range(8):
                assert (cond(x[number : number + 1]).logits[0] - got.logits[number]).abs().max() <= 1e-5
            if threshold == 2.0:
                assert torch.equal(got.logits, model(x).logits)
        set_thresholds(cond, spread(scores))
        assert len(cond(x, taps=True)[1]["exits.depth"].unique()) >= 3
        set_thresholds(cond, -1.0)
    assert flops(cond, x) < 0.5 * flops(program, x)


# ---- files and ONNX


def sessions(program, path) -> tuple:
    import onnx
    import onnxruntime

    report = to_onnx(program, path, overwrite=True)
    model = onnx.load(path)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return report, model, onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def operators(graph):
    """Operators of a graph and of its branches."""
    for node in graph.node:
        yield node.op_type
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from operators(attribute.g)


def branches(graph):
    """Branches of a graph, and those inside them."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield attribute.g
                yield from branches(attribute.g)


@pytest.mark.parametrize("threshold", [-1.0, 0.05, 2.0])
def test_onnx_branches_on_either_side_with_one_copy_of_the_weights(plain, forms, threshold, tmp_path):
    program, cond = plain[1], forms[1]
    set_thresholds(cond, threshold)
    report, model, session = sessions(cond, str(tmp_path / "cond.onnx"))
    assert report.producer == "direct" and report.verified
    assert [n.op_type for n in model.graph.node].count("If") == 1, "who has left at the first exit is not asked again"
    assert list(operators(model.graph)).count("If") == 2
    size = sum(len(i.raw_data) for i in model.graph.initializer)
    parameters = sum(p.numel() * 4 for p in program.parameters())
    assert parameters <= size <= parameters + 8192
    assert not any(branch.initializer for branch in branches(model.graph)), "a branch holds tensors of its own"
    for shape in [(2, 12), (1, 1), (3, 30)]:
        ids = plain[2].flatten()[: shape[0] * shape[1]].reshape(shape)
        feed = {i.name: torch.ones_like(ids).numpy() if i.name == "attention_mask" else ids.numpy()
                for i in session.get_inputs()}  # fmt: skip
        with torch.no_grad():
            assert (torch.tensor(session.run(["logits"], feed)[0]) - cond(ids).logits).abs().max() <= 1e-4


def test_onnx_makes_up_nothing_for_stages_that_are_left_out(stages, tmp_path):
    program = stages[1].rewrite(Exits(at=(1, 2), form="cond"), check=False)
    untrained_heads(program)
    set_thresholds(program, 0.5)
    _, model, _ = sessions(program, str(tmp_path / "stages.onnx"))
    then = next(a.g for n in model.graph.node if n.op_type == "If" for a in n.attribute if a.name == "then_branch")
    assert {n.op_type for n in then.node} == {"Identity"}
    read = {name for graph in (model.graph, *branches(model.graph)) for node in graph.node for name in node.input}
    assert {i.name for i in model.graph.initializer} <= read, "nothing is stored that no node reads"


def test_onnx_with_a_cache_propagates(llama, cached, tmp_path):
    """Checked step by step: to_onnx compares every output, caches included, with and without past tokens."""
    set_thresholds(cached, threshold_for(llama.model, llama.ids(2, 12), 0.5))
    for threshold in (None, -1.0):
        if threshold is not None:
            set_thresholds(cached, threshold)
        report, model, _ = sessions(cached, str(tmp_path / "cond.onnx"))
        assert report.producer == "direct" and report.verified and report.max_error <= 1e-4
    found = Counter(operators(model.graph))
    # keys of the two blocks behind the second exit are filled in where the first one is taken, and where the second one is
    fills = 2 + 2 * 2
    assert found["Attention"] == 6 and found["RotaryEmbedding"] == 2 * 6 + fills, "patterns are seen in branches too"
    assert found["RMSNormalization"] == 2 * 6 + 1 + 2 + fills


def test_the_command_line_rewrites_verifies_and_exports(plain, tmp_path, capsys):
    from hcx.cli.main import main

    plain[1].save(tmp_path / "plain.hcx")
    argv = [["rewrite", f"{tmp_path}/plain.hcx", "--pass", "exits{at=[2,4],form=cond,threshold=0.05}", "-o",
             f"{tmp_path}/cond.hcx"], ["verify", f"{tmp_path}/cond.hcx"], ["inspect", f"{tmp_path}/cond.hcx"],
            ["diff", f"{tmp_path}/plain.hcx", f"{tmp_path}/cond.hcx"],
            ["export", f"{tmp_path}/cond.hcx", "-o", f"{tmp_path}/cond.onnx"]]  # fmt: skip
    for arguments in argv:
        assert main(arguments) == 0, (arguments, capsys.readouterr().err)
    loaded, ids = load(tmp_path / "cond.hcx"), plain[2][:2, :12]
    with torch.no_grad():
        set_thresholds(loaded, 2.0)
        assert torch.equal(loaded(ids).logits, plain[0](ids).logits)


def test_the_torch_archive_keeps_the_branches(stages, tmp_path):
    program = stages[1].rewrite(Exits(at=(1, 2), form="cond"), check=False)
    untrained_heads(program)
    for threshold in (-1.0, 2.0):
        set_thresholds(program, threshold)
        done = to_pt2(program, str(tmp_path / "cond.pt2"), overwrite=True)
        loaded = torch.export.load(tmp_path / "cond.pt2").module()
        assert str(loaded.graph).count("higher_order.cond") == 2 and done.measured["bitwise"]


def test_classifier_heads_learn_through_taps_in_this_form_too(stages):
    program = stages[1].rewrite(Exits(at=(1, 2), form="cond"), check=False)
    x, labels = stages[2], torch.arange(8) % 3
    loss = sum(F.cross_entropy(program(x, taps=True)[1][f"exits.{k}.logits"], labels) for k in (1, 2))
    loss.backward()
    for name, parameter in program.new_parameters().items():
        assert bool(parameter.grad.any()), name


@pytest.mark.usefixtures("traced_once")
def test_it_conforms():
    assert conformance("exits{at=[1,2],form=cond}", subprocesses=False)
