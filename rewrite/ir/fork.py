"""A Program with a graph of its own over the same tensors."""

from __future__ import annotations

from typing import TypeVar

import torch

from .control import copy_graph
from .program import Program

Kind = TypeVar("Kind", bound=Program)


def fork(program: Kind) -> Kind:
    """A Program with a graph and a call of its own over the same tensors.

    New tensors of one are not those of the other. Recorded outputs stay behind: the graph is there to be changed.
    """
    return type(program).build(
        copy_graph(program.graph),
        _same_tensors(program.tree),
        program.signature.copied(),
        examples=list(program.examples),
        reference=program.reference,
        belongings=program.belongings.copied(),
        training=program.training,
    )


def _same_tensors(module: torch.nn.Module) -> torch.nn.Module:
    """A tree of its own that holds the same tensors."""
    new = torch.nn.Module()
    new._parameters.update(module._parameters)
    new._buffers.update(module._buffers)
    new._non_persistent_buffers_set.update(module._non_persistent_buffers_set)
    new._modules.update({n: _same_tensors(m) for n, m in module._modules.items() if m is not None})
    return new
