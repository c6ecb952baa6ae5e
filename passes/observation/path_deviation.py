"""Path deviation: stop thinking when a text turns around more often than it used to.

A transition is a token such as "wait" or "but" that was drawn where the model was unsure:

    x_t = [y_t is a transition token and H_t >= h],   H_t = - sum_v p_v ln p_v  of the distribution that y_t was drawn from
    d_t = mean(x_(t-r+1) .. x_t) - mean(x_1 .. x_(t-r)),   0 while t <= r

Once d has been above tau for w tokens in a row, the stop token is forced. The published method is known by its abstract;
the window r, the floor h and the difference of rates are ours. Source: docs/sources.md, path-deviation.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from hcx.rewrite.errors import UsageError

from .arguments import token_ids, whole
from .forcing import fit_vocabulary, only
from .rows import Rows, carried


class PathDeviation:
    """A logits processor for ``generate(logits_processor=[...])`` and :func:`hcx.rewrite.run.generation.greedy`.

    Every row of a batch is judged by itself, from its first new token on; see :class:`~.rows.Rows` for beams and for
    where a row begins. A row that has its stop token is left alone. Entropies are those of the scores that are given:
    processors in front of this one count. Drafts of an assistant or of prompt lookup are judged as text and taken back
    where they are rejected, up to :data:`~.rows.REMEMBERED` - 1 tokens at once.

    Args:
        transitions: ids of transition tokens.
        stop: id of the token that ends thinking.
        tau: the rate, in transitions a token, that the recent rate may lie above the one before.
        patience: w, tokens in a row above tau.
        recent: r, tokens that the recent rate is taken over.
        entropy: h, in nats.

    Attributes:
        index: d of each row at the last call, ``[B]`` in float64; None before the first. With drafts the last call may
            be one of a draft.
        fired: rows in which the stop token was forced at the last call, ``[B]``.
    """

    def __init__(
        self,
        transitions: Iterable[int],
        stop: int,
        *,
        tau: float,
        patience: int = 8,
        recent: int = 64,
        entropy: float = 0.0,
    ):
        self.transitions, (self.stop,) = token_ids(transitions, "transitions"), token_ids([stop], "stop")
        self.patience, self.recent = whole(patience, "patience", 1), whole(recent, "recent", 1)
        if not 0 <= tau < 1:
            raise UsageError(f"tau={tau}: rates differ by less than 1", where="tau", hint="0 <= tau < 1")
        if not entropy >= 0:
            raise UsageError(f"entropy={entropy}: it is 0 or more", where="entropy", hint="in nats")
        self.tau, self.entropy = tau, entropy
        self._rows = Rows()
        self.reset()

    def reset(self) -> None:
        """Forget every row; calls that start another text do that by themselves."""
        self._rows.reset()
        self.index: torch.Tensor | None = None
        self.fired: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores of the next token, ``[B, V]``, after the tokens ``[B, N]``."""
        fit_vocabulary([*self.transitions, self.stop], scores, "transitions")
        source, before = self._rows.follow(input_ids)
        state = {n: carried(t, source) for n, t in (before or self._begun(input_ids)).items()}
        goes_on, token = source >= 0, input_ids[:, -1]
        unsure = state["entropy"] >= self.entropy
        hit = goes_on & unsure & torch.isin(token, torch.tensor(self.transitions, device=token.device))
        state["hits"] = torch.cat([state["hits"], hit[:, None].double()], 1)
        state["count"] = state["count"] + goes_on.long()
        self.index = self._deviation(state["hits"], state["count"])
        state["streak"] = torch.where(self.index > self.tau, state["streak"] + 1, 0)
        state["done"] = state["done"] | (goes_on & (token == self.stop))
        state["entropy"] = torch.special.entr(scores.double().softmax(-1)).sum(-1)
        self._rows.keep(input_ids, state)
        self.fired = (state["streak"] >= self.patience) & ~state["done"]
        return only(scores, self.fired, self.stop)

    def _begun(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state of rows without new tokens."""
        rows, device = input_ids.shape[0], input_ids.device
        return {
            "hits": torch.zeros(rows, 0, dtype=torch.float64, device=device),
            "count": torch.zeros(rows, dtype=torch.int64, device=device),
            "streak": torch.zeros(rows, dtype=torch.int64, device=device),
            "done": torch.zeros(rows, dtype=torch.bool, device=device),
            "entropy": torch.zeros(rows, dtype=torch.float64, device=device),
        }

    def _deviation(self, hits: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """d of each row from its last ``count`` entries of ``hits``; entries before those are 0."""
        earlier = (count - self.recent).clamp_min(0)
        now = hits[:, -self.recent :].sum(1)
        return torch.where(earlier > 0, now / self.recent - (hits.sum(1) - now) / earlier.clamp_min(1), 0.0)
