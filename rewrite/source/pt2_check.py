"""What in a torch.export archive could run code, checked before torch reads it.

``torch.export.load`` believes its file: pickled tensors and sample inputs are loaded with ``weights_only=False``, shape
expressions go through ``sympify`` (an eval), shape guards and argument names become Python source, call targets are any
attribute of torch, and a tree spec may name a module to import. Each of these has a narrow form in a file that
``torch.export.save`` wrote, and only that form is let through.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import re
from typing import Any

import torch

_PLAIN = re.compile(r"[\w.+\-:/@ ]*")
_OPERATORS = frozenset(
    "add sub mul floordiv truediv mod pow neg pos abs and_ or_ xor not_ invert lshift rshift eq ne lt le gt ge getitem "
    "is_ is_not truth".split()
)
_EXPRESSION_CALLS = frozenset(
    "Symbol Integer Float Rational Add Mul Pow Mod Max Min Abs floor ceiling Eq Ne Lt Le Gt Ge Equality Unequality "
    "StrictLessThan LessThan StrictGreaterThan GreaterThan And Or Not Piecewise ExprCondPair Tuple FloorDiv "
    "ModularIndexing Where PythonMod CleanDiv CeilToInt FloorToInt CeilDiv LShift RShift PowByNatural FloatPow "
    "FloatTrueDiv IntTrueDiv IsNonOverlappingAndDenseIndicator TruncToFloat TruncToInt RoundToInt RoundDecimal ToFloat "
    "Identity BooleanTrue BooleanFalse".split()
)
_GUARD_CALLS = frozenset({"max", "min", "abs", "int", "float", "bool", "round", "IsNonOverlappingAndDenseIndicator"})
_GUARD_METHODS = frozenset({"size", "stride", "storage_offset"})
_HIGHER_ORDER = frozenset(
    "cond while_loop scan associative_scan map map_impl wrap_with_set_grad_enabled wrap_with_autocast invoke_subgraph "
    "hints_wrapper tag_activation_checkpoint wrap auto_functionalized auto_functionalized_v2 out_dtype "
    "flex_attention local_map_hop".split()
)
_SYNTAX = (
    ast.Expression,
    ast.BoolOp,
    ast.BinOp,
    ast.UnaryOp,
    ast.Compare,
    ast.IfExp,
    ast.Constant,
    ast.Load,
    ast.boolop,
    ast.operator,
    ast.unaryop,
    ast.cmpop,
)


class UnsafeError(Exception):
    """Something in the archive that torch.export.save does not write; the message names it."""


def check_model(value: Any, key: str = "", *, inside_node: bool = False) -> None:
    """Walk a model's JSON and let through only what cannot become code.

    Raises:
        UnsafeError: with the first offending text.
    """
    if isinstance(value, dict):
        for name, item in value.items():
            if name == "metadata":  # stack traces and module paths: read as text, never as code
                continue
            _plain(name)
            # string arguments of a call are written into its source by repr
            check_model(item, name, inside_node=inside_node or (name == "inputs" and "target" in value))
    elif isinstance(value, list):
        for item in value:
            check_model(item, key, inside_node=inside_node)
    elif isinstance(value, str):
        _text(value, key, inside_node)


def _text(value: str, key: str, inside_node: bool) -> None:
    """One string, by the key it stands under."""
    if key in ("target", "as_operator"):
        _target(value)
    elif key == "expr_str":
        _parse(value, "shape expression", _expression_node)
    elif key == "guards_code":
        _parse(value, "shape guard", _guard_node)
    elif key in ("in_spec", "out_spec"):
        _tree(json.loads(value) if value else None)
    elif not (key == "as_string" and inside_node):
        _plain(value)


def _plain(value: str) -> None:
    """Names, dtypes, versions: no quote, bracket or line break that could end a literal in generated source."""
    if not _PLAIN.fullmatch(value):
        raise UnsafeError(f"the text {value[:60]!r} where a name belongs")


def _target(name: str) -> None:
    """A call target must be an operator overload, a known higher-order operator, or plain arithmetic."""
    head, _, rest = name.partition(".")
    if head == "_operator" and rest in _OPERATORS:
        return
    if head == "math" and not rest.startswith("_") and callable(getattr(math, rest, None)):
        return
    if head == "torch" and re.fullmatch(r"_?sym_\w+", rest) and hasattr(torch, rest):
        return
    parts = name.split(".")
    if parts[:2] == ["torch", "ops"] and len(parts) > 3:
        if parts[2] == "higher_order" and len(parts) == 4 and parts[3] in _HIGHER_ORDER:
            return
        try:
            found = operator.attrgetter(".".join(parts[2:]))(torch.ops)
        except (AttributeError, RuntimeError):
            raise UnsafeError(f"the call target {name!r}, an operator that is not registered here") from None
        if isinstance(found, torch._ops.OpOverload):
            return
    raise UnsafeError(f"the call target {name[:80]!r}")


def _parse(text: str, what: str, allowed) -> None:
    """Parse an expression and check every node of it."""
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UnsafeError(f"the {what} {text[:60]!r}, which does not parse") from None
    for node in ast.walk(tree):
        literal = not (isinstance(node, ast.Constant) and isinstance(node.value, str)) or _PLAIN.fullmatch(node.value)
        if not literal or not (isinstance(node, _SYNTAX) or allowed(node)):
            raise UnsafeError(f"the {what} {text[:80]!r}")


def _expression_node(node: ast.AST) -> bool:
    """Shape expressions: symbols, numbers, arithmetic and calls of sympy's own constructors."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _EXPRESSION_CALLS
    if isinstance(node, ast.keyword):
        return isinstance(node.value, ast.Constant)
    return isinstance(node, ast.Name | ast.Tuple)


def _guard_node(node: ast.AST) -> bool:
    """Shape guards: ``L['x'].size()[0]``, numbers, arithmetic, and calls of a few pure functions."""
    if isinstance(node, ast.Call):
        plain = isinstance(node.func, ast.Name) and node.func.id in _GUARD_CALLS
        return not node.keywords and (plain or isinstance(node.func, ast.Attribute))
    if isinstance(node, ast.Attribute):
        owner = node.value.id if isinstance(node.value, ast.Name) else None
        if owner == "torch":
            return re.fullmatch(r"_?sym_\w+", node.attr) is not None
        return not node.attr.startswith("_") if owner == "math" else node.attr in _GUARD_METHODS
    if isinstance(node, ast.Name):
        return node.id in _GUARD_CALLS | {"L", "math", "torch", "inf"}
    return isinstance(node, ast.Subscript)


def _tree(value: Any) -> None:
    """A pytree spec: plain names only, and nothing that makes torch import a module."""
    if isinstance(value, dict):
        module, name = value.get("default_factory_module"), value.get("default_factory_name")
        if "__enum__" in value or (module, name) not in ((None, None), *(("builtins", t) for t in _BUILTINS)):
            raise UnsafeError("a tree spec that imports a module")
        for key, item in value.items():
            _plain(key)
            _tree(_context(item) if key == "context" else item)
    elif isinstance(value, list):
        for item in value:
            _tree(item)
    elif isinstance(value, str):
        _plain(value)


_BUILTINS = ("list", "dict", "int", "float", "set", "tuple")


def _context(item: Any) -> Any:
    """A node's context is JSON within JSON for dicts and a bare name for named tuples."""
    try:
        return json.loads(item) if isinstance(item, str) else item
    except ValueError:
        return item
