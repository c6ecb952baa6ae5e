"""Every bad input: the documented exit code, one clear message, no traceback, and nothing written."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hcx.cli.main import main

pytestmark = pytest.mark.usefixtures("traced_once")
MODELS = """
import os, torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
    def forward(self, x):
        return x + self.down(self.up(x).relu())

class Net(torch.nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(depth))
        self.head = torch.nn.Linear(8, 5)
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

class Decides(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
    def forward(self, x):
        if x.sum() > 0:  # THE LINE
            return self.layer(x)
        return x

class Chain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    def forward(self, x):
        return self.layers(x)

class Marker:
    def __reduce__(self):
        return os.mkdir, ("marker",)

def example():
    return (torch.linspace(-1, 1, 48).reshape(2, 3, 8),)
def net():
    torch.manual_seed(0)
    return Net().eval(), example()
def deeper():
    torch.manual_seed(0)
    return Net(5).eval(), example()
def decides():
    return Decides(), example()
def chain():
    return Chain(), example()
def raises():
    raise OSError("the disk is on fire")
"""
NAME = "hcx_bad_input_models"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with one of every bad file, and a good artefact."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / f"{NAME}.py").write_text(MODELS)
    before, path = os.getcwd(), list(sys.path)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        import importlib

        models = importlib.import_module(NAME)
        _write_models(folder, models)
        assert main(["rewrite", f"{NAME}:net", "--pass", "looped{start=1,end=3}", "-o", "good.hcx"]) == 0
        for name, change in TAMPERED.items():
            shutil.copytree("good.hcx", f"{name}.hcx")
            change(folder / f"{name}.hcx")
        yield folder
    finally:
        os.chdir(before)
        sys.path[:] = path


def _write_models(folder: Path, models) -> None:
    torch.save(models.net()[0], folder / "pickled.pt")
    torch.save(models.Marker(), folder / "code.pt")
    torch.save(models.net()[0].state_dict(), folder / "state.pt")
    whole = (folder / "state.pt").read_bytes()
    (folder / "cut.pt").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.pt").write_bytes(b"")
    (folder / "keras.pt").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(200))
    (folder / "page.pt").write_text("<html>not found</html>")
    (folder / "cut.safetensors").write_bytes(b"\x90\x00\x00\x00\x00\x00\x00\x00{")
    (folder / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (folder / "no_plan.json").write_text("{}")
    (folder / "broken.json").write_text("{")
    (folder / "plain_folder").mkdir()
    (folder / "file.hcx").write_text("x")
    (folder / "taken.hcx").mkdir()
    (folder / "taken.onnx").write_text("x")


def _edit(path: Path, change) -> None:
    """Change a JSON file of an artefact and let the manifest agree with it."""
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    manifest = json.loads((path.parent / "manifest.json").read_text())
    if path.name != "manifest.json":
        content = path.read_bytes()
        manifest["files"][path.name] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
        (path.parent / "manifest.json").write_text(json.dumps(manifest))


def _first_call(graph: dict) -> dict:
    return next(n for n in graph["nodes"] if n["op"] == "call_function")


def _manifest(change):
    return lambda folder: _edit(folder / "manifest.json", change)


def _graph(change):
    return lambda folder: _edit(folder / "graph.json", change)


TAMPERED = {
    "not_json": lambda folder: (folder / "manifest.json").write_text("{"),
    "no_manifest": lambda folder: (folder / "manifest.json").unlink(),
    "list_manifest": lambda folder: (folder / "manifest.json").write_text("[]"),
    "foreign_manifest": _manifest(lambda m: m.update(format="other")),
    "newer_schema": _manifest(lambda m: m.update(schema_version=99)),
    "outside_file": _manifest(lambda m: m["files"].update({"../state.pt": {"sha256": "", "bytes": 0}})),
    "graph_by_hand": lambda folder: (folder / "graph.json").write_text((folder / "graph.json").read_text() + " "),
    "os_system": _graph(lambda g: _first_call(g).update(target="os.system")),
    "code_as_name": _graph(lambda g: _first_call(g).update(name="x\nimport os\nos.mkdir('marker')")),
    "cut_weights": lambda folder: os.truncate(folder / "weights.safetensors", 1000),
    "files_are_text": _manifest(lambda m: m.update(files={"graph.json": "x"})),
    "bad_kind": _manifest(lambda m: m["tensors"].update({next(iter(m["tensors"])): 3})),
    "bad_history": _manifest(lambda m: m.update(history=[3])),
    "bad_signature": _manifest(lambda m: m["signature"]["inputs"][0].update(dtype="manual_seed")),
}
NET = f"{NAME}:net"
LOOP = ["--pass", "looped"]
CASES: dict[str, tuple[list[str], int, list[str]]] = {
    # what the message must hold is the name of the thing and what to do
    "untraceable": (["rewrite", f"{NAME}:decides", *LOOP], 3, [f"{NAME}.py:", "if x.sum() > 0", "torch.cond"]),
    "nothing_matched": (["rewrite", f"{NAME}:chain", *LOOP], 4, ["looped", "no-residual-stream", "hcx inspect"]),
    "missing_file": (["rewrite", "absent.pt", *LOOP], 2, ["absent.pt", "no file"]),
    "missing_module": (["rewrite", "no_such_module:make", *LOOP], 2, ["no_such_module"]),
    "missing_function": (["rewrite", f"{NAME}:nett", *LOOP], 2, ["nett", "did you mean"]),
    "failing_factory": (["rewrite", f"{NAME}:raises", *LOOP], 2, ["the disk is on fire"]),
    "truncated": (["rewrite", "cut.pt", *LOOP], 2, ["cut.pt", "damaged or incomplete"]),
    "truncated_safetensors": (["rewrite", "cut.safetensors", *LOOP], 2, ["cut.safetensors", "damaged or incomplete"]),
    "empty": (["rewrite", "empty.pt", *LOOP], 2, ["empty.pt", "damaged or incomplete"]),
    "foreign": (["rewrite", "keras.pt", *LOOP], 2, ["keras.pt", "HDF5"]),
    "web_page": (["rewrite", "page.pt", *LOOP], 2, ["page.pt", "text"]),
    "plain_folder": (["rewrite", "plain_folder", *LOOP], 2, ["plain_folder", "config.json"]),
    "state_dict": (["rewrite", "state.pt", *LOOP], 2, ["hcx rewrite state.pt --pass looped --arch pkg.mod:factory"]),
    "wrong_arch": (["rewrite", "state.pt", *LOOP, "--arch", f"{NAME}:chain"], 2, ["state.pt", "does not fit"]),
    "pickle": (["rewrite", "pickled.pt", *LOOP], 2, ["code execution", "hcx rewrite pickled.pt --pass looped --trust"]),
    "pickled_code": (["rewrite", "code.pt", *LOOP], 2, ["code execution", "mkdir", "--trust"]),
    "existing_output": (["rewrite", NET, *LOOP, "-o", "good.hcx"], 2, ["good.hcx exists", "--overwrite"]),
    "foreign_output": (["rewrite", NET, *LOOP, "-o", "taken.hcx", "--overwrite"], 2, ["taken.hcx", "not replaced"]),
    "output_suffix": (["rewrite", NET, *LOOP, "-o", "out"], 2, [".hcx", "-o out.hcx"]),
    "output_below_a_file": (["rewrite", NET, *LOOP, "-o", "state.pt/out.hcx"], 2, ["state.pt"]),
    "no_name_for_artefact": (["rewrite", "good.hcx", *LOOP], 2, ["-o"]),
    "unknown_pass": (["rewrite", NET, "--pass", "loped"], 2, ["loped", "did you mean `looped`"]),
    "unknown_option": (["rewrite", NET, "--pass", "looped{stepz=2}"], 2, ["stepz", "did you mean `steps`"]),
    "bad_value": (["rewrite", NET, "--pass", "looped{steps=two}"], 2, ["two", "int"]),
    "bad_brackets": (["rewrite", NET, "--pass", "looped{steps=2"], 2, ["brackets"]),
    "out_of_range": (["rewrite", NET, "--pass", "looped{start=1,end=9}"], 2, ["[1,9)", "4"]),
    "wrong_order": (["rewrite", NET, "--pass", "exits,looped"], 2, ["looped", "cannot follow"]),
    "no_pass": (["rewrite", NET], 2, ["--pass"]),
    "pass_and_plan": (["rewrite", NET, *LOOP, "--plan", "plan.json"], 2, ["--plan"]),
    "no_such_plan": (["rewrite", NET, "--plan", "absent.json"], 2, ["absent.json"]),
    "not_a_plan": (["rewrite", NET, "--plan", "no_plan.json"], 2, ["not a plan"]),
    "plan_not_json": (["rewrite", NET, "--plan", "broken.json"], 2, ["not a plan"]),
    "text_missing": (["rewrite", NET, *LOOP, "--text", "absent.txt"], 2, ["absent.txt"]),
    "text_encoding": (["rewrite", NET, *LOOP, "--text", "latin.txt"], 2, ["latin.txt", "UTF-8"]),
    "inputs_missing": (["rewrite", NET, *LOOP, "--inputs", "absent.safetensors"], 2, ["absent.safetensors"]),
    "no_such_dtype": (["rewrite", NET, *LOOP, "--dtype", "float7"], 2, ["float7", "bfloat16"]),
    "dtype_for_artefact": (["inspect", "good.hcx", "--dtype", "bfloat16"], 2, ["--dtype"]),
    "verify_missing": (["verify", "absent.hcx"], 2, ["absent.hcx"]),
    "verify_file": (["verify", "state.pt"], 2, ["state.pt", "not a folder written by hcx"]),
    "verify_file_hcx": (["verify", "file.hcx"], 2, ["file.hcx"]),
    "no_such_format": (["export", "good.hcx", "--to", "tflite"], 2, ["tflite", "onnx"]),
    "export_exists": (["export", "good.hcx", "-o", "taken.onnx"], 2, ["taken.onnx exists", "--overwrite"]),
    "opset_too_low": (["export", "good.hcx", "-o", "new.onnx", "--opset", "11"], 5, ["11", "18"]),
    "opset_too_high": (["export", "good.hcx", "-o", "new.onnx", "--opset", "99"], 5, ["99", "26"]),
    "not_a_language_model": (["generate", "good.hcx", "--prompt", "a"], 2, ["input_ids"]),
    "generate_missing": (["generate", "absent.onnx", "--prompt", "a"], 2, ["absent.onnx"]),
    "generate_broken": (["generate", "taken.onnx", "--prompt", "a"], 2, ["taken.onnx"]),
    "no_tokens": (["generate", "good.hcx", "--prompt", "a", "--tokens", "0"], 2, ["--tokens"]),
    "no_such_command": (["rewritee", NET], 2, ["rewritee", "--help"]),
    "no_such_flag": (["rewrite", NET, "--pas", "looped"], 2, ["--pas"]),
    "no_model": (["rewrite", *LOOP], 2, ["MODEL"]),
    "no_such_pass": (["passes", "loped"], 2, ["loped", "looped"]),
}


def listing(folder: Path) -> dict[str, str]:
    """Every file below a folder with its content's hash."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if "__pycache__" not in path.parts:
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
    return found


def refused(capsys, place: Path, arguments: list[str], code: int, texts: list[str]) -> None:
    """The command ends with ``code`` and one message that holds ``texts``; as JSON too; and the folder is untouched."""
    before = listing(place)
    capsys.readouterr()
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    messages = [line for line in err.splitlines() if line.startswith("hcx: ")]
    assert len(messages) == 1, err
    assert "\n  try:   " in err
    for text in texts:
        assert text in err, f"{text!r} is not in:\n{err}"
    assert main([*arguments, "--json"]) == code
    data = json.loads(capsys.readouterr().out)
    assert data["exit_code"] == code and data["schema_version"] == 1 and data["what"] and data["try"]
    assert listing(place) == before


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused(place, capsys, name):
    refused(capsys, place, *CASES[name])


@pytest.mark.parametrize(
    "name", ["existing_output", "foreign_output", "unknown_pass", "unknown_option", "not_a_plan", "export_exists"]
)
def test_what_can_be_refused_early_is_refused_before_the_model_is_opened(place, capsys, name):
    arguments, code, _ = CASES[name]
    assert main(arguments) == code
    assert "opening" not in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(TAMPERED))
