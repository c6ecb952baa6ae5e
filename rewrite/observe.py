"""Reading values inside a graph without changing it."""

from __future__ import annotations

import torch
from torch import fx

from .control import copy_graph
from .program import Program


def observe(program: Program, nodes: list[fx.Node], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Values of some nodes for one set of flat inputs, without gradients."""
    graph = copy_graph(program.graph)
    by_name = {n.name: n for n in graph.nodes}
    output = graph.output_node()
    output.args = (tuple(by_name[n.name] for n in nodes),)
    graph.eliminate_dead_code()
    code = graph.python_code("self")
    scope = dict(code.globals)
    exec(compile(code.src, "<hcx observe>", "exec"), scope)
    with torch.no_grad():
        return list(scope["forward"](program._root, *inputs))


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
