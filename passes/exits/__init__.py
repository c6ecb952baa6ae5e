"""Early exits."""

from .exits import Exits

__all__ = ["Exits"]
