"""The commands on a small language model: what they print, what they write, and that they agree with the library."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hcx.cli import generate, inspect
from hcx.cli.console import corrected_command
from hcx.cli.main import main
from hcx.cli.opening import program_of
from hcx.passes.exits import Decoder

from tests.conftest import tiny_llama

pytestmark = pytest.mark.usefixtures("traced_once")
PIPELINE = "looped{start=2,end=4},exits{at=[3]}"
PROMPT = "the ferry left the north quay"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder as save_pretrained writes it, with a tokenizer whose words are those of the built-in paragraph."""
    from hcx.rewrite.source.prose import PROSE
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    place = tmp_path_factory.mktemp("models") / "tiny"
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator([PROSE], trainers.WordLevelTrainer(vocab_size=128, special_tokens=["[UNK]"]))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(place)
    tiny_llama().save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def artefact(folder, tmp_path_factory) -> Path:
    """The small model with a loop and an exit at their neutral settings."""
    place = tmp_path_factory.mktemp("written") / "tiny.hcx"
    assert main(["rewrite", str(folder), "--pass", PIPELINE, "-o", str(place)]) == 0
    return place


@pytest.fixture
def call(capsys):
    """Run a command in this process: (exit code, standard output, standard error)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        print(out[-3000:], err[-3000:])  # for a failing test's report
        return code, out, err

    return run


def eager_words(folder: Path, count: int) -> list[int]:
    """Ids that transformers' own generate adds to the prompt."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    return model.generate(ids, max_new_tokens=count, do_sample=False)[0, ids.shape[1] :].tolist()


def in_subprocess(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
    )


# ---- help


@pytest.mark.parametrize("arguments", [["--help"], ["rewrite", "--help"], ["env"], []])
def test_help_and_env_do_not_import_torch(arguments):
    code = f"import sys; from hcx.cli.main import main; code = main({arguments}); print('torch' in sys.modules, code)"
    done = in_subprocess(code)
    assert done.stdout.splitlines()[-1] == "False 0", done.stderr


def test_help_takes_less_than_half_a_second():
    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert in_subprocess("from hcx.cli.main import main; main(['--help'])").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < 0.5


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS"])
def test_help_in_a_pipe_has_no_colour_codes(variable):
    done = in_subprocess("from hcx.cli.main import main; main(['rewrite', '--help'])", **{variable: "1"})
    assert "--allow-partial" in done.stdout and "\x1b" not in done.stdout


# ---- rewrite, verify, inspect, plan


