"""Floating-point operations of a Program, counted while it runs: products of matrices, convolutions and attention, a
multiply-add as two. Norms, activations and other elementwise work are left out, as in torch's own counter."""

from __future__ import annotations

from typing import Any, cast

import torch
from hcx.rewrite.ir.program import Program
from torch import fx
from torch.utils.flop_counter import FlopCounterMode

Shape = tuple[int, ...]


def counter() -> FlopCounterMode:
    """Torch's counter with the attention kernel of CPUs, which it does not know."""
    attention = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}
    return FlopCounterMode(display=False, custom_mapping=attention)


def _attention_flops(query: Shape, key: Shape, value: Shape, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Both products of attention."""
    batch, heads, rows, width = query
    return 2 * batch * heads * rows * key[-2] * (width + value[-1])


def count(program: Program, flat: list[torch.Tensor]) -> int:
    """Operations of one call without taps."""
    with counter() as counted, torch.no_grad():
        program.run_flat([t.clone() for t in program.signature.complete(flat)])
    return cast("int", counted.get_total_flops())


def by_node(program: Program, flat: list[torch.Tensor]) -> dict[str, int]:
    """Operations of each node in one call with all taps, by node name; nodes without any are left out."""
    interpreter = _Counting(program.flat_module(taps=True))
    with torch.no_grad():
        interpreter.run(*[t.clone() for t in program.signature.complete(flat)])
    return interpreter.found


class _Counting(fx.Interpreter):
    def __init__(self, module: fx.GraphModule):
        super().__init__(module)
        self.found: dict[str, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        with counter() as counted:
            result = super().run_node(n)
        if total := counted.get_total_flops():
            self.found[n.name] = total
        return result
