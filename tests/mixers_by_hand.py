"""Coefficients of every mixer from a rewritten Program's parameters, one position after the other in plain float64.

Written from the definitions with other means than the package: explicit inverses, the log domain, Hamilton products,
sums over permutations. ``H[i, j]`` is the weight from stream j to stream i.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch

Values = dict[str, torch.Tensor]


def coefficients(mixer: str, values: Values, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Read ``[n]``, mix ``[n, n]`` and write ``[n]`` of one position; ``streams [n, C]``."""
    n = streams.shape[0]
    if mixer == "ddl":
        return (
            values.get("read", torch.ones(n, dtype=streams.dtype)),
            torch.eye(n, dtype=streams.dtype),
            values["write"],
        )
    if mixer == "hc":
        return values["read"], values["mix"], values["write"]
    if mixer == "hc,dynamic=true":
        return dynamic_hc(values, streams)
    if mixer.startswith("jpmhc"):
        return jpmhc(mixer, values, streams)
    flat = streams.flatten()
    z = values["phi"] @ (flat / (flat.pow(2).mean() + 1e-6).sqrt())
    read = torch.sigmoid(values["read_gate"] * z[:n] + values["read_bias"])
    write = 2 * torch.sigmoid(values["write_gate"] * z[n : 2 * n] + values["write_bias"])
    rest = z[2 * n :]
    if mixer == "ihc":
        return read, torch.eye(n, dtype=read.dtype), write
    if mixer == "shc":
        return read, spectral(values, rest, n), write
    logits = values["mix_gate"] * rest + values["mix_bias"]
    mix: Callable = {"mhc": log_sinkhorn, "mhc_lite": permuted, "ohc": rotated, "kromhc": kronecker}[mixer]
    return read, mix(logits, n), write


def dynamic_hc(values: Values, streams: torch.Tensor):
    read, write, mix = values["read"].clone(), values["write"].clone(), values["mix"].clone()
    s, t = values["gates"]
    for i, x in enumerate(streams):
        x = x / (x.pow(2).mean() + 1e-6).sqrt() * values["norm"]
        read[i] += s * torch.tanh(x @ values["projection"][0])
        write[i] += t * torch.tanh(x @ values["projection"][1])
        mix[:, i] += s * torch.tanh(values["projection"][2:] @ x)
    return read, mix, write


def log_sinkhorn(logits: torch.Tensor, n: int, steps: int = 20) -> torch.Tensor:
    z = logits.reshape(n, n)
    for _ in range(steps):
        z = z - torch.logsumexp(z, 0, keepdim=True)
        z = z - torch.logsumexp(z, 1, keepdim=True)
    return z.exp()


def permuted(logits: torch.Tensor, n: int) -> torch.Tensor:
    weights = logits.exp() / logits.exp().sum()
    return sum(
        w * torch.eye(n, dtype=w.dtype)[list(p)] for w, p in zip(weights, itertools.permutations(range(n)), strict=True)
    )


def kronecker(logits: torch.Tensor, n: int) -> torch.Tensor:
    """Factors of two streams, then one of three where n has it."""
    whole, start = torch.ones(1, 1, dtype=logits.dtype), 0
    for factor in {2: [2], 3: [3], 4: [2, 2], 6: [2, 3], 8: [2, 2, 2]}[n]:
        count = math.factorial(factor)
        whole = torch.kron(whole, permuted(logits[start : start + count], factor))
        start += count
    return whole


