"""Pass names to pass classes: built-in ones by their home module, others by the entry point group ``hcx.passes``."""

from __future__ import annotations

import difflib
import importlib
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from hcx.rewrite.errors import UsageError

from . import spec
from .passbase import Pass

GROUP = "hcx.passes"


@cache
def homes() -> dict[str, str]:
    """Every known pass name with the place of its class (``module:attribute``), nothing imported.

    Raises:
        UsageError: two packages claim one name.
    """
    found: dict[str, str] = {}
    for point in entry_points(group=GROUP):
        if found.setdefault(point.name, point.value) != point.value:
            raise UsageError(
                f"two packages register a pass named `{point.name}`",
                where=f"{found[point.name]} and {point.value}",
                hint="uninstall one of them",
            )
    return dict(sorted(found.items()))


def get(name: str) -> type[Pass]:
    """The class of a pass.

    Raises:
        UsageError: unknown name, with the nearest known one.
    """
    known = homes()
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        raise UsageError(
            f"there is no pass named `{name}`",
            where=name,
            hint=f"did you mean `{near[0]}`?" if near else "known passes: " + ", ".join(known),
        )
    module, _, attribute = known[name].partition(":")
    try:
        cls: type[Pass] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"the pass `{name}` cannot be imported: {error}",
            where=known[name],
            hint="is its package installed completely?",
        ) from error
    if cls.name != name:
        raise UsageError(f"the pass registered as `{name}` calls itself `{cls.name}`", where=known[name])
    return cls


def passes(what: Any) -> list[Pass]:
    """Pass objects of a pipeline string, a pass, or a list of either."""
    if isinstance(what, str):
        return [spec.build(get(name), options) for name, options in spec.parse(what)]
    if isinstance(what, Pass):
        return [what]
    if isinstance(what, type) and issubclass(what, Pass):
        return [what()]
    if isinstance(what, list | tuple) and what:
        return [p for item in what for p in passes(item)]
    raise UsageError(f"cannot make passes of {type(what).__name__}", hint="give a pipeline string, passes or a plan")
