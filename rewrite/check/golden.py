"""Recorded inputs and outputs: what eager gave, and what the Program gave when it was saved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from hcx.rewrite.errors import ArtefactError
from hcx.rewrite.ir import oracle
from hcx.rewrite.pipeline.contracts import Exact, Rounding, combined, compare, from_json, merge
from hcx.rewrite.run.inputs import check_inputs
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .eager import reference_is_current
from .measuring import is_meta, outputs
from .report import Check

if TYPE_CHECKING:
    from hcx.rewrite.ir.program import Program


@dataclass
class Golden:
    """Input sets with the outputs of the source model and of the Program; caches are left out.

    Attributes:
        inputs: flat inputs of each set.
        eager: source model's outputs by name, empty where it was not in memory.
        program: the Program's outputs by name.
    """

    inputs: list[list[torch.Tensor]]
    eager: list[dict[str, torch.Tensor]]
    program: list[dict[str, torch.Tensor]]

    @staticmethod
    def record(program: Program, sets: int = 2) -> Golden:
        """Run the Program, and the source model where it is in memory."""
        if is_meta(program):
            return Golden([program.signature.complete(program.examples[0])], [], [])
        inputs = [program.signature.complete(f) for f in check_inputs(program, sets)]
        got = [{n: t for n, t in o.items() if not n.startswith("present.")} for o in outputs(program, inputs)]
        eager: list[dict[str, torch.Tensor]] = []
        if program.reference is not None and reference_is_current(program):
            for flat in inputs:
                tensors = oracle.run(program.reference, flat)
                named = dict(zip(program.output_names, tensors, strict=False))
                eager.append({n: t for n, t in named.items() if not n.startswith("present.")})
        return Golden(inputs, eager, got)

    def stale(self, program: Program) -> bool:
        """Whether the Program no longer gives what was recorded (it was trained, or its source can be asked again)."""
        return program.reference is not None or not self.program or not self.check(program).holds

    def check(self, program: Program) -> Check:
        """The Program reproduces its own recorded outputs bitwise."""
        got = outputs(program, self.inputs)
        measured = merge(
            [compare([g[n] for n in want], list(want.values())) for g, want in zip(got, self.program, strict=True)]
        )
        return Check("golden reproduced", measured["bitwise"], measured)

    def contracts(self, program: Program) -> list[Check]:
        """The promise of the whole history against the recorded eager outputs."""
        if not self.eager:
            return []
        promised = [from_json(e.contract) for e in program.history]
        weakest = combined(promised)
        if isinstance(weakest, Exact) and not program.trace_exact:
            weakest = Rounding(64)
        got = outputs(program, self.inputs)
        measured = merge(
            [compare([g[n] for n in want], list(want.values())) for g, want in zip(got, self.eager, strict=True)]
        )
        return [Check("against the recorded eager outputs", weakest.check(measured), measured, f"contract {weakest}")]

    def describe(self) -> dict[str, Any]:
        """What the manifest says about the golden."""
        return {
            "sets": len(self.inputs),
            "inputs": len(self.inputs[0]),
            "eager": bool(self.eager),
            "program": bool(self.program),
        }

    def write(self, path: Path) -> None:
        """Store as safetensors."""
        tensors = {f"input.{i}.{k}": t for i, flat in enumerate(self.inputs) for k, t in enumerate(flat)}
        tensors |= {f"eager.{i}.{n}": t for i, named in enumerate(self.eager) for n, t in named.items()}
        tensors |= {f"program.{i}.{n}": t for i, named in enumerate(self.program) for n, t in named.items()}
        save_file({n: t.detach().contiguous().clone() for n, t in tensors.items()}, path)

    @staticmethod
    def read(path: Path, described: dict[str, Any]) -> Golden:
        """Read back.

        Raises:
            ArtefactError: damaged.
        """
        try:
            with safe_open(path, "pt") as file:
                stored = {n: file.get_tensor(n).clone() for n in file.keys()}  # noqa: SIM118 the file is no dict
            sets = range(int(described["sets"]))
            inputs = [[stored[f"input.{i}.{k}"] for k in range(int(described["inputs"]))] for i in sets]
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise ArtefactError(f"{path.name} is damaged or incomplete: {error}", where=str(path)) from error

        def named(kind: str) -> list[dict[str, torch.Tensor]]:
            prefix = [f"{kind}.{i}." for i in sets]
            found = [{n.removeprefix(p): t for n, t in stored.items() if n.startswith(p)} for p in prefix]
            return found if described.get(kind) else []

        return Golden(inputs, named("eager"), named("program"))
