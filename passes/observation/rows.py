"""Which row of the step before each row of a batch goes on from, told from its tokens."""

from __future__ import annotations

import torch


class Rows:
    """Follows the rows of a batch from step to step.

    What a rule remembers of a row depends on the tokens of that row alone. So a row goes on from any earlier row with
    its tokens: beams may change places, rows may leave the batch. A row without such a row before it begins anew, which
    is what happens where another text is started.
    """

    def __init__(self) -> None:
        self._seen: torch.Tensor | None = None

    def reset(self) -> None:
        """Forget every row."""
        self._seen = None

    def follow(self, input_ids: torch.Tensor) -> torch.Tensor:
        """For each row of ``[B, N]`` the row of the step before with its first N - 1 tokens, ``[B]``; -1 for none."""
        seen, self._seen = self._seen, input_ids.clone()
        if seen is None or seen.shape[1] != input_ids.shape[1] - 1:
            return torch.full_like(input_ids[:, 0], -1)
        same = (input_ids[:, None, :-1] == seen[None].to(input_ids.device)).all(-1)
        return torch.where(same.any(1), same.int().argmax(1), -1)


def carried(state: torch.Tensor, source: torch.Tensor, start: float = 0) -> torch.Tensor:
    """The state of each row from the row it goes on from; ``start`` for rows that begin.

    Args:
        state: ``[B', ...]``.
        source: as :meth:`Rows.follow` returns it.
    """
    begins = (source < 0).reshape(-1, *[1] * (state.dim() - 1))
    return state[source.clamp_min(0)].masked_fill(begins, start)
