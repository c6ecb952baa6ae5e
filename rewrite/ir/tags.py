"""What inserted nodes say about themselves: ``meta["custom"]["hcx"]``, which survives saving and re-export."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast

from torch import fx

_PART = "hcx_part"
"""Key of ``meta["custom"]``."""


class Part(StrEnum):
    """What an inserted value is to the residual stream; all that a finder of structure asks."""

    CONTINUES = "continues"
    """It is the stream from here on. An add among it is no residual, the ``hcx.stream_*`` writes are."""
    READS = "reads"
    """It reads the stream out and gives nothing back (a head): nothing in it is a residual."""
    INSIDE = "inside"
    """It is part of what the module around it computes (a norm, an adapter)."""
    BESIDE = "beside"
    """None of these: bookkeeping, selections, reductions."""


@dataclass(frozen=True)
class Role:
    """What a pass declares about a group of nodes that it inserts.

    Attributes:
        word: for people, and for the pass itself to find its nodes again.
        part: for everybody else.
    """

    word: str
    part: Part


MIX = Role("mix", Part.CONTINUES)
"""Joins what is to be the stream (of the passes of a loop, of a second stream) between two blocks."""
REDUCE = Role("reduce", Part.BESIDE)
"""Makes one stream of several; the carrier of several streams looks for it."""


class Tag(dict[str, Any]):
    """The entry of a node; empty for what the model brought. Passes may keep more in it under keys of their own.

    Attributes:
        part: what the node is to the stream; None for nodes of the model, and copies that are what their original is.
    """

    part: Part | None = None

    @property
    def of_pass(self) -> str | None:
        """Name of the pass that inserted or copied the node, or None."""
        return self.get("pass")

    @property
    def word(self) -> str | None:
        """Word of its role; copies without a role of their own have none."""
        return self.get("role")

    @property
    def iteration(self) -> int:
        """Pass of the loop that it belongs to, from 1."""
        return cast("int", self.get("iteration", 1))

    @property
    def original(self) -> str | None:
        """Name of the node that it is a copy of, or None."""
        return self.get("of")


def hcx_tag(node: fx.Node) -> Tag:
    """What an hcx pass recorded on a node; a copy."""
    custom = node.meta.get("custom") or {}
    tag = Tag(custom.get("hcx", {}))
    tag.part = Part(custom[_PART]) if _PART in custom else None
    return tag


def set_tag(node: fx.Node, tag: dict[str, Any], part: Part | None) -> None:
    """Replace the entry of a node. Forks share what lies in a node's metadata, so nothing there is written to."""
    custom = {k: v for k, v in (node.meta.get("custom") or {}).items() if k != _PART}
    node.meta["custom"] = {**custom, "hcx": dict(tag), **({_PART: part.value} if part is not None else {})}


def role_of(role: Role | str | None) -> Role | None:
    """A role as passes may give it: a word alone is part of what the module computes."""
    return Role(role, Part.INSIDE) if isinstance(role, str) else role


def has_role(node: fx.Node, name: str, role: Role) -> bool:
    """Whether a pass inserted a node in this role."""
    tag = hcx_tag(node)
    return (tag.of_pass, tag.word) == (name, role.word)


_PARTS_BEFORE = {
    **dict.fromkeys(("mix", "carry", "write"), Part.CONTINUES),
    "head": Part.READS,
    **dict.fromkeys(
        ("select", "reduce", "read", "expand", "steps", "count", "join", "hold", "propagate", "coefficients", "observe",
         "cond", "while_loop"),
        Part.BESIDE,
    ),
}  # fmt: skip
"""Artefacts of hcx 0.1.0 hold words alone; these are its words."""


def part_before(tag: dict[str, Any]) -> Part | None:
    """The part of a node in an artefact that holds words alone."""
    return _PARTS_BEFORE.get(tag["role"], Part.INSIDE) if "role" in tag else None


def owner(node: fx.Node) -> str:
    """Module path whose forward the node was written in; empty without metadata."""
    stack = node.meta.get("nn_module_stack") or {}
    return list(stack)[-1] if stack else ""
