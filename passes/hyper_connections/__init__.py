"""Hyper-connections."""

from .hc import HyperConnections

__all__ = ["HyperConnections"]
