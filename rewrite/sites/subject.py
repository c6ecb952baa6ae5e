"""What passes see: the graph Program with its sites."""

from __future__ import annotations

from hcx.rewrite.ir.program import Program

from .finder import find
from .views import Sites


class Subject(Program):
    """A Program that a pass plans for and changes. It has sites; it can neither rewrite nor save itself."""

    def sites(self) -> Sites:
        """Stacks, blocks, branches and boundaries; see :func:`hcx.rewrite.sites.finder.find`."""
        return find(self)
