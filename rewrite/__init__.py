"""Trace a model into one graph, rewrite it, check the rewrite, save it."""

from __future__ import annotations

from typing import TYPE_CHECKING

_HOME = {
    "trace": "tracer",
    "Program": "program",
    "BlockModule": "module",
    "load": "artefact",
    "save": "artefact",
    "HcxError": "errors",
    "UsageError": "errors",
    "SourceError": "errors",
    "TraceError": "errors",
    "NoMatchError": "errors",
    "PlanError": "errors",
    "ContractError": "errors",
    "ExportError": "errors",
    "ArtefactError": "errors",
    "ExitCode": "errors",
    "Plan": "plan",
    "Site": "plan",
    "Skip": "plan",
    "Reason": "plan",
    "Pass": "passbase",
    "Exact": "contracts",
    "Rounding": "contracts",
    "Metric": "contracts",
    "Structural": "contracts",
    "verify": "artefact",
    "allow_ops": "graph_text",
}
__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from .errors import HcxError as HcxError
    from .program import Program as Program
    from .tracer import trace as trace


def __getattr__(name: str):
    """Import on first use, so that ``hcx --help`` does not pay for torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'hcx.rewrite' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
