"""The exit that a position takes, and the choice among outputs."""

from __future__ import annotations

import torch
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.tags import hcx_tag
from hcx.rewrite.ir.traced import sizes
from hcx.rewrite.sites.views import Boundary, Stack
from torch import fx

from .roles import HEAD, SELECT


def select(fire: torch.Tensor, early: torch.Tensor, late: torch.Tensor) -> torch.Tensor:
    """The early value where a position leaves, else the late one; ``fire`` has the leading dimensions of both."""
    return torch.where(fire.reshape(fire.shape + (1,) * (late.dim() - fire.dim())), early, late)


def stream_shape(boundary: Boundary) -> tuple[str, ...]:
    """Shape of the plain stream at a boundary; one that carries several streams has one more dimension in front."""
    return sizes(boundary.node)[int(boundary.carrier.kind != "plain") :]


def selects_answer(stack: Stack, answer: fx.Node, head: str) -> bool:
    """Whether early and late meet at the answer, not on the stream: logits of a classifier or behind a norm of their
    own have no way on through the model, and a stream in another order than its answer (time first, several rows a
    token) has no row for each score."""
    rows, scores = stream_shape(stack.boundaries[-1]), sizes(answer)[:-1]
    return head in ("classifier", "norm", "own") or rows[: len(scores)] != scores


def readers_of(program: Program, stack: Stack, answer: fx.Node, is_end: bool) -> set[fx.Node]:
    """Who reads the selected value: everything that read the answer, except heads of exits, and except the output of
    all hidden states."""
    output = program.graph.output_node()
    outputs = set(output.args[0])
    readers = {u for u in answer.users if hcx_tag(u).word not in (HEAD.word, SELECT.word)}
    listed = any(n in outputs for b in stack.boundaries[:-1] for n in (b.node, *b.node.users))
    if is_end and listed:
        readers.discard(output)
    return readers


def depth_of(at: int, full: int):
    """Blocks executed: ``at`` where this exit fires first, else what later exits say."""

    def depth(fire: torch.Tensor, later: torch.Tensor | None = None) -> torch.Tensor:
        rest = torch.full_like(fire, full, dtype=torch.int64) if later is None else later
        return torch.where(fire, torch.full_like(rest, at), rest)

    return depth
