"""``hcx passes``: what can be put in a pipeline."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from typing import Any

from .result import Progress, Result, silent


def passes(name: str | None = None, *, progress: Progress = silent) -> Result:
    """Every pass with its options, defaults and meaning, or one pass in full.

    Raises:
        UsageError: unknown name.
    """
    from hcx.rewrite.pipeline import registry

    found = [describe(registry.get(n)) for n in ([name] if name else registry.homes())]
    text = "\n\n".join(_page(p) for p in found) if name else _table(found)
    return Result({"passes": found}, text)


def describe(cls: type) -> dict[str, Any]:
    from hcx.rewrite.pipeline import spec

    summary, meanings = _docstring(cls)
    hints = typing.get_type_hints(cls)
    options = [
        {
            "name": f.name,
            "default": _default(f),
            "values": spec.describe(hints[f.name]),
            "doc": meanings.get(f.name, ""),
        }
        for f in dataclasses.fields(cls)
    ]
    return {
        "name": cls.name,
        "summary": summary,
        "options": options,
        "rank": cls.place(),
        "class": f"{cls.__module__}.{cls.__qualname__}",
    }


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None


def _docstring(cls: type) -> tuple[str, dict[str, str]]:
    """First sentence, and the text of each option from the ``Args`` section."""
    text = inspect.getdoc(cls) or ""
    body, _, arguments = text.partition("\nArgs:\n")
    meanings: dict[str, str] = {}
    names: list[str] = []
    for line in inspect.cleandoc(arguments).split("\n") if arguments else []:
        start = re.match(r"([A-Za-z_][\w, ]*):\s+(.*)", line)
        if start:
            names = [n.strip() for n in start[1].split(",")]
            meanings.update(dict.fromkeys(names, start[2]))
        elif line.startswith(" "):
            for name in names:
                meanings[name] += " " + line.strip()
        else:
            break
    return _unquoted(body.split("\n\n")[0].replace("\n", " ")), {n: _unquoted(m) for n, m in meanings.items()}


def _unquoted(text: str) -> str:
    return re.sub(r":\w+:`([^`]*)`", r"\1", text).replace("``", "`")


def _table(found: list[dict[str, Any]]) -> str:
    lines = []
    for entry in found:
        lines.append(f"{entry['name']:10s} {entry['summary']}")
        lines += [f"  {o['name']:10s} {_shown(o['default']):9s} {o['values']}" for o in entry["options"]]
    return "\n".join([*lines, "", "`hcx passes NAME` says what the options mean."])


def _page(entry: dict[str, Any]) -> str:
    lines = [f"{entry['name']}: {entry['summary']}", f"  class {entry['class']}"]
    for option in entry["options"]:
        lines.append(f"  {option['name']}={_shown(option['default'])}   {option['values']}")
        lines += [f"      {line}" for line in _wrapped(option["doc"])]
    return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, 100)


def _shown(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
