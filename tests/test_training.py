"""Training a rewritten Program the ordinary ways, against eager, plain loops and closed forms."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hcx.rewrite import ArtefactError, BlockModule, SourceError, UsageError, load, trace
from hcx.rewrite.testing import tiny_decoder
from torch import nn
from torch.nn.functional import cross_entropy

from bench.checkpointing import measure
from tests.conftest import tiny_llama, token_ids

ROOT = Path(__file__).resolve().parent.parent
IDS = token_ids(24).reshape(2, 12)
LOOP = "looped{start=1,end=3,steps=2,scalar=0.3}"


# ---- train mode


class Layers(nn.Module):
    """Attention with dropout inside, an LSTM with dropout between its layers, dropout in place."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.3, batch_first=True)
        self.lstm = nn.LSTM(16, 16, 2, dropout=0.3, batch_first=True)
        self.drop = nn.Dropout(0.2, inplace=True)

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.drop(self.lstm(x)[0] + 0)


class Coin(nn.Module):
    """Skips its layer at random in train mode; with 0 it draws the coin all the same."""

    def __init__(self, probability: float):
        super().__init__()
        self.linear, self.probability = nn.Linear(16, 16), probability

    def forward(self, x):
        if self.training and torch.rand([]) < self.probability:
            return x
        return self.linear(x)


def stream(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(seed))


def drawn(module, *args) -> torch.Tensor:
    torch.manual_seed(11)
    with torch.no_grad():
        result = module(*args)
    return result if isinstance(result, torch.Tensor) else result.logits


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_dropout_inside_attention_follows_the_mode_through_loops_and_files(attention, tmp_path):
    model = tiny_llama(2, attention_dropout=0.3)
    model.set_attn_implementation(attention)
    program = trace(model, (IDS,), cache=False)
    looped = program.rewrite("looped{start=0,end=2,steps=2}", check=False)
    looped.train().save(tmp_path / "a.hcx")
    loaded = load(tmp_path / "a.hcx")
    assert looped.training and not loaded.training
    assert torch.equal(loaded(IDS).logits, model(IDS).logits), "saved in train mode, it drops out in eval mode"
    model.train()
    once, twice = drawn(model, IDS), drawn(looped, IDS)
    assert torch.equal(drawn(program.train(), IDS), once) and not torch.equal(once, drawn(program.eval(), IDS))
    assert torch.equal(drawn(loaded.train(), IDS), twice)
    inside = [n for n in looped.graph.nodes if n.meta.get("modes")]
    assert len(inside) == 4 and all(n.meta["modes"] == inside[0].meta["modes"] for n in inside)


def test_layers_with_dropout_of_their_own_draw_as_in_eager():
    torch.manual_seed(0)
    model = Layers().eval()
    program = trace(model, (stream(),))
    evaluated = drawn(program, stream())
    assert (evaluated - drawn(model, stream())).abs().max() <= 1e-5  # eager takes the fused path in eval mode
    assert torch.equal(drawn(program.train(), stream()), drawn(model.train(), stream()))
    assert not torch.equal(drawn(program, stream()), evaluated)
    assert torch.equal(drawn(program.eval(), stream()), evaluated)


@pytest.mark.parametrize(("model", "reason"), [
    (Coin(0.01), "skips layers at random"),
    (nn.TransformerDecoderLayer(16, 2, 32, dropout=0.1, batch_first=True), None),
    (Coin(0.0), None),
])  # fmt: skip
def test_what_train_mode_alone_does_is_refused_and_not_left_out(model, reason, tmp_path):
    args = (stream(), stream(1)) if isinstance(model, nn.TransformerDecoderLayer) else (stream(),)
    program = trace(model.eval(), args)
    program.save(tmp_path / "a.hcx")
    for one in (program, copy.deepcopy(program), load(tmp_path / "a.hcx")):
        if reason is None:
            assert one.train().training
            continue
        with pytest.raises(UsageError, match=reason) as caught:
            one.train()
        assert caught.value.where and "eval mode" in caught.value.hint and not one.training


