"""Python structures around tensors, described by plain JSON.

A model takes and returns nested dicts, tuples, dataclasses and cache objects; a graph takes and returns flat
tensors. ``flatten`` goes one way and names every tensor by its path, ``rebuild`` goes back. The description is JSON,
so a saved Program rebuilds the same structure in a process that cannot import the model's classes: a foreign class
then becomes a :class:`Record` with the same fields.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from hcx.rewrite.errors import UsageError

Spec = dict[str, Any]
Build = Callable[[dict[str, Any]], Any]
_PLAIN = (bool, int, float, str, type(None))


class Record(OrderedDict[str, Any]):
    """Fields of a foreign class: by attribute, by key, or by position over the fields that are not None.

    >>> out = Record(logits=1, loss=None)
    >>> out.logits, out["logits"], out[0]
    (1, 1, 1)
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int | slice):
            return self.to_tuple()[key]
        return super().__getitem__(key)

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(value for value in self.values() if value is not None)


class Structure:
    """A structure with its tensors taken out.

    Attributes:
        spec: JSON description; tensor leaves are ``{"kind": "tensor", "index": i}``.
        names: path of each tensor leaf, in index order.
        templates: in-process constructors of foreign classes by their number in the spec; not saved.
    """

    def __init__(self, spec: Spec, names: list[str], templates: dict[int, Build] | None = None):
        self.spec, self.names, self.templates = spec, names, templates or {}

    def rebuild(self, tensors: list[Any]) -> Any:
        """Put tensors (in index order) back into the structure."""
        return _rebuild(self.spec, tensors, self.templates)

    def to_json(self) -> dict[str, Any]:
        return {"spec": self.spec, "names": self.names}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Structure:
        return Structure(data["spec"], list(data["names"]))


def flatten(value: Any, root: str = "") -> tuple[list[torch.Tensor], Structure]:
    """Take the tensors out of a structure.

    Args:
        value: any nesting of dict, list, tuple, namedtuple, dataclass, mapping-like output class, object holding
            tensors in its attributes, tensor, None, bool, int, float, str, dtype or device.
        root: prefix of the tensor names.

    Returns:
        the tensors, and the structure whose ``rebuild`` is the inverse.
    """
    walker = _Walker()
    spec = walker.walk(value, root)
    return walker.tensors, Structure(spec, walker.names, walker.templates)


class _Walker:
    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.names: list[str] = []
        self.templates: dict[int, Build] = {}

    def walk(self, value: Any, path: str) -> Spec:
        if isinstance(value, torch.Tensor):
            return self._leaf(value, path, "tensor")
        if isinstance(value, torch.SymInt):
            return self._leaf(torch.scalar_tensor(cast("int", value), dtype=torch.int64), path, "int")
        if isinstance(value, torch.SymFloat):
            return self._leaf(torch.scalar_tensor(cast("float", value), dtype=torch.float64), path, "float")
        if isinstance(value, torch.SymBool):
            raise UsageError(
                "the model returns a bool that depends on the size of its input",
                where=path or "output",
                hint="return it from outside the model, or as a tensor",
            )
        if isinstance(value, _PLAIN):
            return {"kind": "const", "value": value}
        if isinstance(value, torch.dtype):
            return {"kind": "dtype", "value": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"kind": "device", "value": str(value)}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return self._fields(
                "namedtuple",
                value,
                dict(zip(value._fields, value, strict=True)),
                path,
                _from_fields(type(value)),
            )
        if isinstance(value, list | tuple):
            kind = "list" if isinstance(value, list) else "tuple"
            return {"kind": kind, "items": [self.walk(v, _join(path, str(i))) for i, v in enumerate(value)]}
        if type(value) in (dict, OrderedDict) or (isinstance(value, dict) and not dataclasses.is_dataclass(value)):
            if not all(isinstance(k, str | int) for k in value):
                raise UsageError(
                    "a dict in the model's inputs or outputs has keys that are neither str nor int", where=path
                )
            keys = list(value)
            return {"kind": "dict", "keys": keys, "items": [self.walk(value[k], _join(path, str(k))) for k in keys]}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = list(value) if isinstance(value, dict) else [f.name for f in dataclasses.fields(value)]
            get = value.__getitem__ if isinstance(value, dict) else lambda n: getattr(value, n)
            return self._fields("record", value, {n: get(n) for n in names}, path, _from_fields(type(value)))
        return self._object(value, path)

    def _leaf(self, tensor: torch.Tensor, path: str, kind: str) -> Spec:
        self.tensors.append(tensor)
        self.names.append(path or "output")
        return {"kind": kind, "index": len(self.tensors) - 1}

    def _fields(self, kind: str, value: Any, fields: dict[str, Any], path: str, build: Build) -> Spec:
        items = [self.walk(v, _join(path, k)) for k, v in fields.items()]
        number = len(self.templates)
        self.templates[number] = build
        return {"kind": kind, "class": type(value).__name__, "template": number, "fields": list(fields), "items": items}

    def _object(self, value: Any, path: str) -> Spec:
        """An object of a foreign class, such as a cache: only attributes that hold tensors are looked into."""
        attributes = {k: v for k, v in getattr(value, "__dict__", {}).items() if holds_tensors(v)}
        shell = copy.copy(value)
        for name in attributes:  # the template must not keep the example's tensors alive
            shell.__dict__[name] = None

        def build(fields: dict[str, Any]) -> Any:
            new = _own_copy(shell)
            new.__dict__.update(fields)
            return new

        items = [self.walk(v, _join(path, _short(k))) for k, v in attributes.items()]
        number = len(self.templates)
        self.templates[number] = build
        return {
            "kind": "object",
            "class": type(value).__name__,
            "template": number,
            "fields": list(attributes),
            "items": items,
        }


