"""What every mixer is: a map from the streams at a site to its read, mix and write coefficients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from hcx.passes.hyper_connections.inits import Start
from hcx.rewrite.edit.editor import Editor
from hcx.rewrite.ir.dataflow import value
from torch import fx

GATE = 0.01
"""Start of the gates of dynamic coefficients: their projections start at 0, so these are live and the function is kept."""


@dataclass
class Coefficients:
    """Nodes of one site; ``mix=None`` is the identity. ``rows_sum_to_one`` for all parameters, by construction."""

    read: fx.Node
    write: fx.Node
    mix: fx.Node | None = None
    rows_sum_to_one: bool = False
    late: Callable[[fx.Node, fx.Node], fx.Node] | None = None
    """Makes the write from what the branch has read and returned, where a method has it depend on them."""


@dataclass(frozen=True)
class Site:
    """Where coefficients are made.

    Attributes:
        editor: at the place where they go.
        name: prefix of the parameters.
        streams: the carried value, ``[n, ..., C]``.
        start: coefficients at the start.
        dtype: float32, or float64 in a float64 model.
        options: the pass, for options of a single mixer.
    """

    editor: Editor
    name: str
    streams: fx.Node
    start: Start
    dtype: torch.dtype
    options: Any

    @property
    def n(self) -> int:
        """Number of streams."""
        return self.start.read.numel()

    @property
    def width(self) -> int:
        """Features of the stream."""
        return int(value(self.streams).shape[-1])

    def parameter(self, name: str, tensor: torch.Tensor) -> fx.Node:
        """A new parameter in the precision of the coefficients."""
        return self.editor.parameter(f"{self.name}.{name}", tensor.to(self.dtype))

    def gate(self, name: str, *, learned: bool = True) -> fx.Node:
        """A gate ``[1]`` of dynamic coefficients."""
        make = self.editor.parameter if learned else self.editor.buffer
        return make(f"{self.name}.{name}", torch.full((1,), GATE, dtype=self.dtype))


class Mixer:
    """One system. Stateless; ``insert`` is called once a site.

    Attributes:
        name: as in ``hc{mixer=...}``.
        channels_last_only: needs features in the last dimension.
        static_reads: reads are parameters as they are, so that a stream alone can be read.
    """

    name: ClassVar[str]
    channels_last_only: ClassVar[bool] = True
    static_reads: ClassVar[bool] = False

    def refusal(self, n: int) -> str | None:
        """Why the method does not take n streams, or None."""
        return None if n >= 2 else "at least two streams are needed"

    def reads_exactly(self, n: int) -> bool:
        """Whether a read of 1/n comes out as 1/n bit for bit."""
        return n & (n - 1) == 0

    def starts_at_identity(self, options: Any) -> bool:
        """Whether the mix is the identity bit for bit at the start: then the functional of ``transport`` is the same at
        every site."""
        return False

    def rows_sum_to_one(self, options: Any) -> bool:
        """Whether rows of the mix sum to 1 for all parameters."""
        return False

    def keeps_equal_streams(self, options: Any) -> bool:
        """Whether equal streams stay equal bit for bit at the start, so that ``replicate`` is bitwise."""
        return self.starts_at_identity(options) or self.rows_sum_to_one(options)

    def insert(self, site: Site) -> Coefficients:
        """Make the coefficients of one site."""
        raise NotImplementedError

    def inert(self, parts: list[str], init: str) -> str | None:
        """Why a parameter has no gradient at the start although nothing is wrong; ``parts`` of its name at the site."""
        return None


def along(vector: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``[k]`` shaped to broadcast with ``[k, ...]``."""
    return vector.reshape([-1] + [1] * (like.dim() - 1))


class Head(Mixer):
    """The common head: ``z = vec(X) / rms(vec(X))``, logits ``z phi^T``; ``p = sigmoid(a l + c)``,
    ``b = 2 sigmoid(a' l' + c')``, ``H = map(a'' l'' + c'')``.

    phi is one matrix ``[2n + k, n C]`` (read, write, mix), starts at 0; gates start at 0.01; biases give the start.
    Source: docs/sources.md, stream-head.
    """

    learned_mix_gate: ClassVar[bool] = True

    def reads_exactly(self, n: int) -> bool:
        """Behind a sigmoid: 1/2 and 1/4 are, 1/8 is not."""
        one = torch.tensor(1.0 / n)
        return bool(torch.sigmoid(torch.logit(one.double()).float()) == one)

    def mix_bias(self, site: Site) -> torch.Tensor | None:
        """Static logits of the mix, ``[k]``; None for the identity."""
        return None

    def insert(self, site: Site) -> Coefficients:
        """phi, gates and biases of one site."""
        bias = self.mix_bias(site)
        logits, p, b = self.routing(site, 0 if bias is None else bias.numel())
        if bias is None:
            return Coefficients(p, b)
        gate, static = site.gate("mix_gate", learned=self.learned_mix_gate), site.parameter("mix_bias", bias)
        raw = site.editor.inline(_mix_logits, logits, gate, static)
        return Coefficients(p, b, self.mix(site, raw), self.rows_sum_to_one(site.options))

    def routing(self, site: Site, k: int) -> tuple[fx.Node, fx.Node, fx.Node]:
        """All raw logits ``[2n + k, ...]``, and the coefficients p and b, ``[n, ...]`` each."""
        weight = site.parameter("phi", torch.zeros(2 * site.n + k, site.n * site.width))
        logits = site.editor.call(torch.ops.hcx.stream_head.default, site.streams, weight, site.options.eps)
        read = (site.gate("read_gate"), site.parameter("read_bias", torch.logit(site.start.read.double())))
        write = (site.gate("write_gate"), site.parameter("write_bias", torch.logit(site.start.write.double() / 2)))
        return logits, *site.editor.inline(gates, logits, *read, *write)

    def mix(self, site: Site, logits: fx.Node) -> fx.Node:
        """The node of the mix."""
        raise NotImplementedError

    def inert(self, parts: list[str], init: str) -> str | None:
        """Gates multiply projections that start at 0; equal streams hide reads and mixes."""
        if parts[-1].endswith("_gate"):
            return "a gate is live after the first step, when its projection has left 0"
        if parts[-1] == "phi":
            return "behind gates of 0.01, and its reads wait until writes have separated the streams"
        if init in ("rotate", "replicate") and parts[-1] == "read_bias":
            return "reads of equal streams get a gradient only when writes have separated the streams"
        return None


def gates(
    logits: torch.Tensor, a: torch.Tensor, c: torch.Tensor, d: torch.Tensor, e: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``p = sigmoid(a l + c)`` and ``b = 2 sigmoid(d l' + e)`` of raw logits ``[2n + k, ...]``."""
    n = c.numel()
    read = torch.sigmoid(logits[:n] * a + along(c, logits))
    return read, 2 * torch.sigmoid(logits[n : 2 * n] * d + along(e, logits))


def _mix_logits(logits: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return logits[-bias.numel() :] * gate + along(bias, logits)
