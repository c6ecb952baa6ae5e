"""Looking inside: taps on chosen values."""

from .observe import Observe

__all__ = ["Observe"]
