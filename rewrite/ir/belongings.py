"""What travels with a Program beside its graph, its tensors and its call."""

from __future__ import annotations

import copy
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from .history import Entry


class StoredTensor(Protocol):
    """A tensor that still lies in a file; see :class:`hcx.rewrite.source.stored.Stored`."""

    def read(self) -> torch.Tensor:
        """Its values, in memory."""
        ...


@dataclass
class Belongings:
    """What every copy of a Program takes along.

    Attributes:
        history: one entry a pass: pipeline, plan and certificate.
        origin: parameter or buffer name -> name of the pass that added it; base tensors are not listed.
        companions: small files that belong to the model (tokenizer, config), by name.
        stored: name -> place in a file, of tensors that are on ``meta`` because nobody has read them yet.
        trace_exact: whether the fresh trace gave eager's outputs bitwise; None where nothing was run.
        golden: recorded inputs and outputs of the artefact that the Program came from (it is what that artefact
            computes, so a Program with another graph has none).
    """

    history: list[Entry] = field(default_factory=list)
    origin: dict[str, str] = field(default_factory=dict)
    companions: dict[str, bytes] = field(default_factory=dict)
    stored: dict[str, StoredTensor] = field(default_factory=dict)
    trace_exact: bool | None = None
    golden: Any = None

    def copied(self, *, golden: bool = False) -> Belongings:
        """The same for another Program.

        Args:
            golden: hand the recorded outputs on too: only to a Program that computes the same.
        """
        return Belongings(
            copy.deepcopy(self.history),
            dict(self.origin),
            dict(self.companions),
            dict(self.stored),
            self.trace_exact,
            self.golden if golden else None,
        )

    def of_tensors(self, names: Container[str]) -> Belongings:
        """What a part of the Program with these tensors takes along; the history is that of the whole."""
        return Belongings(
            origin={n: p for n, p in self.origin.items() if n in names},
            companions=dict(self.companions),
            stored={n: s for n, s in self.stored.items() if n in names},
        )