class Sizes(nn.Module):
    """Numbers that follow the input's sizes are outputs too."""

    def __init__(self):
        super().__init__()
        self.f, self.drop = nn.Linear(4, 3), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.f(x)), x.shape[0], x.shape[1] * 2


def test_numbers_among_the_outputs_do_not_stand_in_the_way_of_train_mode():
    model, x = Sizes().eval(), torch.randn(2, 5, 4)
    program = trace(model, (x,))
    torch.manual_seed(0)
    got = program.train()(x)
    torch.manual_seed(0)
    wanted = model.train()(x)
    assert torch.equal(got[0], wanted[0]) and got[1:] == wanted[1:]


def test_dropout_that_the_eval_graph_has_no_op_for_is_refused():
    class Weights(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, dropout=0.3, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x)

    program = trace(Weights().eval(), (stream(),))
    with pytest.raises(UsageError, match="runs dropout in train mode, and the eval graph no such op"):
        program.train()


def test_a_file_names_no_other_modes(tmp_path):
    import json

    program = trace(tiny_llama(1, attention_dropout=0.3), (IDS,), cache=False)
    from hcx.rewrite.ir.graph_text import from_json, to_json

    data = json.loads(json.dumps(to_json(program.graph)))
    names = {n for n, _ in program.named_tensors()}
    assert any(n.meta.get("modes") == {"dropout_p": [0.0, 0.3]} for n in from_json(data, names).nodes)
    entry = next(e for e in data["nodes"] if "modes" in e)
    for wrong in ({"nothing": [0.0, 0.3]}, {"dropout_p": [0.0, "0.3"]}, {"dropout_p": 0.3}):
        entry["modes"] = wrong
        with pytest.raises(ArtefactError, match="as a mode"):
            from_json(data, names)


# ---- an ordinary module


@pytest.fixture(scope="module")
def tied():
    model = tiny_llama(4, tie_word_embeddings=True)
    return model, trace(model, (IDS,))


