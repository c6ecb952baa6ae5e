"""Graphs under the caller's autocast."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx

from .control import change_bodies
from .tags import hcx_tag


def suit_autocast(graph: fx.Graph) -> None:
    """Make a copy of a graph ready for the caller's autocast.

    What the model computes with autocast off (rotary angles) stays so. A mask filled with the least number of the dtype
    that was traced is filled with the least one of the dtype that autocast gives, as the model would.
    """
    change_bodies(graph, suit_autocast)
    for node in graph.nodes:
        tag = hcx_tag(node)
        if tag.get("autocast") == "off" and isinstance(node.target, torch._ops.OpOverload):
            node.target = _plainly(node.target)
        elif node.target is torch.ops.aten.masked_fill.Scalar:
            node.target = _fill


def _fill(values: torch.Tensor, mask: torch.Tensor, value: float) -> torch.Tensor:
    if values.is_floating_point() and not math.isinf(value):
        limits = torch.finfo(values.dtype)
        value = min(max(value, limits.min), limits.max)
    return cast("torch.Tensor", torch.ops.aten.masked_fill.Scalar(values, mask, value))


def _plainly(op: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return op(*args, **kwargs)

    call.__name__ = op.__name__.replace(".", "_")
    return call
