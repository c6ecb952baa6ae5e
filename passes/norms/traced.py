"""What a traced graph always has: a value and a shape of every tensor node, and the values that it returns."""

from __future__ import annotations

import torch
from hcx.rewrite.ir.dataflow import shape, value


def traced(node: object) -> torch.Tensor:
    """The fake tensor of a node that holds a tensor."""
    found = value(node)
    assert found is not None, f"{node} holds no tensor"
    return found


def sizes(node: object) -> tuple[str, ...]:
    """The symbolic shape of a node that holds a tensor."""
    found = shape(node)
    assert found is not None, f"{node} holds no tensor"
    return found
