"""How the project is laid out: who imports whom, what is packaged, what is public, and examples in docstrings."""

from __future__ import annotations

import ast
import doctest
import importlib
import io
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from tests import assets

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("rewrite", "kernels", "passes", "export", "cli")
MAY_IMPORT = {
    "rewrite": {"rewrite", "kernels"},
    "kernels": {"kernels"},
    "passes": {"passes", "rewrite", "kernels"},
    "export": {"export", "rewrite", "kernels"},
    "cli": set(FOLDERS),
}
"""Which of our packages each may import; docs/architecture.md has the same table."""
THIRD_PARTY = {"kernels": {"torch", "triton", "numpy"}}
"""What else a package may import at all; the others are held by what their extras install."""


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def module_name(file: Path) -> str:
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    return ".".join(["hcx", *(parts[:-1] if parts[-1] == "__init__" else parts)])


FILES = [file for folder in FOLDERS for file in sources(folder)]
MODULES = [module_name(file) for file in FILES]


def imports(file: Path) -> Iterator[tuple[str, int, bool]]:
    """(absolute module, line, whether it is imported when the file is) of every import, inside functions too."""
    package = module_name(file).split(".")
    package = package if file.name == "__init__.py" else package[:-1]
    tree = ast.parse(file.read_text())
    lazy = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            names = [base] if node.module and base != "hcx" else [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((name, node.lineno, id(node) not in lazy) for name in names)


def test_imports_are_read_right(tmp_path, monkeypatch):
    file = tmp_path / "passes" / "family" / "step.py"
    file.parent.mkdir(parents=True)
    file.write_text("from ..other import x\nfrom . import y\nfrom hcx import cli\nimport os.path\n"
                    "def f():\n    from hcx.export import z\n")  # fmt: skip
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert list(imports(file)) == [
        ("hcx.passes.other", 1, True),
        ("hcx.passes.family.y", 2, True),
        ("hcx.cli", 3, True),
        ("os.path", 4, True),
        ("hcx.export", 6, False),
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_package_imports_only_the_layers_below_it(folder):
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in sources(folder)
        for name, line, _ in imports(file)
        if (name.split(".")[0] == "hcx" and name.split(".")[1] not in MAY_IMPORT[folder])
        or (folder in THIRD_PARTY and name.split(".")[0] not in {*sys.stdlib_module_names, "hcx", *THIRD_PARTY[folder]})
    ]
    assert not wrong


@pytest.mark.parametrize("folder", [*FOLDERS, "tests", "bench", "examples"])
def test_no_file_imports_a_package_by_its_folder_name(folder):
    """The repository root may be on the path, and then `import rewrite` finds a second copy of hcx.rewrite."""
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in sources(folder)
        for name, line, _ in imports(file)
        if name.split(".")[0] in FOLDERS
    ]
    assert not wrong


def test_families_do_not_leak_into_the_ir():
    families = {path.name for path in (ROOT / "passes").iterdir() if path.is_dir()}
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for family in families
        for file in sources(f"passes/{family}")
        for name, line, _ in imports(file)
        if name.startswith("hcx.passes.") and name.split(".")[2] in families - {family}
    ]
    assert families and not wrong, "a family imports another one"


def test_every_package_folder_is_listed_for_setuptools():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {module_name(file) for file in FILES if file.name == "__init__.py"}
    assert sorted(settings["packages"]) == sorted(found)
    assert settings["package-dir"] == {f"hcx.{folder}": folder for folder in FOLDERS}
    assert not (ROOT / "__init__.py").exists() and not (ROOT / "hcx").exists()
    untyped = [folder for folder in FOLDERS if not (ROOT / folder / "py.typed").is_file()]
    assert not untyped


@pytest.mark.parametrize("name", [module_name(f) for f in FILES if f.name == "__init__.py"])
def test_every_public_name_can_be_imported(name):
    module = importlib.import_module(name)
    public = getattr(module, "__all__", [])
    assert len(set(public)) == len(public)
    for item in public:
        assert getattr(module, item) is not None
    with pytest.raises(AttributeError):
        module.no_such_name  # noqa: B018


@pytest.mark.parametrize("name", MODULES)
def test_a_module_says_what_it_is_for_and_its_examples_hold(name):
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        if (error.name or "hcx").split(".")[0] in ("hcx", "torch", *FOLDERS):
            raise
        pytest.skip(f"{error.name} is not installed")
    assert module.__doc__ and module.__doc__.strip(), f"{name} has no docstring"
    output = io.StringIO()
    with redirect_stdout(output):
        failed, _ = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert not failed, output.getvalue()


def test_examples_are_really_run():
    spec, heads = (importlib.import_module(f"hcx.{name}") for name in ("rewrite.pipeline.spec", "passes.looped.mixing"))
    assert all(doctest.testmod(module).attempted > 0 for module in (spec, heads))


def python(script: str, path: str | None = None) -> subprocess.CompletedProcess:
    paths = [path, os.environ.get("PYTHONPATH")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, env=environment)


def test_importing_the_public_names_is_cheap():
    done = python("import sys, hcx.rewrite, hcx.passes; print('torch' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr


def test_the_folder_kernels_is_not_taken_for_another_package_of_that_name():
    """transformers looks for a package `kernels`; with the repository root on the path it finds and imports ours."""
    done = python("import hcx.kernels, kernels, torch; print(hasattr(kernels, '__version__'))", path=str(ROOT))
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "False"


def test_the_assets_script_downloads_nothing_that_is_there(tmp_path, monkeypatch, capsys):
    for name, asset in assets.ASSETS.items():
        file = tmp_path / name / asset.marker.replace("*", "x")
        file.parent.mkdir(parents=True)
        file.write_text("")
    monkeypatch.setattr(assets, "download", lambda *_: pytest.fail("downloaded"))
    assert assets.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path)
    monkeypatch.setenv("HCX_DIST", str(tmp_path))
    assert assets.dist() == tmp_path and assets.find("svhn").name == "svhn.pth"
    (tmp_path / "face" / "face_recognition_model.bin").unlink()
    assert assets.dist() == tmp_path and assets.find("face") is None
    (tmp_path / "svhn" / "ccexam" / "weights" / "svhn.pth").unlink()
    assert assets.dist() is None and assets.find("smollm2") is None
