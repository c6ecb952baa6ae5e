"""How sure an exit is: one figure a position from its logits; larger is surer.

Source: methods note on exits, section 3.3. Both lie in [0, 1], and float32 rounding can reach exactly 1, so "never" is a
threshold of infinity, not of 1.
"""

from __future__ import annotations

import torch


def max_prob(logits: torch.Tensor) -> torch.Tensor:
    """Largest softmax probability, ``[..., C] -> [...]``, in float32.

    >>> max_prob(torch.tensor([[0.0, 0.0]]))
    tensor([0.5000])
    """
    return logits.float().softmax(-1).amax(-1)


def margin(logits: torch.Tensor) -> torch.Tensor:
    """Difference of the two largest softmax probabilities, ``[..., C] -> [...]``, in float32.

    >>> margin(torch.tensor([[2.0, 2.0, 0.0]]))
    tensor([0.])
    """
    top = logits.float().softmax(-1).topk(2, -1).values
    return top[..., 0] - top[..., 1]


SCORES = {"max_prob": max_prob, "margin": margin}