def step(module, ids: torch.Tensor = IDS, **call) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of one step; one seed, so that dropout is the same."""
    module.zero_grad()
    torch.manual_seed(5)
    result = module(ids, **call)
    logits = (result if isinstance(result, torch.Tensor) else result.logits).float()
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def assert_equal(got: tuple, expected: tuple) -> None:
    assert torch.equal(got[0], expected[0])
    assert got[1].keys() == expected[1].keys() and got[1]
    for name, gradient in expected[1].items():
        assert torch.equal(got[1][name], gradient), name


def blocks(module) -> list[str]:
    return [n for n, m in module.named_modules() if isinstance(m, BlockModule)]


@pytest.mark.parametrize("checkpoint", [None, "blocks"])
@pytest.mark.parametrize("pipeline", [None, f"{LOOP},exits{{at=[1]}}", "hc{mixer=ihc},lora"])
def test_the_module_has_the_names_and_gradients_of_the_model(tied, pipeline, checkpoint):
    model, program = tied
    program = program.rewrite(pipeline, check=False) if pipeline else copy.deepcopy(program)
    module = program.as_module(checkpoint)
    assert set(module.state_dict()) >= set(model.state_dict()) and list(module.state_dict()) == list(
        program.state_dict()
    )
    assert module.lm_head.weight is module.model.embed_tokens.weight is program.tensor("lm_head.weight")
    assert blocks(module) == [f"model.layers.{i}" for i in range(4)]
    mask = torch.ones_like(IDS)
    mask[1, 8:] = 0
    assert_equal(step(module, attention_mask=mask), step(program, attention_mask=mask))
    if pipeline is None:
        assert_equal(step(module), step(program))
        loss, gradients = step(model)
        assert torch.equal(step(module)[0], loss)
        for name, gradient in step(module)[1].items():
            assert (gradient - gradients[name]).abs().max() <= 1e-6 * max(1, gradients[name].abs().max()), name
    if program.taps:
        got, expected = (m(IDS, taps=True)[1] for m in (module, program))
        assert got.keys() == expected.keys() and all(torch.equal(got[n], expected[n]) for n in got)


def test_checkpointing_runs_every_pass_over_a_block_again_and_needs_less_memory(tied, monkeypatch):
    program = tied[1].rewrite(LOOP, check=False)
    ids = token_ids(4 * 64).reshape(4, 64)
    rows = measure(program, ids)
    assert rows["checkpointed"]["peak_mib"] < 0.7 * rows["module"]["peak_mib"]
    assert abs(rows["module"]["peak_mib"] / rows["program"]["peak_mib"] - 1) < 0.05
    module = program.as_module("blocks")
    runs: list[str] = []
    plain = type(module._hcx.schedule(False, False, torch.device("cpu")).segments[0]).__call__
    monkeypatch.setattr(
        "hcx.rewrite.host.module.Segment.__call__",
        lambda self, *given: runs.append(self.part.block) or plain(self, *given),
    )
    step(module)
    once = [f"model.layers.{n}" for n in ("0", "1", "2", "1~2", "2~2", "3")]
    done = [r for r in runs if r]
    assert done[:6] == once and done[6:] == once[::-1]
    with torch.no_grad():
        runs.clear(), module(IDS)
    assert [r for r in runs if r] == once


def test_checkpointing_repeats_dropout_and_autocast(tied):
    model = tiny_llama(2, attention_dropout=0.3)
    program = trace(model, (IDS,), cache=False)
    module = program.as_module("blocks")
    evaluated = step(module)
    assert_equal(step(module.train()), step(program.train()))
    assert_equal(step(module), step(program.as_module()))  # made in train mode
    assert not torch.equal(step(module)[0], evaluated[0])
    assert_equal(step(module.eval()), evaluated)
    module, program = tied[1].as_module("blocks"), tied[1]
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(step(module), step(program))
        assert module(IDS).logits.dtype == torch.bfloat16


class Lists(nn.Module):
    """Blocks whose weights lie in two lists: no module holds those of one block."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(128, 16)
        self.up = nn.ParameterList([torch.randn(32, 16) / 4 for _ in range(3)])
        self.down = nn.ParameterList([torch.randn(16, 32) / 4 for _ in range(3)])

    def forward(self, ids):
        x = self.embed(ids)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + torch.relu(x @ up.T) @ down.T
        return x @ self.embed.weight.T


def test_blocks_without_a_module_of_their_own_are_checkpointed_too():
    torch.manual_seed(0)
    model = Lists().eval()
    program = trace(model, (IDS,))
    module = program.as_module("blocks")
    assert list(module.state_dict()) == list(model.state_dict())
    assert blocks(module) == ["hcx_blocks"] and not list(module.hcx_blocks.parameters())
    assert_equal(step(module), step(model))


