"""Artefacts: another process without transformers gets the same bits, and a save that is cut short changes nothing."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hcx.rewrite import ArtefactError, UsageError, load, trace, verify
from hcx.rewrite.run.generation import greedy
from torch import nn

from tests.conftest import adamw_step, assert_same_step, tiny_llama, token_ids

NEUTRAL = "looped{start=1,end=3,steps=2},exits{at=[2,3],head=affine}"
ACTIVE = "looped{start=1,end=3,steps=2,scalar=0.3,mix=output},exits{at=[2,3],head=affine,threshold=0.05}"
IDS = token_ids(600)[:21].reshape(3, 7)


class Net(nn.Module):
    """Four residual blocks; enough to loop, exit and save."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


@pytest.fixture(scope="module")
def tied():
    """A tiny Llama with a tied head, and its Program."""
    model = tiny_llama(4, tie_word_embeddings=True)
    return model, trace(model, (IDS[:2],))


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return trace(Net(), (torch.randn(3, 5, 8),))


def run(script: str, *arguments: object) -> str:
    """Output of a Python process that cannot import transformers."""
    start = "import sys\nsys.modules['transformers'] = None\n"
    command = [sys.executable, "-P", "-c", start + script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


ELSEWHERE = """
import torch
from torch.nn import functional as F
from hcx.rewrite import load
from hcx.rewrite.run.generation import greedy
torch.set_num_threads(1)
results = {}
for name in ("neutral", "active"):
    program = load(f"{sys.argv[1]}/{name}.hcx")
    check = program.golden.check(program)
    assert check.holds and check.measured["bitwise"], check
    assert all(c.holds for c in program.golden.contracts(program))
    assert program.tensor("lm_head.weight") is program.tensor("model.embed_tokens.weight")
    ids = torch.load(f"{sys.argv[1]}/ids.pt")
    with torch.no_grad():
        output, taps = program(ids, taps=True)
    results[name] = {"logits": output.logits, "depth": taps["exits.depth"], "greedy": greedy(program, ids, 5)}
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-3)
    F.cross_entropy(program(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    optimizer.step()
    results[name]["step"] = {n: p.detach() for n, p in program.named_parameters()}
assert sys.modules["transformers"] is None
torch.save(results, f"{sys.argv[1]}/results.pt")
"""


def test_a_process_without_transformers_gets_the_same_bits_and_takes_the_same_step(tied, tmp_path):
    model, program = tied
    rewritten = {"neutral": program.rewrite(NEUTRAL), "active": program.rewrite(ACTIVE)}
    for name, one in rewritten.items():
        one.save(tmp_path / f"{name}.hcx")
    torch.save(IDS, tmp_path / "ids.pt")
    run(ELSEWHERE, tmp_path)
    results = torch.load(tmp_path / "results.pt")
    for name, one in rewritten.items():
        with torch.no_grad():
            output, taps = one(IDS, taps=True)
        assert torch.equal(results[name]["logits"], output.logits)
        assert torch.equal(results[name]["depth"], taps["exits.depth"])
        assert torch.equal(results[name]["greedy"], greedy(one, IDS, 5))
        step = adamw_step(one, IDS)
        assert set(step) == set(results[name]["step"])
        for key, (parameter, _) in step.items():
            assert torch.allclose(results[name]["step"][key], parameter, rtol=0, atol=1e-7), key
    assert 0 < (results["active"]["depth"] < 4).sum() < IDS.numel()
    assert_same_step(
        {key: (parameter,) for key, parameter in results["neutral"]["step"].items()}, adamw_step(model, IDS)
    )


def test_tied_tensors_are_stored_once_and_every_kind_of_tensor_comes_back(tied, tmp_path):
    _, program = tied
    program.save(tmp_path / "tied.hcx")
    loaded = load(tmp_path / "tied.hcx")
    assert loaded.tied_groups() == program.tied_groups() != []
    unique = sum(t.nbytes for t in {id(t): t for _, t in program.named_tensors()}.values())
    assert (tmp_path / "tied.hcx" / "weights.safetensors").stat().st_size <= unique + 20_000
    assert list(loaded.state_dict()) == list(program.state_dict()), "transient buffers, or another order"
    assert all(torch.equal(t, loaded.tensor(n)) for n, t in program.named_tensors())
    assert sorted(p.name for p in (tmp_path / "tied.hcx").iterdir()) == [
        *("golden.safetensors", "graph.json", "manifest.json", "weights.safetensors")
    ]


def test_what_is_loaded_can_be_rewritten_and_saved_again(net, tmp_path):
    net.rewrite("looped{start=1,end=3,scalar=0.2}").save(tmp_path / "a.hcx")
    again = load(tmp_path / "a.hcx").rewrite("exits{at=[3],head=affine}")
    again.save(tmp_path / "b.hcx")
    last = load(tmp_path / "b.hcx")
    x = torch.randn(2, 4, 8)
    assert torch.equal(last(x), again(x)) and [e["pass"] for e in last.history] == ["looped", "exits"]


def test_a_golden_with_real_numbers_as_inputs_is_reproduced_bitwise(tmp_path):
    failed = []
    for width in (8, 9, 11, 16):
        torch.manual_seed(0)
        program = trace(Net(width), (torch.randn(3, 5, width),)).rewrite("exits{at=[3],head=affine}")
        program.save(tmp_path / f"{width}.hcx")
        failed += [f"width {width}: {check}" for check in verify(tmp_path / f"{width}.hcx") if not check.holds]
    assert not failed


def test_companion_files_travel(net, tmp_path):
    program = copy.deepcopy(net)
    program.companions.update({"config.json": b"{}", "sub/tokenizer.model": bytes(range(256))})
    program.save(tmp_path / "a.hcx")
    assert load(tmp_path / "a.hcx").companions == program.companions


# ---- overwriting


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_nothing_is_replaced_unless_asked_and_only_artefacts_are(net, tmp_path):
    net.save(tmp_path / "a.hcx")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "letter.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    before = content(tmp_path)
    for name, overwrite in [("a.hcx", False), ("docs", False), ("docs", True), ("file", False), ("file", True)]:
        with pytest.raises(UsageError, match="exists"):
            net.save(tmp_path / name, overwrite=overwrite)
        assert content(tmp_path) == before
    changed = net.rewrite("exits{at=[2]}")
    changed.save(tmp_path / "a.hcx", overwrite=True)
    assert len(load(tmp_path / "a.hcx").history) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.hcx", "docs", "file"], "something was left behind"


def test_a_program_can_be_saved_over_the_artefact_it_came_from(net, tmp_path):
    net.save(tmp_path / "a.hcx")
    program = load(tmp_path / "a.hcx")
    with torch.no_grad():
        program.get_parameter("blocks.0.weight").add_(1)
    program.save(tmp_path / "a.hcx", overwrite=True)
    x = torch.randn(2, 3, 8)
    assert torch.equal(load(tmp_path / "a.hcx")(x), program(x)) and not torch.equal(program(x), net(x))


def test_a_save_that_fails_leaves_the_old_artefact_and_no_rest(net, tmp_path):
    net.save(tmp_path / "a.hcx")
    before = content(tmp_path)
    broken = net.rewrite("exits{at=[2]}")
    broken.companions["../../outside"] = b"x"
    with pytest.raises(ArtefactError, match="outside"):
        broken.save(tmp_path / "a.hcx", overwrite=True)
    assert content(tmp_path) == before


KILLED = """
import os, signal, time, torch
from hcx.rewrite import load
from hcx.rewrite.store.manifest import changed_files
torch.set_num_threads(1)
old, new, target = load(sys.argv[1]), load(sys.argv[1]), sys.argv[2]
with torch.no_grad():
    new.get_parameter("blocks.0.weight").add_(1)
first = lambda p: p.get_parameter("blocks.0.weight")[0, 0].item()

def save_and_die(at):
    seen = []
    def line(frame, event, _):
        file = os.path.basename(frame.f_code.co_filename)
        if file not in ("artefact.py", "folders.py", "golden.py"):
            return None
        if event == "line":
            seen.append(file)
        if len(seen) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return line
    sys.settrace(line)
    new.save(target, overwrite=True)
    sys.settrace(None)
    open(target + ".lines", "w").write(" ".join(seen))
    os._exit(0)

def attempt(at=None, delay=None):
    start = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        save_and_die(at)
    if delay is not None:
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
    killed = os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    took = time.perf_counter() - start
    assert changed_files(target) == [], "half an artefact"
    found = first(load(target))
    assert found in (first(old), first(new))
    print("line" if at else "time", "killed" if killed else "done", "old" if found == first(old) else "new")
    if found == first(new):
        old.save(target, overwrite=True)
    return took

took = attempt()
lines = open(target + ".lines").read().split()
every = len(lines) // 10
for number, file in enumerate(lines, 1):
    if file == "folders.py" or number % every == 0:
        attempt(at=number)
for number in range(5):
    attempt(delay=took * (number + 0.5) / 5)
"""


def test_killed_at_any_time_the_artefact_is_the_old_one_or_the_new_one(tmp_path):
    program = trace(Net(256), (torch.randn(2, 3, 256),))
    program.save(tmp_path / "source.hcx")
    program.save(tmp_path / "target.hcx")
    lines = run(KILLED, tmp_path / "source.hcx", tmp_path / "target.hcx").split("\n")[:-1]
    by_line = [line.removeprefix("line killed ") for line in lines if line.startswith("line")]
    assert by_line == sorted(by_line, reverse=True) and set(by_line) == {"old", "new"}, "old, then new, always killed"
    assert lines[0] == "time done new" and len(by_line) >= 20 and len(lines) == len(by_line) + 6
