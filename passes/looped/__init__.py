"""Loops: a window of blocks applied several times."""

from .looped import Looped

__all__ = ["Looped"]