def _own_copy(shell: Any) -> Any:
    """What a model writes to an object in one call must not last until the next."""
    try:
        return copy.deepcopy(shell)
    except Exception:  # noqa: BLE001  the model's object holds something that cannot be copied, such as a lock
        return copy.copy(shell)


def holds_tensors(value: Any, depth: int = 6) -> bool:
    """Whether a tensor is reachable through containers and attributes."""
    if isinstance(value, torch.Tensor):
        return True
    if depth == 0 or isinstance(value, (*_PLAIN, torch.nn.Module, type)):
        return False
    if isinstance(value, dict):
        return any(holds_tensors(v, depth - 1) for v in value.values())
    if isinstance(value, list | tuple):
        return any(holds_tensors(v, depth - 1) for v in value)
    return any(holds_tensors(v, depth - 1) for v in getattr(value, "__dict__", {}).values())


def _from_fields(cls: type[Any]) -> Build:
    return lambda fields: cls(**fields)


def _join(path: str, part: str) -> str:
    return ".".join(p for p in (path, part) if p)


def _short(attribute: str) -> str:
    """Names that the field uses for caches: ``past_key_values.0.key``."""
    return {"layers": "", "keys": "key", "values": "value"}.get(attribute, attribute)


def _rebuild(spec: Spec, tensors: list[Any], templates: dict[int, Build]) -> Any:
    kind = spec["kind"]
    if kind == "tensor":
        return tensors[spec["index"]]
    if kind == "int":
        value = tensors[spec["index"]]
        return value if isinstance(value, int) else int(value)
    if kind == "float":
        return float(tensors[spec["index"]])
    if kind == "const":
        return spec["value"]
    if kind == "dtype":
        return getattr(torch, spec["value"])
    if kind == "device":
        return torch.device(spec["value"])
    items = [_rebuild(s, tensors, templates) for s in spec["items"]]
    if kind == "list":
        return items
    if kind == "tuple":
        return tuple(items)
    if kind == "dict":
        return dict(zip(spec["keys"], items, strict=True))
    fields = dict(zip(spec["fields"], items, strict=True))
    template = templates.get(spec["template"])
    if template is not None:
        return template(fields)
    if kind == "namedtuple":
        return namedtuple(spec["class"], spec["fields"])(**fields)
    return Record(fields)


def kinds(spec: Spec) -> Iterator[str]:
    """Kinds of all parts of a structure."""
    yield spec["kind"]
    for item in spec.get("items", ()):
        yield from kinds(item)


def outputs_of(spec: Spec, value: Any, found: list[torch.Tensor]) -> list[torch.Tensor]:
    """Flat outputs of an eager run in the order of the traced structure; sizes that the graph returns become tensors."""
    kind = spec["kind"]
    if kind == "tensor":
        found.append(value)
    elif kind in ("int", "float"):
        found.append(torch.scalar_tensor(value, dtype=torch.int64 if kind == "int" else torch.float64))
    elif "items" in spec:
        inner = flatten_once(spec, value)
        for item, part in zip(spec["items"], inner, strict=True):
            outputs_of(item, part, found)
    return found


