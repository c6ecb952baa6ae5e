"""One finding of a check."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Check:
    """One finding: what was checked, whether it holds, and the figures."""

    name: str
    holds: bool
    measured: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "holds": self.holds, "measured": self.measured, "note": self.note}

    def __str__(self) -> str:
        figures = ", ".join(f"{k} {_short(v)}" for k, v in self.measured.items())
        return f"{'ok  ' if self.holds else 'FAIL'} {self.name}: {figures or self.note}{f' ({self.note})' if self.note and figures else ''}"


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
