"""What a traced graph always has: a value and a shape of every tensor node, and the values that it returns."""

from __future__ import annotations

from typing import cast

import torch
from torch import fx

from .dataflow import shape, value


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


def results(graph: fx.Graph) -> list[fx.Node]:
    """The values that a graph returns: outputs first, then taps."""
    returned = graph.output_node().args[0]
    assert isinstance(returned, list | tuple)
    return [cast(fx.Node, node) for node in returned]
