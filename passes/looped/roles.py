"""Roles of the nodes that loops insert."""

from __future__ import annotations

from hcx.rewrite.ir.tags import Part, Role

HEAD = Role("head", Part.READS)
"""Readouts and gates of single passes."""
STEPS = Role("steps", Part.BESIDE)
"""The number of passes, at run time."""
