"""The conformance kit: what every pass must do, whoever wrote it.

``conformance(MyPass)`` runs all of it on a small model of its own; give ``program`` to run it on another.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .api import load, save, trace
from .driver import plan, rewrite
from .errors import HcxError
from .ir import graph_text
from .ir.fingerprint import fingerprint
from .ir.program import Program
from .pipeline.passbase import Pass
from .pipeline.plan import Plan, Reason
from .pipeline.registry import homes, passes
from .run.inputs import check_inputs


class TinyDecoder(torch.nn.Module):
    """A pre-norm decoder of four equal blocks with a tied head: ``input_ids [B, S] -> logits [B, S, 40]``."""

    class Block(torch.nn.Module):
        """Attention and MLP on one stream."""

        def __init__(self, width: int):
            super().__init__()
            self.norm_1, self.norm_2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
            self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
            self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind(0)
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
            return x + self.down(torch.nn.functional.gelu(self.up(self.norm_2(x))))

    def __init__(self, width: int = 16, depth: int = 4):
        super().__init__()
        self.embed = torch.nn.Embedding(40, width)
        self.layers = torch.nn.ModuleList([self.Block(width) for _ in range(depth)])
        self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.head(self.norm(x))}


def tiny_decoder(seed: int = 0) -> tuple[torch.nn.Module, torch.Tensor]:
    """The model of the kit with fixed weights, and token ids ``[2, 7]``."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = TinyDecoder().eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.3)
        return model, torch.randint(0, 40, (2, 7))


def conformance(
    step: type[Pass] | Pass | str, program: Program | None = None, *, subprocesses: bool = True
) -> list[str]:
    """Run the kit.

    Args:
        step: pass class (its defaults are used), pass object, or pipeline string of one pass.
        program: what to run it on; default: a small decoder with a tied head.
        subprocesses: also replay in a fresh process (two seconds).

    Returns:
        names of the checks that ran.

    Raises:
        AssertionError: names the check that failed.
    """
    made = step() if isinstance(step, type) else passes(step)[0]
    if program is None:
        model, ids = tiny_decoder()
        program = trace(model, (ids,))
    if made.name not in homes():
        raise AssertionError(
            f"no installed package registers `{made.name}`: install its package first, see first_pass.md"
        )
    kit = _Kit(made, program)
    checks: list[Callable[[], None]] = [
        kit.plan_is_pure, kit.plan_is_data, kit.prints_and_parses, kit.original_is_untouched, kit.is_deterministic,
        kit.checks_hold, kit.skips_have_reasons, kit.twice_is_defined, kit.deepcopies, kit.state_dict_round_trip,
        kit.ties_are_kept, kit.addresses_are_stable, kit.saves_and_loads,
    ]  # fmt: skip
    if subprocesses:
        checks.append(kit.replays_elsewhere)
    for check in checks:
        try:
            check()
        except AssertionError as error:
            raise AssertionError(f"{made.name} fails `{check.__name__}`: {error}") from error
    return [c.__name__ for c in checks]


