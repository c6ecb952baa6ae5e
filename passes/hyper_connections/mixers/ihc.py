"""iHC: the mix is the identity, reads and writes are dynamic. Source: docs/sources.md, ihc."""

from __future__ import annotations

from typing import Any

from .base import Head


class IHC(Head):
    """``2n (n C) + 2n + 2`` parameters a site."""

    name = "ihc"

    def starts_at_identity(self, options: Any) -> bool:
        """Always."""
        return True
