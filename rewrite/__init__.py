"""Trace a model into one graph, rewrite it, check the rewrite, save it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

_HOME = {
    "trace": "api",
    "Program": "api",
    "BlockModule": "host.module",
    "load": "api",
    "save": "api",
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
    "Plan": "pipeline.plan",
    "Site": "pipeline.plan",
    "Skip": "pipeline.plan",
    "Reason": "pipeline.plan",
    "Pass": "pipeline.passbase",
    "Exact": "pipeline.contracts",
    "Rounding": "pipeline.contracts",
    "Metric": "pipeline.contracts",
    "Structural": "pipeline.contracts",
    "verify": "api",
    "allow_ops": "ir.graph_text",
}
__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from .api import Program as Program
    from .api import load as load
    from .api import trace as trace
    from .api import verify as verify
    from .errors import HcxError as HcxError


def __getattr__(name: str) -> Any:
    """Import on first use, so that ``hcx --help`` does not pay for torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'hcx.rewrite' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
