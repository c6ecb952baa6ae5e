"""Learned scores: a linear probe of the stream, gates with their cumulated probability, and JEI-DNN's gate.

Source: docs/sources.md, learned-scores. Parameters start so that every gate can learn: weights at 0, so that all
positions are equally sure; no threshold is set at the start, so that nothing leaves.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

SMALLEST = 1e-6
"""Least probability of having come so far that the conditional one divides by."""

POWER = 2.0
"""Exponent of the sharpened distribution in JEI-DNN's features; the source leaves it open."""


HIDDEN = 3
"""Layers of PALBERT's gate before the last one."""


def unit_rms(stream: torch.Tensor) -> torch.Tensor:
    """The stream over its root mean square, ``[..., d]`` in float32: its length grows with depth and says little."""
    wide = stream.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-12)


def probe(stream: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """``sigmoid(w . h / rms(h) + b)``, ``[..., d] -> [...]``; ``weight`` is ``[1, d]``, ``bias`` ``[1]``."""
    return torch.sigmoid(F.linear(unit_rms(stream), weight, bias)).squeeze(-1)


def cumulated(stream: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """:func:`joined` with the share of :func:`probe`."""
    return joined(probe(stream, weight, bias), before)


def deep(stream: torch.Tensor, before: torch.Tensor, *layers: torch.Tensor) -> torch.Tensor:
    """PALBERT's lambda: ``sigmoid(MLP([h_k; h_{k-1}]))``, ``[..., d]`` twice ``-> [...]``.

    Three layers ``2d -> 2d`` with tanh and one ``2d -> 1``, the same at all exits; both streams over their root mean square.

    Args:
        stream, before: after k blocks and one block earlier.
        layers: weight and bias of each layer in turn; ``[2d, 2d]``, ``[2d]``, at the end ``[1, 2d]``, ``[1]``.
    """
    return torch.sigmoid(F.linear(hidden(stream, before, *layers[:-2]), *layers[-2:])).squeeze(-1)


def hidden(stream: torch.Tensor, before: torch.Tensor, *layers: torch.Tensor) -> torch.Tensor:
    """What the last layer of :func:`deep` reads, ``[..., 2d]``."""
    x = torch.cat([unit_rms(stream), unit_rms(before)], -1)
    for weight, bias in zip(layers[::2], layers[1::2], strict=True):
        x = torch.tanh(F.linear(x, weight, bias))
    return x


def joined(share: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Probability of having left here or earlier, ``1 - (1 - before)(1 - share)``: lambda, the share that leaves here of those
    that have come so far.

    A threshold q on it is PALBERT's deterministic Q-exit: leave at the first exit whose cumulated probability is q.
    """
    return 1 - (1 - before) * (1 - share)


def start(width: int, bias: float) -> dict[str, torch.Tensor]:
    """Layers of :func:`deep` for a stream of that width: drawn as ``nn.Linear`` draws them, and a last one of zeros."""
    generator, wide = torch.Generator().manual_seed(width), 2 * width
    layers: dict[str, torch.Tensor] = {}
    for number in range(HIDDEN):
        for name, shape in (("weight", (wide, wide)), ("bias", (wide,))):
            draw = torch.rand(shape, generator=generator) * 2 - 1
            layers[f"{number}.{name}"] = draw / math.sqrt(wide)
    return layers | {f"{HIDDEN}.weight": torch.zeros(1, wide), f"{HIDDEN}.bias": torch.full((1,), bias)}


def features(logits: torch.Tensor) -> torch.Tensor:
    """JEI-DNN's four features of an exit, ``[..., C] -> [..., 4]``: largest probability, entropy, margin and entropy of
    the sharpened distribution. Entropies are shares of ``ln C``. No gradient reaches the logits."""
    logits = logits.detach().float()
    p = logits.softmax(-1)
    top = p.topk(2, -1).values
    return torch.stack([top[..., 0], _share(logits), top[..., 0] - top[..., 1], _share(POWER * logits)], -1)


def _share(logits: torch.Tensor) -> torch.Tensor:
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1) / math.log(logits.shape[-1])


def jei(logits: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *earlier: torch.Tensor) -> torch.Tensor:
    """JEI-DNN: probability of leaving here for those that have come so far, ``[..., C] -> [...]``.

    ``g = sigmoid(u . features + v)``, ``came = prod (1 - earlier scores)``, ``P = min(g, came)``, score ``P / came``. The
    published rule leaves at a score of 0.5.

    Args:
        logits: ``[..., C]``; ``weight`` ``[1, 4]``, ``bias`` ``[1]``.
        earlier: scores of the exits before, ``[...]`` each.
    """
    gate = torch.sigmoid(F.linear(features(logits), weight, bias)).squeeze(-1)
    came = torch.ones_like(gate)
    for score in earlier:
        came = came * (1 - score)
    return (torch.minimum(gate, came) / came.clamp_min(SMALLEST)).clamp(0, 1)
