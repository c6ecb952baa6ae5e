"""Starts that keep a pretrained model's function, and their symmetry.

A rewritten stream carries ``X_l`` with one of three invariants (docs/sources.md, exact-starts):
R (replicated): all streams equal, ``H 1 = 1``, ``b = 1``, ``sum p = sum r = 1``;
W (transported, at mixes that are the identity): ``w . e = 1``, ``p = r = w``, ``w . b = 1``;
M (mean): ``sum e = n``, column sums of H are 1, ``sum b = n``, ``p = r = 1/n``.
With equal streams and equal rows every stream keeps getting the same gradient ("symmetric trap"), so R starts are for
goldens unless the reads differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Start:
    """Coefficients of one site at the start; all ``[n]``, in float64: rounded once, to the precision of the parameters."""

    read: torch.Tensor
    write: torch.Tensor


def functional(n: int) -> torch.Tensor:
    """w of a transported start: ``w . X`` is the plain stream at every site while mixes are the identity; sums to 1."""
    weights = torch.arange(n, 0, -1, dtype=torch.float64)
    return weights / weights.sum()


def is_power_of_two(n: int) -> bool:
    """Whether 1/n is exact in binary."""
    return n & (n - 1) == 0


def expand_start(init: str, n: int) -> torch.Tensor:
    """How the first value enters the streams."""
    if init == "transport":
        entry = expand_start("mean", n)
        return entry / (functional(n) @ entry)
    if init != "mean" or n == 1:
        return torch.ones(n, dtype=torch.float64)
    return _vector([1.3, 1.1, 0.9, 0.7]) if n == 4 else torch.linspace(1.3, 0.7, n, dtype=torch.float64)


def reduce_start(init: str, n: int) -> torch.Tensor:
    """How the streams become one value again."""
    if init == "transport":
        return functional(n)
    if init == "replicate" and not is_power_of_two(n):  # the mean of equal values would be rounded
        return _one_hot(0, n)
    return torch.full((n,), 1.0 / n, dtype=torch.float64)


def site_start(init: str, n: int, number: int) -> Start:
    """Read and write coefficients of residual ``number`` of a stack.

    Args:
        init: ``replicate`` (bitwise), ``rotate`` (R with reads that differ), ``mean`` (M, streams that differ),
            ``transport`` (W: another functional than the mean; everything has a gradient at once).
        n: number of streams.
    """
    ones, mean = torch.ones(n, dtype=torch.float64), torch.full((n,), 1.0 / n, dtype=torch.float64)
    if init == "replicate" or n == 1:
        return Start(mean if is_power_of_two(n) else _one_hot(number % n, n), ones)
    if init == "rotate":
        read = torch.full((n,), 0.45 / (n - 1), dtype=torch.float64)
        read[0] = 0.55
        return Start(read.roll(number % n), ones)
    if init == "transport":
        w = functional(n)
        basis = torch.linalg.qr(torch.stack([ones, w], 1)).Q
        change = site_start("mean", n, number).write - 1
        change = change - basis @ (basis.T @ change)  # sum b = n and w . b = 1 both stay
        return Start(w, 1 + change)
    pattern = [0.4, -0.1, -0.4, 0.1] if n == 4 else [0.4 * math.cos(2 * math.pi * i / n) for i in range(n)]
    return Start(mean, 1 + _vector(pattern).roll(number % n))


def _vector(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _one_hot(index: int, n: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(index), n).double()
