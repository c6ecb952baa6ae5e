"""Roles of the nodes that exits insert."""

from __future__ import annotations

from hcx.rewrite.ir.tags import Part, Role

HEAD = Role("head", Part.READS)
"""A head with its score: it reads the stream out."""
SELECT = Role("select", Part.BESIDE)
"""The choice among what the heads and the model say."""
SKIP = Role("skip", Part.INSIDE)
"""What stands for blocks that are left out."""
HOLD = Role("hold", Part.BESIDE)
"""The stream of positions that have left, kept for the blocks they skip."""
PROPAGATE = Role("propagate", Part.BESIDE)
"""Keys and values that skipped blocks would have written."""
