"""The house: which room may import which, no circles, no private doors, functions that fit in the head."""

from __future__ import annotations

import ast
import itertools
import statistics
from collections.abc import Iterator
from pathlib import Path

import networkx
import pytest

from tests.test_layout import FILES, FOLDERS, ROOT, imports, module_name

IR = {"kernels", "rewrite.errors", "rewrite.ir"}
FAMILY = IR | {"rewrite.edit", "rewrite.run", "rewrite.sites", "rewrite.pipeline"}
MAY_IMPORT: dict[str, set[str]] = {
    "kernels": set(),
    "rewrite.errors": set(),
    "rewrite.ir": {"kernels", "rewrite.errors"},
    "rewrite.source": {"rewrite.errors"},
    "rewrite.edit": IR,
    "rewrite.run": IR,
    "rewrite.sites": IR,
    "rewrite.pipeline": IR | {"rewrite.edit"},
    "rewrite.tracing": IR | {"rewrite.source", "rewrite.run"},
    "rewrite.check": IR | {"rewrite.run", "rewrite.pipeline"},
    "rewrite.driver": FAMILY | {"rewrite.check"},
    "rewrite.diff": IR | {"rewrite.sites", "rewrite.pipeline", "rewrite.check"},
    "rewrite.store": IR
    | {"rewrite.source", "rewrite.run", "rewrite.pipeline", "rewrite.tracing", "rewrite.check", "rewrite.driver"},
    "rewrite.host": FAMILY | {"rewrite.tracing", "rewrite.driver"},
    "rewrite.api": FAMILY | {"rewrite.tracing", "rewrite.check", "rewrite.driver", "rewrite.store", "rewrite.host"},
    "rewrite.testing": FAMILY | {"rewrite.driver", "rewrite.api"},
    "passes.adapters": FAMILY,
    "passes.hyper_connections": FAMILY,
    "passes.norms": FAMILY,
    "passes.observation": FAMILY,
    "passes.quantization": FAMILY,
    "passes.looped": FAMILY | {"rewrite.driver"},
    "passes.exits.insert": FAMILY,
    "passes.exits": FAMILY | {"passes.exits.insert"},
    "passes.exits.run": FAMILY | {"rewrite.driver", "rewrite.store", "passes.exits", "passes.exits.insert"},
    "passes.exits.fitting": FAMILY | {"passes.exits", "passes.exits.insert", "passes.exits.run"},
    "export.onnx_direct.emitting": IR,
    "export.onnx_direct.ops": IR | {"export.onnx_direct.emitting"},
    "export.onnx_direct": IR | {"export.onnx_direct.emitting", "export.onnx_direct.ops"},
    "export": FAMILY
    | {"rewrite.source", "rewrite.tracing", "rewrite.check", "rewrite.store", "rewrite.host"}
    | {"export.onnx_direct", "export.onnx_direct.emitting"},
}
"""Room -> the rooms that its files may import, also inside functions. The command line may import all of them."""
ALONE = {"driver", "api", "testing"}
"""Files of rewrite/ that are rooms of their own."""
MOST_LEVELS, MOST_FLAT_FILES, MOST_LINES = 9, 16, 60


def room(module: str) -> str | None:
    """The room of a module; None for a package's face, which only hands names on."""
    parts = module.split(".")[1:]
    known = [*MAY_IMPORT, "cli"]
    if parts[:1] == ["rewrite"] and parts[1:] and parts[1] in ("errors", "collection"):
        return "rewrite.errors"
    return next((".".join(parts[:n]) for n in (3, 2, 1) if ".".join(parts[:n]) in known), None)


def typing_only(tree: ast.AST) -> set[int]:
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
    return {inner.lineno for block in blocks for inner in ast.walk(block) if hasattr(inner, "lineno")}


def uses(files: list[Path] = FILES) -> Iterator[tuple[Path, int, str, str]]:
    """(file, line, its module, module it imports) of every import that runs, faces left out."""
    for file in files:
        if file.name == "__init__.py":
            continue
        skipped = typing_only(ast.parse(file.read_text()))
        for name, line, _ in imports(file):
            if name.startswith("hcx.") and line not in skipped:
                yield file, line, module_name(file), name


def upward(files: list[Path] = FILES) -> list[str]:
    """Imports that a room may not make, with both rooms."""
    return [
        f"{file.name}:{line}: {own} may not import {other} ({name})"
        for file, line, module, name in uses(files)
        if (own := room(module)) != "cli"
        and own is not None
        and (other := room(name)) is not None
        and other != own
        and other not in MAY_IMPORT[own]
    ]


def test_every_file_stands_in_a_room():
    lost = [str(f.relative_to(ROOT)) for f in FILES if room(module_name(f)) is None and f.name != "__init__.py"]
    assert not lost, "give them a room in MAY_IMPORT"


def test_a_room_imports_only_what_lies_below_it():
    assert not upward()


def test_an_upward_import_is_found_with_both_rooms(tmp_path, monkeypatch):
    file = tmp_path / "rewrite" / "ir" / "program.py"
    file.parent.mkdir(parents=True)
    file.write_text("from hcx.rewrite.store import saving\n")
    monkeypatch.setattr("tests.test_layout.ROOT", tmp_path)
    (message,) = upward([file])
    assert "rewrite.ir may not import rewrite.store" in message


