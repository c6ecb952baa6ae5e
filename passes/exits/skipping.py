"""Exits that were fitted and calibrated in select form, made to skip work: the same heads, scores and thresholds in branches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from hcx.rewrite.edit.editor import Editor
from hcx.rewrite.errors import UsageError
from hcx.rewrite.ir.fork import fork
from hcx.rewrite.ir.history import runs_of
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.tags import has_role
from hcx.rewrite.pipeline.contracts import Contract, Exact, Structural
from hcx.rewrite.pipeline.passbase import Pass, tap_prefix
from hcx.rewrite.pipeline.plan import PassPlan, Reason, Site, Skip
from hcx.rewrite.sites.finder import find
from hcx.rewrite.sites.views import Stack
from torch import fx

from .applied import NAME, Applied, applied, never_leaving, without_taps
from .insert import cond_form
from .insert.heads_copied import OWN_CACHE
from .insert.inserted import NEVER, answer_of, is_selection
from .insert.places import Place
from .insert.roles import SELECT
from .insert.selection import readers_of


@dataclass(frozen=True)
class Skipping(Pass):
    """Run blocks after an exit only while some position is still on the way; see :mod:`hcx.passes.exits.insert.cond_form`.

    Args:
        kv: what the cache gets of blocks that are skipped, which a model with a cache needs to know: ``propagate``, keys
            and values from the stream at the exit.
    """

    name: ClassVar[str] = "skipping"
    rank: ClassVar[int | None] = 90

    kv: Literal["propagate"] | None = None

    def plan(self, program: Program) -> PassPlan:
        """One site an exit of the last ``exits``."""
        plan = self.new_plan(sites=[])
        assert plan.sites is not None
        if not runs_of(program.history, NAME):
            plan.skips.append(Skip("model", Reason.NO_READOUT, "there are no exits; rewrite with `exits` first"))
            return plan
        exits = applied(program)
        if exits.rule == "max":
            plan.skips.append(
                Skip("model", Reason.UNSUPPORTED, "rule=max needs every exit and the model: nothing is skipped")
            )
            return plan
        if program.signature.has_cache and any(d["head"] == "block" for d in exits.details):
            plan.skips.append(Skip("model", Reason.UNSUPPORTED, f"head=block {OWN_CACHE}"))
            return plan
        bare, stack = _bare(program, exits)
        answer = answer_of(bare.graph, len(bare.output_names), stack)
        assert answer is not None  # it has exits
        refused = cond_form.refusal(bare, stack, answer, exits.places, self.kv)
        if refused is not None:
            plan.skips.append(refused)
            return plan
        plan.sites = [Site(f"{stack.label}@{k}", "exit", {"stack": stack.label, "at": k}) for k in exits.places]
        return plan

    def apply(self, program: Program, plan: PassPlan, editor: Editor) -> None:
        """Take the selection out, and decide and branch on what the heads find."""
        if not plan.sites:
            return
        exits = applied(program)
        named = {n.name: n for n in program.graph.nodes}
        _, found = _bare(program, exits)
        stack = replace(found, boundaries=[replace(b, node=named[b.node.name]) for b in found.boundaries])
        answer = named[exits.answer]
        prefix = tap_prefix(NAME, exits.number)
        for node in [n for n in program.graph.nodes if is_selection(n)]:
            editor.redirect(node, node.args[2])
        editor.drop_taps(f"{prefix}.")
        for node in reversed(list(program.graph.nodes)):
            if has_role(node, NAME, SELECT) and not node.users:
                program.graph.erase_node(node)
        entries = [
            _Entry(k, named[logits], named[score], _fire(named[score], exits.tensor(k, "threshold")))
            for k, logits, score in zip(exits.places, exits.logits, exits.scores, strict=True)
        ]

        def tap(depth: fx.Node) -> None:
            for entry in entries:
                editor.tap(f"{prefix}.{entry.at}.logits", entry.logits)
                editor.tap(f"{prefix}.{entry.at}.score", entry.score)
            editor.tap(f"{prefix}.depth", depth)

        readers = readers_of(program, stack, answer, False)
        cond_form.insert(program, stack, editor, entries, answer, readers, hold=self.kv == "propagate", tap=tap)

    def preserves(self, program: Program, plan: PassPlan) -> Contract:
        """Exact, but for keys and values of blocks that are skipped."""
        limits = [t for n, t in program.named_buffers() if program.origin.get(n) == NAME and n.endswith(".threshold")]
        silent = all(bool((t == NEVER).all()) for t in limits)
        return Exact() if self.kv is None or silent else Structural()

    def misfit(self, program: Program, detail: dict[str, Any]) -> str | None:
        """Exits move into branches all together."""
        places = applied(program).places
        return None if detail.get("at") in places else f"`at` is {detail.get('at')!r}, exits are at {places}"

    def fold(self, program: Program, sites: list[Site], prefix: str, weights: dict[str, torch.Tensor]) -> str | None:
        """Nothing of its own: ``exits`` says whether one of them can leave."""
        return None


@dataclass
class _Entry:
    at: Place
    logits: fx.Node
    score: fx.Node
    fire: fx.Node


def _bare(program: Program, exits: Applied) -> tuple[Program, Stack]:
    """The Program in which nothing leaves and its heads are gone, under the same node names, and its stack."""
    bare = fork(program)
    prefix = tap_prefix(NAME, exits.number)
    bare.graph = without_taps(never_leaving(program), len(program.output_names), f"{prefix}.")
    stack = find(bare).stack(exits.details[0]["stack"])
    if stack is None:
        raise UsageError("the stack of the exits is not found any more", where=str(exits.details[0]["stack"]))
    return bare, stack


def _fire(score: fx.Node, threshold: str) -> fx.Node:
    """The decision at an exit: who compares its score with its threshold."""
    return next(u for u in score.users if any(o.op == "get_attr" and o.target == threshold for o in u.all_input_nodes))