class Scan(nn.Module):
    """A block that fills a tensor row by row, in place."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        state = self.up(x)
        for i in range(1, 4):
            row = state[:, i, :i].clone()
            state[:, i, :i] = row + state[:, :i, :i].clone().sum(1)
        return x + self.down(state)


def test_a_block_keeps_what_it_writes_in_place():
    torch.manual_seed(0)
    embed = nn.Embedding(128, 16)
    model = nn.Sequential(embed, *[Scan() for _ in range(3)], nn.Linear(16, 128)).eval()
    program = trace(model, (IDS,))
    assert any("copy_" in str(n.target) for n in program.graph.nodes), "nothing is written in place"
    module = program.as_module("blocks")
    assert blocks(module) == ["1", "2", "3"]
    assert_equal(step(module), step(model))


@pytest.mark.parametrize("name", ["t5", "bloom_post", "convnext", "shared_block"])
def test_every_block_of_other_kinds_of_model_is_checkpointed(name):
    """Two stacks, blocks across modules, convolutions, one block called again: counts by hand."""
    from tests.zoo import ZOO

    model, args, kwargs = ZOO[name].build()
    program = trace(model, args, kwargs)
    module = program.as_module("blocks")
    flat = program.signature.complete(program.examples[0])
    found = []
    for one in (module, program):
        one.zero_grad()
        results = [t for t in one.run_flat([t.clone() for t in flat]) if t.is_floating_point() and t.requires_grad]
        sum(t.float().square().sum() for t in results).backward()
        found.append((torch.cat([t.flatten() for t in results]), {n: p.grad for n, p in one.named_parameters() if p.grad is not None}))  # fmt: skip
        found[-1] = (found[-1][0].detach(), {n: g.clone() for n, g in found[-1][1].items()})
    assert_equal(*found)
    segments = module._hcx.schedule(False, False, torch.device("cpu")).segments
    assert sum(s.part.block is not None for s in segments) == sum(ZOO[name].blocks)


def test_a_copy_trains_alone_and_moves_keep_the_program_whole(tied):
    program = copy.deepcopy(tied[1]).rewrite(LOOP, check=False)
    module = program.as_module("blocks")
    other = copy.deepcopy(module)
    assert other.lm_head.weight is other.model.embed_tokens.weight is not module.lm_head.weight
    assert_equal(step(other), step(module))
    torch.optim.SGD(module.parameters(), lr=0.5).step()
    assert torch.equal(program(IDS).logits, module(IDS).logits) and not torch.equal(step(other)[0], step(module)[0])
    assert program.to("cpu").sites().main.depth == 4, "values of a looped program with a cache are made again"
    assert program.as_module().to("cpu").lm_head.weight is program.tensor("lm_head.weight")


def test_what_a_module_cannot_be_is_refused(tied):
    program = tied[1]
    with pytest.raises(UsageError, match="checkpoint='all'"):
        program.as_module("all")
    with pytest.raises(UsageError, match="no blocks"):
        trace(nn.Linear(4, 4), (torch.randn(2, 4),)).as_module("blocks")
    with pytest.raises(UsageError, match="cannot be cast") as caught:
        program.as_module().to(torch.bfloat16)
    assert "program.to(dtype)" in caught.value.hint
    with pytest.raises(UsageError, match="skips layers"):
        trace(Coin(0.5).eval(), (stream(),)).as_module().train()


def test_smollm2_with_checkpointing_has_the_gradients_of_the_program(smollm2):
    program = smollm2.program.rewrite("looped,exits", check=False)
    ids = smollm2.ids(1, 16)
    assert_equal(step(program.as_module("blocks"), ids), step(program, ids))


# ---- what is trained


@pytest.mark.parametrize(("train", "prefixes"), [
    ("lora", ("hcx.lora_",)), ("new", ("hcx.",)), ("looped", ("hcx.looped_",)), ("all", ("",)),
])  # fmt: skip
def test_one_switch_says_what_is_trained_and_the_rest_stays(tied, train, prefixes):
    program = tied[1].rewrite(f"{LOOP},lora", check=False)
    before = {n: p.detach().clone() for n, p in program.named_parameters()}
    groups = program.param_groups(train, weight_decay=0.5)
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    step(program.as_module("blocks"))
    optimizer.step()
    names = {n for n in before if n.startswith(prefixes)}
    parameters = dict(program.named_parameters())
    assert names and {n for n, p in parameters.items() if p.requires_grad} == names
    assert {id(p) for p in optimizer.state} == {id(parameters[n]) for n in names}
    assert all(p.grad is None and torch.equal(p, before[n]) for n, p in parameters.items() if n not in names)
    assert any(not torch.equal(parameters[n], before[n]) for n in names)
    decayed = {id(p) for g in optimizer.param_groups if g["weight_decay"] for p in g["params"]}
    matrices = {n for n, p in parameters.items() if p.dim() > 1 and not n.startswith("hcx.")}
    assert decayed == ({id(parameters[n]) for n in matrices} if train == "all" else set())


def test_nothing_to_train_is_said(tied):
    with pytest.raises(UsageError, match="nothing to train for train='lora'"):
        copy.deepcopy(tied[1]).param_groups("lora")


# ---- loops of others


def plain_loop(module, rows: torch.Tensor, steps: int, batch: int = 4, lr: float = 1e-2) -> list[float]:
    """Losses of AdamW on consecutive batches."""
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=lr)
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        ids = rows[number * batch : (number + 1) * batch]
        logits = module(ids)["logits"]
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def same_tensors(one, other) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def test_a_plain_loop_and_accelerate_train_as_the_source_model_does(tied):
    from accelerate import Accelerator

    rows = token_ids(16 * 12).reshape(16, 12)
    expected = plain_loop(copy.deepcopy(tied[0]), rows, 3)
    assert plain_loop(copy.deepcopy(tied[1]).as_module("blocks"), rows, 3) == pytest.approx(expected, abs=1e-5)
    accelerator = Accelerator(cpu=True)
    module = copy.deepcopy(tied[1]).as_module()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    module, optimizer = accelerator.prepare(module, optimizer)
    losses = []
    for ids in rows.split(4)[:3]:
        optimizer.zero_grad()
        logits = module(ids).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses == pytest.approx(expected, abs=1e-5) and expected[0] != pytest.approx(expected[2], abs=1e-2)


def trainer(program, folder, steps: int, **options):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=4, save_steps=2, logging_steps=1,
        learning_rate=1e-2, lr_scheduler_type="constant", use_cpu=True, report_to=[], disable_tqdm=True, **options,
    )  # fmt: skip
    rows = [{"input_ids": r, "labels": r} for r in token_ids(16 * 12).reshape(16, 12)]
    return Trainer(model=program.as_pretrained(), args=arguments, train_dataset=rows)


def losses_of(made) -> list[float]:
    return [float(entry["loss"]) for entry in made.state.log_history if "loss" in entry]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bf16", [False, True])
def test_trainer_saves_goes_on_and_gives_the_weights_back(tied, bf16, tmp_path):
    base = tied[1].rewrite(f"{LOOP},lora", check=False)
    whole, broken, again, loaded = (copy.deepcopy(base) for _ in range(4))
    once = trainer(whole, tmp_path / "whole", 4, bf16=bf16, activation_checkpointing=True)
    once.train()
    trainer(broken, tmp_path / "broken", 2, bf16=bf16).train()
    more = trainer(again, tmp_path / "broken", 4, bf16=bf16)
    loaded.load_checkpoint(tmp_path / "broken")  # the folder of a run: its last checkpoint
    assert same_tensors(loaded, broken) and not same_tensors(loaded, base)
    more.train(resume_from_checkpoint=True)
    assert same_tensors(again, whole) and losses_of(more) == losses_of(once) and len(losses_of(once)) == 4
    loaded.load_checkpoint(tmp_path / "broken" / "checkpoint-4")
    assert same_tensors(loaded, whole)
    assert loaded.tensor("lm_head.weight") is loaded.tensor("model.embed_tokens.weight")
    assert torch.equal(loaded(IDS).logits, whole.eval()(IDS).logits)
    if not bf16:
        model = copy.deepcopy(tied[0])
        neutral = trainer(copy.deepcopy(tied[1]), tmp_path / "neutral", 2)
        neutral.train()
        rows = token_ids(16 * 12).reshape(16, 12)[[*_order(neutral)]]
        assert losses_of(neutral) == pytest.approx(plain_loop(model, rows, 2), abs=2e-4)


def _order(made) -> list[int]:
    """Rows in the order in which the Trainer's seeded sampler gives them."""
    torch.manual_seed(made.args.seed)
    rows = {tuple(r["input_ids"].tolist()): i for i, r in enumerate(made.train_dataset)}
    return [rows[tuple(r.tolist())] for batch in made.get_train_dataloader() for r in batch["input_ids"]]


