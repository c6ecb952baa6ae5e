"""The table from ATen operators to functions that emit them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from hcx.export.onnx_direct.emitting.unsupported import UnsupportedError

RENAMED = {"self": "x", "input": "x"}
"""Schema names that translators spell differently."""

NAMESPACES, COMPLEX = ("aten", "hcx", "prims"), "complex:"

IN_THE_RESULT = {
    "dtype",
    "layout",
    "device",
    "pin_memory",
    "memory_format",
    "non_blocking",
    "copy",
    "implicit",
    "out_dtype",
}
"""Arguments that the result's dtype says already, or that mean nothing in ONNX."""


Handler: TypeAlias = Callable[..., Any]
"""``emit(e, **arguments)``: a value, several of them for an operator with several results, or a size."""
H = TypeVar("H", bound=Handler)


@dataclass(frozen=True)
class Translator:
    """How one operator is emitted: ``emit(e, **arguments)`` with the schema's argument names."""

    emit: Handler
    accepts: frozenset[str]


TABLE: dict[str, Translator] = {}


def op(*names: str, complex_numbers: bool = False) -> Callable[[H], H]:
    """Register a translator for operators such as ``aten.add.Tensor``; the name space ``aten.`` may be left out.

    The function declares the schema's arguments that it handles (``self`` and ``input`` are called ``x``). A call that
    gives any other argument a value that is not the default is refused, so that nothing is silently ignored. Calls with
    complex tensors only go to translators that are registered with ``complex_numbers``.
    """

    def register(emit: H) -> H:
        accepts = frozenset(list(inspect.signature(emit).parameters)[1:])
        for name in names:
            full = name if name.split(".")[0] in NAMESPACES else f"aten.{name}"
            full = COMPLEX + full if complex_numbers else full
            assert full not in TABLE, full
            TABLE[full] = Translator(emit, accepts)
        return emit

    return register


def find(target: Any, complex_numbers: bool = False) -> Translator | None:
    """The translator of an operator, or of its out-of-place twin (``add_`` → ``add``).

    With ``complex_numbers`` only translators that know pairs of numbers.
    """
    prefix, name = COMPLEX if complex_numbers else "", str(target)
    namespace, _, rest = name.partition(".")
    base, _, overload = rest.partition(".")
    twin = f"{namespace}.{base[:-1]}.{overload}" if base.endswith("_") and not base.startswith("__") else name
    return TABLE.get(prefix + name) or TABLE.get(prefix + twin)


def arguments(
    target: torch._ops.OpOverload, translator: Translator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Bind a call to the schema, with defaults; raises UnsupportedError for what the translator does not handle."""
    bound: dict[str, Any] = {}
    for index, argument in enumerate(target._schema.arguments):
        name = RENAMED.get(argument.name, argument.name)
        given = index < len(args) or argument.name in kwargs
        value = args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
        if name in translator.accepts:
            bound[name] = value
        elif given and value != argument.default_value and name not in IN_THE_RESULT:
            raise UnsupportedError(f"{target} with {argument.name}={value}")
    return bound