def test_rewrite_reports_sites_checks_and_figures(folder, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = call("rewrite", folder, "--pass", "looped{start=2,end=4}", "-p", "exits{at=[3]}", "--json")
    assert code == 0
    data = json.loads(out)
    assert data["schema_version"] == 1 and data["command"] == "rewrite" and data["exit_code"] == 0
    assert data["output"] == "tiny.hcx" and (tmp_path / "tiny.hcx" / "manifest.json").is_file()
    assert [p["pass"] for p in data["passes"]] == ["looped", "exits"]
    assert [s["address"] for s in data["passes"][0]["sites"]] == ["model.layers[2:4]"]
    names = [c["name"] for p in data["passes"] for c in p["checks"]]
    assert "contract of looped" in names and "against the source model in eager" in names
    assert all(c["holds"] for p in data["passes"] for c in p["checks"])
    assert data["after"]["parameters"] == data["before"]["parameters"] + 1
    assert data["after"]["flops"] > 1.3 * data["before"]["flops"]  # 2 of 6 blocks again, and one more head
    assert data["files"]["weights.safetensors"] == (tmp_path / "tiny.hcx" / "weights.safetensors").stat().st_size
    assert "checking looped" in err and "saving" in err


def test_rewrite_text_shows_every_check(folder, artefact, call, tmp_path):
    code, out, _ = call("rewrite", folder, "--pass", PIPELINE, "-o", tmp_path / "a.hcx")
    assert code == 0
    for expected in (
        "model.layers[2:4]",
        "model.layers@3",
        "contract: exact",
        "bitwise True",
        "parameters",
        "flops",
        "seconds",
    ):
        assert expected in out


def test_flops_are_what_the_shapes_say():
    from hcx.cli.figures import flops
    from hcx.rewrite import trace

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.project = torch.nn.Linear(8, 12)

        def forward(self, x):
            query = self.project(x)[:, None]
            return torch.nn.functional.scaled_dot_product_attention(query, query, query)

    program = trace(Attention(), (torch.randn(2, 5, 8),))
    assert flops(program, program.examples[0]) == 2 * (2 * 5 * 8 * 12) + 2 * (2 * 5 * 5 * 12) * 2


def test_verify_holds_and_a_changed_weight_fails(artefact, call, tmp_path):
    code, out, _ = call("verify", artefact, "--json")
    data = json.loads(out)
    assert code == 0 and data["holds"] and len(data["checks"]) >= 4
    assert {"files are as written", "golden reproduced"} <= {c["name"] for c in data["checks"]}

    import shutil

    copy = tmp_path / "changed.hcx"
    shutil.copytree(artefact, copy)
    weights = bytearray((copy / "weights.safetensors").read_bytes())
    weights[-2] ^= 0x41
    (copy / "weights.safetensors").write_bytes(bytes(weights))
    code, out, err = call("verify", copy, "--json")
    data = json.loads(out)
    assert code == 1 and data["exit_code"] == 1 and data["error"] == "ChecksFailed" and not data["holds"]
    assert "weights.safetensors" in next(c["note"] for c in data["checks"] if c["name"] == "files are as written")
    code, out, err = call("verify", copy)
    assert code == 1 and "FAIL files are as written" in out and err.count("hcx: ") == 1


def test_inspect_shows_the_call_the_stack_and_the_history(folder, artefact, call):
    code, out, _ = call("inspect", folder)
    assert code == 0
    for expected in (
        "input_ids",
        "[batch, sequence]",
        "past_key_values.*.key (x6)",
        "may be omitted",
        "model.layers: 6 blocks",
    ):
        assert expected in out
    assert "0..5" in out and "attn + mlp" in out
    code, out, _ = call("inspect", artefact, "--why", "--pass", "exits", "--json")
    data = json.loads(out)
    assert code == 0 and data["model"]["kind"] == "hcx" and [h["pass"] for h in data["history"]] == ["looped", "exits"]
    main_stack = next(s for s in data["stacks"] if s["main"])
    assert [b["index"] for b in main_stack["blocks"]] == [0, 1, 2, 3, 2, 3, 4, 5]
    assert main_stack["boundaries"][0]["shape"] == ["batch", "sequence", 32]
    assert data["other_adds"] and data["versions"]["torch"] == torch.__version__
    assert data["plan"]["steps"][0]["name"] == "exits"


def test_a_plan_can_be_edited_and_applied(folder, call, tmp_path):
    code, out, _ = call("plan", folder, "--pass", "exits{at=[2,4]}", "--json")
    assert code == 0
    plan = json.loads(out)
    assert [s["address"] for s in plan["steps"][0]["sites"]] == ["model.layers@2", "model.layers@4"]
    del plan["steps"][0]["sites"][0]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    written = tmp_path / "b.hcx"
    code, out, _ = call("rewrite", folder, "--plan", tmp_path / "plan.json", "-o", written, "--json")
    assert code == 0
    assert [s["address"] for s in json.loads(out)["passes"][0]["sites"]] == ["model.layers@4"]
    code, out, _ = call("plan", folder, "--pass", "exits{at=[2,4]}")
    assert code == 0 and "model.layers@2" in out


def test_a_second_rewrite_starts_from_the_first(artefact, call, tmp_path):
    code, out, _ = call("rewrite", artefact, "--pass", "exits{at=[5]}", "-o", tmp_path / "c.hcx", "--json")
    assert code == 0
    assert [p["pass"] for p in json.loads(out)["passes"]] == ["exits"]
    code, out, _ = call("inspect", tmp_path / "c.hcx", "--json")
    assert [h["pass"] for h in json.loads(out)["history"]] == ["looped", "exits", "exits"]


def test_dtype_and_text_reach_the_trace(folder, call, tmp_path):
    (tmp_path / "words.txt").write_text("the sea was rough and the harbour wall " * 20)
    code, out, _ = call("inspect", folder, "--dtype", "bfloat16", "--text", tmp_path / "words.txt", "--json")
    assert code == 0 and json.loads(out)["figures"]["dtype"] == "bfloat16"


# ---- generate and export


def test_generate_equals_transformers_before_and_after(folder, artefact, call):
    expected = eager_words(folder, 8)
    for model in (folder, artefact):
        code, out, _ = call("generate", model, "--prompt", PROMPT, "--tokens", 8, "--json")
        data = json.loads(out)
        assert code == 0 and data["ids"] == expected and data["text"].startswith(PROMPT)
    assert data["mean_depth"] == 6.0 and data["depths"] == [6] * 8
    code, out, _ = call("generate", artefact, "--prompt", PROMPT, "--tokens", 8)
    assert data["text"] in out and "mean depth 6.00" in out


def test_depths_are_those_of_a_full_forward(folder, artefact, tmp_path):
    """Some positions leave at block 4, and of the prompt's first and last one does: each token has its own depth."""
    program = program_of(str(folder))
    data = generate(str(artefact), prompt=PROMPT, tokens=1).data
    _, taps = program.rewrite("exits{at=[4]}", check=False)(input_ids=torch.tensor([data["prompt_ids"]]), taps=True)
    threshold = taps["exits.4.score"][0, [0, -1]].mean().item()
    leaving = program.rewrite(f"exits{{at=[4],threshold={threshold}}}", check=False)
    leaving.save(tmp_path / "leaving.hcx")

    data = generate(str(tmp_path / "leaving.hcx"), prompt=PROMPT, tokens=12).data
    _, taps = leaving(input_ids=torch.tensor([[*data["prompt_ids"], *data["ids"]]]), taps=True)
    assert data["depths"] == taps["exits.depth"][0, len(data["prompt_ids"]) - 1 : -1].tolist()
    assert set(data["depths"]) == {4, 6} and 4 < data["mean_depth"] < 6


def test_generate_in_pieces_skips_and_drafts(folder, artefact, call, tmp_path):
    """In pieces with exact caches: ids and depths of the whole; drafts: the model's own text; what it took is told."""
    program = program_of(str(folder))
    ids = generate(str(artefact), prompt=PROMPT, tokens=1).data["prompt_ids"]
    _, taps = program.rewrite("exits{at=[4]}", check=False)(input_ids=torch.tensor([ids]), taps=True)
    threshold = taps["exits.4.score"][0, [0, -1]].mean().item()
    place = tmp_path / "leaving.hcx"
    program.rewrite(f"exits{{at=[2,4],threshold={threshold}}}", check=False).save(place)
    whole = generate(str(place), prompt=PROMPT, tokens=12).data
    code, out, _ = call("generate", place, "--prompt", PROMPT, "-n", 12, "--kv", "recompute", "--json")
    data = json.loads(out)
    assert code == 0 and data["ids"] == whole["ids"] and data["depths"] == whole["depths"]
    assert data["exits"] == {k: whole["depths"].count(int(k)) for k in ("2", "4", "6")} and data["exits"]["6"] < 12
    assert data["mean_depth"] == whole["mean_depth"] and 0.5 < data["net_flops"] < 1.3
    code, out, _ = call("generate", place, "--prompt", PROMPT, "-n", 12, "--kv", "mask")
    assert code == 0 and "tokens that left" in out and "kv=mask" in out and "weights read" in out

    code, out, _ = call("generate", place, "--prompt", PROMPT, "-n", 12, "--speculate", 3, "--exit", 4, "--json")
    data = json.loads(out)
    assert code == 0 and data["ids"] == eager_words(folder, 12)
    assert data["acceptance"] == data["accepted"] / data["drafted"] and data["rounds"] >= data["drafted"] / 3
    code, out, _ = call("generate", place, "--prompt", PROMPT, "-n", 4, "--speculate", 2)
    assert code == 0 and "drafts accepted" in out
    code, out, _ = call("generate", artefact, "--prompt", PROMPT, "-n", 6, "--kv", "propagate", "--json")
    assert code == 0 and json.loads(out)["ids"] == eager_words(folder, 6), "a loop is in one piece with its window"

    pipeline = "quantize{bits=2}"
    code, out, _ = call("generate", place, "--prompt", PROMPT, "-n", 12, "--kv", "river", "--river", pipeline, "--json")
    made = Decoder(program_of(str(place)), "river", river=pipeline).generate(torch.tensor([ids]), 12)
    data = json.loads(out)
    assert code == 0 and data["ids"] == made.tokens[0, len(ids) :].tolist() and data["exits"]["6"] < 12
    assert data["depths"] == made.depths[0].tolist() and data["net_bytes"] == made.net_bytes < 1

    for wrong, word in (
        ([place, "--kv", "copy"], "policy"),
        ([place, "--kv", "mask", "--river", "quantize"], "--kv river"),
        ([place, "--kv", "mask", "--speculate", 3], "does not go with"),
        ([place, "--exit", 4], "--speculate 4"),
        ([folder, "--kv", "mask"], "not said where"),
    ):
        code, _, err = call("generate", wrong[0], "--prompt", PROMPT, *wrong[1:])
        assert code == 2 and word in err


def test_export_and_generate_from_onnx(folder, artefact, call, tmp_path):
    pytest.importorskip("onnxruntime")
    code, out, _ = call("export", artefact, "--to", "onnx", "-o", tmp_path / "with_tokenizer", "--json")
    data = json.loads(out)
    assert code == 0 and data["verified"] and data["max_error"] < 1e-3
    expected = eager_words(folder, 8)
    assert generate(str(tmp_path / "with_tokenizer"), prompt=PROMPT, tokens=8).data["ids"] == expected
    file = tmp_path / "tiny.onnx"
    file.write_bytes((tmp_path / "with_tokenizer" / "model.onnx").read_bytes())
    code, out, _ = call("generate", file, "--tokenizer", artefact, "--prompt", PROMPT, "--tokens", 8, "--json")
    assert code == 0 and json.loads(out)["ids"] == expected
    code, _, err = call("generate", file, "--prompt", PROMPT)
    assert code == 2 and "--tokenizer" in err  # no tokenizer beside the file


# ---- other commands and forms


def test_every_folder_with_code_is_in_the_wheel():
    """pyproject lists packages one by one; one left out works in an editable install and is missing in a wheel."""
    import tomllib

    root = Path(__file__).parent.parent
    setup = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    for name, folder in setup["package-dir"].items():
        for path in (root / folder).rglob("*.py"):
            package = ".".join([name, *path.parent.relative_to(root / folder).parts])
            assert package in setup["packages"], f"{package} is not in pyproject.toml"


def test_passes_lists_options_and_meanings(call):
    code, out, _ = call("passes", "--json")
    found = {p["name"]: p for p in json.loads(out)["passes"]}
    assert code == 0 and {"looped", "exits"} <= set(found)
    assert {o["name"]: o["default"] for o in found["looped"]["options"]}["steps"] == 2
    assert all(o["doc"] for p in ("looped", "exits") for o in found[p]["options"])
    code, out, _ = call("passes", "exits")
    assert code == 0 and "threshold" in out and "leave where the score reaches it" in out


def test_a_state_dict_beside_its_config_is_rewritten_by_the_plain_line(folder, call, tmp_path, monkeypatch):
    import shutil

    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path / name)
    torch.save(tiny_llama().state_dict(), tmp_path / "model.pt")
    monkeypatch.chdir(tmp_path)
    code, _, _ = call("rewrite", "model.pt", "--pass", "looped,exits")
    assert code == 0 and (tmp_path / "model.hcx").is_dir() and "tokenizer.json" in os.listdir("model.hcx/source")


def test_commands_are_functions(folder):
    result = inspect(str(folder))
    assert result.data["figures"]["parameters"] > 0 and "model.layers" in str(result)


def test_corrected_command_names_the_missing_option():
    line = ["rewrite", "my model.pt", "--pass", "looped"]
    assert corrected_command(line, "add --trust (it may run code)") == "hcx rewrite 'my model.pt' --pass looped --trust"
    assert corrected_command(line, "give --arch pkg.mod:factory, or ...").endswith(
        "--pass looped --arch pkg.mod:factory"
    )
    assert corrected_command([*line, "--trust"], "add --trust") is None
    assert corrected_command(line, "check the file") is None and corrected_command(line, None) is None
