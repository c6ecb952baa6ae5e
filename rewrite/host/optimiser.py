"""Groups of parameters for an optimiser."""

from __future__ import annotations

from typing import Any

from hcx.rewrite.errors import UsageError
from hcx.rewrite.ir.program import Program


def param_groups(
    program: Program, train: str = "all", *, weight_decay: float = 0.01, new_lr: float | None = None
) -> list[dict[str, Any]]:
    """Optimiser groups, and ``requires_grad`` set to match.

    Args:
        train: ``all``; ``new`` for what passes added; or the name of a pass, for its parameters alone (``lora``).
        weight_decay: of base matrices; gains, biases and everything new are not decayed: a decayed mixing scalar or
            stream coefficient drifts away from the start that keeps the function.
        new_lr: learning rate of new parameters, where it should differ.

    Raises:
        UsageError: nothing to train.
    """
    chosen = {"all": lambda n: True, "new": lambda n: n in program.origin}.get(
        train, lambda n: program.origin.get(n) == train
    )
    groups: dict[str, list[Any]] = {"decay": [], "plain": [], "new": []}
    for name, parameter in program.named_parameters():
        parameter.requires_grad_(chosen(name))
        if chosen(name):
            groups["new" if name in program.origin else "decay" if parameter.dim() > 1 else "plain"].append(parameter)
    if not any(groups.values()):
        raise UsageError(f"nothing to train for train={train!r}", where="param_groups",
                         hint="passes with parameters: " + (", ".join(sorted(set(program.origin.values()))) or "none"))  # fmt: skip
    result = [
        {"params": ps, "weight_decay": weight_decay if key == "decay" else 0.0} for key, ps in groups.items() if ps
    ]
    if groups["new"] and new_lr is not None:
        result[-1]["lr"] = new_lr
    return result