@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_a_tampered_artefact_is_refused(place, capsys, name, command):
    before = listing(place)
    capsys.readouterr()
    assert main([command, f"{name}.hcx"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err and "internal" not in err
    assert err.count("hcx: ") == 1 and f"{name}.hcx" in err
    assert not (place / "marker").exists() and listing(place) == before


def test_a_plan_for_another_model_is_refused(place, capsys, tmp_path):
    assert main(["plan", f"{NAME}:deeper", *LOOP, "--json"]) == 0
    (tmp_path / "plan.json").write_text(capsys.readouterr().out)
    refused(capsys, place, ["rewrite", NET, "--plan", str(tmp_path / "plan.json")], 2, ["another program"])


def test_a_plan_with_a_site_of_its_own_is_refused(place, capsys, tmp_path):
    assert main(["plan", NET, *LOOP, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    plan["steps"][0]["sites"][0]["address"] = "blocks[7:9]"
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    refused(capsys, place, ["rewrite", NET, "--plan", str(tmp_path / "plan.json")], 2, ["blocks[7:9]"])


def test_nothing_is_written_when_a_check_fails(place, capsys, monkeypatch):
    from hcx.passes.looped import mixing

    wrong = lambda entry, state, scalar: entry + 1e-3  # noqa: E731
    monkeypatch.setattr(mixing, "mix_input", wrong)
    refused(capsys, place, ["rewrite", NET, *LOOP, "-o", "wrong.hcx"], 1, ["contract of looped"])


def test_an_unexpected_error_is_internal(capsys, monkeypatch):
    from hcx.cli import cmd_env

    def broken(**_):
        raise RuntimeError("boom")

    monkeypatch.setattr(cmd_env, "env", broken)
    assert main(["env"]) == 70
    out, err = capsys.readouterr()
    assert out == "" and "internal error: RuntimeError: boom" in err and "report" in err and "Traceback" not in err
    assert main(["env", "-vv"]) == 70
    assert "Traceback" in capsys.readouterr().err
    assert main(["env", "--json"]) == 70
    assert json.loads(capsys.readouterr().out)["exit_code"] == 70


def test_tracebacks_only_with_vv(place, capsys):
    assert main(["rewrite", "absent.pt", *LOOP, "-v"]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert main(["rewrite", "absent.pt", *LOOP, "-vv"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_is_130(capsys, monkeypatch):
    from hcx.cli import cmd_env

    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cmd_env, "env", interrupted)
    assert main(["env"]) == 130
    assert capsys.readouterr().err.strip() == "hcx: interrupted"


def test_a_closed_pipe_is_no_error():
    code = "import sys; from hcx.cli.main import main; sys.exit(main(['env', '--json']))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        child.stdout.close()
        assert child.stderr.read() == b"" and child.wait() == 0


KILLED = """
import os, signal, sys
from hcx.cli.main import main
from hcx.rewrite.store import saving

saving.replace_folder = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # everything is written, nothing renamed
main(sys.argv[1:])
"""


def test_killed_in_the_middle_of_a_save_leaves_the_old_artefact(place, tmp_path):
    shutil.copytree(place / "good.hcx", tmp_path / "old.hcx")
    before = listing(tmp_path / "old.hcx")
    arguments = ["rewrite", NET, "--pass", "looped{start=0,end=2}", "-o", str(tmp_path / "old.hcx"), "--overwrite"]
    done = subprocess.run([sys.executable, "-c", KILLED, *arguments], cwd=place, capture_output=True, timeout=300)
    assert done.returncode == -9, done.stderr
    assert listing(tmp_path / "old.hcx") == before
    assert main(["verify", str(tmp_path / "old.hcx")]) == 0
