"""Whether what another format computes is what the Program computes."""

from __future__ import annotations

from typing import Any

import torch
from hcx.rewrite.errors import ExportError
from hcx.rewrite.pipeline.contracts import UNIT, compare, merge

SAME = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Largest difference relative to the rms of an output, for the same operations over the same weights."""
MERGED = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 8e-3}
"""The same where an adapter was added to its weight, which rounds otherwise than one beside it."""

Named = list[dict[str, torch.Tensor]]


def agree(got: Named, expected: Named, limit: float) -> dict[str, Any]:
    """Named outputs of each input set against the Program's; every one of these must be there.

    Args:
        limit: largest difference of an output relative to its rms.

    Returns:
        the worst figures, see :func:`hcx.rewrite.pipeline.contracts.compare`, and ``sets``.

    Raises:
        ExportError: nothing was compared, or an output is missing or differs; the message names it.
    """
    measured = []
    for number, (mine, want) in enumerate(zip(got, expected, strict=True)):
        for name, tensor in want.items():
            if name not in mine:
                raise ExportError(f"output `{name}` is missing", where=name, hint="nothing was written")
            one = compare([mine[name]], [tensor])
            measured.append(one)
            unit = UNIT.get(tensor.dtype, 2**-23)
            exact = tensor.is_floating_point() or one["bitwise"]
            if not (one["same_structure"] and exact and one["ulps"] * unit <= limit):
                raise ExportError(
                    f"output `{name}` differs on input set {number}: largest difference {one['max_diff']:.3g}, "
                    f"{one['ulps'] * unit:.3g} relative to its rms, allowed {limit:.3g}",
                    where=name,
                    hint="nothing was written; please report this",
                )
    if not measured:
        raise ExportError("there is no output to compare", where="check inputs", hint="nothing was written")
    return {**merge(measured), "sets": len(expected)}
