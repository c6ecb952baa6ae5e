"""Hyper-connections."""

from .hc import HyperConnections
from .inspection import inspect_mixers

__all__ = ["HyperConnections", "inspect_mixers"]