def test_the_rooms_have_one_direction_and_few_levels():
    rooms = networkx.DiGraph((own, other) for own, others in MAY_IMPORT.items() for other in others)
    assert networkx.is_directed_acyclic_graph(rooms), networkx.find_cycle(rooms)
    real = networkx.DiGraph(
        (own, other)
        for _, _, module, name in uses()
        if (own := room(module)) and (other := room(name)) and own != other
    )
    assert networkx.dag_longest_path_length(real) + 1 <= MOST_LEVELS, networkx.dag_longest_path(real)


def test_no_circle_of_files():
    modules = {module_name(file) for file in FILES}
    graph = networkx.DiGraph()
    for _, _, module, name in uses():
        graph.add_edges_from((module, other) for other in [name] if other in modules and other != module)
    for file in FILES:  # `from . import x` names the package; the module is what is meant
        package = module_name(file).rpartition(".")[0] if file.name != "__init__.py" else module_name(file)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and file.name != "__init__.py":
                base = package if node.level and not node.module else node.module or ""
                base = f"{package}.{node.module}" if node.level and node.module else base
                graph.add_edges_from(
                    (module_name(file), f"{base}.{a.name}") for a in node.names if f"{base}.{a.name}" in modules
                )
    circles = [c for c in networkx.strongly_connected_components(graph) if len(c) > 1]
    assert not circles


def test_few_files_lie_directly_in_rewrite():
    entries = [p for p in (ROOT / "rewrite").iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()]
    assert len(entries) - 1 <= MOST_FLAT_FILES


def test_no_file_imports_a_private_name_of_another():
    wrong = []
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("hcx")):
                private = [a.name for a in node.names if a.name.startswith("_") and not a.name.startswith("__")]
                wrong += [f"{file.relative_to(ROOT)}:{node.lineno}: {name}" for name in private]
    assert not wrong


TORCH_OWN = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_apply", "_replace", "_asdict", "_version",
             "_ops", "_schema"}  # fmt: skip


def test_no_room_uses_a_private_method_or_attribute_of_another():
    defined: dict[str, set[str | None]] = {}
    trees = {file: ast.parse(file.read_text()) for file in FILES}
    for file, tree in trees.items():
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.FunctionDef):
                names = [node.name]
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names = [node.attr]
            for name in names:
                if name.startswith("_") and not name.startswith("__"):
                    defined.setdefault(name, set()).add(room(module_name(file)))
    wrong = [
        f"{file.relative_to(ROOT)}:{node.lineno}: .{node.attr}"
        for file, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in defined
        and node.attr not in TORCH_OWN
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        and room(module_name(file)) not in defined[node.attr]
    ]
    assert not wrong


def lengths() -> list[tuple[int, str]]:
    return sorted(
        (node.end_lineno - node.lineno + 1, f"{file.relative_to(ROOT)}:{node.lineno} {node.name}")
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def test_functions_fit_in_the_head():
    found = lengths()
    lines = [n for n, _ in found]
    assert [name for n, name in found if n > MOST_LINES] == []
    assert statistics.median(lines) <= 8
    assert lines[int(0.95 * len(lines))] <= 31


def test_the_folders_are_all_looked_at():
    counted = [sum(f.is_relative_to(ROOT / folder) for f in FILES) for folder in FOLDERS]
    assert all(counted) and sum(counted) == len(FILES)
    assert len(list(itertools.chain(uses()))) > 500


PUBLIC = {
    "hcx.rewrite": "ArtefactError BlockModule ContractError Exact ExitCode ExportError HcxError Metric NoMatchError Pass "
    "Plan PlanError Program Reason Rounding Site Skip SourceError Structural TraceError UsageError allow_ops load save "
    "trace verify",
    "hcx.passes": "Exits HyperConnections Lora Looped NormFormer Observe Quantize ScaleVectors Siamese Skipping Unloop",
    "hcx.export": "HandedOn OnnxReport OnnxSession to_hf to_onnx to_pt2",
    "hcx.cli": "diff env exits export generate inspect passes plan rewrite verify",
    "hcx.passes.exits": "Calibration Compact Costs Decoded Decoder Drift EncoderExits Exits Fit Generated RIVER River "
    "Skipping Speculated Step Trials calibrate drift error_rate exit_costs fit hypothesis_posterior measure sampler "
    "save_pieces set_thresholds speculate spelled split token_batches within_budget",
}
VERBS = "plan rewrite save as_pretrained as_module load_checkpoint check_inputs sites param_groups to train eval"


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_stay(module):
    import importlib

    names = set(PUBLIC[module].split())
    assert names <= set(importlib.import_module(module).__all__)


def test_the_graph_program_has_no_verbs_and_the_users_program_has_them_all():
    from hcx.rewrite import Program
    from hcx.rewrite.ir.program import Program as Core

    assert all(callable(getattr(Program, verb)) for verb in VERBS.split())
    assert not [v for v in VERBS.split()[:-3] if hasattr(Core, v)]
