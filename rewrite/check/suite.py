"""The checks of a pipeline, in their order, over one set of inputs."""

from __future__ import annotations

from collections.abc import Callable, Set

import torch
from hcx.rewrite.errors import ContractError
from hcx.rewrite.ir import oracle
from hcx.rewrite.ir.history import tensor_prefix
from hcx.rewrite.ir.program import Program
from hcx.rewrite.pipeline import contracts
from hcx.rewrite.pipeline.contracts import Contract
from hcx.rewrite.pipeline.passbase import Pass
from hcx.rewrite.run.inputs import check_inputs

from .decoding import check_decode
from .eager import check_contract, check_source
from .invariants import check_base_untouched, check_grad_mode
from .liveness import check_live
from .measuring import outputs
from .report import Check
from .vacuous import check_changed, check_not_vacuous, state_of

Progress = Callable[[str], None]


class Checker:
    """Runs the checks of a pipeline over one set of inputs."""

    def __init__(self, base: Program, new: Program, say: Progress):
        self.base, self.say = base, say
        self.inputs = [flat for flat in check_inputs(base, 3) if _eager_accepts(base, flat)]
        self.first = self.before = outputs(base, self.inputs)
        self.state = state_of(new)

    def step(
        self, program: Program, step: Pass, contract: Contract, number: int, changes: bool, moved: dict[str, str]
    ) -> list[Check]:
        """After one pass: its contract against the program before it, not vacuous, live.

        Args:
            number: of the runs of this pass, from 0.
            changes: whether its plan must change something.
            moved: names of outputs before -> now, of those that are left; empty where none was taken out.
        """
        if moved:
            self.before = [{moved[n]: t for n, t in named.items() if n in moved} for named in self.before]
        after = outputs(program, self.inputs)
        checks: list[Check | None] = [
            check_contract(contract, after, self.before, f"contract of {step.name}"),
            check_not_vacuous(program, step, number, self.inputs[0])
            or (check_changed(step, self.state, state_of(program)) if changes else None),
            check_live(program, self.inputs[0], tensor_prefix(step.name, number) + ".", step),
        ]
        self.before, self.state = after, state_of(program)
        return required(checks, may_fail={"live gradients"})

    def whole(self, program: Program, promised: list[Contract]) -> list[Check]:
        """After the pipeline: against eager, with gradients, through the cache, and the base tensors."""
        after = self.before
        weakest = contracts.combined(promised)
        checks = [
            check_source(program, weakest, self.inputs, after, self.first if self.base.history else None),
            check_grad_mode(program, self.inputs, after),
            check_decode(program, self.inputs[0]),
            check_base_untouched(program, self.base),
        ]
        return required(checks)


def _eager_accepts(program: Program, flat: list[torch.Tensor]) -> bool:
    """Whether the source model runs on an input set that was made from the example."""
    if program.reference is None:
        return True
    try:
        oracle.run(program.reference, flat)
    except (RuntimeError, ValueError, IndexError):
        return False
    return True


def required(checks: list[Check | None], may_fail: Set[str] = frozenset()) -> list[Check]:
    done = [c for c in checks if c is not None]
    for check in done:
        if not check.holds and check.name not in may_fail:
            raise ContractError(
                f"a check failed: {check}",
                hint="nothing was written; this is a bug of the pass or a model it does not fit",
            )
    return done
