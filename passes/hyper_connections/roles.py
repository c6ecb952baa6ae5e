"""Roles of the nodes that hyper-connections insert."""

from __future__ import annotations

from hcx.rewrite.ir.tags import Part, Role

EXPAND = Role("expand", Part.BESIDE)
"""Makes streams of the plain one."""
READ = Role("read", Part.BESIDE)
"""What a branch reads of the streams."""
WRITE = Role("write", Part.CONTINUES)
"""Mixes the streams and adds what a branch gives."""
COEFFICIENTS = Role("coefficients", Part.BESIDE)
CARRY = Role("carry", Part.CONTINUES)
"""What the model does to the plain stream between two residuals, done to every stream."""