def delta_rule(values: Values, streams: torch.Tensor, view: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    """Streams after a write of deep delta learning: ``A X + k v*^T`` with the operator ``A = I - g k k^T`` and the target
    ``v* = |f| rho + g v``. One position; ``streams [m, C]``, ``view`` and ``update [C]``."""
    logits = values["phi"] @ (view / (view.pow(2).mean() + 1e-6).sqrt()) + values["phi_bias"]
    gate = (values["strength"][0] * 2 / (1 + (-logits[0]).exp())).clamp(0, 2)
    length = (update.pow(2).sum() + 1e-10).sqrt()
    k = update / length
    operator = torch.eye(len(k), dtype=k.dtype) - gate * torch.outer(k, k)
    target = length * values["write"] + gate * 4 / (1 + (-logits[1:]).exp())
    return (operator @ streams.T + torch.outer(k, target)).T


def hamilton(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    (w, *u), (x, *v) = a, b
    u, v = torch.stack(u), torch.stack(v)
    return torch.cat([(w * x - u @ v).reshape(1), w * v + x * u + torch.linalg.cross(u, v)])


def rotated(logits: torch.Tensor, n: int) -> torch.Tensor:
    if n == 2:
        turn = torch.stack([torch.zeros_like(logits[0]), -logits[0], logits[0], torch.zeros_like(logits[0])])
        return torch.matrix_exp(turn.reshape(2, 2))
    one = torch.tensor([1.0, 0, 0, 0], dtype=logits.dtype)
    conjugate = torch.tensor([1.0, -1, -1, -1], dtype=logits.dtype)
    q = (one + logits[:4]) / (one + logits[:4]).norm()
    r = q if n == 3 else (one + logits[4:]) / (one + logits[4:]).norm()
    columns = [hamilton(hamilton(q, e), r * conjugate) for e in torch.eye(4, dtype=logits.dtype)]
    whole = torch.stack(columns, 1)
    return whole[1:, 1:] if n == 3 else whole


def inverse_cayley(skew: torch.Tensor) -> torch.Tensor:
    eye = torch.eye(len(skew), dtype=skew.dtype)
    return torch.linalg.inv(eye + skew) @ (eye - skew)


def skew(entries: torch.Tensor, m: int) -> torch.Tensor:
    matrix = torch.zeros(m, m, dtype=entries.dtype)
    matrix[tuple(torch.triu_indices(m, m, 1))] = entries
    return matrix - matrix.T


def spectral(values: Values, rest: torch.Tensor, n: int) -> torch.Tensor:
    m = n - 1
    k, bias = m * (m - 1) // 2, values["mix_bias"]
    basis = torch.zeros(n, m, dtype=rest.dtype)
    for i in range(1, n):
        basis[:i, i - 1], basis[i, i - 1] = 1 / math.sqrt(i * (i + 1)), -i / math.sqrt(i * (i + 1))
    s = torch.tanh(values["middle_gate"] * rest[2 * k :] + bias[2 * k :])
    if m == 1:
        return torch.full((n, n), 1 / n, dtype=rest.dtype) + basis @ torch.diag(s) @ basis.T
    u, v = (
        inverse_cayley(skew(values[f"{side}_scale"] * torch.tanh(values[f"{side}_gate"] * rest[a : a + k] + bias[a : a + k]), m))
        for side, a in (("left", 0), ("right", k))
    )  # fmt: skip
    return torch.full((n, n), 1 / n, dtype=rest.dtype) + basis @ u @ torch.diag(s) @ v.T @ basis.T


def jpmhc(mixer: str, values: Values, streams: torch.Tensor):
    n, flat = streams.shape[0], streams.flatten()
    normed = (flat - flat.mean()) / (flat.var(unbiased=False) + 1e-5).sqrt() * values["norm.weight"] + values[
        "norm.bias"
    ]
    blocks = (values["phi"] @ normed + values["phi_bias"]).reshape(-1, n, n)
    read, write = torch.softmax(blocks[0], 1).mean(0), torch.softmax(blocks[1], 0).sum(1)
    if "grassmann" in mixer:
        z = torch.linalg.svd(torch.eye(n, dtype=flat.dtype) - 1 / n).U[:, : n - 1]  # any basis: only the span matters
        helmert = torch.zeros(n, n - 1, dtype=flat.dtype)
        for i in range(1, n):
            helmert[:i, i - 1], helmert[i, i - 1] = 1 / math.sqrt(i * (i + 1)), -i / math.sqrt(i * (i + 1))
        span = helmert @ values["basis"]
        assert (z.T @ span).norm() > 0
        full = torch.cat([torch.ones(n, 1, dtype=flat.dtype), span], 1)
        return read, full @ torch.linalg.pinv(full), write
    if "bistochastic" in mixer:
        return read, log_sinkhorn(blocks[2], n), write
    return read, inverse_cayley(-0.05 * (blocks[2] - blocks[2].T)), write
