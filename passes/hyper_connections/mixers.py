"""Coefficient maps: what a site reads with, mixes by and writes with. One small class a system.

Sources: methods note on hyper-connections, sections 1.1 (HC) and 1.5 (iHC).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hcx.rewrite.dataflow import value
from hcx.rewrite.editor import Editor
from torch import fx

from .inits import Start


@dataclass
class Coefficients:
    """Nodes of one site; ``mix=None`` is the identity."""

    read: fx.Node
    write: fx.Node
    mix: fx.Node | None = None


class StaticHC:
    """HC with static coefficients: p, H and b are free learned tensors, ``n^2 + 2n`` a site."""

    name = "hc"
    channels_last_only = False

    def insert(self, editor: Editor, site: str, streams: fx.Node, start: Start, dtype: torch.dtype) -> Coefficients:
        """Make the coefficients of one site."""
        n = start.read.numel()
        return Coefficients(
            editor.parameter(f"{site}.read", start.read.to(dtype)),
            editor.parameter(f"{site}.write", start.write.to(dtype)),
            editor.parameter(f"{site}.mix", torch.eye(n, dtype=dtype)),
        )


def flat_unit(streams: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """``z = vec(X) / rms(vec(X))`` per position: ``[n, ..., C] -> [..., n C]``, in float32 or better."""
    rows = streams.movedim(0, -2).flatten(-2)
    rows = rows if rows.dtype == torch.float64 else rows.float()
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)


def sigmoid_head(streams: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """``sigmoid(a (z phi^T) + b)``, one coefficient a stream and position: ``[n, ..., C] -> [n, ...]``.

    Args:
        streams: ``[n, ..., C]``.
        weight: phi, ``[n, n C]``; scale: a, ``[1]``; bias: b, ``[n]``.
    """
    logits = torch.nn.functional.linear(flat_unit(streams), weight) * scale + bias
    return torch.sigmoid(logits).movedim(-1, 0)


class IHC:
    """iHC: the mix is the identity; p = sigmoid and b = 2 sigmoid of learned heads over all streams,
    ``2n (n C) + 2n + 2`` parameters a site. phi starts at 0 and a at 0.01, so p and b start at their biases."""

    name = "ihc"
    channels_last_only = True

    def insert(self, editor: Editor, site: str, streams: fx.Node, start: Start, dtype: torch.dtype) -> Coefficients:
        """Make the heads of one site."""
        read = self._head(editor, f"{site}.read", streams, torch.logit(start.read), dtype)
        half = self._head(editor, f"{site}.write", streams, torch.logit(start.write / 2), dtype)
        return Coefficients(read, editor.inline(_twice, half))

    @staticmethod
    def _head(editor: Editor, name: str, streams: fx.Node, bias: torch.Tensor, dtype: torch.dtype) -> fx.Node:
        n, width = bias.numel(), int(value(streams).shape[-1])
        weight = editor.parameter(f"{name}.weight", torch.zeros(n, n * width, dtype=dtype))
        scale = editor.parameter(f"{name}.scale", torch.full((1,), 0.01, dtype=dtype))
        return editor.inline(sigmoid_head, streams, weight, scale, editor.parameter(f"{name}.bias", bias.to(dtype)))


def _twice(half: torch.Tensor) -> torch.Tensor:
    return 2 * half


MIXERS = {m.name: m for m in (StaticHC(), IHC())}
