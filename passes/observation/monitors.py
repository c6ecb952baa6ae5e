"""Reading units while text is made, and acting on the next token where enough of them fire (NEAT)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from hcx.rewrite.errors import UsageError
from hcx.rewrite.ir.program import Program

from .arguments import token_ids, whole
from .forcing import fit_vocabulary, only, without
from .rows import Rows, carried
from .taps import Unit, columns, widths


class NeuronMonitor:
    """A logits processor that reads taps of the step that gave the scores.

    Hand :meth:`see` to whoever runs the Program, and the monitor to whoever picks tokens::

        monitor = NeuronMonitor(program, found.units, suppress=[wait])
        model = program.as_pretrained(on_taps=monitor.see)
        model.generate(**prompt, logits_processor=[monitor])

    Every row of a batch is judged by itself, from the activations at its last position. A row is forced to its token
    once; see :class:`~.rows.Rows`.

    The model has to run once between two judgements. Where it runs again, the taps of the last run may belong to other
    tokens than the scores do (the unconditional branch of ``guidance_scale``), which nobody can tell from them; a prompt
    in chunks (``prefill_chunk_size``) looks the same. Both are refused.

    Args:
        program: has ``observe`` taps of the units.
        units: with their thresholds.
        suppress: ids of tokens that cannot follow where the units fire; or
        force: id of the token that must.
        need: how many units have to be beyond their threshold.

    Attributes:
        fired: rows in which it acted at the last step, bool ``[B]``; None before the first.

    Raises:
        UsageError: no unit, a unit that no tap holds, a tap that is not ``[B, position, units]`` at the positions of the
            tokens, a threshold that is no number, both or neither of ``suppress`` and ``force``.
    """

    def __init__(
        self,
        program: Program,
        units: Sequence[Unit],
        *,
        suppress: Iterable[int] | None = None,
        force: int | None = None,
        need: int = 1,
    ):
        if (suppress is None) == (force is None):
            raise UsageError("a monitor suppresses some tokens or forces one", where="NeuronMonitor",
                             hint="give suppress=[ids] or force=id")  # fmt: skip
        self.units, self.need = list(units), whole(need, "need", 1)
        if self.need > len(self.units):
            raise UsageError(f"need={need} of {len(self.units)} units", where="need",
                             hint="1 up to the number of units")  # fmt: skip
        self.places = columns(program, self.units)
        known = widths(program)
        self._widths = {tap: known[tap] for tap, _ in self.places}
        for unit, (tap, _) in zip(self.units, self.places, strict=True):
            if not _is_number(unit.threshold):
                raise UsageError(f"the threshold of unit {unit.unit} of tap `{tap}` is {unit.threshold}",
                                 where="threshold", hint="a number, such as separation() finds")  # fmt: skip
        self.suppress = token_ids(suppress, "suppress") if suppress is not None else None
        self.force = token_ids([force], "force")[0] if force is not None else None
        self._rows = Rows()
        self.reset()

    def reset(self) -> None:
        """Forget every row; calls that start another text do that by themselves."""
        self._rows.reset()
        self.fired: torch.Tensor | None = None
        self._active: torch.Tensor | None = None
        self._runs = 0

    def see(self, taps: Mapping[str, torch.Tensor]) -> None:
        """Take the taps of a step: each ``[B, positions, units]``, of which the last position is read.

        Raises:
            UsageError: taps of another Program.
        """
        for tap, width in self._widths.items():
            if tap not in taps or taps[tap].dim() != 3 or taps[tap].shape[-1] != width:
                got = f"{list(taps[tap].shape)}" if tap in taps else "none"
                raise UsageError(f"tap `{tap}` is [batch, position, {width}], given was {got}", where="NeuronMonitor",
                                 hint="run the Program that the monitor was made for")  # fmt: skip
        votes = [
            (x if u.above else -x) >= (u.threshold if u.above else -u.threshold)
            for u, (tap, column) in zip(self.units, self.places, strict=True)
            for x in [taps[tap][:, -1, column].detach().double()]
        ]
        self._active = torch.stack(votes).sum(0) >= self.need
        self._runs += 1

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores of the next token, ``[B, V]``, after the tokens ``[B, N]``.

        Raises:
            UsageError: the taps of this step have not been handed over, those of several runs have, or they are those
                of other rows; nothing is left that could follow.
        """
        (active, self._active), (runs, self._runs) = (self._active, None), (self._runs, 0)
        if active is None:
            raise UsageError("the taps of this step were not handed over", where="NeuronMonitor",
                             hint="program.as_pretrained(on_taps=monitor.see); drafts of an assistant have no taps")  # fmt: skip
        if runs > 1:
            raise UsageError(f"the model ran {runs} times since the last step: whose taps these are is not known",
                             where="NeuronMonitor",
                             hint="leave out guidance_scale and prefill_chunk_size; after calls of the model that picked "
                                  "no token, call monitor.reset()")  # fmt: skip
        if active.shape[0] != scores.shape[0]:
            raise UsageError(f"taps of {active.shape[0]} rows, scores of {scores.shape[0]}", where="NeuronMonitor",
                             hint="run the model on the rows whose tokens are picked")  # fmt: skip
        active = active.to(scores.device)
        if self.suppress is not None:
            fit_vocabulary(self.suppress, scores, "suppress")
            self.fired = active
            if len(self.suppress) == scores.shape[-1]:  # told before the units fire for the first time
                without(scores, torch.ones_like(active), self.suppress)
            return without(scores, active, self.suppress)
        fit_vocabulary([self.force], scores, "force")
        source, before = self._rows.follow(input_ids)
        done = torch.zeros_like(active) if before is None else carried(before["done"], source)
        done = done | ((source >= 0) & (input_ids[:, -1] == self.force))
        self._rows.keep(input_ids, {"done": done})
        self.fired = active & ~done
        return only(scores, self.fired, self.force)


def _is_number(threshold: object) -> bool:
    try:
        return not math.isnan(threshold)
    except (TypeError, ValueError, RuntimeError):  # of what is no number: text, None, several numbers in a tensor
        return False
