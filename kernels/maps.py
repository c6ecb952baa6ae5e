"""``torch.ops.hcx.*``: maps from logits to the n x n matrix that mixes streams.

Logits and matrices carry the positions behind: ``[k, ...]`` in, ``[n, n, ...]`` out, ``H[i, j]`` the weight from stream j
to stream i. All maps are exact closed forms or fixed numbers of steps, in float32 or better, without solvers of a library (they export).
Sources: docs/sources.md (Hyper-connections).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

_LIBRARY: Any = torch.library.Library("hcx", "FRAGMENT")
_LIBRARY.define("stream_head(Tensor streams, Tensor weight, float eps) -> Tensor")
_LIBRARY.define("sinkhorn(Tensor logits, int steps, bool implicit) -> Tensor")
_LIBRARY.define("permutation_mix(Tensor logits, int n) -> Tensor")
_LIBRARY.define("kronecker_mix(Tensor logits, int n) -> Tensor")
_LIBRARY.define("rotation(Tensor logits, int n) -> Tensor")
_LIBRARY.define("cayley(Tensor logits, float alpha) -> Tensor")
_LIBRARY.define("spectral_mix(Tensor left, Tensor right, Tensor middle, int n) -> Tensor")
_LIBRARY.define("pinned_projector(Tensor basis) -> Tensor")


def stream_head(streams: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``z phi^T`` with ``z = vec(X) / rms(vec(X))`` at each position: ``[n, ..., C] -> [k, ...]``.

    Args:
        weight: phi, ``[k, n C]``, streams first. The division comes after the product, which needs no copy of X.
    """
    n, width = streams.shape[0], streams.shape[-1]
    precise = streams.to(torch.float64 if torch.float64 in (streams.dtype, weight.dtype) else torch.float32)
    flat = precise.reshape(n, -1, width)
    phi = weight.to(flat.dtype).reshape(weight.shape[0], n, width).permute(1, 2, 0)
    products = torch.bmm(flat, phi).sum(0)
    # norms first: squares of all streams would be one more tensor of their size
    scale = torch.rsqrt(torch.linalg.vector_norm(flat, dim=-1).square().sum(0) / (n * width) + eps)
    return (products * scale.unsqueeze(-1)).t().reshape([weight.shape[0], *streams.shape[1:-1]])


def sinkhorn(logits: torch.Tensor, steps: int, implicit: bool = False) -> torch.Tensor:
    """Sinkhorn-Knopp: exp, then ``steps`` times columns and rows scaled to sum 1, rows last. ``[n, n, ...]``.

    Args:
        implicit: gradient of the limit (the doubly stochastic matrix) instead of the exact one of the steps.
    """
    return _Implicit.apply(logits, steps) if implicit else _scaled(logits, steps)


def _scaled(logits: torch.Tensor, steps: int) -> torch.Tensor:
    # only a shift of columns is neutral, since columns are scaled first
    logits = logits.clamp(-30.0, 30.0)
    kernel = torch.exp(logits - logits.amax(0, keepdim=True))
    scaled = kernel  # two vectors are scaled, never the matrix: a tenth of the time of the textbook form
    for _ in range(steps):
        columns = scaled.sum(0, keepdim=True).reciprocal()
        rows = (kernel * columns).sum(1, keepdim=True).reciprocal()
        scaled = kernel * rows
    return scaled * columns


