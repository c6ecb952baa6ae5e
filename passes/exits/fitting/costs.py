"""Net floating-point operations of leaving at each exit: blocks, scores and heads, counted from the ops of the graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hcx.passes.exits.applied import Applied, applied
from hcx.rewrite.ir.program import Program
from hcx.rewrite.run.flops import by_node
from hcx.rewrite.run.reading import reader
from torch import fx


@dataclass(frozen=True)
class Costs:
    """Operations a position, counted on one call; see :mod:`hcx.rewrite.run.flops` for what is counted.

    A position that leaves at an exit has paid for the blocks before it, for the scores of this exit and of those before,
    and for one head: the exit's, and one for each score that reads logits. Work that only cached keys and values of
    later blocks would need is not counted.

    Attributes:
        leave: of leaving at each exit, in order, and last of never leaving.
        plain: of the model without exits.
    """

    leave: tuple[float, ...]
    plain: float

    def net(self, shares: list[float]) -> float:
        """Operations over those of the plain model where these shares leave at each exit; the last share never does."""
        return sum(s * c for s, c in zip(shares, self.leave, strict=True)) / self.plain

    def relative(self) -> list[float]:
        """Each way through the model over the plain model."""
        return [c / self.plain for c in self.leave]


def exit_costs(program: Program | Applied, flat: list[torch.Tensor]) -> Costs:
    """Count what each way through the model takes.

    Args:
        flat: flat inputs of the counted call; attention makes the figures depend on its length.

    Raises:
        UsageError: a Program without exits in select form.
    """
    exits = program if isinstance(program, Applied) else applied(program)
    counted = by_node(exits.program, flat)
    nodes = {n.name: n for n in exits.graph.nodes}
    positions = _positions(exits, flat)

    def total(names: list[str]) -> float:
        return sum(counted.get(name, 0) for name in _ancestors([nodes[n] for n in names])) / positions

    plain = total([exits.answer])
    if exits.own_score is not None:  # the surest of all: everything is computed, whichever it is
        every = total([*exits.scores, *exits.logits, exits.own_score, exits.answer])
        return Costs((every,) * (len(exits.places) + 1), plain)
    leave = [total([*exits.scores[: i + 1], exits.logits[i]]) for i in range(len(exits.places))]
    return Costs((*leave, total([*exits.scores, exits.answer])), plain)


def _positions(exits: Applied, flat: list[torch.Tensor]) -> int:
    """Positions of the answer in one call."""
    (answer,) = reader(exits.program, exits.graph, [exits.answer])(exits.program.signature.complete(flat))
    return answer[..., 0].numel()


def _ancestors(nodes: list[fx.Node]) -> set[str]:
    seen, pending = set(nodes), list(nodes)
    while pending:
        for operand in pending.pop().all_input_nodes:
            if operand not in seen:
                seen.add(operand)
                pending.append(operand)
    return {n.name for n in seen}
