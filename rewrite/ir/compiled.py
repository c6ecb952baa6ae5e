"""A graph as a Python function: the one place where generated code is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import fx


def compiled(graph: fx.Graph, name: str) -> Callable[..., Any]:
    """A function ``(module that holds the tensors, *inputs)`` that computes a graph.

    The code is made from the nodes alone; where a graph comes from a file, its reader has checked every target, name
    and literal (:mod:`hcx.rewrite.ir.graph_text`).

    Args:
        name: what tracebacks call it.
    """
    code = graph.python_code("self")
    scope = dict(code.globals)
    exec(compile(code.src, f"<hcx {name}>", "exec"), scope)
    return cast("Callable[..., Any]", scope["forward"])
