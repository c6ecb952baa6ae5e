"""What differs between two Programs, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .graph import Region, Status


@dataclass
class Change:
    """An input, output, tap or tensor that only one side has, or that has another form."""

    kind: str
    name: str
    before: str | None
    after: str | None

    @property
    def status(self) -> Status:
        return "added" if self.before is None else "removed" if self.after is None else "changed"


@dataclass
class Side:
    """Figures of one Program."""

    model: str
    fingerprint: str
    base: str
    pipeline: list[str]
    parameters: int
    parameter_bytes: int
    added_parameters: int
    nodes: int
    dtype: str


@dataclass
class Report:
    """What differs between two Programs.

    Attributes:
        call: inputs, outputs and taps that differ.
        tensors: parameters, buffers and constants that differ in name, kind, shape or dtype.
        values: names of tensors of the same form with other values.
        rewrites: the rewrites of both histories, each with ``in`` = before, after or both, contract and checks.
        notes: what a reader must know to read the rest.
    """

    before: Side
    after: Side
    regions: list[Region]
    call: list[Change]
    tensors: list[Change]
    values: list[str]
    rewrites: list[dict[str, Any]]
    notes: list[str]

    def __bool__(self) -> bool:
        """Whether anything differs."""
        lists = (self.call, self.tensors, self.values, [r for r in self.rewrites if r["in"] != "both"])
        return any(lists) or any(r.status != "unchanged" for r in self.regions)

    def blocks(self, status: Status) -> list[Region]:
        """Blocks of a status."""
        return [r for r in self.regions if r.is_block and r.status == status]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; of the nodes, those that differ."""
        data = asdict(self)
        for entry, region in zip(data["regions"], self.regions, strict=True):
            entry["status"] = region.status
            entry["lines"] = [line for line in entry["lines"] if line["status"] != "unchanged"]
        for key in ("call", "tensors"):
            for entry, change in zip(data[key], getattr(self, key), strict=True):
                entry["status"] = change.status
        return {"differ": bool(self), **data}
