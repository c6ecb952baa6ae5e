"""Passes that begin at the window's entry again and hear from the pass before through low-rank gates.

In pass t = 2..T every branch of a looped block reads ``(1 - tanh f) h + tanh(g) m`` in the place of the stream h. The
message m is an attention read, by a learned query, over what the blocks of pass t - 1 made, each at rms 1; f and g are
low-rank maps of ``[h / rms(h); m / rms(m)]``. With both maps at 0 every pass repeats the first, bitwise.

The equations are those of ``inkling2_loop`` in Transformers, which has messages of their own for queries, keys and values
where this has one a branch. Source: docs/sources.md, loop-restart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hcx.rewrite.edit.editor import Editor
from hcx.rewrite.ir.dataflow import is_identity, resolve
from hcx.rewrite.ir.tags import MIX
from hcx.rewrite.sites.views import Block, Branch, Residual, Stack
from torch import fx

RANK = 64
"""Largest rank of the gates."""
EPS = 1e-6


def unit(stream: torch.Tensor) -> torch.Tensor:
    """``[..., d]`` at rms 1.

    >>> unit(torch.tensor([3.0, 4.0])).square().mean()
    tensor(1.0000)
    """
    return stream * torch.rsqrt(stream.square().mean(-1, keepdim=True) + EPS)


def message(query: torch.Tensor, *states: torch.Tensor) -> torch.Tensor:
    """Attention read of states ``[..., d]`` by a query ``[d]``; keys and values are the states at rms 1.

    >>> message(torch.zeros(2), torch.tensor([1.0, 1.0]), torch.tensor([1.0, -1.0]))
    tensor([1.0000, 0.0000])
    """
    read = unit(torch.stack(states, -2))
    weights = torch.softmax((read * query).sum(-1) / query.shape[0] ** 0.5, -1)
    return (weights.unsqueeze(-1) * read).sum(-2)


def received(
    stream: torch.Tensor,
    query: torch.Tensor,
    down: torch.Tensor,
    forget: torch.Tensor,
    inject: torch.Tensor,
    *states: torch.Tensor,
) -> torch.Tensor:
    """What a branch reads: the stream ``[..., d]`` with the message of the states.

    Args:
        query: ``[d]``.
        down, forget, inject: ``[r, 2 d]``, ``[d, r]``, ``[d, r]``.
    """
    heard = message(query, *states)
    low = F.linear(torch.cat([unit(stream), unit(heard)], -1), down)
    return (1 - torch.tanh(F.linear(low, forget))) * stream + torch.tanh(F.linear(low, inject)) * heard


def start(width: int, seed: int) -> dict[str, torch.Tensor]:
    """Initial tensors of one branch: gates at 0, the map into them uniform by its inputs, a query that weighs all alike."""
    rank, generator = min(RANK, width), torch.Generator().manual_seed(seed)
    return {
        "query": torch.zeros(width),
        "down": (torch.rand(rank, 2 * width, generator=generator) * 2 - 1) / (2 * width) ** 0.5,
        "forget": torch.zeros(width, rank),
        "inject": torch.zeros(width, rank),
    }


@dataclass(frozen=True)
class Listener:
    """One branch that hears.

    Attributes:
        block, branch: where.
        stream: what it reads.
        reads: its nodes that read the stream, each with the operand that is the stream.
    """

    block: Block
    branch: Branch
    stream: fx.Node
    reads: list[tuple[fx.Node, fx.Node]]


def listeners(stack: Stack, first: int, end: int) -> list[Listener]:
    """The branches of blocks [first, end)."""
    found, taken = [], set()
    for block in (b for b in stack.blocks if first <= b.index < end and b.iteration == 1):
        for residual in block.residuals:
            for branch in residual.branches:
                reads = _reads(residual, branch)
                if reads and not taken & set(reads):  # parallel branches may share their first norm
                    taken |= set(reads)
                    found.append(Listener(block, branch, resolve(residual.skip), reads))
    return found


def _reads(residual: Residual, branch: Branch) -> list[tuple[fx.Node, fx.Node]]:
    """A cast that changes nothing is passed over: the residual add may read the stream through it."""
    stream, body = resolve(residual.skip), sorted(branch.body)
    return [(n, o) for n in body if not is_identity(n) for o in n.all_input_nodes if resolve(o) is stream]


def insert(
    editor: Editor,
    heard: list[Listener],
    mapping: dict[fx.Node, fx.Node],
    before: dict[fx.Node, fx.Node],
    label: str,
    like: dict[str, Any],
    **tag: Any,
) -> None:
    """Let one pass hear from the one before.

    Args:
        heard: of :func:`listeners`.
        mapping: node of the first pass -> of this pass; ``before``: -> of the pass before, empty for the first.
        label: prefix of the tensors, which all passes share.
        like: dtype and device of new tensors.
        tag: recorded on the nodes.
    """
    exits = list(dict.fromkeys(one.block.exit for one in heard))
    states = [before.get(e, e) for e in exits]
    for number, one in enumerate(heard):
        own = mapping.get(one.stream, one.stream)
        name = f"{label}block{one.block.index}.{one.branch.address.rsplit('/', 1)[1]}"
        tensors = start(int(own.meta["val"].shape[-1]), number).items()
        nodes = [editor.parameter(f"{name}.{n}", t.to(**like)) for n, t in tensors]
        with editor.before(min(mapping[n] for n, _ in one.reads), role=MIX, **tag):
            new = editor.inline(received, own, *nodes, *states)
        for node, operand in one.reads:
            mapping[node].replace_input_with(mapping.get(operand, operand), new)


def is_silent(tensors: dict[str, torch.Tensor]) -> bool:
    """Whether no gate lets anything through."""
    return not any(bool(t.any()) for n, t in tensors.items() if n.endswith((".forget", ".inject")))
