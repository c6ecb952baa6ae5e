"""The history of a Program: one entry a pass, with what was planned, promised and measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

Json = dict[str, Any]


class Entry(dict[str, Any]):
    """One pass that was applied.

    A dictionary of JSON values, as users read it and artefacts hold it; code reads the attributes. Passes may add keys
    of their own (what was fitted or calibrated since).
    """

    @staticmethod
    def of(name: str, rank: int | None) -> Entry:
        """The entry of a pass that has just been applied; the driver completes it."""
        return Entry({"pass": name, "rank": rank})

    @property
    def name(self) -> str:
        """Name of the pass."""
        return cast("str", self["pass"])

    @property
    def rank(self) -> int | None:
        """Place in the order of passes; None goes anywhere."""
        return self.get("rank")

    @property
    def pipeline(self) -> str:
        """The pass with its options, as in a pipeline string."""
        return cast("str", self["pipeline"])

    @property
    def plan(self) -> Json:
        """Its plan, a pipeline of one step."""
        return cast("Json", self["plan"])

    @property
    def step(self) -> Json:
        """The step of its plan: options, sites, skips, notes."""
        return cast("Json", self.plan["steps"][0])

    @property
    def sites(self) -> list[Json]:
        """What was changed: ``{"address": ..., "detail": {...}}``."""
        return cast("list[Json]", self.step["sites"])

    @property
    def contract(self) -> Json:
        """What it promised; see :func:`hcx.rewrite.pipeline.contracts.from_json`."""
        return cast("Json", self["contract"])

    @property
    def checks(self) -> list[Json]:
        """What was measured, as :meth:`hcx.rewrite.check.report.Check.to_json` gives it."""
        return cast("list[Json]", self["checks"])

    @property
    def owed(self) -> bool:
        """Whether checks of values are still to be run."""
        return bool(self.get("owed"))

    @property
    def approximate_cache(self) -> str | None:
        """Why decoding through the cache may differ from full forwards since, or None where it must not."""
        return self.get("approximate_cache")


def tensor_prefix(name: str, number: int) -> str:
    """Where the tensors of a pass lie; ``number`` counts its runs from 0.

    >>> tensor_prefix("lora", 1)
    'hcx.lora_1'
    """
    return f"hcx.{name}_{number}"


def numbered(history: Iterable[Entry]) -> Iterator[tuple[Entry, int]]:
    """Each entry with the number of its pass's run."""
    runs: dict[str, int] = {}
    for entry in history:
        number = runs[entry.name] = runs.get(entry.name, -1) + 1
        yield entry, number


def runs_of(history: Iterable[Entry], name: str) -> list[Entry]:
    """The entries of one pass, in order."""
    return [entry for entry in history if entry.name == name]
