"""Pipeline strings: ``looped{start=12,end=16,steps=2},exits{at=[20,25]}``, parsed and printed without loss."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import re
import types
import typing
from typing import Any

from hcx.rewrite.errors import UsageError


def parse(text: str) -> list[tuple[str, dict[str, str]]]:
    """Names and raw options of a pipeline string.

    >>> parse("looped{steps=2},exits")
    [('looped', {'steps': '2'}), ('exits', {})]
    """
    steps = []
    for item in split(text):
        found = re.fullmatch(r"([A-Za-z_][\w.-]*)\s*(?:\{(.*)\})?", item, re.S)
        if not found:
            raise UsageError(
                f"cannot read the pass {item!r}",
                where=text,
                hint="write name{option=value,...}, passes separated by commas",
            )
        options: dict[str, str] = {}
        for pair in split(found[2] or ""):
            key, equals, value = pair.partition("=")
            if not equals:
                raise UsageError(
                    f"option {pair!r} of pass `{found[1]}` has no value", where=text, hint="write option=value"
                )
            if key.strip() in options:
                raise UsageError(f"option `{key.strip()}` of pass `{found[1]}` is given twice", where=text)
            options[key.strip()] = value.strip()
        steps.append((found[1], options))
    if not steps:
        raise UsageError("the pipeline is empty", hint="give at least one pass, e.g. looped,exits")
    return steps


def split(text: str) -> list[str]:
    """Split at commas outside brackets and quotes."""
    items, depth, quote, current = [], 0, "", ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "{[(":
            depth += 1
        elif char in "}])":
            depth -= 1
        if char == "," and not depth and not quote:
            items.append(current)
            current = ""
        else:
            current += char
        if depth < 0:
            raise UsageError("brackets do not match", where=text)
    if depth or quote:
        raise UsageError("brackets or quotes do not match", where=text)
    return [i.strip() for i in [*items, current] if i.strip()]


def build(cls: type[Any], options: dict[str, Any]) -> Any:
    """A pass object from raw (text) or typed options, each checked against the field's type.

    Raises:
        UsageError: unknown option (with the nearest name) or a value of the wrong kind.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    values = {}
    for given, raw in options.items():
        name = cls.aliases.get(given, given)
        if name in values:
            raise UsageError(f"option `{name}` of pass `{cls.name}` is given twice", where=given)
        if name not in fields:
            near = difflib.get_close_matches(name, fields, 1)
            raise UsageError(
                f"pass `{cls.name}` has no option `{name}`",
                where=name,
                hint=f"did you mean `{near[0]}`?" if near else "options: " + ", ".join(fields),
            )
        values[name] = convert(raw, hints[name], f"{cls.name}{{{name}=...}}")
    return cls(**values)


def convert(raw: Any, hint: Any, where: str) -> Any:
    """A value of the annotated type from text or from JSON."""
    value = _literal(raw) if isinstance(raw, str) else raw
    for kind in _alternatives(hint):
        result = _as(kind, value, raw)
        if result is not _NO:
            return result
    raise UsageError(f"{raw!r} is not a value for this option", where=where, hint=f"expected {describe(hint)}")


_NO = object()


def _literal(text: str) -> Any:
    low = text.strip().lower()
    if low in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[low]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        if text.startswith("[") and text.endswith("]"):
            return [_literal(t) for t in split(text[1:-1])]
        return text


def _alternatives(hint: Any) -> list[Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [k for a in typing.get_args(hint) for k in _alternatives(a)]
    return [hint]


def _as(kind: Any, value: Any, raw: Any) -> Any:
    origin = typing.get_origin(kind)
    if kind is type(None):
        return None if value is None else _NO
    if origin is typing.Literal:
        text = raw if isinstance(raw, str) else value
        return text if text in typing.get_args(kind) else _NO
    if kind is bool:
        return value if isinstance(value, bool) else _NO
    if kind is int:
        return value if isinstance(value, int) and not isinstance(value, bool) else _NO
    if kind is float and isinstance(raw, str) and raw.strip().lower() in ("inf", "-inf", "nan"):
        return float(raw)
    if kind is float:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else _NO
    if kind is str:
        if not isinstance(raw, str) or value is None:
            return _NO
        return value if isinstance(value, str) else raw
    if origin is tuple:
        item = typing.get_args(kind)[0]
        items = value if isinstance(value, list | tuple) else [value]
        converted = tuple(next((r for k in _alternatives(item) if (r := _as(k, v, v)) is not _NO), _NO) for v in items)
        return converted if _NO not in converted and value is not None else _NO
    return _NO


def describe(hint: Any) -> str:
    names = []
    for kind in _alternatives(hint):
        if typing.get_origin(kind) is typing.Literal:
            names.append(" | ".join(map(str, typing.get_args(kind))))
        elif typing.get_origin(kind) is tuple:
            names.append(f"[{describe(typing.get_args(kind)[0])}, ...]")
        else:
            names.append("none" if kind is type(None) else kind.__name__)
    return " or ".join(names)


def unparse(step: Any) -> str:
    """The pipeline notation of a pass object; options at their default are left out."""
    parts = []
    for f in dataclasses.fields(step):
        value = getattr(step, f.name)
        default = (
            f.default
            if f.default is not dataclasses.MISSING
            else f.default_factory()
            if f.default_factory is not dataclasses.MISSING
            else _NO
        )
        if value != default:
            parts.append(f"{f.name}={_text(value)}")
    name: str = step.name
    return name + (f"{{{','.join(parts)}}}" if parts else "")


def _text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "[" + ",".join(_text(v) for v in value) + "]"
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, str) and (
        _literal(value) != value or set(value) & set(",{}[]()='\"") or value != value.strip()
    ):
        return repr(value)
    return repr(value) if isinstance(value, float) else str(value)
