"""Roles of the nodes that norms, scales and the second stream insert."""

from __future__ import annotations

from hcx.rewrite.ir.tags import Part, Role

SCALE = Role("scale", Part.INSIDE)
HEAD_SCALE = Role("head_scale", Part.INSIDE)
NORM = Role("norm", Part.INSIDE)
CARRY = Role("carry", Part.CONTINUES)
JOIN = Role("join", Part.BESIDE)
