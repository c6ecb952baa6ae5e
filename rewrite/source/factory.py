"""Models built by a function of the user's own: ``pkg.mod:factory``."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import torch
from hcx.rewrite.errors import SourceError

from .files import first_line

_SPEC = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def is_factory_spec(spec: str) -> bool:
    """True for text of the form ``pkg.mod:factory``."""
    return _SPEC.fullmatch(spec) is not None


def allow_local_imports() -> None:
    """Put the working directory on the import path, as ``python -m`` does."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def build(spec: str) -> tuple[torch.nn.Module, tuple[Any, ...] | None, dict[str, Any]]:
    """Call a factory.

    Args:
        spec: ``pkg.mod:factory``; the module is looked for in the working directory too. The factory takes no
            arguments and returns a module, ``(module, args)`` or ``(module, args, kwargs)``.

    Returns:
        (module, args, kwargs); args is None when the factory gave no example.

    Raises:
        SourceError: it cannot be imported or called, or returns something else.
    """
    target = _import(spec)
    if isinstance(target, torch.nn.Module):
        return target, None, {}
    if not callable(target):
        raise SourceError(
            f"{spec} is a {type(target).__name__}, not a function",
            where=spec,
            hint="name a function that takes no arguments and returns a torch.nn.Module",
        )
    try:
        result = target()
    except (Exception, SystemExit) as error:  # the user's own code: keep its message, chain its traceback
        raise SourceError(
            f"the factory {spec} failed: {first_line(error)}",
            where=spec,
            hint="it is called without arguments; run with -vv for the full traceback",
        ) from error
    return _unpack(spec, result)


def _import(spec: str) -> Any:
    """The object that ``pkg.mod:name`` stands for."""
    module_name, _, attribute = spec.partition(":")
    allow_local_imports()
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise SourceError(
                f"there is no module {error.name!r} to import",
                where=spec,
                hint="run in the folder that holds it, or install its package",
            ) from error
        raise SourceError(
            f"importing {module_name} failed: {first_line(error)}", where=spec, hint="install what it imports"
        ) from error
    except (Exception, SystemExit) as error:  # the user's own code, as above
        raise SourceError(
            f"importing {module_name} failed: {first_line(error)}",
            where=spec,
            hint="import it in a Python session to see the whole traceback",
        ) from error
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            near = difflib.get_close_matches(part, dir(value), n=3)
            raise SourceError(
                f"{module_name} has no {attribute!r}",
                where=spec,
                hint=f"did you mean {', '.join(near)}?" if near else "check the name after the colon",
            )
        value = getattr(value, part)
    return value


def _unpack(spec: str, result: Any) -> tuple[torch.nn.Module, tuple[Any, ...] | None, dict[str, Any]]:
    """Bring the three forms of a factory's answer into one."""
    parts = result if isinstance(result, tuple) else (result,)
    model, args, kwargs = (*parts, None, None)[:3]
    if not isinstance(model, torch.nn.Module) or len(parts) > 3:
        got = f"{len(parts)} values" if len(parts) > 3 else f"a {type(model).__name__}"
        raise SourceError(
            f"the factory {spec} returned {got}, not a module with its example",
            where=spec,
            hint="return model, (model, args) or (model, args, kwargs)",
        )
    if isinstance(args, torch.Tensor):
        args = (args,)
    if args is None and kwargs is not None:
        args = ()
    if (args is not None and not isinstance(args, tuple | list)) or not isinstance(kwargs or {}, dict):
        raise SourceError(
            f"the factory {spec} returned args of type {type(args).__name__} and kwargs of type "
            f"{type(kwargs).__name__}",
            where=spec,
            hint="args is a tuple and kwargs a dict",
        )
    return model, None if args is None else tuple(args), dict(kwargs or {})
