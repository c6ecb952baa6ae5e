"""Chosen values inside the model as taps; the function stays what it is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal

import torch
from hcx.rewrite.edit.editor import Editor
from hcx.rewrite.errors import UsageError
from hcx.rewrite.ir.aliases import Aliases, mutated
from hcx.rewrite.ir.dataflow import shape
from hcx.rewrite.ir.program import Program
from hcx.rewrite.pipeline.contracts import Contract, Exact
from hcx.rewrite.pipeline.passbase import Pass, tap_prefix
from hcx.rewrite.pipeline.plan import PassPlan, Reason, Site, Skip
from hcx.rewrite.sites.views import Boundary, Stack
from hcx.rewrite.sites.weight_targets import fits
from torch import fx

from .roles import OBSERVE
from .values import SIDES, Values, spellings


@dataclass(frozen=True)
class Observe(Pass):
    """Add values inside the model as taps. In a call without taps nothing more is computed.

    Without ``at``, ``branches`` and ``modules`` every boundary of the stack is taken. Behind a loop each pass has a tap
    of its own (``~2`` in its name); a pattern that names one pass takes that one alone, ``~1`` the first. So with calls:
    ``@1`` is the second one, ``@0`` the first.

    Args:
        at: the stream after so many blocks, 0 up to the depth: ``3``, or ``3~1`` in pass 1 of a loop only.
        branches: addresses of branches or patterns: ``layers.3/mlp``, ``*/attn``.
        modules: paths of modules or patterns, as ``target`` of other passes reads them: ``down_proj``,
            ``model.layers.3.mlp``, ``*.7.*.down_proj~2``.
        side: what of branches and modules: the ``input`` or the ``output``. A branch's input is the stream before its
            norm, its output is what is added.
        units: numbers on the last axis; None takes all.
        last: the last position only, of values ``[batch, position, ...]``.
        stack: label of the stack that ``at`` speaks of; default: the one the output is read from.
    """

    name: ClassVar[str] = "observe"

    at: tuple[int | str, ...] | None = None
    branches: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    side: Literal["input", "output"] = "output"
    units: tuple[int, ...] | None = None
    last: bool = False
    stack: str | None = None

    def __post_init__(self) -> None:
        if self.at is not None and not self.at:
            raise UsageError("observe{at=[]}: no place", where="at", hint="e.g. at=[20]; left out: every boundary")
        named = self.branches or self.modules
        if self.side == "input" and not named:
            raise UsageError(
                "observe{side=input}: a stream has no sides", where="side", hint="name branches or modules"
            )
        if self.stack is not None and self.at is None and named:
            raise UsageError(f"observe{{stack={self.stack}}}: nothing is read from a stack", where="stack",
                             hint="`stack` says where `at` counts; branches and modules have names of their own")  # fmt: skip
        if self.units is not None and (not self.units or min(self.units) < 0 or len(set(self.units)) < len(self.units)):
            raise UsageError(f"units={list(self.units)} is no list of units", where="units",
                             hint="different numbers from 0 on")  # fmt: skip

    def plan(self, program: Program) -> PassPlan:
        """One site a tap.

        Raises:
            UsageError: a place that there is not, a pattern that fits nothing, a unit out of range.
        """
        plan, values = self.new_plan(sites=[]), Values(program)
        everything = self.at is None and not self.branches and not self.modules
        if self.at is not None or everything:
            stack = values.sites.stack(self.stack)
            if stack is None:
                if self.stack is not None or self.at is not None:
                    labels = ", ".join(s.label for s in values.sites.stacks) or "none"
                    raise UsageError(f"there is no stack{f' `{self.stack}`' if self.stack else ''}", where="stack",
                                     hint=f"stacks: {labels}; modules=[...] needs none")  # fmt: skip
                plan.skips.append(Skip("model", Reason.NO_STREAM, "no stack: name modules"))
            else:
                for address in self._streams(values, stack):
                    self._add(plan, values, "stream", address, "")
        for address in _matching(self.branches, values.branches(), "branches", fnmatchcase):
            self._add(plan, values, "branch", address, self.side)
        paths = {m.address: m.path for m in values.modules.values()}
        for address in _matching(self.modules, paths, "modules", lambda a, p: _is_module(paths[a], a, p)):
            self._add(plan, values, "module", address, self.side)
        return plan

    def _streams(self, values: Values, stack: Stack) -> list[str]:
        found = values.boundaries(stack)
        if self.at is None:
            return list(found)
        chosen = []
        for place in self.at:
            parsed = re.fullmatch(r"(\d+)(?:~([1-9]\d*))?", str(place))
            if parsed is None:
                raise UsageError(
                    f"`{place}` is no place in a stack", where="at", hint="14, or 14~1 in pass 1 of a loop"
                )
            index, iteration = int(parsed[1]), parsed[2]
            hits = [a for a, b in found.items() if b.index == index and iteration in (None, str(b.iteration))]
            if not hits:
                text = f" in pass {iteration}" if iteration else ""
                raise UsageError(f"there is no stream after {index} blocks{text} of {stack.label}", where="at",
                                 hint=f"0 to {stack.depth}")  # fmt: skip
            chosen += hits
        return list(dict.fromkeys(chosen))

    def _add(self, plan: PassPlan, values: Values, kind: str, name: str, side: str) -> None:
        detail: dict[str, Any] = {"of": kind, "name": name, "side": side, "stack": self.stack, "last": self.last,
                                  "units": list(self.units) if self.units is not None else None}  # fmt: skip
        address = f"{name}.{side}" if side else name
        found = _value(values, detail)
        wrong = found if isinstance(found, str) else _last_misfit(values.program, found, detail)
        if wrong is not None:
            plan.skips.append(Skip(address, Reason.UNSUPPORTED, wrong))
            return
        assert not isinstance(found, str)
        if (wrong := _units_misfit(found, detail)) is not None:
            raise UsageError(wrong, where="units", hint="observe values of different widths by passes of their own")
        assert plan.sites is not None
        plan.sites.append(Site(address, "tap", detail))

    def apply(self, program: Program, plan: PassPlan, editor: Editor) -> None:
        """Add the taps; units and positions are chosen in front of them."""
        values = Values(program)
        aliases = Aliases(program.graph)
        written = {m for n in program.graph.nodes for t in mutated(n) for m in aliases.members(t)}
        prefix = tap_prefix(self.name, editor.number)
        for site in plan.sites or ():
            found = _value(values, site.detail)
            assert not isinstance(found, str)  # the plan skips what is no single tensor
            node = found.read(editor) if isinstance(found, Boundary) else found
            editor.tap(f"{prefix}.{site.address}", _chosen(editor, node, site.detail, node in written))

    def misfit(self, program: Program, detail: dict[str, Any]) -> str | None:
        """An edited value, side, unit or position that there is none of."""
        if detail.get("of") not in ("stream", "branch", "module") or detail.get("side") not in ("", *SIDES):
            return f"`of` is {detail.get('of')!r} and `side` {detail.get('side')!r}"
        try:
            found = _value(Values(program), detail)
        except (KeyError, AttributeError):
            return f"there is no {detail['of']} `{detail.get('name')}`"
        if isinstance(found, str):
            return found
        return _units_misfit(found, detail) or _last_misfit(program, found, detail)

    def fold(self, program: Program, sites: list[Site], prefix: str, weights: dict[str, torch.Tensor]) -> str | None:
        """Nothing to do: who looks changes nothing."""
        return None

    def preserves(self, program: Program, plan: PassPlan) -> Contract:
        return Exact()


def _matching(patterns: tuple[str, ...], names: Any, option: str, fit: Any) -> list[str]:
    """Names that one of the patterns fits, in order. A name fits itself, also with brackets (``stack0[3]/mlp``)."""

    def means(name: str, pattern: str) -> bool:
        return name == pattern or fit(name, pattern)

    for pattern in patterns:
        if not any(means(n, pattern) for n in names):
            known = list(names)
            raise UsageError(f"nothing is called `{pattern}`", where=option,
                             hint=f"{option} of this model: {', '.join(known[:8])}{', ...' if known[8:] else ''}")  # fmt: skip
    return [n for n in names if any(means(n, p) for p in patterns)]


def _is_module(path: str, address: str, pattern: str) -> bool:
    """Whether a pattern means a run of a module: every run by the path, or one by call and pass."""
    return fits(path, pattern) or any(fnmatchcase(spelling, pattern) for spelling in spellings(address))


def _value(values: Values, detail: dict[str, Any]) -> fx.Node | Boundary | str:
    """The value a site means, or why it is no single tensor."""
    name, side = detail["name"], detail["side"]
    if detail["of"] == "stream":
        stack = values.sites.stack(detail["stack"])
        assert stack is not None  # the plan is of this graph
        return values.boundaries(stack)[name]
    if detail["of"] == "branch":
        return values.of_branch(*values.branches()[name], side)
    return values.of_module(values.modules[name], side)


def _dimensions(found: fx.Node | Boundary) -> tuple[str, ...]:
    """Symbolic shape of what the tap will be; of several streams that of one."""
    if isinstance(found, Boundary):
        return _shape(found.node)[int(found.carrier.kind != "plain") :]
    return _shape(found)


def _shape(node: fx.Node) -> tuple[str, ...]:
    found = shape(node)
    assert found is not None, f"{node} holds no tensor"
    return found


def _units_misfit(found: fx.Node | Boundary, detail: dict[str, Any]) -> str | None:
    units, width = detail["units"], (_dimensions(found) or ("",))[-1]
    if units is None or (width.isdigit() and max(units, default=0) < int(width)):
        return None
    return f"{detail['name']} has {width or 'no'} units, not one number {max(units, default=0)}"


def _last_misfit(program: Program, found: fx.Node | Boundary, detail: dict[str, Any]) -> str | None:
    """Why the last position of a value is not that of its axis before the last one."""
    if not detail["last"]:
        return None
    names = [i.name for i in program.inputs]
    if program.signature.tokens is None:
        return "the model takes no tokens, so nothing has a last position"
    placeholders = program.graph.find_nodes(op="placeholder")
    tokens, own = _shape(placeholders[names.index(program.signature.tokens)]), _dimensions(found)
    if len(own) < 3 or own[:2] != tokens[:2]:
        return f"the value is {list(own)}, not [batch, position, ...]".replace("'", "")
    return None


def _chosen(editor: Editor, node: fx.Node, detail: dict[str, Any], in_place: bool) -> fx.Node:
    """The part of a value that is asked for, taken before anything writes to it."""
    units = detail["units"]
    if units is None and not detail["last"] and not in_place:
        return node
    *_, first = editor.graph.find_nodes(op="placeholder")
    operands = [node]
    if units is not None:
        device = node.meta["val"].device
        index = torch.tensor(units, dtype=torch.int64, device=device)
        operands.append(editor.constant("units", index))
    with editor.after(max([first, *operands]), role=OBSERVE):
        part: fx.Node = editor.inline(_part(detail["last"], len(operands) > 1), *operands)
        return part


def _part(last: bool, some: bool) -> Any:
    def part(x: torch.Tensor, units: torch.Tensor | None = None) -> torch.Tensor:
        x = x[:, -1:] if last else x
        return x.index_select(-1, units) if some and units is not None else x.clone()

    return part
