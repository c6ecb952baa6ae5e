"""The error for what the direct emitter cannot say."""

from __future__ import annotations


class UnsupportedError(Exception):
    """The direct emitter has no exact translation; the reason is for the report."""
