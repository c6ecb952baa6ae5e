"""Reading values inside a graph without changing it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hcx.rewrite.ir.compiled import compiled
from hcx.rewrite.ir.control import copy_graph
from hcx.rewrite.ir.program import Program
from torch import fx


def observe(program: Program, nodes: list[fx.Node], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Values of some nodes for one set of flat inputs, without gradients."""
    return reader(program, program.graph, [n.name for n in nodes])(inputs)


def reader(program: Program, graph: fx.Graph, names: list[str]) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """A function from flat inputs to the values of some nodes, without gradients; nothing else is computed.

    Args:
        graph: of the Program, or a changed copy of it over the same tensors.
        names: of its nodes.
    """
    graph = copy_graph(graph)
    by_name = {n.name: n for n in graph.nodes}
    output = graph.output_node()
    output.args = (tuple(by_name[name] for name in names),)
    graph.eliminate_dead_code()
    function = compiled(graph, "observe")

    def read(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            return list(function(program.tree, *inputs))

    return read


def stream_rms(program: Program, nodes: list[fx.Node], inputs: list[torch.Tensor]) -> torch.Tensor:
    """Root mean square over the feature dimension of token streams, ``[len(nodes), positions]`` (batch maximum)."""
    rows = []
    for value in observe(program, nodes, inputs):
        rms = value.double().square().mean(-1).sqrt()
        rows.append(rms.reshape(-1, rms.shape[-1]).amax(0))
    return torch.stack(rows)


def sink_jumps(rms: torch.Tensor, factor: float = 20.0) -> list[int]:
    """Blocks in which one position's rms jumps far beyond the other positions (an attention sink appears).

    Args:
        rms: ``[blocks + 1, positions]`` as from :func:`stream_rms`.
        factor: least growth of the position within the block, and of its rms over the median position.
    """
    found = []
    for block in range(rms.shape[0] - 1):
        growth = rms[block + 1] / rms[block].clamp_min(1e-12)
        above = rms[block + 1] / rms[block + 1].median().clamp_min(1e-12)
        if bool(((growth > factor) & (above > factor)).any()):
            found.append(block)
    return found
