"""What a command hands back, and how a failed check travels with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hcx.rewrite.errors import ContractError

SCHEMA_VERSION = 1
"""Version of everything printed with ``--json``."""

Progress = Callable[[str], None]


@dataclass
class Result:
    """The outcome of a command.

    Attributes:
        data: plain JSON values; printed with ``--json``.
        text: the same for people.
    """

    data: dict[str, Any]
    text: str

    def __str__(self) -> str:
        return self.text


class ChecksFailed(ContractError):  # noqa: N818  the name stands in the data of --json
    """Checks ran to the end and some failed; ``result`` holds all of them."""

    def __init__(self, what: str, result: Result, *, where: str | None = None, hint: str | None = None):
        super().__init__(what, where=where, hint=hint)
        self.result = result


def plain(value: Any) -> Any:
    """A copy that strict JSON can hold: infinities and NaN become text, other objects their ``str``."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def silent(text: str) -> None:
    """A progress function that says nothing."""


def checks_failed(checks: list[dict[str, Any]]) -> list[str]:
    """Names of the checks that do not hold."""
    return [c["name"] for c in checks if not c["holds"]]
