"""The interface of a pass."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from . import spec
from .contracts import Contract
from .plan import PassPlan, Site

if TYPE_CHECKING:
    from hcx.rewrite.edit.editor import Editor
    from hcx.rewrite.ir.program import Program


def tap_prefix(name: str, number: int) -> str:
    """What the taps of a pass begin with, before the dot; ``number`` counts its runs in a pipeline from 0.

    >>> tap_prefix("exits", 0), tap_prefix("exits", 1)
    ('exits', 'exits_1')
    """
    return f"{name}_{number}" if number else name


class Pass:
    """A rewrite: a frozen dataclass of its options with a ``name``.

    Attributes:
        name: name in pipeline strings; equal to its key in the registry.
        rank: place in the default order (hc 10, looped 20, gates 30, exits 40, adapters 50, sparsify 60, quantize 70);
            a pass may not follow one of a higher rank. None goes anywhere.
        aliases: other names of options that are read, never written.
    """

    name: ClassVar[str]
    rank: ClassVar[int | None] = None
    aliases: ClassVar[dict[str, str]] = {}

    @classmethod
    def place(cls) -> int | None:
        """Place in the default order: ``rank``, unless the pass has an option of that name."""
        return cls.rank

    def order(self) -> int | None:
        """Place of this pass with its options; larger than :meth:`place` where they hide what other passes look for."""
        return self.place()

    def plan(self, program: Program) -> PassPlan:
        """What would be done. Pure: the Program is not changed."""
        raise NotImplementedError

    def apply(self, program: Program, plan: PassPlan, editor: Editor) -> None:
        """Do it, through the editor only."""
        raise NotImplementedError

    def preserves(self, program: Program, plan: PassPlan) -> Contract:
        """The contract that holds for this plan; checked by the driver."""
        raise NotImplementedError

    def perturbed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Another value for a tensor this pass added, one that must change an output or a tap."""
        noise = torch.linspace(0.5, 1.5, max(tensor.numel(), 1), dtype=torch.float64)[: tensor.numel()]
        return tensor + (0.1 * (1 + tensor.double().abs()) * noise.reshape(tensor.shape).to(tensor.device)).to(
            tensor.dtype
        )

    def inert(self, name: str) -> str | None:
        """Why a parameter of this pass has no gradient at the start although nothing is wrong, or None."""
        return None

    def changes(self, plan: PassPlan) -> bool:
        """Whether a plan with sites must change something; False for settings that are meant to do nothing."""
        return bool(plan.sites)

    def misfit(self, program: Program, detail: dict[str, Any]) -> str | None:
        """Why a site of an edited plan cannot be applied, or None."""
        return None

    def caveat(self) -> str | None:
        """What the certificate must say about training from this start, although every gradient is there, or None."""
        return None

    def fold(self, program: Program, sites: list[Site], prefix: str, weights: dict[str, torch.Tensor]) -> str | None:
        """Express what this pass did in the base's own tensors, so that the base's architecture computes it.

        Called from the last pass of the history to the first: a tensor of ``weights`` is what earlier passes see.

        Args:
            program: where the tensors of the pass are.
            sites: what its plan changed.
            prefix: of its tensors, ``hcx.lora_0``.
            weights: tensors of the base by name; entries are replaced or added, never written to.

        Returns:
            None where that is done, else the reason why the architecture cannot say it.
        """
        return "it changes the architecture"

    def approximates(self, plan: PassPlan) -> str | None:
        """Why decoding through the cache may differ from full forwards after this pass, or None where it must not."""
        return None

    def undo(self, program: Program, sites: list[Site], prefix: str) -> Pass | None:
        """A pass that takes out what this one added where it changes nothing at present, or None; for exporters."""
        return None

    def new_plan(self, **fields: Any) -> PassPlan:
        """An empty plan step of this pass with its options."""
        return PassPlan(self.name, self.options(), **fields)

    def options(self) -> dict[str, Any]:
        """Options as JSON values; tuples become lists."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(cast("Any", self)).items()}

    def __str__(self) -> str:
        return spec.unparse(self)
