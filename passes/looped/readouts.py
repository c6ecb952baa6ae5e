"""What every iteration of a loop predicts, as taps: logits through the rest of the model, and a gate on its state.

Taps cost nothing in a plain call. In cached decoding the readouts of earlier iterations attend to what the last one left
in the caches of the blocks behind the window.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from hcx.rewrite.edit.editor import Editor
from hcx.rewrite.ir.dataflow import Dataflow
from hcx.rewrite.ir.graphs import sort_graph
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.traced import results, traced
from hcx.rewrite.pipeline.passbase import tap_prefix
from hcx.rewrite.sites.views import Stack
from torch import fx

from .roles import HEAD
from .window import after_norm


def exit_gate(state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """``sigmoid(w . n_f(h) + c)`` a position, ``[B, N, d] -> [B, N]``: how likely an iteration is the last.

    Args:
        state: the stream behind the final norm.
        weight, bias: ``[1, d]``, ``[1]``; d + 1 parameters for all iterations (Ouro).
    """
    return torch.sigmoid(F.linear(state, weight, bias))[..., 0]


def stacked(*gates: torch.Tensor) -> torch.Tensor:
    """Gates of all iterations, ``[B, N, T]``."""
    return torch.stack(gates, -1)


def add_readouts(
    program: Program, editor: Editor, stack: Stack, states: list[fx.Node], detail: dict[str, Any], label: str
) -> None:
    """Tap the logits, state and gate of every iteration.

    Args:
        states: the stream after each iteration; the last one is what the model goes on with.
        label: prefix of tensors, for a pass with several windows.
    """
    sort_graph(program.graph)
    flow, last = Dataflow(program.graph), states[-1]
    count = len(program.output_names)
    answer = next((o for o in results(program.graph)[:count] if flow.reaches(last, o)), last)
    rest = flow.between(last, answer)
    end = last if detail["mix"] == "full" else stack.boundaries[-1].node
    end = last if not flow.reaches(last, end) else end
    norm = [] if detail["mix"] == "full" else flow.between(end, after_norm(program, end))
    prefix = f"{tap_prefix(editor.pass_name, editor.number)}.{label}"
    gates: list[fx.Node] = []
    for step, state in enumerate(states, 1):
        with editor.after(max([answer, *states, *gates]), role=HEAD, iteration=step):
            if detail["readout"] == "steps":
                logits = (
                    answer if state is last else editor.clone(rest, {last: state}, role=HEAD, iteration=step)[answer]
                )
                editor.tap(f"{prefix}{step}.logits", logits)
                editor.tap(f"{prefix}{step}.state", state)
            if detail["gate"] == "ouro":
                normed = editor.clone(norm, {end: state}, role=HEAD, iteration=step)[norm[-1]] if norm else state
                gates.append(editor.inline(exit_gate, normed, *_gate(editor, label, traced(state))))
    if gates:
        with editor.after(max(gates), role=HEAD):
            editor.tap(f"{prefix}gate", editor.inline(stacked, *gates))


def _gate(editor: Editor, label: str, like: torch.Tensor) -> tuple[fx.Node, fx.Node]:
    """Parameters of the gate; it begins at one half everywhere."""
    options: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
    weight, bias = torch.zeros(1, int(like.shape[-1]), **options), torch.zeros(1, **options)
    return editor.parameter(f"{label}gate.weight", weight), editor.parameter(f"{label}gate.bias", bias)
