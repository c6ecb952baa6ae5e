"""Runs hcx over the model cases of ``shared/cases`` and prints one row a case.

    HCX_CASES=../shared/cases python tests/cases/run_cases.py [-v] [case ...]

Columns: trace, looped, exits, save+load, onnx. A cell says ``right``, ``refused: reason``, ``WRONG: what`` or ``CRASH:
exception`` (anything that is not an ``HcxError``). Non-neutral rewrites are compared with an evaluation of the same
formula on the graph before the rewrite, so a loop or an exit that is thrown away or applied twice is seen.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from hcx.rewrite import trace
from hcx.rewrite.errors import HcxError
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

STAGES = ("trace", "looped", "exits", "save+load", "onnx")
SCALAR, STEPS = 0.1, 2


def cases_folder() -> Path:
    """Where the cases lie: ``HCX_CASES``, or ``../shared/cases`` beside the repository."""
    given = os.environ.get("HCX_CASES")
    return Path(given) if given else Path(__file__).resolve().parents[2].parent / "shared" / "cases"


def load_cases() -> ModuleType | None:
    """The module ``cases.py``, or None where it is absent."""
    file = cases_folder() / "cases.py"
    if not file.is_file():
        return None
    if "hcx_cases" not in sys.modules:
        spec = importlib.util.spec_from_file_location("hcx_cases", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["hcx_cases"] = module
        spec.loader.exec_module(module)
    return sys.modules["hcx_cases"]


def _copied(value: Any) -> Any:
    """The same arguments in fresh tensors: a model may write to its inputs."""
    return tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, value)


class Wrong(AssertionError):
    """A value or a fact that is not as demanded."""


def need(condition: Any, what: str) -> None:
    """Raise :class:`Wrong` unless the condition holds."""
    if not condition:
        raise Wrong(what)


# ---- the graph before a rewrite, as an oracle


class _Override(fx.Interpreter):
    """Runs a graph with some values replaced; remembers the values of some nodes."""

    def __init__(self, program: Any, replaced: dict[str, torch.Tensor], wanted: set[str]):
        super().__init__(program.tree, graph=program.graph, garbage_collect_values=False)
        self.replaced, self.wanted, self.seen = replaced, wanted, {}

    def run_node(self, node: fx.Node) -> Any:
        result = self.replaced[node.name].clone() if node.name in self.replaced else super().run_node(node)
        if node.name in self.wanted:
            self.seen[node.name] = result.clone()
        return result


def evaluate(program: Any, flat: list, replaced: dict[str, torch.Tensor], wanted: set[str]) -> tuple[list, dict]:
    """Outputs of the graph, and the wanted values, with some values replaced."""
    run = _Override(program, replaced, wanted)
    with torch.no_grad():
        outputs = run.run(*[t.clone() for t in program.signature.complete(flat)])
    return list(outputs)[: len(program.output_names)], run.seen


def looped_oracle(program: Any, detail: dict, flat: list) -> list[torch.Tensor]:
    """``h + b (F(h) - h)``, evaluated with the graph before the loop."""
    stack = program.sites().stack(detail["stack"])
    entry, exit_ = stack.boundary(detail["start"]).node.name, stack.boundary(detail["end"]).node.name
    _, seen = evaluate(program, flat, {}, {exit_})
    state = seen[exit_]
    for _ in range(detail["steps"] - 1):
        _, seen = evaluate(program, flat, {entry: state}, {exit_})
        state = state + detail["scalar"] * (seen[exit_] - state)
    return evaluate(program, flat, {exit_: state}, set())[0]


def exits_oracle(program: Any, details: list[dict], flat: list) -> list[torch.Tensor] | None:
    """First output when every position leaves at the first exit (None for heads with weights of their own)."""
    first = min(details, key=lambda d: d["at"])
    if first["head"] != "shared":
        return None
    stack = program.sites().stack(first["stack"])
    place, end = stack.boundary(first["at"]).node.name, stack.boundaries[-1].node.name
    _, seen = evaluate(program, flat, {}, {place})
    return evaluate(program, flat, {end: seen[place]}, set())[0]


# ---- one case


class Run:
    """One case on its way through hcx."""

    def __init__(self, cases: ModuleType, case: Any):
        self.cases, self.case = cases, case
        self.expected = cases.reference(case)
        self.model, self.args, self.kwargs = case.build()
        self.before = {n: t.detach().clone() for n, t in self.model.state_dict().items()}
        self.calls = [(self.args, self.kwargs), *(case.alt() if case.alt else [])]
        self.program: Any = None
        self.rewritten: list[Any] = []
        self.notes: list[str] = []

    def check_calls(self, call: Callable, what: str) -> None:
        """Outputs of a callable on the example and all other inputs against eager."""
        for number, ((args, kwargs), want) in enumerate(zip(self.calls, self.expected, strict=True)):
            try:
                with torch.no_grad():
                    got = call(*_copied(args), **_copied(kwargs))
            except HcxError as error:
                if number and self.case.expect != "correct" and error.where:  # another shape, refused by name
                    continue
                raise Wrong(f"{what} input {number} refused: {error.what}") from error
            same, reason = self.cases.same(got, want, self.case.tol)
            need(same, f"{what} input {number}: {reason}")

    def _accepted(self, program: Any, args: tuple, kwargs: dict) -> bool:
        """Whether the program takes this call; a shape it refuses is judged in :meth:`check_calls`."""
        try:
            program.signature.bind(_copied(args), _copied(kwargs))
        except HcxError:
            return False
        return True

    def check_state(self, program: Any, what: str) -> None:
        """Names, dtypes and values of the model's own tensors, and a strict load of the old state."""
        keys = [k for k in program.state_dict() if k not in program.origin]
        need(
            sorted(keys) == sorted(self.before),
            f"{what}: state-dict keys differ: {sorted(set(keys) ^ set(self.before))[:4]}",
        )
        for name, tensor in self.before.items():
            need(program.state_dict()[name].dtype == tensor.dtype, f"{what}: dtype of {name} changed")
        extra = {k: v for k, v in program.state_dict().items() if k in program.origin}
        program.load_state_dict({**self.before, **extra}, strict=True)

    def trace(self) -> str:
        self.program = trace(self.model, self.args, self.kwargs)
        for got, want in zip(tree_leaves((self.args, self.kwargs)), tree_leaves(self.case.build()[1:]), strict=True):
            need(not isinstance(got, torch.Tensor) or torch.equal(got, want), "tracing changed the caller's example")
        need(self.model.training == self.case.train, "the model's own mode was changed")
        for name, tensor in self.model.state_dict().items():
            need(
                torch.equal(torch.nan_to_num(tensor), torch.nan_to_num(self.before[name])),
                f"the caller's {name} was changed",
            )
        self.check_calls(self.program, "traced")
        self.check_state(self.program, "traced")
        self.check_calls(self.program, "after a strict load")
        FACTS.get(self.case.id, lambda run: None)(self)
        return "right"

    def looped(self) -> str:
        plan = self.program.plan("looped")
        new = self.program.rewrite("looped")
        self.check_calls(new, "looped")
        self.check_state(new, "looped")
        moved = self.program.rewrite(f"looped{{mix=output,scalar={SCALAR},steps={STEPS}}}")
        detail = {**plan.steps[0].sites[0].detail, "scalar": SCALAR, "steps": STEPS}
        different = False
        for args, kwargs in self.calls:
            if not self._accepted(self.program, args, kwargs):
                continue
            flat = self.program.signature.bind(_copied(args), _copied(kwargs))
            want = looped_oracle(self.program, detail, flat)
            got = moved.run_flat([t.clone() for t in flat])
            same, reason = self.cases.same(got, want, self.case.tol)
            need(same, f"looped{{scalar={SCALAR}}} against its formula: {reason}")
            with torch.no_grad():
                base = self.program.run_flat([t.clone() for t in flat])
            different |= not self.cases.same(got, base, 1e-7)[0]
        need(different, "the loop changes nothing")
        self.rewritten.append(moved)
        LOOPED_FACTS.get(self.case.id, lambda run, program: None)(self, moved)
        return f"right ({plan.steps[0].sites[0].address})"

    def exits(self) -> str:
        plan = self.program.plan("exits")
        new = self.program.rewrite("exits")
        self.check_calls(new, "exits")
        self.check_state(new, "exits")
        details = [s.detail for s in plan.steps[0].sites]
        self.check_calls(self.program.rewrite("exits{threshold=1.5}"), "exits{threshold=1.5}")
        first = self.program.rewrite("exits{threshold=-1}")
        half = self.program.rewrite("exits{threshold=0.5}")
        for args, kwargs in self.calls:
            if not self._accepted(self.program, args, kwargs):
                continue
            flat = self.program.signature.bind(_copied(args), _copied(kwargs))
            want = exits_oracle(self.program, details, flat)
            got = first.run_flat([t.clone() for t in flat])
            if want is not None:
                same, reason = self.cases.same(got[:1], want[:1], self.case.tol)
                need(same, f"exits{{threshold=-1}} against the first head: {reason}")
            self._rows_alone(half, flat)
        self.rewritten.append(half)
        return f"right ({details[0]['head']}@{','.join(str(d['at']) for d in details)})"

    def _rows_alone(self, program: Any, flat: list) -> None:
        """A row's answer does not depend on its neighbours, where that holds for the model."""
        rows = flat[0].shape[0] if flat[0].dim() else 1
        if rows < 2 or any(not t.dim() or t.shape[0] != rows for t in flat):
            return
        for row in range(rows):
            one = [t[row : row + 1] for t in flat]
            try:
                alone, base, together = (
                    p.run_flat([t.clone() for t in f])
                    for p, f in ((program, one), (self.program, one), (self.program, flat))
                )
            except (HcxError, RuntimeError):
                return
            if not base[0].dim() or not self.cases.same(base[0], together[0][row : row + 1], self.case.tol)[0]:
                return
            same, reason = self.cases.same(
                alone[0], program.run_flat([t.clone() for t in flat])[0][row : row + 1], self.case.tol
            )
            need(same, f"exits: row {row} depends on its batch: {reason}")

    def save_load(self) -> str:
        from hcx.rewrite import load, save, verify

        with tempfile.TemporaryDirectory() as folder:
            for number, program in enumerate([self.program, *self.rewritten]):
                path = Path(folder) / f"{number}.hcx"
                save(program, path)
                again = load(path)
                self._same_calls(program, again)
                self.check_state(again, "loaded")
                self._stored_once(path, program)
                failed = [c.name for c in verify(path) if not c.holds]
                need(not failed, f"hcx verify fails: {failed}")
                second = Path(folder) / f"{number}-again.hcx"
                save(again, second)
                self._same_calls(program, load(second))
        return "right"

    def _same_calls(self, program: Any, again: Any) -> None:
        for args, kwargs in self.calls:
            if not self._accepted(program, args, kwargs):
                continue
            with torch.no_grad():
                got, want = again(*_copied(args), **_copied(kwargs)), program(*_copied(args), **_copied(kwargs))
            same, reason = self.cases.same(got, want, 0.0)
            need(same, f"loaded: {reason}")
            need(_shape_of(got) == _shape_of(want), "loaded: another structure")

    def _stored_once(self, path: Path, program: Any) -> None:
        size = (path / "weights.safetensors").stat().st_size
        unique = {id(t): t.numel() * t.element_size() for _, t in program.named_tensors()}
        header = int.from_bytes((path / "weights.safetensors").read_bytes()[:8], "little") + 8
        need(
            size - header <= sum(unique.values()),
            f"weights take {size - header} bytes, unique tensors have {sum(unique.values())}",
        )
        own = {id(t): t.numel() * t.element_size() for t in [*self.model.parameters(), *self.model.buffers()]}
        passes = sum(program.tensor(n).numel() * program.tensor(n).element_size() for n in program.origin)
        need(
            size - header <= sum(own.values()) + passes + 4096,
            f"weights take {size - header} bytes, the model's unique tensors {sum(own.values())}",
        )

    def onnx(self) -> str:
        try:
            from hcx.export import OnnxSession, to_onnx
        except ImportError as error:
            return f"skipped: {error}"
        with tempfile.TemporaryDirectory() as folder:
            for number, program in enumerate([self.program, *self.rewritten]):
                path = Path(folder) / f"{number}.onnx"
                try:
                    to_onnx(program, path)
                except HcxError:
                    need(not list(Path(folder).glob(f"{number}.onnx*")), "the export was refused and a file is left")
                    raise
                session = OnnxSession(path)
                if number == 0:
                    self.check_calls(session, "ONNX Runtime")
        return "right"


