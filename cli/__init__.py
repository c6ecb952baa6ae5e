"""The command line. Each command is also a function of the same name: ``from hcx.cli import rewrite``.

The functions return a :class:`~hcx.cli.result.Result`: plain data, and the text that the command prints.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

COMMANDS = ("inspect", "plan", "rewrite", "verify", "diff", "export", "generate", "passes", "env")
GROUPS = ("exits",)
"""Groups of commands: ``hcx exits fit`` is ``hcx.cli.exits.fit``."""

__all__ = [*COMMANDS, *GROUPS]


def __getattr__(name: str) -> Any:
    """Import a command's module on first use, so that ``hcx --help`` does not pay for torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f".cmd_{name}", __name__)
    return module if name in GROUPS else getattr(module, name)
