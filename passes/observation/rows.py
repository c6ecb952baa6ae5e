"""Which row of an earlier step each row of a batch goes on from, told from its tokens, and what was known of it."""

from __future__ import annotations

import torch

State = dict[str, torch.Tensor]
"""What a rule knows of the rows of a call, each ``[B, ...]``."""

REMEMBERED = 64
"""Lengths of text whose states are kept: a draft of fewer tokens can be taken back."""


class Rows:
    """Follows the rows of a batch from step to step.

    What a rule remembers of a row depends on the tokens of that row alone. So a row goes on from any earlier row with
    its tokens: beams may change places, rows may leave the batch. A row without such a row before it begins anew, which
    is what happens where another text is started.

    Of each length the state of the last call is kept. Decoding with drafts (an assistant, prompt lookup) judges tokens
    that are then thrown away, some of them twice, and goes on from a shorter text: that has its state still.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.Tensor, State]] = {}

    def reset(self) -> None:
        """Forget every row."""
        self._kept.clear()

    def follow(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, State | None]:
        """For each row of ``[B, N]`` the row of the last call of length N - 1 with its first N - 1 tokens.

        Returns:
            ``[B]``, -1 for none, and the state of that call; None where no row goes on.
        """
        nowhere = torch.full_like(input_ids[:, 0], -1)
        if input_ids.shape[1] - 1 not in self._kept:
            return nowhere, None
        seen, state = self._kept[input_ids.shape[1] - 1]
        same = (input_ids[:, None, :-1] == seen[None].to(input_ids.device)).all(-1)
        if not bool(same.any()):
            return nowhere, None
        return torch.where(same.any(1), same.int().argmax(1), -1), state

    def keep(self, input_ids: torch.Tensor, state: State) -> None:
        """Remember the state of the rows of ``[B, N]``; of this length it is the newest."""
        length = input_ids.shape[1]
        self._kept.pop(length, None)  # so that the order of the dictionary is that of the calls
        self._kept[length] = (input_ids.clone(), state)
        if len(self._kept) > REMEMBERED:
            del self._kept[next(iter(self._kept))]


def carried(state: torch.Tensor, source: torch.Tensor, start: float = 0) -> torch.Tensor:
    """The state of each row from the row it goes on from; ``start`` for rows that begin.

    Args:
        state: ``[B', ...]``.
        source: as :meth:`Rows.follow` returns it.
    """
    begins = (source < 0).reshape(-1, *[1] * (state.dim() - 1))
    return state[source.clamp_min(0)].masked_fill(begins, start)
