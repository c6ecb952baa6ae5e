"""What an exit predicts from: the stream as it is, a learned view of it, or a classifier of its own.

Heads that start as copies of parts of the model are in :mod:`hcx.passes.exits.insert.heads_copied`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hcx.rewrite.edit.editor import Editor
from hcx.rewrite.ir.dataflow import value
from hcx.rewrite.ir.traced import traced
from torch import fx

HEADS = ("shared", "norm", "own", "affine", "mlp", "block", "classifier")


def translate(stream: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Affine translator ``h A^T + c`` of the stream, ``[..., d] -> [..., d]``; A = I, c = 0 leaves it unchanged."""
    return F.linear(stream, weight, bias)


def pooled(stream: torch.Tensor) -> torch.Tensor:
    """Mean over positions: ``[B, C, H, W]`` or ``[B, S, C]`` to ``[B, C]``; two dimensions stay."""
    return stream.flatten(2).mean(-1) if stream.dim() >= 4 else stream.mean(1) if stream.dim() == 3 else stream


def classify(stream: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Mean over positions, then a linear classifier: ``[B, C, H, W]`` or ``[B, S, C]`` to ``[B, classes]``."""
    return F.linear(pooled(stream), weight, bias)


def classify_each(stream: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A linear classifier at each position: ``[B, S, C]`` to ``[B, S, classes]``, as CTC reads an encoder."""
    return F.linear(stream, weight, bias)


def features(node: fx.Node) -> int:
    """Feature width of a stream: dimension 1 of images, the last one otherwise."""
    val = traced(node)
    return int(val.shape[1] if val.dim() >= 4 else val.shape[-1])


def affine_view(editor: Editor, site: str, stream: fx.Node) -> fx.Node:
    """Insert the translator at its exact start."""
    width, val = features(stream), value(stream)
    weight = editor.parameter(f"{site}.weight", torch.eye(width, dtype=val.dtype, device=val.device))
    bias = editor.parameter(f"{site}.bias", torch.zeros(width, dtype=val.dtype, device=val.device))
    made: fx.Node = editor.inline(translate, stream, weight, bias)
    return made


def classifier(editor: Editor, site: str, stream: fx.Node, classes: int, *, each: bool = False) -> fx.Node:
    """Insert a classifier that starts undecided (all logits equal); trained through its tap.

    Args:
        each: one answer a position, else one a row.
    """
    width, val = features(stream), value(stream)
    weight = editor.parameter(f"{site}.weight", torch.zeros(classes, width, dtype=val.dtype, device=val.device))
    bias = editor.parameter(f"{site}.bias", torch.zeros(classes, dtype=val.dtype, device=val.device))
    made: fx.Node = editor.inline(classify_each if each else classify, stream, weight, bias)
    return made