def flatten_once(spec: Spec, value: Any) -> list[Any]:
    """The parts of one container."""
    if spec["kind"] in ("list", "tuple"):
        return list(value)
    return [_field(value, n, "output") for n in (spec["keys"] if spec["kind"] == "dict" else spec["fields"])]


def rebuild_constant(spec: Spec) -> Any:
    """The value of a structure without tensors."""
    return _rebuild(spec, [], {})


def extract(spec: Spec, value: Any, path: str) -> list[torch.Tensor]:
    """Take the tensors out of a value that must have the traced structure.

    Raises:
        UsageError: names the first place where the value differs from what was traced.
    """
    found: list[torch.Tensor] = []
    _extract(spec, value, path, found)
    return found


def _extract(spec: Spec, value: Any, path: str, found: list[torch.Tensor]) -> None:
    kind = spec["kind"]
    if kind == "tensor":
        if not isinstance(value, torch.Tensor):
            raise UsageError(
                f"argument `{path}` was a tensor when traced, now it is {_kind_of(value)}",
                where=path,
                hint="trace the model again with an example that passes it this way",
            )
        found.append(value)
    elif kind in ("const", "dtype", "device", "int"):
        expected = _rebuild(spec, [], {}) if kind != "int" else value
        if value is not expected and not (type(value) is type(expected) and value == expected):
            raise UsageError(
                f"argument `{path}` was {expected!r} when traced and is part of the graph, now it is {_kind_of(value)}",
                where=path,
                hint="trace the model again with an example that passes it this way",
            )
    elif kind in ("list", "tuple"):
        if not isinstance(value, list | tuple) or len(value) != len(spec["items"]):
            raise UsageError(
                f"argument `{path}` was a {kind} of {len(spec['items'])} when traced, now it is {_kind_of(value)}",
                where=path,
            )
        for i, item in enumerate(spec["items"]):
            _extract(item, value[i], f"{path}.{i}", found)
    else:
        names = spec["keys"] if kind == "dict" else spec["fields"]
        for name, item in zip(names, spec["items"], strict=True):
            _extract(item, _field(value, name, path), f"{path}.{name}", found)


def _field(value: Any, name: Any, path: str) -> Any:
    if isinstance(value, dict) and name in value:
        return value[name]
    if isinstance(name, str) and hasattr(value, name):
        return getattr(value, name)
    raise UsageError(f"argument `{path}` has no `{name}`, which it had when traced", where=path)


def _kind_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {tuple(value.shape)}"
    return repr(value) if isinstance(value, _PLAIN) else type(value).__name__


def tensor_indices(spec: Spec) -> Iterator[int]:
    """Indices of the tensor leaves below a structure description, in order."""
    if spec["kind"] in ("tensor", "int", "float"):
        yield spec["index"]
    for item in spec.get("items", ()):
        yield from tensor_indices(item)


def list_items(spec: Spec, wanted: set[int]) -> list[tuple[Spec, list[Spec]]]:
    """(item, list it is in) of the innermost list items that hold some of the wanted tensors."""
    found = []
    for item in spec.get("items", ()):
        inner = list_items(item, wanted)
        if (
            not inner
            and spec["kind"] in ("list", "tuple")
            and wanted & set(tensor_indices(item))
            and item["kind"] != "tensor"
        ):
            inner = [(item, spec["items"])]
        found += inner
    return found


def renumber(spec: Spec, mapping: dict[int, int]) -> Spec:
    """A structure description with other tensor indices."""
    new = dict(spec)
    if "index" in new:
        new["index"] = mapping[new["index"]]
    if "items" in new:
        new["items"] = [renumber(s, mapping) for s in new["items"]]
    return new


def without_items(spec: Spec, gone: set[int]) -> Spec:
    """A structure description without the innermost list items that hold some tensors."""
    new = dict(spec)
    if "items" in new:
        lost = [item for item, siblings in list_items(spec, gone) if siblings is spec["items"]]
        new["items"] = [without_items(s, gone) for s in spec["items"] if not any(s is item for item in lost)]
    return new
