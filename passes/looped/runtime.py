"""Loops whose number of steps is an input of the call.

The first pass over the window stays in the graph; the others are one loop that runs ``steps - 1`` times over the same
weights, with what the unrolled form computes in each iteration. The graph, and every file made of it, is as large for
one step as for a hundred.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from hcx.rewrite.edit.editor import Editor
from hcx.rewrite.edit.regions import Region
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.tags import MIX
from hcx.rewrite.sites.spans import Span
from torch import fx

from .mixing import update_output
from .roles import STEPS

INPUT = "steps"
CACHE = (
    "each pass keeps keys and values in slots of its own, so their number is fixed with the graph: leave out runtime, "
    "or trace without a cache (use_cache=False)"
)


def further(steps: torch.Tensor) -> torch.Tensor:
    """Passes behind the first."""
    return steps - 1


def insert(
    program: Program,
    editor: Editor,
    loop: Span,
    mix: Callable | None,
    scalar: fx.Node,
    steps: int,
    readers: set[fx.Node],
) -> fx.Node:
    """Repeat the window as often as the input says; returns the state after the last iteration.

    Args:
        mix: what an iteration reads, of the window's entry, the state and the scalar; None mixes what it returns.
        steps: where a call leaves the input out.
        readers: who reads the state after the last iteration.
    """
    count = editor.input(INPUT, steps)
    last = max([loop.exit, *loop.nodes, scalar])
    with editor.after(last, role=STEPS):
        trips = editor.inline(further, count)
    known = set(program.graph.nodes)
    with editor.after(trips, role=MIX):
        read = editor.inline(mix, loop.entry, loop.exit, scalar) if mix else loop.exit
        mapping = editor.clone(loop.nodes, {loop.entry: read})
        state = mapping[loop.exit]
        if not mix:
            state = editor.inline(update_output, loop.exit, state, scalar)
    body = [n for n in program.graph.nodes if n not in known and n.op == "call_function"]
    editor.redirect(loop.exit, state, only=readers.__contains__)
    return editor.repeat(trips, Region(body, [state]), [loop.exit])[0]
