"""Figures of mixes and streams: what a mix does to n streams, alone and over depth.

``H[i, j]`` is the weight from stream j to stream i. Mixes come as ``[T, n, n]``, one a position, in float64.
Sources: docs/sources.md, mix-figures; docs/sources.md, random-jacobian.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from hcx.kernels.maps import helmert

WORST = {
    "sigma1": "max", "sigma2": "min", "sigma_n": "min", "det": "min", "row_error": "max", "column_error": "max",
    "forward_gain": "max", "backward_gain": "max", "mean_gain": "min", "to_mean": "max", "from_mean": "max",
    "cosine": "max", "spread": "min",
}  # fmt: skip
"""Which end of a figure's distribution over positions is the one to worry about."""
HOMOGENEOUS = 1e-3
"""Warn where the product of sigma_2 over a stack falls below this: what streams differ in does not reach the end."""
LEVEL = 0.01
"""Of the effective depth: mixes after which this part of the difference is left."""


def mix_figures(mix: torch.Tensor) -> dict[str, torch.Tensor]:
    """Singular values, determinant, sums and gains of mixes ``[T, n, n]``; ``[T]`` each, ``angles [T, n // 2]`` in degrees.

    ``mean_gain``, ``to_mean`` and ``from_mean`` are a, ``|b|`` and ``|c|`` of ``[[a, b], [c, D]]`` in the basis of the
    mean and the differences: what the mean keeps, gets from the differences, and gives to them.
    """
    n = mix.shape[-1]
    basis = _differences(n).to(mix)
    ones = torch.full((n,), 1.0 / math.sqrt(n)).to(mix)
    values = torch.linalg.svdvals(mix)
    rows, columns = mix.sum(-1), mix.sum(-2)
    return {
        "sigma1": values[:, 0],
        "sigma2": values[:, 1],
        "sigma_n": values[:, -1],
        "det": torch.linalg.det(mix),
        "row_error": (rows - 1).abs().amax(-1),
        "column_error": (columns - 1).abs().amax(-1),
        "forward_gain": rows.abs().amax(-1),
        "backward_gain": columns.abs().amax(-1),
        "mean_gain": mix.sum((-1, -2)) / n,
        "to_mean": (ones @ mix @ basis).norm(dim=-1),
        "from_mean": (basis.T @ (mix @ ones).unsqueeze(-1)).squeeze(-1).norm(dim=-1),
        "angles": rotation_angles(mix),
    }


@cache
def _differences(n: int) -> torch.Tensor:
    """Orthonormal basis of the differences between n streams, ``[n, n - 1]``."""
    return torch.tensor(helmert(n), dtype=torch.float64)


def rotation_angles(mix: torch.Tensor) -> torch.Tensor:
    """Angles in degrees, largest first, of the rotation nearest to each mix (its polar factor): ``[T, n // 2]``.

    NaN where the mix is singular, so that none is nearest.
    """
    n = mix.shape[-1]
    left, values, right = torch.linalg.svd(mix)
    turns = torch.linalg.eigvals(left @ right).angle().abs().sort(-1, descending=True).values
    angles = torch.rad2deg(turns[:, ::2][:, : n // 2])  # they come in pairs of a turn and its conjugate
    return torch.where(values[:, -1:] > 1e-6, angles, torch.nan)


def stream_figures(streams: torch.Tensor) -> dict[str, torch.Tensor]:
    """Mean cosine of pairs of streams, and their spread ``|X - mean| / |X|``; ``[T]`` each.

    Args:
        streams: ``[n, T, C]``. Equal streams: 1 and 0; orthogonal ones of equal length: 0 and ``sqrt(1 - 1/n)``.
    """
    n = streams.shape[0]
    units = torch.nn.functional.normalize(streams, dim=-1)
    cosine = (units.sum(0).square().sum(-1) - units.square().sum((0, -1))) / (n * (n - 1))
    apart = (streams - streams.mean(0)).square().sum((0, -1))
    return {"cosine": cosine, "spread": (apart / streams.square().sum((0, -1)).clamp_min(1e-30)).sqrt()}


def composites(mixes: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gains of ``H_l .. H_1`` after each of L mixes ``[T, n, n]`` (or ``[1, n, n]``), over positions: ``[L]`` each.

    ``forward_gain`` and ``backward_gain``: largest absolute row and column sum, over all positions. ``difference_gain``:
    how much of a difference between streams can be left, mean over positions, with ``sigma2_product``, its bound where
    mixes are doubly stochastic.
    """
    n, product = mixes[0].shape[-1], torch.eye(mixes[0].shape[-1], dtype=torch.float64)
    basis = _differences(n)
    found: dict[str, list[torch.Tensor]] = {}
    bound = torch.ones(1, dtype=torch.float64)
    for mix in mixes:
        product = mix.double().cpu() @ product
        bound = bound * torch.linalg.svdvals(mix.double().cpu())[:, 1]
        row = {
            "forward_gain": product.sum(-1).abs().max(),
            "backward_gain": product.sum(-2).abs().max(),
            "difference_gain": torch.linalg.matrix_norm(basis.T @ product @ basis, 2).mean(),
            "sigma2_product": bound.mean(),
        }
        for name, figure in row.items():
            found.setdefault(name, []).append(figure)
    return {name: torch.stack(figures) for name, figures in found.items()}


def effective_depth(sigma2: torch.Tensor, level: float = LEVEL) -> float:
    """Mixes until ``level`` of the difference between streams is left, at the mean log of sigma_2; infinite at 1.

    >>> round(effective_depth(torch.tensor([0.1, 0.1])), 6)
    2.0
    """
    rate = sigma2.double().clamp(1e-300, 1.0).log().mean().item()
    return math.log(level) / rate if rate < -1e-9 else math.inf


def jacobian_spectrum(
    mixes: list[torch.Tensor], *, width: int = 25, variance: float = 0.05, draws: int = 4, seed: int = 0
) -> torch.Tensor:
    """Singular values of ``prod_l (H_l (x) I + G_l)`` by Monte Carlo, largest first, ``[draws, n width]``.

    The model that the paper of JPmHC (arXiv 2602.18308) compares mixers by: each branch has a Gaussian Jacobian,
    ``G_l`` has entries of variance ``variance / (L N)`` with N = n width, so that all branches together add
    ``variance``.

    Args:
        mixes: L mixes ``[T, n, n]``; each draw takes one position of each.
    """
    generator = torch.Generator().manual_seed(seed)
    size = mixes[0].shape[-1] * width
    eye = torch.eye(width, dtype=torch.float64)
    noise = math.sqrt(variance / (len(mixes) * size))
    rows = []
    for draw in range(draws):
        forward = torch.eye(size, dtype=torch.float64)
        backward = torch.eye(size, dtype=torch.float64)
        for mix in mixes:
            factor = torch.kron(mix[draw * mix.shape[0] // draws].double().cpu().contiguous(), eye)
            factor = factor + noise * torch.randn(size, size, dtype=torch.float64, generator=generator)
            forward, backward = factor @ forward, torch.linalg.solve(factor.T, backward)
        large = torch.linalg.svdvals(forward)
        # a product loses values below 1e-16 of its largest; they are the large ones of the product of the inverses
        small = 1.0 / torch.linalg.svdvals(backward).flip(0)
        rows.append(torch.where(large > 1e-8 * large[0], large, small))
    return torch.stack(rows)
