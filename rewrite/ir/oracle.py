"""The oracle of every check: the source model in eager, behind the Program's flat interface."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from .structure import Structure


class Oracle(Protocol):
    """What the checks ask of a source model.

    Attributes:
        model: the source model itself; it may have been trained since the trace.
        structure: its call over flat tensors; flat inputs that passes have added come after these.
        positions: positional arguments, by name.
        optional: arguments that calls may leave out -> whether it is the cache (else positions).
    """

    model: torch.nn.Module
    structure: Structure
    positions: dict[str, int]
    optional: dict[str, bool]

    def __call__(self, flat: list[torch.Tensor], *, grad: bool = False) -> list[torch.Tensor]:
        """Flat outputs for flat inputs."""
        ...

    def named(self, flat: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The outputs by name."""
        ...

    def result(self, flat: list[torch.Tensor], *, grad: bool = False) -> Any:
        """The output as the model gives it."""
        ...

    def flat(self, result: Any) -> list[torch.Tensor]:
        """The model's output as flat tensors."""
        ...


def run(oracle: Oracle, flat: list[torch.Tensor]) -> list[torch.Tensor]:
    """Flat outputs for the flat inputs of a Program, of which passes may have added the last; they are copied first."""
    return oracle([t.clone() for t in flat[: len(oracle.structure.names)]])