class _Kit:
    def __init__(self, step: Pass, program: Program):
        self.step, self.program = step, program
        self.result = rewrite(program, step)
        self.plan = plan(program, step)

    def plan_is_pure(self) -> None:
        before = _snapshot(self.program)
        again = plan(self.program, self.step)
        assert again.to_json() == self.plan.to_json(), "two plans of one program differ"
        _assert_same(_snapshot(self.program), before, "planning changed the program")

    def plan_is_data(self) -> None:
        stored = json.loads(json.dumps(self.plan.to_json()))
        assert Plan.from_json(stored).to_json() == self.plan.to_json(), "the plan does not survive JSON"
        assert self.step.name in str(self.plan), "the printed plan does not name the pass"
        assert self.plan.steps[0].sites, "the plan has no site on this model"

    def prints_and_parses(self) -> None:
        assert passes(str(self.step)) == [self.step], f"{self.step} does not parse back"

    def original_is_untouched(self) -> None:
        before = _snapshot(self.program)
        result = rewrite(self.program, self.step, check=False)
        with torch.no_grad():
            for parameter in result.parameters():
                parameter.add_(1.0)
        _assert_same(_snapshot(self.program), before, "rewriting or training the result changed the original")

    def is_deterministic(self) -> None:
        again = rewrite(self.program, self.plan, check=False)
        _assert_same(_snapshot(again), _snapshot(self.result), "two applications differ")

    def checks_hold(self) -> None:
        checks = {c["name"]: c for e in self.result.history for c in e["checks"]}
        failed = [f"{n}: {c['note']}" for n, c in checks.items() if not c["holds"]]
        assert checks and not failed, f"failed checks: {failed}"

    def skips_have_reasons(self) -> None:
        assert all(isinstance(s.reason, Reason) and s.address for p in self.plan.steps for s in p.skips)

    def twice_is_defined(self) -> None:
        try:
            twice = rewrite(self.result, self.step)
        except HcxError:
            return
        assert len(twice.history) == len(self.result.history) + 1

    def deepcopies(self) -> None:
        _assert_same(_snapshot(copy.deepcopy(self.result)), _snapshot(self.result), "a deep copy differs")
        _assert_same_outputs(copy.deepcopy(self.result), self.result)

    def state_dict_round_trip(self) -> None:
        state = {n: t.clone() for n, t in self.result.state_dict().items()}
        other = copy.deepcopy(self.result)
        with torch.no_grad():
            for parameter in other.parameters():
                if parameter.is_floating_point():
                    parameter.zero_()
        other.load_state_dict(state, strict=True)
        _assert_same_outputs(other, self.result)

    def ties_are_kept(self) -> None:
        names = dict(self.result.named_tensors())
        for group in self.program.tied_groups():
            here = [names[n] for n in group if n in names]
            assert all(t is here[0] for t in here), f"{group} are no longer one tensor"

    def addresses_are_stable(self) -> None:
        expected = [s.address for p in self.plan.steps for s in p.sites or ()]
        reference = self.program.reference
        variants = [copy.deepcopy(self.program).to(torch.float64)]
        shapes = check_inputs(self.program, 2)
        if reference is not None and len(self.program.inputs) == 1 and len(shapes) == 2:
            variants.append(trace(reference.model, tuple(shapes[1])))
        for variant in variants:
            found = [s.address for p in plan(variant, self.step).steps for s in p.sites or ()]
            assert found == expected, f"addresses changed: {found[:3]} for {expected[:3]}"

    def saves_and_loads(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            save(self.result, Path(folder) / "a.hcx")
            loaded = load(Path(folder) / "a.hcx")
            _assert_same(_snapshot(loaded), _snapshot(self.result), "the loaded program differs")
            _assert_same_outputs(loaded, self.result)
            assert fingerprint(loaded) == fingerprint(self.result)

    def replays_elsewhere(self) -> None:
        """Load the base and apply the stored plan in a fresh process: the same artefact comes out."""
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            save(self.program, root / "base.hcx")
            (root / "plan.json").write_text(json.dumps(self.plan.to_json()))
            done = subprocess.run([sys.executable, "-c", _REPLAY, folder], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-2000:]
            _assert_same(_snapshot(load(root / "out.hcx")), _snapshot(self.result), "the replayed artefact differs")


_REPLAY = """
import sys
from pathlib import Path
from hcx.rewrite import Plan, load
root = Path(sys.argv[1])
plan = Plan.from_json((root / "plan.json").read_text())
load(root / "base.hcx").rewrite(plan, check=False).save(root / "out.hcx")
"""


def _snapshot(program: Program) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Graph without the symbol names of its shapes, and a copy of every tensor."""
    data = _without_shapes(graph_text.to_json(program.graph))
    return [*data["nodes"], {"stacks": data["stacks"]}], {n: t.detach().clone() for n, t in program.named_tensors()}


def _without_shapes(data: dict[str, Any]) -> dict[str, Any]:
    nodes = [{k: v for k, v in n.items() if k not in ("shape", "dtype")} for n in data["nodes"]]
    for node in nodes:
        if "bodies" in node:
            node["bodies"] = [_without_shapes(body) for body in node["bodies"]]
    return {**data, "nodes": nodes}


def _assert_same(got: Any, expected: Any, message: str) -> None:
    for one, other in zip(got[0], expected[0], strict=False):
        assert one == other, f"{message}: {str(one)[:300]} for {str(other)[:300]}"
    assert len(got[0]) == len(expected[0]), f"{message}: {len(got[0])} nodes for {len(expected[0])}"
    assert got[1].keys() == expected[1].keys(), f"{message}: tensors {sorted(got[1].keys() ^ expected[1].keys())[:5]}"
    for name, tensor in got[1].items():
        assert torch.equal(torch.nan_to_num(tensor), torch.nan_to_num(expected[1][name])), f"{message}: tensor {name}"


def _assert_same_outputs(one: Program, other: Program) -> None:
    for flat in other.check_inputs(2):
        with torch.no_grad():
            left = one.run_flat(one.signature.complete(flat), taps=True)
            right = other.run_flat(other.signature.complete(flat), taps=True)
        for a, b in zip(left, right, strict=True):
            assert torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)), "outputs differ"
