"""What passes speak about: stacks, blocks, branches and boundaries, over the nodes of one graph.

These objects are views; they hold nodes and are made anew for each graph. What is stored and edited is their address.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from hcx.rewrite.ir.tags import REDUCE, hcx_tag
from torch import fx


class Inserts(Protocol):
    """What a carrier asks of an editor."""

    def reduced_mean(self, streams: fx.Node, count: int) -> fx.Node:
        """Insert the mean over the streams of a boundary."""
        ...


@dataclass
class Branch:
    """One residual branch: what is computed from the stream and added back.

    Attributes:
        kind: attn, cross-attn, mlp, moe, ssm, conv or conv-mlp.
        value: the term of the add that comes from the branch, scale included.
        scaled: whether the term is a scaled branch value (LayerScale, residual multiplier).
        body: nodes from the stream (left out) to the term (included).
    """

    address: str
    kind: str
    value: fx.Node
    scaled: bool
    body: list[fx.Node]


@dataclass
class Residual:
    """One residual add, with one branch (sequential) or several (parallel).

    Attributes:
        add: last add of the chain; its value is the new stream.
        skip: the stream as the add takes it, scale and casts seen through.
        skip_scaled: whether the skip is scaled first (DeepNorm).
        projected: the skip has weights of its own (a down-sampling shortcut).
        adds: all adds of the chain.
    """

    add: fx.Node
    skip: fx.Node
    branches: list[Branch]
    skip_scaled: bool = False
    projected: bool = False
    adds: tuple[fx.Node, ...] = ()
    pass_name: str | None = None


@dataclass
class Boundary:
    """The value between two blocks.

    Attributes:
        index: number of blocks executed before it (the index into ``hidden_states``).
        node: the value.
        carrier: how the value carries the stream.
        iteration: pass of a loop that the block before it belongs to.
        state: at the end of a loop's pass what that pass has made, where the next one reads something mixed from it.
    """

    index: int
    node: fx.Node
    carrier: Carrier
    iteration: int = 1
    state: fx.Node | None = None

    def read(self, editor: Inserts) -> fx.Node:
        """The plain value of the stream here, inserted where the carrier is not plain."""
        return self.carrier.read(editor, self.node)


class Carrier:
    """How a boundary carries the residual stream: as the plain value."""

    kind = "plain"

    def read(self, editor: Inserts, node: fx.Node) -> fx.Node:
        """What a foreign reader of the stream sees."""
        return node


class Streams(Carrier):
    """The boundary is ``[n, ...]``: n streams, as the ops ``hcx.stream_*`` make them."""

    kind = "streams"

    def __init__(self, count: int):
        self.count = count

    def read(self, editor: Inserts, node: fx.Node) -> fx.Node:
        """The reduced stream: the reduction that the graph already has for this boundary, or a mean."""
        for user in node.users:
            if hcx_tag(user).word == REDUCE.word:
                return user
        return editor.reduced_mean(node, self.count)


@dataclass
class Block:
    """Consecutive residuals that form one layer.

    Attributes:
        address: name of the block: its module path where there is one, else ``stack[i]``; ``@2`` for a repetition.
        index: position in the model before any loop.
        iteration: 1, or the number of the pass of a loop it belongs to.
        entry, exit: boundary values before and after.
        body: nodes from entry (left out) to exit (included).
        key: canonical text; equal keys are equal computations over other weights.
        roles: outside values used, with their role filled in by the run.
    """

    address: str
    index: int
    iteration: int
    residuals: list[Residual]
    entry: fx.Node
    exit: fx.Node
    body: list[fx.Node] = field(default_factory=list)
    key: str = ""
    outside: list[fx.Node] = field(default_factory=list)


@dataclass
class BlockRun:
    """Consecutive blocks that are equal in code, alone (period 1) or in groups.

    Attributes:
        start, end: half-open range of positions in ``Stack.blocks``.
        period: blocks in the repeating unit.
        roles: for each outside value of a block (in first-use order): ``invariant``, ``periodic(p)``, ``cache`` or
            ``varying``. The value carried from block to block is not listed.
    """

    start: int
    end: int
    period: int
    roles: list[str]

    def __len__(self) -> int:
        return self.end - self.start


@dataclass
class Stack:
    """Blocks that one residual stream runs through, or the stages of a network without one.

    Attributes:
        label: common module path of the blocks.
        blocks: in order of execution.
        boundaries: one more than blocks.
        runs: maximal runs of equal blocks.
        residual: False where the blocks are stages between cut vertices.
    """

    label: str
    blocks: list[Block]
    boundaries: list[Boundary]
    runs: list[BlockRun]
    residual: bool = True

    @property
    def depth(self) -> int:
        """Blocks before any loop."""
        return max((b.index for b in self.blocks), default=-1) + 1

    def boundary(self, index: int) -> Boundary:
        """The last boundary after ``index`` blocks of the original model."""
        return [b for b in self.boundaries if b.index == index][-1]

    def position(self, index: int, *, last: bool = False) -> int:
        """Position in ``blocks`` of the first (or last) execution of original block ``index``."""
        places = [i for i, b in enumerate(self.blocks) if b.index == index]
        return places[-1 if last else 0]


class Rule(StrEnum):
    """Why an add of two full tensors is no residual of a stack."""

    NO_WEIGHT = "no weight leads from one term to the other one"
    PREVIEW = "only a branch of the same stream reads this sum"
    NESTED = "it lies in a branch of its own stream"
    INNER = "its chain lies in a branch of a chain that is no shorter"
    AROUND = "it skips around a longer chain"


@dataclass
class Sites:
    """Everything found in a graph.

    Attributes:
        other_adds: adds of two full tensors that are no residual.
        rejected: each of them -> the rule that says so.
    """

    stacks: list[Stack]
    residuals: list[Residual]
    other_adds: list[fx.Node]
    rejected: dict[fx.Node, Rule] = field(default_factory=dict)

    def branches(self) -> list[Branch]:
        """Every residual branch of every stack, in order."""
        return [b for s in self.stacks for block in s.blocks for r in block.residuals for b in r.branches]

    @property
    def main(self) -> Stack | None:
        """The stack that the first output is read from."""
        return self.stacks[-1] if self.stacks else None

    def stack(self, label: str | None) -> Stack | None:
        """A stack by its label, or the main one."""
        return self.main if label is None else next((s for s in self.stacks if s.label == label), None)