class _Implicit(torch.autograd.Function):
    """Backward of the limit: with A = P * G, dL/dZ = A - u P - v P where ``u + P v = A 1`` and ``P^T u + v = A^T 1``.

    Source: docs/sources.md, sinkhorn-gradient.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, steps: int) -> torch.Tensor:
        mixed = _scaled(logits, steps)
        ctx.save_for_backward(mixed)
        return mixed

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (mixed,) = ctx.saved_tensors
        n = mixed.shape[0]
        p = mixed.movedim((0, 1), (-2, -1)).double()
        a = p * gradient.movedim((0, 1), (-2, -1)).double()
        rows, columns = a.sum(-1, keepdim=True), a.sum(-2).unsqueeze(-1)
        # singular along u = -v = 1, which changes nothing: pinned by 11^T / n
        system = (
            (1 + 1e-7) * torch.eye(n, dtype=p.dtype, device=p.device) - p @ p.mT + torch.ones_like(p[..., :1, :1]) / n
        )
        u = torch.linalg.solve(system, rows - p @ columns)
        v = columns - p.mT @ u
        result = a - u * p - v.mT * p
        return result.movedim((-2, -1), (0, 1)).to(gradient.dtype), None


@cache
def permutations(n: int) -> tuple[tuple[int, ...], ...]:
    """All permutations of n streams, the identity first."""
    return tuple(itertools.permutations(range(n)))


@cache
def _permutation_table(n: int) -> tuple[tuple[float, ...], ...]:
    """Entry ``[n i + j, k]`` is 1 where permutation k sends stream j to stream i."""
    rows = itertools.product(range(n), repeat=2)
    return tuple(tuple(float(order[i] == j) for order in permutations(n)) for i, j in rows)


def permutation_mix(logits: torch.Tensor, n: int) -> torch.Tensor:
    """``sum_k softmax(l)_k P_k`` over all permutation matrices: ``[n!, ...] -> [n, n, ...]``."""
    weights = torch.softmax(logits, 0)
    return (_table(_permutation_table, n, logits) @ weights.reshape(weights.shape[0], -1)).reshape(
        [n, n, *logits.shape[1:]]
    )


@cache
def kronecker_factors(n: int) -> tuple[int, ...]:
    """Prime factors of n, smallest first: the sizes of the Kronecker factors."""
    factors, rest, divisor = [], n, 2
    while rest > 1:
        while rest % divisor == 0:
            factors.append(divisor)
            rest //= divisor
        divisor += 1
    return tuple(factors)


def kronecker_mix(logits: torch.Tensor, n: int) -> torch.Tensor:
    """``U_1 (x) ... (x) U_K``, each a mixture of the f! permutations of its f streams: ``[sum f!, ...] -> [n, n, ...]``.

    The first factor stands for the most significant digit of a stream's number.
    """
    start = 0
    mixed: torch.Tensor | None = None
    for factor in kronecker_factors(n):
        count = math.factorial(factor)
        part = permutation_mix(logits[start : start + count], factor)
        start += count
        if mixed is None:
            mixed = part
        else:  # H[(i, k), (j, l)] = U[i, j] V[k, l]
            size = mixed.shape[0] * factor
            mixed = (mixed[:, None, :, None] * part[None, :, None, :]).reshape([size, size, *logits.shape[1:]])
    assert mixed is not None  # n > 1 has a factor
    return mixed


def logits_of_rotation(n: int) -> int:
    """How many logits :func:`rotation` takes."""
    return {2: 1, 3: 4, 4: 8}.get(n, n * (n - 1) // 2)


def rotation(logits: torch.Tensor, n: int) -> torch.Tensor:
    """A rotation in SO(n); zero logits give the identity bit for bit.

    n=2: an angle. n=3: ``x -> q x conj(q)``. n=4: ``x -> q x conj(r)`` with two unit quaternions, all of SO(4). More: the
    Cayley transform of a skew matrix.
    """
    if n == 2:
        cos, sin = torch.cos(logits[0]), torch.sin(logits[0])
        return _matrix([[cos, -sin], [sin, cos]])
    if n == 3:
        w, x, y, z = _unit(logits)
        return _matrix(
            [
                [w * w + x * x - y * y - z * z, 2 * (x * y - w * z), 2 * (x * z + w * y)],
                [2 * (x * y + w * z), w * w - x * x + y * y - z * z, 2 * (y * z - w * x)],
                [2 * (x * z - w * y), 2 * (y * z + w * x), w * w - x * x - y * y + z * z],
            ]
        )
    if n == 4:
        left, right = _unit(logits.reshape([2, 4, *logits.shape[1:]]), 1).unbind(0)
        flat = (left.unsqueeze(1) * right.unsqueeze(0)).reshape(16, -1)
        return (_table(_quaternion_table, n, flat) @ flat).reshape([4, 4, *logits.shape[1:]])
    return _solved(_skew(logits, n))


def _unit(logits: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """``(1 + l0, l1, l2, l3)`` at length 1; no epsilon, which would move the identity."""
    shape = [1] * dim + [4] + [1] * (logits.dim() - dim - 1)
    vector = logits + _table(_one, 4, logits).reshape(shape)
    square = vector.square().sum(dim, keepdim=True)
    return vector * torch.rsqrt(torch.where(square > 1e-12, square, 1.0))


@cache
def _one(n: int) -> tuple[float, ...]:
    return (1.0,) + (0.0,) * (n - 1)


_TABLES: dict[tuple[Any, ...], torch.Tensor] = {}


def _table(entries: Callable[[int], tuple[Any, ...]], n: int, like: torch.Tensor) -> torch.Tensor:
    """Constant tensor of a table, kept from call to call; made anew while a graph is traced."""
    if type(like) not in (torch.Tensor, torch.nn.Parameter) or torch.compiler.is_compiling():
        return torch.tensor(entries(n), dtype=like.dtype, device=like.device)
    key = entries, n, like.dtype, like.device
    if key not in _TABLES:
        with torch.inference_mode(False):  # else a later backward could not keep it
            _TABLES[key] = torch.tensor(entries(n), dtype=like.dtype, device=like.device)
    return _TABLES[key]


@cache
def _quaternion_table(n: int = 4) -> tuple[tuple[int, ...], ...]:
    """``vec(H) = T vec(q r^T)``: entries 0, 1 and -1, ``[16, 16]``."""
    table = [[0] * 16 for _ in range(16)]
    for a, b, axis in itertools.product(range(4), repeat=3):
        first, sign = _times(a, axis)  # column `axis` of H is q e conj(r)
        result, second = _times(first, b)
        table[4 * result + axis][4 * a + b] += sign * second * (1 if b == 0 else -1)
    return tuple(map(tuple, table))


def _times(a: int, b: int) -> tuple[int, int]:
    """Product of two quaternion units 1, i, j, k: unit and sign."""
    if a == 0 or b == 0:
        return a + b, 1
    if a == b:
        return 0, -1
    return 6 - a - b, 1 if (b - a) % 3 == 1 else -1


def _matrix(rows: list[list[torch.Tensor]]) -> torch.Tensor:
    return torch.stack([torch.stack(row) for row in rows])


def _skew(logits: torch.Tensor, n: int) -> torch.Tensor:
    """Skew matrix of the logits above its diagonal, row by row: ``[n(n-1)/2, ...] -> [n, n, ...]``."""
    zero = torch.zeros_like(logits[0])
    number = {pair: k for k, pair in enumerate(itertools.combinations(range(n), 2))}
    return _matrix(
        [
            [
                zero if i == j else logits[number[i, j]] if i < j else -logits[number[j, i]]
                for j in range(n)
            ]
            for i in range(n)
        ]
    )  # fmt: skip


def cayley(logits: torch.Tensor, alpha: float) -> torch.Tensor:
    """``(I + A)^-1 (I - A)`` with ``A = -(alpha / 2) (L - L^T)``: orthogonal, det 1; ``[n, n, ...]``.

    Closed form at n = 4 and below, so that nothing is solved in an exported graph.
    """
    skew = (logits - logits.transpose(0, 1)) * (-alpha / 2)
    n = logits.shape[0]
    if n == 4:
        return _cayley_4(skew)
    if n == 3:
        return _cayley_3(skew)
    if n == 2:
        t = skew[0, 1]
        scale = 1.0 / (1.0 + t * t)
        return _matrix([[(1 - t * t) * scale, -2 * t * scale], [2 * t * scale, (1 - t * t) * scale]])
    return _solved(skew)


def _identity_like(matrix: torch.Tensor) -> torch.Tensor:
    n = matrix.shape[0]
    return _table(_eye, n, matrix).reshape([n, n] + [1] * (matrix.dim() - 2))


@cache
def _eye(n: int) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(float(i == j) for j in range(n)) for i in range(n))


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.unsqueeze(2) * b.unsqueeze(0)).sum(1)


def _cayley_4(a: torch.Tensor) -> torch.Tensor:
    square = _product(a, a)
    t = a.square().sum((0, 1)) / 2
    pfaffian = a[0, 1] * a[2, 3] - a[0, 2] * a[1, 3] + a[0, 3] * a[1, 2]
    eye = _identity_like(a)
    first = eye - 2 * a + square
    return _product(first, (1 + t) * eye + square) / (1 + t + pfaffian.square())


def _cayley_3(a: torch.Tensor) -> torch.Tensor:
    square = _product(a, a)
    return _identity_like(a) + 2 * (square - a) / (1 + a.square().sum((0, 1)) / 2)


def _solved(skew: torch.Tensor) -> torch.Tensor:
    """``(I + A)^-1 (I - A)`` by elimination without pivots: the symmetric part of I + A is I, so none can vanish."""
    n, eye = skew.shape[0], _identity_like(skew)
    rows = torch.cat([eye + skew, eye - skew], 1)
    for k in range(n):
        pivot = rows[k] / rows[k, k]
        rows = rows - (rows[:, k] - eye[:, k]).unsqueeze(1) * pivot.unsqueeze(0)
    return rows[:, n:]


@cache
def helmert(n: int) -> tuple[tuple[float, ...], ...]:
    """Orthonormal columns orthogonal to the ones, ``[n, n - 1]``."""
    columns = []
    for i in range(1, n):
        scale = 1.0 / math.sqrt(i * (i + 1))
        columns.append([scale] * i + [-i * scale] + [0.0] * (n - i - 1))
    return tuple(zip(*columns, strict=True))


def spectral_mix(left: torch.Tensor, right: torch.Tensor, middle: torch.Tensor, n: int) -> torch.Tensor:
    """``J + Z U diag(tanh s) V^T Z^T``: rows and columns sum to 1 for all logits, largest singular value 1.

    Args:
        left, right: entries of the skew matrices behind U and V, ``[m(m-1)/2, ...]`` with m = n - 1.
        middle: s, ``[m, ...]``.
    """
    m = n - 1
    basis = _table(helmert, n, middle).reshape([n, m] + [1] * (middle.dim() - 1))
    values = torch.tanh(middle)
    if m == 1:
        core = values.unsqueeze(0)
    else:
        u, v = (_turn(x, m) for x in (left, right))
        core = _product(u * values.unsqueeze(0), v.transpose(0, 1))
    return 1.0 / n + _product(_product(basis, core), basis.transpose(0, 1))


def _turn(logits: torch.Tensor, m: int) -> torch.Tensor:
    skew = _skew(logits, m)
    return cayley(skew, -1.0)  # L - L^T doubles a skew L, alpha = -1 takes the half of that


def pinned_projector(basis: torch.Tensor) -> torch.Tensor:
    """Projector ``U U^T`` on the ones and ``basis``'s span in their complement; static, ``[n - 1, p - 1] -> [n, n]``."""
    n = basis.shape[0] + 1
    z = _table(helmert, n, basis)
    ones = torch.full((n, n), 1.0 / n, dtype=basis.dtype, device=basis.device)
    columns: list[torch.Tensor] = []
    for k in range(basis.shape[1]):  # Gram-Schmidt: a handful of columns, and it exports
        column = basis[:, k]
        for earlier in columns:
            column = column - (earlier * column).sum() * earlier
        columns.append(column * torch.rsqrt((column * column).sum()))
    for column in columns:
        spread = z @ column
        ones = ones + spread.unsqueeze(1) * spread.unsqueeze(0)
    return ones


DEFINITIONS = {
    "stream_head": stream_head,
    "sinkhorn": sinkhorn,
    "permutation_mix": permutation_mix,
    "kronecker_mix": kronecker_mix,
    "rotation": rotation,
    "cayley": cayley,
    "spectral_mix": spectral_mix,
    "pinned_projector": pinned_projector,
}
for _name, _function in DEFINITIONS.items():
    _LIBRARY.impl(_name, _function, "CompositeImplicitAutograd")