def test_weights_files_load_back_with_their_ties(tied, tmp_path):
    from safetensors.torch import save_file

    program = tied[1].rewrite("lora", check=False)
    trained = copy.deepcopy(program)
    plain_loop(trained.as_module(), token_ids(4 * 12).reshape(4, 12), 1)
    state = {n: t.clone() for n, t in trained.state_dict().items()}
    without = {n: t for n, t in state.items() if n != "lm_head.weight"}
    torch.save(state, tmp_path / "state.pt")
    torch.save({"model": {"module." + n: t for n, t in state.items()}, "step": 1}, tmp_path / "ddp.pt")
    save_file(without, tmp_path / "state.safetensors")
    trained.save(tmp_path / "trained.hcx")
    for name in ("state.pt", "ddp.pt", "state.safetensors", "trained.hcx"):
        other = copy.deepcopy(program)
        assert not same_tensors(other, trained)
        other.load_checkpoint(tmp_path / name)
        assert same_tensors(other, trained), name
        assert other.tensor("lm_head.weight") is other.tensor("model.embed_tokens.weight"), name


@pytest.mark.parametrize(("change", "words"), [
    (lambda s: s.pop("model.norm.weight"), "lacks `model.norm.weight`"),
    (lambda s: s.update(more=torch.ones(2)), "has besides `more`"),
    (lambda s: s.update({"model.norm.weight": torch.ones(3)}), "in another shape `model.norm.weight`"),
    (lambda s: s.update({"lm_head.weight": s["lm_head.weight"] + 1}), "2 values for one tied tensor"),
])  # fmt: skip
def test_a_checkpoint_of_another_model_changes_nothing(tied, change, words, tmp_path):
    program = copy.deepcopy(tied[1])
    state = {n: t + 1 for n, t in program.state_dict().items()}
    change(state)
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(SourceError, match=words) as caught:
        program.load_checkpoint(tmp_path / "a.pt")
    assert caught.value.where and same_tensors(program, tied[1])
    with pytest.raises(SourceError, match="does not exist"):
        program.load_checkpoint(tmp_path / "b.pt")


