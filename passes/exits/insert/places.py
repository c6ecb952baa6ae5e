"""Where an exit is: after some blocks, or after a block in one pass of a loop.

``14`` is after 14 blocks, in the last pass where a loop holds that place; ``14~1`` is after the 14th block in pass 1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from hcx.rewrite.errors import UsageError
from hcx.rewrite.sites.views import Boundary, Stack

Place = int | str


def parsed(place: Place) -> tuple[int, int | None]:
    """Blocks before the exit, and the pass, None for the last one.

    >>> parsed(14), parsed("14~1")
    ((14, None), (14, 1))

    Raises:
        UsageError: neither a number nor two joined by ``~``.
    """
    if isinstance(place, int):
        return place, None
    match = re.fullmatch(r"(\d+)~([1-9]\d*)", place)
    if match is None:
        raise UsageError(f"`{place}` is no place for an exit", where="at", hint="14, or 14~1 in pass 1 of a loop")
    return int(match[1]), int(match[2])


def position(stack: Stack, place: Place) -> int:
    """Blocks executed before the exit, every pass over a block counted: index into ``stack.boundaries``.

    Raises:
        UsageError: no such place.
    """
    at, iteration = parsed(place)
    found = [
        i
        for i, b in enumerate(stack.boundaries)
        if b.index == at and (iteration is None or b.iteration == iteration) and 0 < i < len(stack.boundaries) - 1
    ]
    if not found or (iteration is None and at >= stack.depth):
        passes = max((b.iteration for b in stack.boundaries if b.index == at), default=1)
        ran = f"; the block before ran in {passes} pass(es)" if iteration and 0 < at <= stack.depth else ""
        text = f"{at} blocks" if iteration is None else f"{at} blocks in pass {iteration}"
        raise UsageError(
            f"exit after {text}: {stack.label} has {stack.depth}{ran}", where="at", hint=f"0 < at < {stack.depth}"
        )
    return found[-1]


def boundary(stack: Stack, place: Place) -> Boundary:
    """The boundary of an exit; at the end of a loop's pass the state of that pass, not what the next one reads."""
    found = stack.boundaries[position(stack, place)]
    by_pass = isinstance(place, str) and found.state is not None
    return replace(found, node=found.state) if by_pass else found


def blocks_before(stack: Stack, places: Sequence[Place]) -> list[int]:
    """Blocks executed on the way to each exit and to the end. Passes of loops count as soon as one exit is in a pass."""
    if any(isinstance(p, str) for p in places):
        return [*(position(stack, p) for p in places), len(stack.blocks)]
    return [*(int(p) for p in places), stack.depth]


def tensor_part(place: Place) -> str:
    """A place as the names of tensors have it.

    >>> tensor_part("14~1")
    '14_loop1'
    """
    return str(place).replace("~", "_loop")
