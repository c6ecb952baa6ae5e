"""Closed-form fits that exits start from: streaming ridge regression towards the identity, logistic regression.

Source: docs/sources.md, exit-fits.
"""

from __future__ import annotations

import torch


class Ridge:
    """Affine translator ``y = A h + c`` fitted towards ``A = I, c = 0`` in one pass over the data.

    Minimises ``sum w |A h + c - y|^2 + ridge * sum_ij s_j (A - I)_ij^2``, where ``s_j`` is the weighted sum of squares
    of feature j, so that ``ridge`` has no unit; c is not penalised. With ``w = 1 / mean(y^2)`` a position counts by its
    direction, which is what a final RMS norm keeps of it. Sums are float64.

    Args:
        width: d.
    """

    def __init__(self, width: int):
        self.gram = torch.zeros(width + 1, width + 1, dtype=torch.float64)
        self.cross = torch.zeros(width + 1, width, dtype=torch.float64)
        self.count = 0

    def add(self, stream: torch.Tensor, target: torch.Tensor) -> None:
        """Add positions, both ``[n, d]``."""
        h, y = stream.double(), target.double()
        weight = 1 / y.square().mean(-1, keepdim=True).clamp_min(1e-12)
        h1 = torch.cat([h, torch.ones_like(h[:, :1])], 1)
        self.gram += h1.T @ (weight * h1)
        self.cross += h1.T @ (weight * (y - h))
        self.count += len(h)

    def solve(self, ridge: float) -> tuple[torch.Tensor, torch.Tensor]:
        """``A`` as ``[d, d]`` and ``c`` as ``[d]`` in float64."""
        penalty = ridge * self.gram.diagonal().clone()
        penalty[-1] = 0
        solution = torch.linalg.lstsq(self.gram + torch.diag(penalty), self.cross, driver="gelsd").solution
        width = self.cross.shape[1]
        return torch.eye(width, dtype=torch.float64) + solution[:-1].T, solution[-1]


def logistic(
    features: torch.Tensor, labels: torch.Tensor, *, ridge: float = 1e-3, steps: int = 25, balanced: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights ``[1, d]`` and bias ``[1]`` of ``sigmoid(w . x + b)`` by Newton's method, in float64.

    Features are standardised for the penalty ``ridge * n * |w|^2 / 2``. Where all labels are equal, w is 0 and b the
    log odds with one count added to both sides.

    Args:
        features: ``[n, d]``.
        labels: ``[n]``, 0 or 1.
        balanced: both labels weigh as much, so that 0.5 lies between them however rare one is.
    """
    x, y = features.double(), labels.double()
    share = (y.sum() + 1) / (len(y) + 2)
    start = torch.log(share / (1 - share))
    if not 0 < y.sum() < len(y):
        return torch.zeros(1, x.shape[1], dtype=torch.float64), start[None]
    mean, spread = x.mean(0), x.std(0).clamp_min(1e-9)
    z = torch.cat([(x - mean) / spread, torch.ones(len(x), 1, dtype=torch.float64)], 1)
    penalty = torch.full((z.shape[1],), ridge * len(x), dtype=torch.float64)
    penalty[-1] = 1e-6
    count = torch.where(y > 0.5, len(y) / 2 / y.sum(), len(y) / 2 / (1 - y).sum()) if balanced else torch.ones_like(y)
    w = torch.cat([torch.zeros(x.shape[1], dtype=torch.float64), (0 * start if balanced else start)[None]])
    for _ in range(steps):
        p = torch.sigmoid(z @ w)
        gradient = z.T @ (count * (p - y)) + penalty * w
        curvature = z.T @ ((count * p * (1 - p)).clamp_min(1e-9)[:, None] * z) + torch.diag(penalty)
        step = torch.linalg.solve(curvature, gradient)
        w = w - step
        if step.abs().max() < 1e-8:
            break
    weight = w[:-1] / spread
    return weight[None], (w[-1] - weight @ mean)[None]


def softmax_regression(
    features: torch.Tensor, targets: torch.Tensor, classes: int, *, ridge: float = 1e-3, steps: int = 100
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights ``[classes, d]`` and biases ``[classes]`` of a linear classifier by L-BFGS, in float64.

    Args:
        features: ``[n, d]``.
        targets: class numbers ``[n]``, or probabilities ``[n, classes]``.
    """
    x = features.double()
    mean, spread = x.mean(0), x.std(0).clamp_min(1e-9)
    z = (x - mean) / spread
    targets = targets.double() if targets.is_floating_point() else targets
    w = torch.zeros(classes, z.shape[1], dtype=torch.float64, requires_grad=True)
    b = torch.zeros(classes, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([w, b], max_iter=steps, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(z @ w.T + b, targets) + ridge / 2 * w.square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    weight = w.detach() / spread
    return weight, b.detach() - weight @ mean