# ---- several processes


def torchrun(folder, *arguments: str) -> list[float]:
    """Losses of examples/distributed.py on two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, str(ROOT / "examples" / "distributed.py"), "base.hcx", "--lr", "0.01", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout)]


def test_ddp_and_fsdp2_on_two_processes_train_as_one_process_does(tmp_path):
    model, ids = tiny_decoder()
    program = trace(model, (ids,)).rewrite(f"{LOOP},lora", check=False)
    program.save(tmp_path / "base.hcx")
    rows = torch.randint(0, 40, (32, 32), generator=torch.Generator().manual_seed(1))
    alone = copy.deepcopy(program)
    expected = plain_loop(alone, rows, 4)
    first = torchrun(tmp_path, "--mode", "fsdp", "--steps", "2", "--save", "sharded")
    rest = torchrun(tmp_path, "--mode", "fsdp", "--checkpoint", "blocks", "--resume", "sharded", "--out", "f.hcx")
    other = torchrun(tmp_path, "--mode", "ddp", "--resume", "sharded", "--save", "ddp", "--out", "d.hcx")
    assert first + rest == pytest.approx(expected, abs=1e-5)
    assert first + other == pytest.approx(expected, abs=1e-5)
    from torch.distributed.checkpoint import FileSystemReader

    pieces = [FileSystemReader(tmp_path / d).read_metadata().state_dict_metadata["model.layers.1.up.weight"].chunks
              for d in ("sharded", "ddp")]  # fmt: skip
    assert [len(p) for p in pieces] == [2, 1], "the blocks were not sharded"
    with pytest.raises(SourceError, match="needs code execution"):
        copy.deepcopy(program).load_checkpoint(tmp_path / "ddp")
    last = copy.deepcopy(program)
    last.load_checkpoint(tmp_path / "ddp", trust=True)
    assert same_tensors(last, load(tmp_path / "d.hcx"))
    for name in ("f.hcx", "d.hcx"):
        trained = load(tmp_path / name)
        assert trained.tied_groups() == program.tied_groups() != []
        assert (trained(ids)["logits"] - alone(ids)["logits"]).abs().max() <= 1e-4
        for key, tensor in trained.state_dict().items():
            if not key.endswith("qkv.bias"):  # that of keys has no gradient but rounding, of which Adam makes a step
                assert (tensor - alone.state_dict()[key]).abs().max() <= 2e-4, key
