"""The role of what `observe` inserts."""

from __future__ import annotations

from hcx.rewrite.ir.tags import Part, Role

OBSERVE = Role("observe", Part.BESIDE)
