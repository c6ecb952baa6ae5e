"""Which units tell what comes next: single activations that separate positions before an event from all others.

Two closed-form statistics of each unit x, over positions with the event (n1) and without (n0):

    d = (mean1 - mean0) / s,   s^2 = ((n1 - 1) s1^2 + (n0 - 1) s0^2) / (n1 + n0 - 2)    standardised mean difference
    AUROC = P(x1 > x0) + P(x1 = x0) / 2                                                  from ranks

d needs sums only, so all units of all taps are compared in one pass over the inputs; AUROC and a threshold are taken in a
second pass of the units that d puts in front. Source: docs/sources.md, separating-units.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from hcx.rewrite.errors import UsageError
from hcx.rewrite.ir.program import Program

from .arguments import token_ids, whole
from .taps import Unit, observed, widths
from .values import exactly

Batches = Sequence[list[torch.Tensor]]
"""Flat inputs, one list a call."""

Chosen = tuple[str, int, float]
"""A unit that goes through the second pass: its tap, its column there, and d."""


@dataclass
class Separation:
    """What was found.

    Attributes:
        units: best first, by AUROC on the positions they were chosen on.
        compared: number of units looked at.
        positions: ``{"fit": [with the event, without], "held_out": [...]}``.
        values: details of each observed value that a unit lies in, by address.
    """

    units: list[Unit]
    compared: int
    positions: dict[str, list[int]]
    values: dict[str, dict[str, Any]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    def pipeline(self) -> str:
        """Passes that observe these units alone, of the model as it was before it was observed.

        Modules are named by call and pass (``f@0~1``): ``f`` would be every one of them.
        """
        by_site: dict[str, list[int]] = {}
        for unit in self.units:
            by_site.setdefault(unit.site, []).append(unit.unit)
        return ",".join(_observer(self.values[site], sorted(set(units))) for site, units in by_site.items())


def separation(
    program: Program,
    batches: Batches,
    *,
    before: Collection[int] | None = None,
    where: Sequence[torch.Tensor] | None = None,
    count: int = 8,
    share: float = 0.7,
    skip: int = 1,
) -> Separation:
    """The units of the observed values that separate best.

    Args:
        program: with ``observe`` taps ``[batch, position, units]`` at the positions of its tokens; others are left out.
        batches: flat inputs of calls; token ids are among them.
        before: token ids: the event is that one of them comes next. Or
        where: bool ``[batch, position]`` for each call: where the event is.
        count: how many units to return; ten times as many, at least 64, go through the second pass.
        share: of the calls that units are chosen on; the others are held out.
        skip: leading positions of each row that are left out: the first token of a decoder carries an attention sink.

    Raises:
        UsageError: no taps, too few calls, an option out of range, or a part without one of the two kinds of positions.
    """
    count, skip = whole(count, "count", 1), whole(skip, "skip", 0)
    cut, known = _question(batches, before, where, share)
    data = _Data(program, batches, known, where, skip)
    differences = _differences(data, range(cut))
    chosen = _in_front(differences, max(64, 10 * count))
    fit = _Part("fit", *data.gather(range(cut), chosen))
    held_out = _Part("held-out", *data.gather(range(cut, len(batches)), chosen))
    positions = {"fit": fit.counts(), "held_out": held_out.counts()}
    above = auroc(fit.values, fit.event) >= 0.5
    fit, held_out = fit.turned(above), held_out.turned(above)
    areas, limits = auroc(fit.values, fit.event), best_threshold(fit.values, fit.event)
    areas_later = auroc(held_out.values, held_out.event)
    units = []
    for i in areas.argsort(descending=True, stable=True)[:count].tolist():
        tap, column, d = chosen[i]
        about, limit = data.taps[tap], limits[i]
        number = column if about["units"] is None else about["units"][column]
        threshold = float(limit if above[i] else -limit)
        seen, later = fit.figures(i, limit, areas[i]), held_out.figures(i, limit, areas_later[i])
        units.append(Unit(about["site"], number, threshold, bool(above[i]), d, seen, later))
    compared = sum(d.numel() for d in differences.values())
    sites = {u.site for u in units}
    return Separation(units, compared, positions, {a["site"]: a for a in data.taps.values() if a["site"] in sites})


def _question(
    batches: Batches, before: Collection[int] | None, where: Sequence[torch.Tensor] | None, share: float
) -> tuple[int, frozenset[int]]:
    """The number of calls that units are chosen on, and the token ids that tell the event, if they do."""
    if not 0 < share <= 1:
        raise UsageError(f"share={share} of the calls", where="share", hint="between 0 and 1")
    if (before is None) == (where is None):
        raise UsageError("the event is told by token ids or by masks", where="separation", hint="before= or where=")
    cut = max(1, round(share * len(batches)))
    if cut >= len(batches):
        raise UsageError("chosen units are measured on calls of their own", where="batches",
                         hint="give at least two calls")  # fmt: skip
    if where is not None and len(where) != len(batches):
        raise UsageError(f"{len(where)} masks for {len(batches)} calls", where="where")
    return cut, frozenset(token_ids(before, "before") if before is not None else ())


def _differences(data: _Data, calls: range) -> dict[str, torch.Tensor]:
    """d of every unit of every tap."""
    moments: dict[str, _Moments] = {}
    for values, event in data.read(calls):
        for tap, x in values.items():
            moments.setdefault(tap, _Moments(x.shape[-1])).add(x, event)
    return {tap: m.difference() for tap, m in moments.items()}


def _in_front(differences: dict[str, torch.Tensor], count: int) -> list[Chosen]:
    """The units with the largest differences, either way."""
    ranked = sorted(
        ((abs(d), tap, unit, d) for tap, ds in differences.items() for unit, d in enumerate(ds.tolist())), reverse=True
    )
    return [(tap, unit, d) for _, tap, unit, d in ranked[:count]]


def auroc(x: torch.Tensor, event: torch.Tensor) -> torch.Tensor:
    """Area under the ROC curve of each column, in float64; ties count one half.

    Args:
        x: scores ``[N, K]``.
        event: bool ``[N]``, with both values.

    >>> auroc(torch.tensor([[0.1], [0.4], [0.4], [0.8]]), torch.tensor([False, False, True, True]))
    tensor([0.8750], dtype=torch.float64)
    """
    columns = x.double().T.contiguous()
    ordered = columns.sort(-1).values
    below, upto = (torch.searchsorted(ordered, columns, right=r) for r in (False, True))
    ranks = (below + upto + 1).double() / 2  # mean rank of equal values, from 1
    n1 = int(event.sum())
    n0 = event.numel() - n1
    return (ranks[:, event].sum(-1) - n1 * (n1 + 1) / 2) / (n1 * n0)


def best_threshold(x: torch.Tensor, event: torch.Tensor) -> torch.Tensor:
    """Of each column the value t for which ``x >= t`` tells the event best: hits minus false alarms are largest (Youden).

    Args:
        x: ``[N, K]``.
        event: bool ``[N]``.

    >>> best_threshold(torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.tensor([False, False, True, True]))
    tensor([3.], dtype=torch.float64)
    """
    ordered, order = x.double().T.sort(-1, descending=True)
    happened = event[order].double()
    gain = (happened / event.sum() - (1 - happened) / (~event).sum()).cumsum(-1)
    ends = torch.ones_like(gain, dtype=torch.bool)
    ends[:, :-1] = ordered[:, :-1] != ordered[:, 1:]  # equal values are all in or all out
    return ordered.gather(-1, gain.masked_fill(~ends, float("-inf")).argmax(-1, keepdim=True))[:, 0]


class _Moments:
    """Count, mean and sum of squares about it, with the event and without, over batches (Chan et al.)."""

    def __init__(self, width: int):
        self.count = torch.zeros(2, 1, dtype=torch.float64)
        self.mean, self.square = (torch.zeros(2, width, dtype=torch.float64) for _ in range(2))

    def add(self, x: torch.Tensor, event: torch.Tensor) -> None:
        """``[N, width]`` and bool ``[N]``."""
        for kind, rows in enumerate((x[~event].double().cpu(), x[event].double().cpu())):
            if not len(rows):
                continue
            old, new = self.count[kind], float(len(rows))
            mean = rows.mean(0)
            gap = mean - self.mean[kind]
            self.square[kind] += (rows - mean).square().sum(0) + gap.square() * old * new / (old + new)
            self.mean[kind] += gap * new / (old + new)
            self.count[kind] += new

    def difference(self) -> torch.Tensor:
        """d of each unit; 0 where it never changes."""
        spread = (self.square.sum(0) / (self.count.sum() - 2).clamp_min(1)).sqrt()
        gap = self.mean[1] - self.mean[0]
        return torch.where(spread > 0, gap / spread, torch.zeros_like(gap)) * bool((self.count > 0).all())


class _Data:
    """Positions of calls with the values of the taps there."""

    def __init__(self, program: Program, batches: Batches, before: frozenset[int], where: Any, skip: int):
        names = [i.name for i in program.inputs]
        if program.signature.tokens is None:
            raise UsageError("this model takes no tokens", where=program.signature.model)
        self.program, self.batches, self.before, self.where, self.skip = program, batches, before, where, skip
        self.tokens = names.index(program.signature.tokens)
        mask = program.signature.tokens.removesuffix("input_ids") + "attention_mask"
        self.mask = names.index(mask) if mask in names else None
        taps = {tap: about for tap, about in observed(program).items() if not about["last"]}
        if not taps:
            raise UsageError("the program has no taps of every position", where="observe",
                             hint="rewrite it with observe{...}, without last=true")  # fmt: skip
        readable = widths(program)
        self.taps = {tap: about for tap, about in taps.items() if tap in readable}
        if not self.taps:
            raise UsageError("no tap is [batch, position, units] at the positions of the tokens", where="observe",
                             hint=f"taps: {', '.join(list(taps)[:6])}")  # fmt: skip

    def read(self, calls: range) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """(tap -> ``[N, units]``, event ``[N]``) of each call, over the positions that count."""
        outputs = len(self.program.output_names)
        for number in calls:
            flat = self.program.signature.complete(self.batches[number])
            with torch.no_grad():
                results = self.program.run_flat(flat, taps=True)[outputs:]
            kept, event = self._positions(number, flat)
            values = {tap: v[kept] for tap, v in zip(self.program.taps, results, strict=True) if tap in self.taps}
            yield values, event[kept]

    def _positions(self, number: int, flat: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """bool ``[B, N]``: the positions that count, and the event."""
        ids = flat[self.tokens]
        kept = torch.ones_like(ids, dtype=torch.bool)
        kept[:, : self.skip] = False
        real = torch.ones_like(kept)
        if self.mask is not None and flat[self.mask].shape == ids.shape:
            real = flat[self.mask].bool()
            kept = kept & real & (real.long().cumsum(1) > self.skip)
        if self.where is not None:
            event = self.where[number].bool()
            if event.shape != ids.shape:
                raise UsageError(f"mask {number} is {list(event.shape)}, tokens are {list(ids.shape)}", where="where")
            return kept, event
        known = torch.tensor(sorted(self.before), device=ids.device)
        event = torch.zeros_like(kept)
        event[:, :-1] = torch.isin(ids[:, 1:], known)
        kept = kept.clone()
        kept[:, -1] = False  # nobody knows what follows
        kept[:, :-1] &= real[:, 1:]
        return kept, event

    def gather(self, calls: range, chosen: list[Chosen]) -> tuple[torch.Tensor, torch.Tensor]:
        """The chosen units side by side, ``[N, K]`` in float64, and the event ``[N]``."""
        columns, events = [], []
        for values, event in self.read(calls):
            columns.append(torch.stack([values[tap][:, unit].double() for tap, unit, _ in chosen], -1))
            events.append(event)
        return torch.cat(columns), torch.cat(events)


@dataclass
class _Part:
    """The chosen units at the positions of some of the calls: ``[N, K]``, and the event ``[N]``."""

    name: str
    values: torch.Tensor
    event: torch.Tensor

    def counts(self) -> list[int]:
        """Positions with the event, and without."""
        found = [int(self.event.sum()), int((~self.event).sum())]
        if not all(found):
            raise UsageError(f"of {self.event.numel()} {self.name} positions {found[0]} have the event",
                             where="batches", hint="give more text, or another event")  # fmt: skip
        return found

    def turned(self, above: torch.Tensor) -> _Part:
        """Units with their sign changed where less is nearer to the event, so that more is."""
        return _Part(self.name, torch.where(above, self.values, -self.values), self.event)

    def figures(self, unit: int, limit: torch.Tensor, area: torch.Tensor) -> dict[str, float]:
        """How well one unit tells the event from this limit on."""
        beyond = self.values[:, unit] >= limit
        return {
            "auroc": float(area),
            "hits": float(beyond[self.event].double().mean()),
            "false_alarms": float(beyond[~self.event].double().mean()),
        }


def _observer(about: dict[str, Any], units: list[int]) -> str:
    """The pass that observes some units of one value."""
    name, listed = about["name"], ",".join(map(str, units))
    if about["of"] == "stream":
        label, _, place = name.rpartition("@")
        at = place if "~" in place else f"{place}~1"
        return f"observe{{at=[{at}],units=[{listed}],stack={label}}}"
    if about["of"] == "branch":
        return f"observe{{branches=[{name}],side={about['side']},units=[{listed}]}}"
    return f"observe{{modules=[{exactly(name)}],side={about['side']},units=[{listed}]}}"
