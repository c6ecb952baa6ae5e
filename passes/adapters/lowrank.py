"""Equations of low-rank updates.

A weight ``W[out, in]`` gets ``W + s B A`` with ``A[r, in]``, ``B[out, r]`` and ``s = alpha / r`` (rsLoRA:
``alpha / sqrt(r)``). Beside an op the product of the two is never formed; where a weight is not used as a plain matrix
(experts, convolutions) it is. Sources: Hu et al. 2021, equation 3; Kalajdzievski 2023 for the other scale; initial
values as PEFT 0.21 draws them (``tuners/lora/layer.py``); docs/sources.md, lora.
"""

from __future__ import annotations

import math
import zlib

import torch
import torch.nn.functional as F


def scale_of(alpha: float, rank: int, rslora: bool) -> float:
    """``alpha / r``, or ``alpha / sqrt(r)``.

    >>> scale_of(16, 4, False), scale_of(16, 4, True)
    (4.0, 8.0)
    """
    return alpha / (math.sqrt(rank) if rslora else rank)


def beside_linear(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, dropout: float) -> torch.Tensor:
    """``s (drop(x) A^T) B^T``: ``[..., in] -> [..., out]``."""
    dropped = F.dropout(x, dropout, training=False) if dropout else x  # a node whose flag train() and eval() turn
    return F.linear(F.linear(dropped, a), b) * scale


def beside_left(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, dropout: float) -> torch.Tensor:
    """``s B (A drop(x))`` beside ``W x``: ``[..., in, n] -> [..., out, n]``."""
    dropped = F.dropout(x, dropout, training=False) if dropout else x
    return torch.matmul(b, torch.matmul(a, dropped)) * scale


def beside_embedding(ids: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """``s A^T[ids] B^T``: ids ``[...] -> [..., dim]`` with ``A[r, rows]``, ``B[dim, r]``."""
    return F.linear(F.embedding(ids, a.t()), b) * scale


def updated_weight(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, order: tuple[int, ...]
) -> torch.Tensor:
    """``W + s B A`` for a weight of any shape.

    Args:
        weight: the weight.
        a: ``[r, in]`` or ``[experts, r, in]``; ``in`` is the product of the summed axes.
        b: ``[out, r]`` or ``[experts, out, r]``.
        order: axes of the weight as experts (if any), output, then the summed ones.
    """
    shape = [weight.shape[i] for i in order]
    inverse = [order.index(i) for i in range(len(order))]
    return weight + (torch.matmul(b, a) * scale).reshape(shape).permute(inverse)


def initial_a(shape: list[int], init: str, name: str) -> torch.Tensor:
    """``A[..., r, in]``: uniform in ``+-1/sqrt(in)`` (``kaiming``) or normal with deviation ``1/r`` (``gaussian``).

    The same name gives the same values in every run and whatever else is adapted.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if init == "gaussian":
        return torch.randn(shape, generator=generator) / shape[-2]
    return (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(shape[-1])


def initial_embedding_b(shape: list[int], name: str) -> torch.Tensor:
    """``B[dim, r]`` of an embedding: standard normal; there A is zero."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
