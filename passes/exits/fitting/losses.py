"""Training losses of exits, over what their taps give: the published ones, as plain functions of tensors.

Source: docs/sources.md, exit-losses. ``readings`` are logits in the order of depth, ``[..., C]``: the exits' taps,
and last the model's own where a loss wants it. ``labels`` are ``[...]``; positions with ``ignore`` count nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from hcx.rewrite.errors import UsageError
from hcx.rewrite.pipeline.passbase import tap_prefix

from .hypotheses import IGNORE


def taps_of(taps: dict[str, torch.Tensor], kind: str = "logits", number: int = 0) -> list[torch.Tensor]:
    """Exits' ``logits`` or ``score`` from ``program(..., taps=True)``, in the order of depth.

    Args:
        number: which ``exits`` of the pipeline.

    >>> taps = {"exits.4.score": torch.ones(1), "exits.10.score": torch.zeros(1), "exits.depth": torch.ones(1)}
    >>> taps_of(taps, "score")
    [tensor([1.]), tensor([0.])]
    """
    prefix = tap_prefix("exits", number)
    named = [n.split(".") for n in taps]
    places = [n[1] for n in named if len(n) == 3 and n[0] == prefix and n[2] == kind]  # in order of execution
    return [taps[f"{prefix}.{k}.{kind}"] for k in places]


def shifted(logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits ``[B, S, V]`` of all positions but the last, and the next tokens ``[B, S - 1]`` as labels."""
    return logits[:, :-1], ids[:, 1:]


