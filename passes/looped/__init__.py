"""Loops: a window of blocks applied several times."""

from .looped import Looped
from .unloop import Unloop

__all__ = ["Looped", "Unloop"]
