"""Sizes beyond which a traced graph is no longer the model: found from the decisions that torch.export took on sizes.

A model that works through its tokens in chunks runs its loop as often as the example needed, and torch.export notes the
number only as a guard, which a graph does not hold. A guard that other sizes break is a suspicion: the graph is run there,
and what eager disagrees with becomes a limit of the signature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from hcx.rewrite.ir.signature import Dim, size_of
from torch.utils._sympy.printers import PythonPrinter

LARGEST = 4096
"""Sizes up to here are looked at: all small ones, then powers of two and their neighbours."""
FURTHEST = 1024
"""Larger sizes are not run for a second look."""

Agrees = Callable[[dict[str, int]], bool]


def find_limits(
    values: list[Any], shapes: list[tuple[Dim, ...]], sizes: dict[str, int], agrees: Agrees
) -> dict[str, list[Any]]:
    """``{dimension: [least, largest]}`` of the named dimensions that have a limit; None for an open end.

    Args:
        values: the fake tensor of each flat input, as exported.
        shapes: dimension expressions of the same.
        sizes: named sizes of the example.
        agrees: whether the graph gives what the source model gives at other named sizes.
    """
    symbols = {
        str(size.node.expr): dim
        for value, shape in zip(values, shapes, strict=True)
        for size, dim in zip(value.shape, shape, strict=True)
        if not isinstance(size, int) and size.node.expr.is_Symbol and isinstance(dim, str)
    }
    guards = list(_guards(values, symbols))
    found: dict[str, list[Any]] = {}
    for name, traced in sizes.items():
        known: dict[int, bool] = {}

        def holds(guard, size: int, name: str = name) -> bool:
            return guard({s: size_of(dim, {**sizes, name: size}) for s, dim in symbols.items()})

        def differs(size: int, name: str = name, known: dict[str, Any] = known) -> bool:
            if size not in known:
                known[size] = not agrees({**sizes, name: size})
            return known[size]

        for guard in guards:
            if not holds(guard, traced):
                continue
            for step in (1, -1):
                first = _first_broken(partial(holds, guard), traced, step)
                if first is None:
                    continue
                further = 2 * first if step > 0 else first // 2  # one size too many may happen to change nothing
                if differs(first):
                    wrong = first
                elif 1 < further <= FURTHEST and not holds(guard, further) and differs(further):
                    wrong = _nearest(differs, first, further)
                else:
                    continue
                least, largest = found.setdefault(name, [None, None])
                if step > 0:
                    found[name][1] = min(wrong - 1, largest or LARGEST)
                else:
                    found[name][0] = max(wrong + 1, least or 0)
    return found


def _nearest(differs: Callable[[int], bool], good: int, wrong: int) -> int:
    """By halving, a size next to a good one that is wrong."""
    while abs(wrong - good) > 1:
        middle = (good + wrong) // 2
        good, wrong = (good, middle) if differs(middle) else (middle, wrong)
    return wrong


def _first_broken(holds: Callable[[int], bool], traced: int, step: int) -> int | None:
    """The size nearest to the traced one, above (step 1) or below it (step -1), at which a guard is known to break."""
    last = traced
    for size in sorted((s for s in _looked_at() if (s - traced) * step > 0), reverse=step < 0):
        if not holds(size):
            return next(s for s in range(last + step, size + step, step) if not holds(s))
        last = size
    return None


def _looked_at() -> list[int]:
    near = {p + d for k in range(8, 13) for p in [1 << k] for d in (-1, 0, 1) if p + d <= LARGEST}
    return sorted({*range(2, 132), *near})


def _guards(values: list[Any], symbols: dict[str, Dim]) -> Iterator[Callable[[dict[str, int]], bool]]:
    """The recorded decisions on sizes that can be asked about with the symbols of the inputs alone."""
    environment = next(
        (s.node.shape_env for v in values for s in v.shape if not isinstance(s, int)),
        None,
    )
    seen = set()
    for guard in environment.guards if environment is not None else ():
        names = {str(s) for s in guard.expr.free_symbols}
        text = PythonPrinter().doprint(guard.expr)
        if text in seen or not names or not names <= set(symbols):
            continue
        seen.add(text)
        try:
            code = compile(text, "<guard>", "eval")
        except SyntaxError:
            continue  # a function that has no Python spelling
        yield _evaluated(code)


def _evaluated(code) -> Callable[[dict[str, int]], bool]:
    def guard(sizes: dict[str, int]) -> bool:
        try:
            return bool(eval(code, {"__builtins__": {"max": max, "min": min, "abs": abs}}, sizes))
        except Exception:  # noqa: BLE001  eval of a text of torch's: math functions and the like tell nothing
            return True

    return guard
