"""Fit what exits have of their own in closed form: translators and classifiers first, then gates and candidates.

Nothing here needs a gradient through the model: the backbone is run and left as it is. Heads with a norm, an MLP or a
block of their own are trained through their taps, with the losses of :mod:`hcx.passes.exits.fitting.losses`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from hcx.passes.exits.applied import Applied, applied, with_values
from hcx.passes.exits.insert import gates
from hcx.passes.exits.insert.heads import pooled
from hcx.rewrite.errors import UsageError
from hcx.rewrite.ir.program import Program
from hcx.rewrite.run.reading import reader

from .hypotheses import IGNORE
from .ridge import Ridge, logistic, softmax_regression
from .trials import Batches, Trials, kept, measure

GATES = ("probe", "gate", "palbert", "jei")


@dataclass
class Fit:
    """What was fitted, and how well exits agree with the model on the inputs that heads were not fitted on.

    Attributes:
        fitted: names of the tensors with new values.
        positions: that heads, and that gates were fitted on.
        agreement: share of positions with the model's own answer at each exit, by number of blocks, after the fit;
            ``before``: with the values that the Program had.
    """

    fitted: list[str]
    positions: dict[str, int]
    agreement: dict[str, float]
    before: dict[str, float]
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def fit(
    program: Program,
    batches: Batches,
    *,
    ridge: float = 1e-3,
    share: float = 0.7,
    skip: int = 0,
    labels: list[torch.Tensor] | None = None,
) -> tuple[Program, Fit]:
    """A new Program with fitted exits; the given one is not changed.

    ``affine`` heads get a ridge fit of the stream towards the end of the stack, in one pass; ``classifier`` heads a
    softmax regression to the model's own most likely class. Then gates are fitted, on other inputs, to predict at
    which positions an exit agrees with the model: ``probe`` at each exit, ``gate`` among positions where no earlier
    exit does, ``palbert`` likewise, its last layer alone, for all exits together, ``jei`` at each exit that is not before the cheapest one that agrees, both classes with the same weight.
    Candidates are the rows that the
    model chose most often.

    Args:
        batches: flat inputs, one list a call.
        ridge: penalty, finite and at least 0, see :class:`~hcx.passes.exits.fitting.ridge.Ridge`.
        share: of the calls that heads are fitted on; gates see the rest.
        skip: leading positions of each row that are left out: the first token of a decoder carries an attention sink.
        labels: truth for each call; classifiers are fitted to it instead, and gates to being right.

    Raises:
        UsageError: nothing to fit, too few calls, a penalty that is none, no exits in select form, or labels of sequences, which do not say what
            each position is.
    """
    if not 0 <= ridge < math.inf:
        raise UsageError(f"ridge={ridge:g} is no penalty", where="ridge", hint="finite and at least 0, e.g. 1e-3")
    exits = applied(program)
    notes = _to_fit(exits, labels is not None)
    score, candidates = exits.details[0]["score"], exits.details[0].get("candidates")
    cut = max(1, round(share * len(batches)))
    if cut >= len(batches):
        raise UsageError("heads and gates need inputs of their own", where="batches", hint="give at least two calls")
    first, rest = batches[:cut], batches[cut:]
    truth = (labels[:cut], labels[cut:]) if labels is not None else (None, None)
    before = measure(exits, rest, skip=skip)
    values, positions = _heads(exits, first, ridge, skip, truth[0])
    if candidates is not None:
        chosen = measure(exits, first, skip=skip).answers[-1]
        most = torch.bincount(chosen).argsort(descending=True)[:candidates]
        values[exits.tensor(None, "candidates")] = _filled_up(most, candidates)
    new = with_values(program, values) if values else program
    after = measure(new, rest, skip=skip, labels=truth[1])  # gates do not change answers
    if score in GATES:
        own = _gates(applied(new), after, rest, score, skip)
        values |= own
        new = with_values(new, own)
    counts = {"heads": positions, "gates": len(after) if score in GATES else 0}
    report = Fit(sorted(values), counts, _by_place(after), _by_place(before), notes)
    applied(new).entry["fit"] = report.to_json()
    return new, report


def _to_fit(exits: Applied, labelled: bool) -> list[str]:
    """Notes on what is not fitted here; refused where nothing is."""
    if labelled and exits.per == "sequence":
        raise UsageError("labels of sequences do not say what each position is", where="labels",
                         hint="fit to the model's own answers, or train with hcx.passes.exits.fitting.losses.ctc")  # fmt: skip
    kinds = {d["head"] for d in exits.details}
    score, candidates = exits.details[0]["score"], exits.details[0].get("candidates")
    if not kinds & {"affine", "classifier"} and score not in GATES and candidates is None:
        raise UsageError(
            f"exits with head={'/'.join(sorted(kinds))} and score={score} have nothing to fit in closed form",
            where="exits",
            hint="use head=affine or a learned score; see docs/training.md for the other heads",
        )
    return [f"head={h} is trained through its taps, not here" for h in sorted(kinds & {"norm", "mlp", "block"})]


def _by_place(trials: Trials) -> dict[str, float]:
    shares = trials.agrees.double().mean(1).tolist()
    return {str(k): s for k, s in zip(trials.places, shares, strict=True)}


def _filled_up(rows: torch.Tensor, count: int) -> torch.Tensor:
    """So many different rows: the given ones, then the first of the others (common tokens have small numbers)."""
    have = set(rows.tolist())
    more = (n for n in range(count + len(have)) if n not in have)
    return torch.tensor([*rows.tolist(), *(next(more) for _ in range(count - len(rows)))])


def _heads(
    exits: Applied, batches: Batches, ridge: float, skip: int, labels: list[torch.Tensor] | None
) -> tuple[dict[str, torch.Tensor], int]:
    """Values of translators and classifiers, and the number of positions they were fitted on."""
    heads = {k: d["head"] for k, d in zip(exits.places, exits.details, strict=True)}
    affine = [k for k, h in heads.items() if h == "affine"]
    pooling = [k for k, h in heads.items() if h == "classifier"]
    if not affine and not pooling:
        return {}, 0
    stream = dict(zip(exits.places, exits.streams, strict=True))
    names = [*(stream[k] for k in (*affine, *pooling)), exits.end, exits.answer]
    valid = [exits.valid] if exits.valid is not None else []
    read = reader(exits.program, exits.graph, [*valid, *names])
    sums: dict[int, Ridge] = {}
    seen: dict[int, list[torch.Tensor]] = {k: [] for k in pooling}
    answers: list[torch.Tensor] = []
    positions, classes = 0, 0
    for number, flat in enumerate(batches):
        found = read(exits.program.signature.complete(flat))
        keep, (*values, end, answer) = found[0] if valid else None, found[len(valid) :]
        classes, each = answer.shape[-1], answer.dim() > 2

        def rows(value: torch.Tensor, keep: torch.Tensor | None = keep) -> torch.Tensor:
            """Positions that count, ``[n, d]``."""
            if keep is not None and value.shape[: keep.dim()] == keep.shape:
                return value[keep]
            return kept(value, skip).flatten(0, -2)

        for k, value in zip(affine, values, strict=False):
            x, y = rows(value), rows(end)
            sums.setdefault(k, Ridge(x.shape[-1])).add(x, y)
            positions = sums[k].count
        for k, value in zip(pooling, values[len(affine) :], strict=True):
            seen[k].append(rows(value) if each else pooled(value))
        if pooling:
            truth = labels[number][..., None] if labels is not None else answer.argmax(-1, keepdim=True)
            answers.append(rows(truth)[:, 0] if each else truth[:, 0])
            positions = sum(len(a) for a in answers)
    fitted = {}
    told = torch.cat(answers) if pooling else torch.zeros(0)
    for k in (*affine, *pooling):
        counts = told != IGNORE
        weight, bias = (
            sums[k].solve(ridge) if k in sums else softmax_regression(torch.cat(seen[k])[counts], told[counts], classes)
        )
        fitted[exits.tensor(k, "weight")], fitted[exits.tensor(k, "bias")] = weight, bias
    return fitted, positions


def _gates(exits: Applied, trials: Trials, batches: Batches, score: str, skip: int) -> dict[str, torch.Tensor]:
    """Values of the gates at each exit; ``trials`` are what the exits answered on these calls."""
    good = trials.agrees if trials.labels is None else trials.answers[:-1] == trials.labels
    told: list[tuple[torch.Tensor, torch.Tensor]] = []
    missed = torch.ones(len(trials), dtype=torch.bool)  # no exit before has given the right answer
    for number, x in enumerate(_features(exits, batches, score, skip)):
        label = good[number] if score != "jei" else good[: number + 1].any(0)
        rows = missed if score in ("gate", "palbert") and int(missed.sum()) > 1 else slice(None)
        told.append((x[rows], label[rows]))
        missed &= ~good[number]
    if score == "palbert":  # one gate for all exits
        last = exits.tensor(None, f"gate.{gates.HIDDEN}")
        features, labels = (torch.cat(parts) for parts in zip(*told, strict=True))
        return dict(zip((f"{last}.weight", f"{last}.bias"), logistic(features, labels, ridge=1e-2), strict=True))
    found: dict[str, torch.Tensor] = {}
    for k, (x, label) in zip(exits.places, told, strict=True):
        weight, bias = logistic(x, label, ridge=1e-2, balanced=score == "jei")
        found[exits.tensor(k, "gate.weight")], found[exits.tensor(k, "gate.bias")] = weight, bias
    return found


def _features(exits: Applied, batches: Batches, score: str, skip: int) -> list[torch.Tensor]:
    """What the gate of each exit reads at each position, ``[N, d]``, from one run."""
    count = len(exits.places)
    sources = [exits.scored] if score == "jei" else [exits.streams, exits.earlier][: 1 + (score == "palbert")]
    read = reader(exits.program, exits.graph, [*(n for names in sources for n in names), *exits.scores])
    layers = _hidden_layers(exits) if score == "palbert" else []
    reading = {"jei": gates.features, "palbert": lambda *streams: gates.hidden(*streams, *layers)}
    rows: list[list[torch.Tensor]] = [[] for _ in range(count)]
    for flat in batches:
        *values, figures = _groups(read(exits.program.signature.complete(flat)), count)
        for number, (figure, *parts) in enumerate(zip(figures, *values, strict=True)):
            if score != "jei":
                parts = [pooled(p) if p.dim() - 1 > figure.dim() else p for p in parts]
            made = reading.get(score, gates.unit_rms)(*parts)
            rows[number].append(kept(made, skip if figure.dim() > 1 else 0).flatten(0, -2))
    return [torch.cat(r) for r in rows]


def _hidden_layers(exits: Applied) -> list[torch.Tensor]:
    parts = (f"gate.{n}.{part}" for n in range(gates.HIDDEN) for part in ("weight", "bias"))
    return [exits.program.tensor(exits.tensor(None, part)) for part in parts]


def _groups(values: list[torch.Tensor], size: int) -> list[list[torch.Tensor]]:
    return [values[i : i + size] for i in range(0, len(values), size)]
