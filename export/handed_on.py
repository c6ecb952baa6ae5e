"""What an export to another tool of PyTorch's wrote, and how it was checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class HandedOn:
    """Result of :func:`hcx.export.to_hf` and :func:`hcx.export.to_pt2`.

    Attributes:
        path: the folder or file.
        files: file name -> bytes.
        measured: worst differences from the Program over ``sets`` input sets.
        loader: what it was loaded with for that.
        notes: what the reader should know.
    """

    path: Path
    files: dict[str, int]
    measured: dict[str, Any]
    loader: str
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        return {"path": str(self.path), "files": self.files, "bytes": sum(self.files.values()), "loader": self.loader,
                "measured": self.measured, "max_error": self.measured["max_diff"], "verified": True,
                "notes": self.notes}  # fmt: skip

    def __str__(self) -> str:
        agreement = "bitwise" if self.measured["bitwise"] else f"max error {self.measured['max_diff']:.2g}"
        lines = [
            f"{self.path}: {len(self.files)} file{'s' if len(self.files) > 1 else ''}, "
            f"{sum(self.files.values()) / 1e6:.1f} MB",
            f"loaded with {self.loader}, it gives what the program gives on {self.measured['sets']} input sets: {agreement}",
        ]
        return "\n".join([*lines, *(f"note: {n}" for n in self.notes)])
