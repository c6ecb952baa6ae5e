"""The mixers of a rewritten Program, measured: one run, the figures of every site and of every stack over depth."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from hcx.rewrite.errors import UsageError
from hcx.rewrite.ir.control import copy_graph
from hcx.rewrite.ir.dataflow import WRITES, op_name
from hcx.rewrite.ir.program import Program
from hcx.rewrite.sites.finder import find
from hcx.rewrite.sites.views import Streams
from torch import fx

from .diagnostics import (
    HOMOGENEOUS,
    WORST,
    composites,
    effective_depth,
    jacobian_spectrum,
    mix_figures,
    stream_figures,
)


@dataclass
class SiteFigures:
    """One residual: its mix over all positions, and the streams behind it.

    Attributes:
        kind: op of the write: ``stream_add`` mixes by the identity.
        dynamic: whether coefficients depend on the input.
        mean, worst: figures by name, over positions; ``angles`` only in ``mean``, in degrees.
        read, mix, write: coefficients, mean over positions.
    """

    address: str
    kind: str
    dynamic: bool
    mean: dict[str, Any] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)
    read: list[float] = field(default_factory=list)
    mix: list[list[float]] = field(default_factory=list)
    write: list[float] = field(default_factory=list)


@dataclass
class StackFigures:
    """One stack.

    Attributes:
        streams: number of streams.
        positions: how many positions coefficients were measured at; 1 where all are static.
        depth: composite gains after each site, by name.
        effective_depth: sites until 1 % of a difference between streams is left; None where it is never lost.
        homogeneous: differences between streams do not reach the end of the stack.
        jacobian: singular values of the Monte Carlo model, of all draws, and log10 of the condition number.
    """

    label: str
    streams: int
    positions: int
    sites: list[SiteFigures]
    depth: dict[str, list[float]]
    effective_depth: float | None
    homogeneous: bool
    jacobian: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def inspect_mixers(program: Program, inputs: list[torch.Tensor] | None = None, *, draws: int = 4) -> list[StackFigures]:
    """Measure every stack whose stream is carried as several streams.

    Args:
        inputs: flat inputs; default: what the artefact recorded, else the example.
        draws: of the Monte Carlo of Jacobians.

    Raises:
        UsageError: no stack has several streams, or the weights are not in memory.
    """
    stacks = [s for s in find(program).stacks if isinstance(s.boundaries[0].carrier, Streams)]
    if not stacks:
        raise UsageError(
            "no stream is carried as several streams, so there are no mixers", where="mixers",
            hint="hcx rewrite MODEL --pass hc -o OUT.hcx, then inspect OUT.hcx",
        )  # fmt: skip
    if any(p.is_meta for p in program.parameters()):
        raise UsageError("weights are not in memory", where="mixers", hint="inspect with --weights FOLDER")
    if inputs is None:
        inputs = program.golden.inputs[0] if program.golden is not None else program.examples[0]
    wanted: dict[str, tuple[SiteFigures, str]] = {}
    sites: list[list[SiteFigures]] = []
    for stack in stacks:
        mine = []
        for residual in (r for b in stack.blocks for r in b.residuals):
            address = "+".join(b.address for b in residual.branches)
            mine.append(SiteFigures(address, op_name(residual.add), _reads_input(residual.add)))
            wanted[residual.add.name] = (mine[-1], "write")
            read = next((n for b in residual.branches for n in b.body if op_name(n) == "stream_read"), None)
            if read is not None:
                wanted[read.name] = (mine[-1], "read")
        sites.append(mine)
    runner = _Measure(program, wanted)
    with torch.no_grad():
        runner.run(*program.signature.complete([t.clone() for t in inputs]))
    return [
        _stack(stack.label, stack.boundaries[0].carrier.count, mine, [runner.mixes[id(s)] for s in mine], draws)
        for stack, mine in zip(stacks, sites, strict=True)
    ]


def _reads_input(write: fx.Node) -> bool:
    """Whether a write's coefficients vary by position: one more dimension than static ones."""
    weights = write.args[-1]
    assert isinstance(weights, fx.Node)
    return bool(weights.meta["val"].dim() > 1)


def _stack(label: str, n: int, sites: list[SiteFigures], mixes: list[torch.Tensor], draws: int) -> StackFigures:
    depth = {k: v.tolist() for k, v in composites(mixes).items()}
    reach = effective_depth(torch.tensor([s.mean["sigma2"] for s in sites]))
    values = jacobian_spectrum(mixes, draws=draws)
    condition = torch.log10(values[:, 0] / values[:, -1])
    jacobian = {
        "max": values.max().item(),
        "median": values.median().item(),
        "min": values.min().item(),
        "log10_condition": condition.mean().item(),
        "values": values[0].tolist(),
    }
    return StackFigures(
        label, n, max(m.shape[0] for m in mixes), sites, depth, reach if reach < 1e9 else None,
        depth["sigma2_product"][-1] < HOMOGENEOUS, jacobian,
    )  # fmt: skip


class _Measure(fx.Interpreter):
    """Runs the graph and keeps figures, never the streams: values are freed behind their last reader."""

    def __init__(self, program: Program, wanted: dict[str, tuple[SiteFigures, str]]):
        super().__init__(program.tree, graph=copy_graph(program.graph))
        self.wanted = wanted
        self.mixes: dict[int, torch.Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.name in self.wanted:
            site, what = self.wanted[n.name]
            values = self.fetch_args_kwargs_from_env(n)[0]
            if what == "read":
                site.read = _mean(values[1])
            else:
                self._write(n, site, values, result)
        return result

    def _write(self, node: fx.Node, site: SiteFigures, values: tuple[Any, ...], result: torch.Tensor) -> None:
        n, dynamic = result.shape[0], op_name(node) in WRITES - {"stream_add"}
        mix = values[2].double() if dynamic else torch.eye(n, dtype=torch.float64, device=result.device)
        mix = mix.reshape(n, n, -1).movedim(-1, 0)
        self.mixes[id(site)] = mix.cpu()
        site.write, site.mix = _mean(values[-1]), mix.mean(0).tolist()
        # features are last, but in pictures [B, C, H, W] an example is one row
        rows = result.double().flatten(2) if result.dim() >= 5 else result.double().flatten(1, -2)
        figures = {**mix_figures(mix), **stream_figures(rows)}
        site.mean["angles"] = [a if a == a else None for a in figures.pop("angles").nanmean(0).tolist()]
        for name, figure in figures.items():
            site.mean[name] = figure.mean().item()
            site.worst[name] = (figure.max() if WORST[name] == "max" else figure.min()).item()


def _mean(weights: torch.Tensor) -> list[float]:
    return weights.double().flatten(1).mean(1).tolist() if weights.dim() > 1 else weights.double().tolist()
