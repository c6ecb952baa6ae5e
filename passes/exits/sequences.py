"""Exits that whole sequences take: which positions of a row count, the mean of a score over them, the surest of all exits.

Source: methods note on exits, sections 3.1 and 3.3 (encoders of speech: entropy of the frames, posterior of the sentence).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hcx.rewrite.dataflow import Dataflow, shape, value
from hcx.rewrite.errors import UsageError
from hcx.rewrite.observe import reader
from hcx.rewrite.pieces import is_size
from hcx.rewrite.program import Program
from hcx.rewrite.signature import InputSpec
from torch import fx

RULES = ("first", "max")
"""Leave at the first exit that is sure enough, or at the surest of them."""


def averaged(score: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
    """Mean score of each row over its positions that count, ``[B, ...] -> [B]``.

    Args:
        valid: bool, of the shape of ``score``; None counts all. A row where nothing counts has no score: NaN, which
            never leaves.

    >>> averaged(torch.tensor([[0.5, 0.25, 9.0]]), torch.tensor([[True, True, False]]))
    tensor([0.3750])
    """
    if score.dim() == 1:
        return score
    score = score.flatten(1)
    if valid is None:
        return score.mean(1)
    valid = valid.flatten(1)
    # not a product: what stands in padding may be no number
    return torch.where(valid, score, torch.zeros_like(score)).sum(1) / valid.sum(1)


def kept_rows(mask: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    """Which positions count, as bool with the rows of ``score``, from a mask that is not 0 where they do.

    Rows are taken by number: a graph may not know that a mask has as many rows as the data, and must not compare them.
    """
    return mask[torch.arange(score.shape[0], device=score.device)] != 0


def dropped_rows(mask: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    """The same from a mask that is 0 where positions count."""
    return mask[torch.arange(score.shape[0], device=score.device)] == 0


def surest(end: torch.Tensor, *scores_and_fires: torch.Tensor) -> torch.Tensor:
    """The largest of the last score and those of exits that may be left at; NaN where the last one is.

    Args:
        scores_and_fires: score and decision of each exit in turn.
    """
    best = end
    for score, fire in zip(scores_and_fires[::2], scores_and_fires[1::2], strict=True):
        best = torch.maximum(best, torch.where(fire, score, torch.full_like(score, float("-inf"))))
    return best


def is_surest(fire: torch.Tensor, score: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """Whether an exit may be left at and none is surer; of equal ones the first is taken by who reads this."""
    return fire & (score >= best)


def choose(
    scores: torch.Tensor, thresholds: Sequence[float], rule: str = "first", end: torch.Tensor | None = None
) -> torch.Tensor:
    """Number of the exit that each sequence or position takes, ``[N]``; K is the model itself.

    Args:
        scores: of K exits, ``[K, N]``, larger is surer.
        thresholds: K of them; ``-inf`` lets every number pass, infinity none.
        rule: ``first`` that reaches its threshold; ``max``: the surest of those that do, and of the model.
        end: the model's own score, ``[N]``, for ``max``; without it the model is taken only where no exit may be.

    Raises:
        UsageError: another rule, or not one threshold an exit.

    >>> scores = torch.tensor([[0.2, 0.6, 0.1], [0.9, 0.7, 0.2]])
    >>> choose(scores, [0.5, 0.5]).tolist(), choose(scores, [0.5, 0.5], "max", torch.tensor([0.8, 0.8, 0.8])).tolist()
    ([1, 0, 2], [1, 2, 2])
    """
    if rule not in RULES:
        raise UsageError(f"there is no rule `{rule}`", where="rule", hint=" or ".join(RULES))
    if len(thresholds) != len(scores):
        raise UsageError(f"{len(thresholds)} thresholds for {len(scores)} exits", where="thresholds",
                         hint="one an exit, in order; infinity never leaves")  # fmt: skip
    limits = torch.tensor(list(thresholds), dtype=scores.dtype, device=scores.device)
    fires = scores >= limits[:, None]
    if rule == "max":
        last = torch.full_like(scores[0], float("-inf")) if end is None else end.to(scores.dtype)
        best = surest(last, *(t for pair in zip(scores, fires, strict=True) for t in pair))
        fires = torch.stack([is_surest(f, s, best) for f, s in zip(fires, scores, strict=True)])
    fires = torch.cat([fires, torch.ones_like(fires[:1])])
    return fires.int().argmax(0)


# ---- which positions count


def is_mask(spec: InputSpec) -> bool:
    """Whether an input says which positions count: one that ones stand for, or that is called a mask."""
    return len(spec.shape) == 2 and (spec.fill == "ones" or spec.name.endswith("mask"))


def find_valid(program: Program, answer: fx.Node) -> tuple[fx.Node, bool] | str | None:
    """The value in the graph that says which positions of the answer count.

    An encoder that shortens its input computes such a value from the mask of its samples, and so does one that hides
    padding from attention: it has one entry a position, depends on masks alone, keeps all where the mask is all ones
    and drops some where half of it is zeros.

    Args:
        answer: ``[B, ..., C]``.

    Returns:
        the value and whether it says what is left out instead; None where no mask reaches the answer, so that all
        positions count; or why it is not known.
    """
    rows = shape(answer)[:-1]
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    flow = Dataflow(program.graph)
    masks = [
        i
        for i, (n, spec) in enumerate(zip(placeholders, program.inputs, strict=True))
        if is_mask(spec) and flow.reaches(n, answer)
    ]
    if not masks or len(rows) < 2:
        return None
    made = _made_from(program, {placeholders[i] for i in masks})
    found = [n for n in made if (s := shape(n)) is not None and len(s) == len(rows) and s[1:] == rows[1:]]
    found = [n for n in found if any(u not in found for u in n.users)]  # steps on the way have no other reader
    told = _told(program, masks, found)
    if not told:
        return "no value made from the mask says which positions of the answer count"
    (node, inverted, kept), *others = reversed(told)
    if any(not torch.equal(kept, other) for _, _, other in others):
        return f"`{node.name}` and `{others[0][0].name}` disagree about which positions count"
    return node, inverted


def _made_from(program: Program, masks: set[fx.Node]) -> list[fx.Node]:
    """Values that depend on masks, and otherwise on constants and sizes alone; the masks among them."""
    free, found = set(), []
    reached: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node.op == "placeholder":
            if node in masks:
                free.add(node), reached.add(node), found.append(node)
            continue
        if node.op == "output":
            continue
        if is_size(node):
            free.add(node)
        elif all(o in free for o in node.all_input_nodes):
            free.add(node)
            if any(o in reached for o in node.all_input_nodes):
                reached.add(node), found.append(node)
    return [n for n in found if isinstance(value(n), torch.Tensor)]


def _told(program: Program, masks: list[int], found: list[fx.Node]) -> list[tuple[fx.Node, bool, torch.Tensor]]:
    """Those of some values that tell which positions count, whether inverted, and what is kept of a half mask."""
    if not found:
        return []
    read = reader(program, program.graph, [n.name for n in found])
    flat = [t.clone() for t in program.signature.complete(program.examples[0])]
    whole, half = list(flat), list(flat)
    for i in masks:
        whole[i] = torch.ones_like(flat[i])
        half[i] = torch.ones_like(flat[i])
        half[i][:, flat[i].shape[1] // 2 :] = 0
    result = []
    for node, full, part in zip(found, read(whole), read(half), strict=True):
        everything = bool((full != 0).all())
        if everything or bool((full == 0).all()):
            kept = (part != 0) if everything else (part == 0)
            if bool(kept.any()) and not bool(kept.all()):
                result.append((node, not everything, kept))
    return result