def _shape_of(value: Any) -> Any:
    """Containers and keys, with classes only where both processes can have them."""
    if isinstance(value, dict):
        return {k: _shape_of(v) for k, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return (value._fields, [_shape_of(v) for v in value])
    if isinstance(value, list | tuple):
        return (isinstance(value, list), [_shape_of(v) for v in value])
    return tuple(value.shape) if isinstance(value, torch.Tensor) else value


# ---- demands of single cases


def _refuses(call: Callable, what: str) -> None:
    try:
        call()
    except HcxError as error:
        need(error.what, f"{what}: an empty message")
        return
    raise Wrong(f"{what} is accepted")


def _shared_block(run: Run) -> None:
    need(len(run.program.sites().residuals) == 6, f"{len(run.program.sites().residuals)} residuals, not 6")
    need(len(list(run.program.parameters())) == len(list(run.model.parameters())), "parameters are not stored once")
    skip = run.program.plan("looped").steps[0].skips
    need(
        any("share" in s.text for s in skip) if skip and hasattr(skip[0], "text") else "share" in str(skip),
        f"looped does not say that the stack is shared: {skip}",
    )


def _train_mode(run: Run) -> None:
    run.program.eval()
    a, b = run.program(*run.args), run.program(*run.args)
    need(torch.equal(a, b), "two calls in eval mode differ")


def _parallel(run: Run) -> None:
    residuals = run.program.sites().residuals
    need(
        len(residuals) == 2 and all(len(r.branches) == 2 for r in residuals),
        f"{[len(r.branches) for r in residuals]} branches",
    )
    need(residuals[1].skip is residuals[0].add, "the second block's skip is not the first one's sum")


def _norms(run: Run) -> None:
    from hcx.rewrite.ir.dataflow import op_name

    residuals = run.program.sites().residuals
    need(len(residuals) == 4, f"{len(residuals)} residuals, not 4")
    need(op_name(residuals[1].skip) == "layer_norm", "the second skip is not the normed value")


def _hidden(run: Run) -> None:
    need(len(run.program.sites().residuals) == 6, f"{len(run.program.sites().residuals)} residuals, not 6")


def _hidden_looped(run: Run, program: Any) -> None:
    _, states, _ = program(*run.args)
    need(
        all(not torch.equal(states[i], states[j]) for i in range(3) for j in range(i)), "hidden states are not distinct"
    )


def _dict_out(run: Run) -> None:
    out = run.program(*run.args)
    need(list(out) == ["zeros", "ones", "pair", "none", "n"], f"keys {list(out)}")
    need(type(out["pair"]) is run.cases.Pair and out["none"] is None and out["n"] == 3, "another structure")
    need(not out["zeros"].any() and bool((out["ones"] == 1).all()), "outputs are exchanged")


def _kwargs(run: Run) -> None:
    values = {"flag": False, "x2": run.kwargs["x2"], "scale": 0.5}
    _refuses(lambda: run.program(*run.args, **{**values, "flag": True}), "flag=True")
    _refuses(lambda: run.program(*run.args, **{**values, "scale": 1.0}), "scale=1.0")
    _refuses(
        lambda: run.program(*run.args, x2=values["x2"]), "leaving out flag and scale (default flag=True, scale=1.0)"
    )
    need([i.name for i in run.program.inputs] == ["x1", "x2"], f"inputs {[i.name for i in run.program.inputs]}")


def _optional(run: Run) -> None:
    need(sorted(i.name for i in run.program.inputs) == ["attention_mask", "inputs_embeds"], "other inputs")
    _refuses(lambda: run.program(input_ids=torch.zeros(2, 5, dtype=torch.long)), "input_ids")
    _refuses(lambda: run.program(inputs_embeds=run.kwargs["inputs_embeds"]), "leaving out the mask")


def _bool_mask(run: Run) -> None:
    need(torch.isfinite(run.program(*run.args)).all(), "not finite")
    need(run.program.inputs[1].dtype is torch.bool, "the mask is not bool")


def _too_long(run: Run) -> None:
    try:
        run.program(torch.zeros(1, 17, dtype=torch.long))
    except (HcxError, RuntimeError):
        return
    raise Wrong("a length of 17 is accepted")


def _complex(run: Run) -> None:
    names = [n for n, b in run.model.named_buffers() if b.is_complex()]
    try:
        cast = trace(run.model, run.args, run.kwargs).to(torch.bfloat16)
    except HcxError:
        return
    need(all(cast.tensor(n).is_complex() for n in names), "the imaginary part of a buffer is gone")


FACTS: dict[str, Callable[[Run], None]] = {
    "shared-block": _shared_block,
    "train-mode-handed-over": _train_mode,
    "parallel-residual": _parallel,
    "norm-placement": _norms,
    "hidden-states-out": _hidden,
    "dict-output-order": _dict_out,
    "kwargs-order": _kwargs,
    "optional-none-inputs": _optional,
    "bool-mask-empty-row": _bool_mask,
    "dynamic-batch-example-1": _too_long,
    "complex-rope": _complex,
}
LOOPED_FACTS: dict[str, Callable[[Run, Any], None]] = {"hidden-states-out": _hidden_looped}


# ---- the table


def run_case(cases: ModuleType, case: Any) -> dict[str, str]:
    """One cell a stage."""
    run = Run(cases, case)
    row = dict.fromkeys(STAGES, "-")
    for stage, step in zip(STAGES, (run.trace, run.looped, run.exits, run.save_load, run.onnx), strict=True):
        row[stage] = _cell(step)
        if stage == "trace" and row[stage] != "right":
            if row[stage].startswith("refused") and case.id == "data-dependent-if":
                row[stage] = row[stage] if "cases.py:" in row[stage] else f"WRONG: no line named: {row[stage]}"
            if run.program is None:
                break
    return row


def _cell(step: Callable[[], str]) -> str:
    try:
        return step()
    except HcxError as error:
        return f"refused: {type(error).__name__}: {error.what}" + (f" [{error.where}]" if error.where else "")
    except Wrong as error:
        return f"WRONG: {error}"
    except Exception as error:  # noqa: BLE001  any error of any case is a line of the list
        import traceback

        frame = next(
            (f for f in reversed(traceback.extract_tb(error.__traceback__)) if "site-packages" not in f.filename), None
        )
        where = f" at {Path(frame.filename).name}:{frame.lineno}" if frame else ""
        first = next(iter(str(error).splitlines()), "")
        return f"CRASH: {type(error).__name__}: {first[:160]}{where}"


def failures(case: Any, row: dict[str, str]) -> list[str]:
    """Cells that do not meet what the case expects: wrong values and crashes; a trace refused where it must work."""
    bad = [f"{stage}: {cell}" for stage, cell in row.items() if cell.startswith(("WRONG", "CRASH"))]
    if case.expect == "correct" and row["trace"].startswith("refused"):
        bad.append(f"trace: {row['trace']}")
    if case.expect == "correct" and row["save+load"].startswith("refused"):
        bad.append(f"save+load: {row['save+load']}")
    return bad


def model_cases(cases: ModuleType) -> list[Any]:
    """All cases that are models."""
    return [c for c in cases.REGISTRY.values() if c.kind == "model"]


def main(argv: list[str]) -> int:
    """Print the table; the exit code is 1 where a case fails."""
    import warnings

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cases = load_cases()
    if cases is None:
        print(f"no cases at {cases_folder()}")
        return 0
    verbose, wanted = "-v" in argv, [a for a in argv if not a.startswith("-")]
    bad = 0
    chosen = model_cases(cases)
    if "--nasty" in argv:
        from nasty import as_cases

        chosen = as_cases(cases)
    for case in chosen:
        if wanted and case.id not in wanted:
            continue
        row = run_case(cases, case)
        failed = failures(case, row)
        bad += bool(failed)
        cut = 400 if verbose else 90
        print(
            f"{'FAIL' if failed else 'ok  '} {case.id:30s} | "
            + " | ".join(row[s].replace("\n", " ")[:cut] for s in STAGES),
            flush=True,
        )
    print(f"{bad} failed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
