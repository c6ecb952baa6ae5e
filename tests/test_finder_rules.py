"""The rules of the finder, one ten-line net each, with the text of what it finds: read it as documentation.

A line is ``stack: block [kind, kind || parallel kind]`` in the order of execution; ````*`` marks a scaled branch; below
stand the adds that are no residual, with the rule that says so.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hcx.rewrite import trace
from hcx.rewrite.sites.views import Rule, Sites
from torch import Tensor, nn

RULES: dict[str, tuple[type[nn.Module], str]] = {}


def rule(expected: str) -> Callable[[type[nn.Module]], type[nn.Module]]:
    def remember(net: type[nn.Module]) -> type[nn.Module]:
        RULES[net.__name__] = (net, "\n".join(line.strip() for line in expected.strip().splitlines()))
        return net

    return remember


class Net(nn.Module):
    """``self.w(i, x)`` is the i-th linear layer of 8 to 8 features."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.gain = nn.Parameter(torch.ones(8))

    def w(self, i: int, x: Tensor) -> Tensor:
        return torch.tanh(self.layers[i](x))


@rule("stack0: [mlp] [mlp]")
class AddOfABranch(Net):
    """``x + f(x)`` with a weight in f."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.w(0, x)
        return x + self.w(1, x)


@rule("no residual: add no weight leads from one term to the other one")
class NoWeight(Net):
    """tanh-GELU's ``x + c x^3``: no weight on the way, so it is arithmetic."""

    def forward(self, x: Tensor) -> Tensor:
        return self.w(0, x + 0.04 * x * x * x)


@rule("stack0: [mlp*]")
class ScaledBranch(Net):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * self.w(0, x)


@rule("stack0: [mlp*]")
class ScaledByAParameter(Net):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.w(0, x)


@rule("stack0: [mlp || mlp]")
class Parallel(Net):
    """Two terms that both read the same x are one residual with two branches."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.w(0, x) + self.w(1, x)


@rule("stack0: [mlp]")
class CastThatChangesNothing(Net):
    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.float32) + self.w(0, x)


@rule("stack0: [mlp] [mlp]\nno residual: add_1 it lies in a branch of its own stream")
class GateInABranch(Net):
    """``h + g(h)`` inside a branch, where h is the stream without a weight on the way: a gate."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.w(0, x)
        h = torch.sigmoid(x)
        h = h + self.w(1, h)
        return x + self.w(2, h)


@rule("stack0: [mlp] [mlp]\nno residual: add_1 only a branch of the same stream reads this sum")
class Preview(Net):
    """``h + f(h + g(h))``: only f reads the inner sum."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.w(0, x)
        return x + self.w(1, x + self.w(2, x))


@rule("stack0: [mlp] [mlp] [mlp]\nno residual: add_3 it skips around a longer chain")
class LongSkip(Net):
    """A skip around three residuals (U-Net) is not the stream."""

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for i in range(3):
            y = y + self.w(i, y)
        return x + self.w(3, y)


@rule("stack0: [mlp] [mlp]\nno residual: add_2 no weight leads from one term to the other one")
class Mean(Net):
    """A mean has no weight on its way."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.w(0, x)
        x = x + self.w(1, x)
        return x + x.mean(-1, keepdim=True)


@rule("stack0: [mlp]\nno residual: add its chain lies in a branch of a chain that is no shorter")
class ChainInABranch(Net):
    """A small net of its own inside a branch: its stream starts after a weight."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.w(0, x)
        h = h + self.w(1, h)
        return x + self.w(2, h)


@rule("stack1: [mlp]\nstack0: [mlp]")
class TwoStreams(Net):
    """Two inputs, two streams; the one that the first output reads stands last."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.w(0, x), y + self.w(1, y)


@rule("stack0: [mlp] [mlp]")
class InPlace(Net):
    """``x += f(x)`` is the same add."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        x += self.w(0, x)
        x += self.w(1, x)
        return x


def shown(sites: Sites) -> str:
    lines = []
    for stack in sites.stacks:
        if stack.residual:
            blocks = [
                ", ".join(" || ".join(b.kind + "*" * b.scaled for b in r.branches) for r in block.residuals)
                for block in stack.blocks
            ]
            lines.append(f"{stack.label}: " + " ".join(f"[{block}]" for block in blocks))
    lines += [f"no residual: {node.name} {reason}" for node, reason in sites.rejected.items()]
    return "\n".join(lines)


@pytest.mark.parametrize("name", RULES)
def test_rule(name):
    net, expected = RULES[name]
    torch.manual_seed(0)
    inputs = tuple(torch.randn(3, 4, 8) for _ in range(2 if name == "TwoStreams" else 1))
    program = trace(net().eval(), inputs)
    assert shown(program.sites()) == expected


def test_every_rule_has_a_net():
    told = " ".join(expected for _, expected in RULES.values())
    assert [r for r in Rule if r.value not in told] == []