def cross_entropies(readings: Sequence[torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of every reading at every position, ``[K, N]`` over the N positions that count."""
    keep = labels.reshape(-1) != IGNORE
    flat = labels.reshape(-1)[keep]
    rows = [F.cross_entropy(r.reshape(-1, r.shape[-1])[keep].float(), flat, reduction="none") for r in readings]
    return torch.stack(rows)


# ---- fixed weights


def weighted(
    readings: Sequence[torch.Tensor], labels: torch.Tensor, weights: Sequence[float] | None = None
) -> torch.Tensor:
    """``sum w_k CE_k / sum w_k``. CALM and PABEE: ``w_k = k`` counted from 1, the default."""
    if weights is None:
        weights = range(1, len(readings) + 1)
    w = torch.tensor(list(weights), dtype=torch.float32, device=readings[0].device)
    return (w * cross_entropies(readings, labels).mean(1)).sum() / w.sum()


def ee_llm(
    readings: Sequence[torch.Tensor],
    labels: torch.Tensor,
    weights: Sequence[float],
    *,
    warm_up: float = 1.0,
    by_confidence: bool = False,
) -> torch.Tensor:
    """EE-LLM: ``CE_L + sum w_k CE_k``; the last reading is the model's own.

    Args:
        weights: one an exit; 0.1 and 0.2 for exits after a quarter and half of a 7B model.
        warm_up: share of the weights, growing from 0 to 1 in training.
        by_confidence: multiply each position's loss at an exit by its largest probability, without gradient.
    """
    losses = cross_entropies(readings, labels)
    total = losses[-1].mean()
    keep = labels.reshape(-1) != IGNORE
    for reading, loss, weight in zip(readings[:-1], losses[:-1], weights, strict=True):
        if by_confidence:
            sure = reading.detach().float().softmax(-1).amax(-1).reshape(-1)[keep]
            loss = sure * loss
        total = total + warm_up * weight * loss.mean()
    return total


def layer_skip_weights(
    places: Sequence[int], depth: int, scale: float, enabled: Sequence[bool] | None = None
) -> list[float]:
    """LayerSkip's shares of the loss for exits after ``places`` blocks and for the model, which add up to 1.

    ``e_k = scale * sum_{i <= l} i`` for layer ``l = k - 1``, and ``e_L = L - 1 + scale * sum_{i <= L - 2} i``, over
    the enabled ones.

    >>> [round(w, 4) for w in layer_skip_weights([2, 3], 4, 1.0)]
    [0.1, 0.3, 0.6]
    """
    wanted = [True] * len(places) if enabled is None else list(enabled)
    raw = [scale * (k - 1) * k / 2 if on else 0.0 for k, on in zip(places, wanted, strict=True)]
    raw.append(depth - 1 + scale * (depth - 2) * (depth - 1) / 2)
    return [r / sum(raw) for r in raw]


def rotational(count: int, step: int, every: int) -> list[bool]:
    """LayerSkip's rotational curriculum: every R-th exit counts, shifted by one each step."""
    return [(number + step) % every == 0 for number in range(count)]


def gradual(count: int, progress: float) -> list[bool]:
    """LayerSkip's gradual curriculum: exits join from the last to the first over the first half of training."""
    joined = min(count, int(2 * progress * count))
    return [number >= count - joined for number in range(count)]


def layer_skip(
    readings: Sequence[torch.Tensor],
    labels: torch.Tensor,
    places: Sequence[int],
    depth: int,
    scale: float = 0.2,
    enabled: Sequence[bool] | None = None,
) -> torch.Tensor:
    """LayerSkip: cross entropies under :func:`layer_skip_weights`; the last reading is the model's own."""
    w = torch.tensor(layer_skip_weights(places, depth, scale, enabled), device=readings[0].device)
    return (w * cross_entropies(readings, labels).mean(1)).sum()


# ---- sequences


def ctc(
    readings: Sequence[torch.Tensor],
    targets: torch.Tensor,
    frames: torch.Tensor | None = None,
    *,
    blank: int = 0,
    weights: Sequence[float] | None = None,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """``sum w_k CTC_k``, all weights 1 as exits of speech encoders are trained.

    Args:
        readings: exits, and last the model's own where it is trained too, ``[B, T, C]``.
        targets: ``[B, labels]``, filled up with ``IGNORE`` (any negative number) at the end of a row.
        frames: how many of the T count in each row, ``[B]``, from the start: of the tap ``exits.valid`` its sum over a
            row. None counts all.
        weights: one a reading.
        reduction: ``mean`` divides each row by its labels, ``sum`` adds rows; as in ``torch.nn.functional.ctc_loss``.
        zero_infinity: a row with too few frames for its labels gives 0.

    Raises:
        UsageError: no readings, or not one weight a reading.
    """
    if not len(readings) or (weights is not None and len(weights) != len(readings)):
        raise UsageError(f"{len(readings)} readings and {len(weights or readings)} weights", where="readings",
                         hint="losses.taps_of(taps), and last the model's own logits")  # fmt: skip
    counts = targets >= 0
    lengths, flat = counts.sum(1), targets[counts]
    weights = [1.0] * len(readings) if weights is None else weights
    total = readings[0].new_zeros((), dtype=torch.float32)
    for reading, weight in zip(readings, weights, strict=True):
        log_p = reading.float().log_softmax(-1).transpose(0, 1)
        steps = torch.full_like(lengths, len(log_p)) if frames is None else frames
        total = total + weight * F.ctc_loss(
            log_p, flat, steps, lengths, blank=blank, reduction=reduction, zero_infinity=zero_infinity
        )
    return total


# ---- from the model to its exits


def self_distillation(
    readings: Sequence[torch.Tensor],
    labels: torch.Tensor,
    weights: Sequence[float],
    *,
    alpha: float = 1.0,
    temperature: float = 1.0,
) -> torch.Tensor:
    """``sum w_k ((1 - alpha) CE_k + alpha T^2 KL(model || exit_k))``, the model's logits without gradient.

    The default reads no label (``alpha = 1``) and leaves a frozen model bitwise as it is.

    Args:
        readings: exits, and last the model's own; labels only say which positions count while ``alpha`` is 1.
        weights: one an exit; the place over the depth is usual.
    """
    keep = labels.reshape(-1) != IGNORE

    def log_p(reading: torch.Tensor) -> torch.Tensor:
        return (reading.reshape(-1, reading.shape[-1])[keep].float() / temperature).log_softmax(-1)

    teacher = log_p(readings[-1].detach())
    total = teacher.new_zeros(())
    losses = cross_entropies(readings[:-1], labels) if alpha < 1 else None
    for number, (reading, weight) in enumerate(zip(readings[:-1], weights, strict=True)):
        kl = (teacher.exp() * (teacher - log_p(reading))).sum(-1).mean()
        own = (1 - alpha) * losses[number].mean() if losses is not None else 0.0
        total = total + weight * (own + alpha * temperature**2 * kl)
    return total


# ---- learned gates


def halting(cumulated: Sequence[torch.Tensor]) -> torch.Tensor:
    """Probability of leaving at each of K exits and of never leaving, ``[K + 1, ...]``, from the taps of ``score=gate``."""
    steps = torch.stack([torch.zeros_like(cumulated[0]), *cumulated, torch.ones_like(cumulated[0])])
    return steps[1:] - steps[:-1]


def geometric(count: int, rate: float) -> torch.Tensor:
    """Geometric prior over so many ways through the model; the last takes the rest.

    >>> geometric(3, 0.5)
    tensor([0.5000, 0.2500, 0.2500])
    """
    p = rate * (1 - rate) ** torch.arange(count, dtype=torch.float32)
    p[-1] = (1 - rate) ** (count - 1)
    return p


def ponder(
    readings: Sequence[torch.Tensor],
    labels: torch.Tensor,
    probabilities: torch.Tensor,
    *,
    rate: float = 0.1,
    beta: float = 0.5,
    reverse: bool = False,
) -> torch.Tensor:
    """PonderNet's loss as PALBERT takes it: ``sum p_k CE_k + beta KL(prior || p)`` with a geometric prior.

    Args:
        readings: K exits, and last the model's own; ``probabilities``: ``[K + 1, ...]`` from :func:`halting`.
        reverse: ``KL(p || prior)``, as PonderNet itself writes it (``beta`` is 0.01 there).
    """
    keep = labels.reshape(-1) != IGNORE
    p = probabilities.float().reshape(len(readings), -1)[:, keep].clamp_min(1e-12)
    prior = geometric(len(readings), rate).to(p.device)[:, None]
    ratio = p / prior if reverse else prior / p
    kl = ((p if reverse else prior) * ratio.log()).sum(0)
    return ((p * cross_entropies(readings, labels)).sum(0) + beta * kl).mean()


def jei_shares(gates: torch.Tensor) -> torch.Tensor:
    """JEI-DNN: ``P_k = max(0, min(g_k, 1 - sum_{j<k} g_j))``, and the rest for the model; ``[K, N]`` to ``[K + 1, N]``."""
    before = gates.cumsum(0) - gates
    taken = torch.minimum(gates, 1 - before).clamp_min(0)
    return torch.cat([taken, 1 - taken.sum(0, keepdim=True)])


def jei_inference(readings: Sequence[torch.Tensor], labels: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """JEI-DNN, phase of the heads: ``sum P_k CE_k``, rescaled a position so that its sum is ``sum CE_k``.

    Args:
        gates: ``[K, N]`` over the positions that count; they get no gradient.
    """
    losses = cross_entropies(readings, labels)
    shares = jei_shares(gates.detach())
    spread = shares * losses
    scale = losses.detach().sum(0) / spread.detach().sum(0).clamp_min(1e-12)
    return (scale * spread.sum(0)).mean()


def jei_gates(
    readings: Sequence[torch.Tensor],
    labels: torch.Tensor,
    gates: torch.Tensor,
    costs: Sequence[float],
    trade: float,
) -> torch.Tensor:
    """JEI-DNN, phase of the gates: binary cross entropy of ``g_k`` with ``k >= k*``, ``k* = argmin CE_k + trade cost_k``.

    Positives of a gate weigh as much as its negatives.

    Args:
        gates: ``[K, N]``; ``costs``: K + 1 of them, over the full model's, so that the last is 1.
        trade: lambda, 0.15 to 0.7.
    """
    losses = cross_entropies(readings, labels).detach()
    best = (losses + trade * torch.tensor(list(costs), device=losses.device)[:, None]).argmin(0)
    total = gates.new_zeros(())
    for number, gate in enumerate(gates):
        target = (best <= number).to(gate.dtype)
        total = total + _balanced(gate, target)
    return total / len(gates)


def calm_meta(gates: torch.Tensor, readings: Sequence[torch.Tensor]) -> torch.Tensor:
    """CALM's meta-classifier: binary cross entropy of each exit's gate with whether it gives the model's answer, both
    classes with the same weight.

    Args:
        gates: ``[K, N]``; ``readings``: exits and last the model's own, ``[..., C]`` with N positions each.
    """
    answers = torch.stack([r.detach().reshape(-1, r.shape[-1]).argmax(-1) for r in readings])
    return torch.stack(
        [_balanced(g, (a == answers[-1]).to(g.dtype)) for g, a in zip(gates, answers, strict=False)]
    ).mean()


def _balanced(gate: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Binary cross entropy with equal total weight for both classes."""
    loss = F.binary_cross_entropy(gate, target, reduction="none")
    parts = [loss[target == c].mean() for c in (0, 1) if bool((target == c).any())]
    return torch.stack(parts).mean()
