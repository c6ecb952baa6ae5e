"""Early exits in select form: every position leaves at the first exit that is sure enough.

All heads are computed and the answer is selected, so rows never depend on each other and the graph stays static.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, isnan
from typing import Any, ClassVar, Literal, cast

import torch
from hcx.rewrite.edit.editor import Editor
from hcx.rewrite.errors import UsageError
from hcx.rewrite.ir.dataflow import shape
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.traced import sizes, traced
from hcx.rewrite.pipeline.contracts import Contract, Exact, Structural
from hcx.rewrite.pipeline.passbase import Pass, tap_prefix
from hcx.rewrite.pipeline.plan import PassPlan, Reason, Site, Skip
from hcx.rewrite.sites.finder import find
from hcx.rewrite.sites.views import Stack
from torch import fx

from .insert import places
from .insert.heads import HEADS
from .insert.heads_copied import OWN_CACHE, last_part, norm_parameters, restrictable
from .insert.inserted import NEVER, Inserted, answer_of, readout, stream_misfit
from .insert.padding import find_valid
from .insert.roles import HEAD, SELECT
from .insert.scores import CHEAP, FOR_SEQUENCES, FROM_LOGITS, SCORES
from .insert.selection import depth_of, readers_of, select, selects_answer, stream_shape
from .insert.sequences import RULES, averaged, is_surest, surest


@dataclass(frozen=True)
class Exits(Pass):
    """Insert exits after ``at`` blocks each.

    Args:
        at: numbers of blocks executed before each exit (indices into ``hidden_states``); default: two thirds and five
            sixths of the depth. In a loop ``14~1`` is after block 14 in pass 1, ``14`` in the last one.
        head: ``shared`` reads the stream with the model's own final norm and head; ``norm`` with a norm of its own;
            ``own`` with a norm and a head of its own, copies at the start; ``affine`` translates it first; ``mlp`` and
            ``block`` first run a copy of the last block's MLP or of the whole block; ``classifier`` is linear with weights
            of its own, on the mean of the stream where the model gives one answer a row, else at each position; ``auto``
            is shared where that fits, else classifier.
        score: ``max_prob``, ``margin``, ``entropy`` or ``posterior`` (the logarithm of max_prob) of the exit's softmax;
            ``patience``: exits in a row with one answer; ``cosine`` of the stream with that of a block earlier;
            ``probe``: a linear probe of the stream; ``gate``: probability of having left, cumulated over linear gates;
            ``palbert``: over one MLP for all exits, which also reads the stream of a block earlier; ``jei``: gate over
            features of the softmax. All but the softmax ones, ``patience`` and ``jei`` need no head where nothing leaves.
        threshold: leave where the score reaches it; None never leaves, which keeps the function bitwise.
        candidates: how many rows of the head the score reads, not with a score of the stream; None reads all. The answer of an exit has all rows.
        per: what leaves together: each ``position``, or a ``sequence``: a row with all its positions, by the mean of the
            score over those that the call's mask keeps.
        rule: leave at the ``first`` exit whose score reaches its threshold; ``max``: at the surest of those whose score
            does, if it is at least as sure as the model's own answer, which is computed first.
        form: ``select`` computes everything and selects; ``cond`` runs the blocks and the head after an exit only while
            some position is still on the way, see :mod:`hcx.passes.exits.insert.cond_form`.
        kv: what the cache gets of blocks after a position's exit; None: what they compute anyway. ``propagate``: keys
            and values from the stream at the exit, which ``cond`` needs where there is a cache.
        stack: label of the stack to read; default: the one the output is read from.
    """

    name: ClassVar[str] = "exits"
    rank: ClassVar[int | None] = 40

    at: tuple[int | str, ...] | None = None
    head: Literal["auto", "shared", "norm", "own", "affine", "mlp", "block", "classifier"] = "auto"
    score: Literal[
        "max_prob", "margin", "entropy", "posterior", "cosine", "patience", "probe", "gate", "palbert", "jei"
    ] = "max_prob"
    threshold: float | None = None
    candidates: int | None = None
    per: Literal["position", "sequence"] = "position"
    rule: Literal["first", "max"] = "first"
    form: Literal["select", "cond"] = "select"
    kv: Literal["propagate"] | None = None
    stack: str | None = None

    def __post_init__(self) -> None:
        if self.threshold is not None and isnan(self.threshold):
            raise UsageError("exits{threshold=nan}: not a number", where="threshold", hint="left out, nothing leaves")
        if self.candidates is not None and self.candidates < 2:
            raise UsageError(f"exits{{candidates={self.candidates}}}: a score compares at least 2 rows", where="candidates",
                             hint="e.g. candidates=1024; left out: all rows")  # fmt: skip
        if self.candidates is not None and self.score in CHEAP:
            raise UsageError(f"exits{{score={self.score},candidates={self.candidates}}}: the score reads no rows of the head",
                             where="candidates", hint="leave it out, or a score of the softmax")  # fmt: skip
        if self.kv is not None and self.form == "select":
            raise UsageError(f"exits{{kv={self.kv}}}: select computes every block", where="kv", hint="form=cond")
        if self.per == "sequence" and self.score not in FOR_SEQUENCES:
            raise UsageError(
                f"exits{{score={self.score},per=sequence}}: the score cannot be averaged over positions",
                where="score",
                hint="one of " + ", ".join(FOR_SEQUENCES),
            )
        if self.rule == "max" and (self.score not in FROM_LOGITS or self.candidates is not None):
            raise UsageError(
                "exits{rule=max} compares with the model's own answer, which has scores of logits alone",
                where="rule",
                hint="score is one of " + ", ".join(FROM_LOGITS) + ", without candidates",
            )
        if self.rule == "max" and self.form == "cond":
            raise UsageError(
                "exits{rule=max} needs every exit and the model: nothing is skipped", where="rule", hint="form=select"
            )
        by_pass = [place for place in self.at or () if places.parsed(place)[1] is not None]
        if by_pass and self.form == "cond":
            raise UsageError(
                "exits{form=cond} skips blocks of the last pass of a loop only", where="at", hint="form=select"
            )

    def order(self) -> int | None:
        """Last where blocks move into branches: no other pass finds them there."""
        return 90 if self.form == "cond" else self.rank

    def plan(self, program: Program) -> PassPlan:
        """One site an exit; the ones whose head does not fit are skipped with the reason."""
        if self.at is not None and not self.at:
            raise UsageError("exits{at=[]}: no exit", where="at", hint="e.g. at=[20]; left out: two places by depth")
        plan = self.new_plan(sites=[])
        assert plan.sites is not None
        sites = find(program)
        stack = sites.stack(self.stack)
        if stack is None:
            if self.stack is not None and sites.stacks:
                raise UsageError(
                    f"there is no stack `{self.stack}`",
                    where="stack",
                    hint="stacks: " + ", ".join(s.label for s in sites.stacks),
                )
            plan.skips.append(
                Skip("model", Reason.NO_STREAM, "neither a residual stream nor stages between cut vertices")
            )
            return plan
        wanted = self.at if self.at is not None else default_places(stack.depth)
        if not wanted:
            plan.skips.append(Skip(stack.label, Reason.NO_BLOCKS, f"{stack.label} has only {stack.depth} block(s)"))
            return plan
        found = {places.position(stack, k): k for k in reversed(wanted)}
        ordered = [found[i] for i in sorted(found)]
        head = self._head(program, stack, ordered, plan)
        misfit = self._misfit(program, stack, head) or self._rows_misfit(program, stack, plan.notes)
        if misfit is not None:
            plan.skips.append(Skip(stack.label, Reason.HEAD_SHAPE, misfit))
            return plan
        for k in ordered:
            wrong = self._misfit_at(program, stack, k, head)
            if wrong is not None:
                plan.skips.append(Skip(f"{stack.label}@{k}", Reason.HEAD_SHAPE, wrong))
            else:
                plan.sites.append(Site(f"{stack.label}@{k}", "exit", self._detail(stack, k, head)))
        self._check_form(program, stack, plan)
        width = traced(stack.boundaries[-1].node).shape[-1]
        plan.estimate = {
            "heads": len(plan.sites),
            "new parameters": len(plan.sites) * (int(width) * (int(width) + 1) if head == "affine" else 0),
        }
        return plan

    def _misfit_at(self, program: Program, stack: Stack, place: places.Place, head: str) -> str | None:
        """Why this head or the score does not fit the stream at one place, or None."""
        here = places.boundary(stack, place)
        if head == "classifier" and (wrong := _each_misfit(stack, place, sizes(_answer(program, stack)))):
            return wrong
        if head != "classifier" and not self._fits(stack, here.node):
            return f"the stream is {_text(here.node)} here and {_text(stack.boundaries[-1].node)} at the readout"
        return stream_misfit(stream_shape(here), sizes(_answer(program, stack))) if self.score in CHEAP else None

    def _detail(self, stack: Stack, place: places.Place, head: str) -> dict[str, Any]:
        """What a plan says of one exit: options that are left out are not named."""
        detail: dict[str, Any] = {
            "stack": stack.label,
            "at": place,
            "head": head,
            "score": self.score,
            "threshold": self.threshold,
        }
        if self.candidates is not None:
            detail["candidates"] = self.candidates
        if self.per != "position":
            detail["per"] = self.per
        if self.rule != "first":
            detail["rule"] = self.rule
        return detail

    def _misfit(self, program: Program, stack: Stack, head: str) -> str | None:
        """Why this head or these candidates cannot be had in this model, or None."""
        wrong = _misfit(program, stack, head)
        if wrong is not None or (head in ("shared", "affine") and self.candidates is None):
            return wrong
        if head == "classifier":
            return "a classifier has no rows of the model's head" if self.candidates is not None else None
        if head in ("mlp", "block"):
            part = last_part(program, stack, head) if stack.residual else "there is no residual stream"
            if stack.boundaries[-1].carrier.kind != "plain":
                part = "the stream is carried as several streams"
            if isinstance(part, str):
                return part
        end, answer = stack.boundaries[-1], _answer(program, stack)
        assert answer is not None  # else there is a misfit above
        nodes = readout(program, end.node, answer)
        if head == "norm" and norm_parameters(program, nodes) is None:
            return "the model's readout has no norm with weights between the stream and its head"
        if head == "own" and not any(n.op == "get_attr" for node in nodes for n in node.all_input_nodes):
            return "the model's readout has no weights that an exit could have of its own"
        if self.candidates is None:
            return None
        return restrictable(program, nodes, int(traced(answer).shape[-1]), self.candidates)

    def _rows_misfit(self, program: Program, stack: Stack, notes: list[str]) -> str | None:
        """Why a sequence cannot leave as a whole in this model, or None."""
        if self.per != "sequence":
            return None
        if program.signature.has_cache:
            return "a sequence leaves as a whole, and a step with a cache sees its new tokens alone: trace with cache=False"
        answer = _answer(program, stack)
        assert answer is not None  # else there is a misfit already
        if sizes(answer)[0] not in _batches(program):
            return f"the answer {_text(answer)} does not start with the batch, so it is not known what a row is"
        found = find_valid(program, answer, notes)
        return found if isinstance(found, str) else None

    def _check_form(self, program: Program, stack: Stack, plan: PassPlan) -> None:
        from .insert import cond_form

        if (
            self.form == "cond"
            and plan.sites
            and plan.sites[0].detail["head"] == "block"
            and program.signature.has_cache
        ):
            plan.sites = []
            plan.skips.append(Skip(stack.label, Reason.UNSUPPORTED, f"head=block {OWN_CACHE}"))
        if self.form == "cond" and plan.sites:
            at = [s.detail["at"] for s in plan.sites]
            answer = _answer(program, stack)
            assert answer is not None  # else there is a misfit already
            refused = cond_form.refusal(program, stack, answer, at, self.kv)
            if refused is not None:
                plan.sites = []
                plan.skips.append(refused)

    def _head(self, program: Program, stack: Stack, wanted: list[places.Place], plan: PassPlan) -> str:
        if self.head != "auto":
            return self.head
        if stack.residual and all(self._fits(stack, places.boundary(stack, k).node) for k in wanted):
            return "shared"
        plan.notes.append(
            "head=auto became classifier: the model's own head does not read the stream at these places; train it through its tap"
        )
        return "classifier"

    @staticmethod
    def _fits(stack: Stack, node: fx.Node) -> bool:
        return (
            shape(node) == shape(stack.boundaries[-1].node)
            and traced(node).dtype == traced(stack.boundaries[-1].node).dtype
        )

    def apply(self, program: Program, plan: PassPlan, editor: Editor) -> None:
        """Insert heads, scores and the selection; taps carry each exit's logits and score, and the depth taken."""
        if not plan.sites:
            return
        stack = find(program).stack(plan.sites[0].detail["stack"])  # once: heads look like blocks
        assert stack is not None  # the plan is of this graph
        logits = _answer(program, stack)
        assert logits is not None
        first = plan.sites[0].detail
        valid = find_valid(program, logits) if first.get("per") == "sequence" else None
        assert not isinstance(valid, str)  # a misfit in the plan
        exits: list[Inserted] = []
        for site in plan.sites:
            earlier = exits[-1] if exits else None
            exits.append(Inserted(editor, program, stack, logits, site.detail, earlier, len(plan.sites), valid))
        if first.get("rule") == "max":
            self._compare(editor, exits, logits)
        if self.form == "cond":
            from .insert import cond_form

            readers = readers_of(program, stack, logits, False)
            cond_form.insert(program, stack, editor, exits, logits, readers, hold=self.kv == "propagate",
                             tap=lambda depth: self._add_taps(editor, exits, depth))  # fmt: skip
            return
        if first.get("rule") == "max" or selects_answer(stack, logits, first["head"]):
            answer = logits
            candidates = [e.logits for e in exits]
        else:
            answer = stack.boundaries[-1].read(editor)
            candidates = [e.view for e in exits]
        readers = readers_of(program, stack, answer, answer is not logits)
        with editor.after(max([answer, *(e.fire for e in exits)]), role=SELECT):
            chosen: fx.Node = answer
            depth: fx.Node | None = None
            *before, full = places.blocks_before(stack, [e.at for e in exits])
            for entry, candidate, count in reversed(list(zip(exits, candidates, before, strict=True))):
                chosen = editor.inline(select, entry.fire, candidate, chosen)
                depth = editor.inline(depth_of(count, full), entry.fire, *([depth] if depth is not None else []))
        editor.redirect(answer, chosen, only=readers.__contains__)
        assert depth is not None  # there is an exit
        self._add_taps(editor, exits, depth)

    def _compare(self, editor: Editor, exits: list[Inserted], answer: fx.Node) -> None:
        """Let the surest of the exits win that may be left at; tap what it was up against."""
        prefix, detail = tap_prefix(self.name, editor.number), exits[-1].detail
        with editor.after(max(answer, exits[-1].fire), role=HEAD):
            end = editor.inline(FROM_LOGITS[detail["score"]], answer)
            if detail.get("per") == "sequence":
                end = editor.inline(averaged, end, *([exits[-1].valid] if exits[-1].valid is not None else []))
            best = editor.inline(surest, end, *(n for e in exits for n in (e.score, e.fire)))
            for entry in exits:
                editor.tap(f"{prefix}.{entry.at}.fires", entry.fire)
                entry.fire = editor.inline(is_surest, entry.fire, entry.score, best)
        editor.tap(f"{prefix}.score", end)

    def _add_taps(self, editor: Editor, exits: list[Inserted], depth: fx.Node) -> None:
        prefix = tap_prefix(self.name, editor.number)
        for entry in exits:
            editor.tap(f"{prefix}.{entry.at}.logits", entry.logits)
            editor.tap(f"{prefix}.{entry.at}.score", entry.score)
        editor.tap(f"{prefix}.depth", depth)
        if exits[-1].valid is not None:
            editor.tap(f"{prefix}.valid", exits[-1].valid)

    def misfit(self, program: Program, detail: dict[str, Any]) -> str | None:
        """An edited place, head, score or threshold that there is none of."""
        stack = find(program).stack(detail.get("stack"))
        if stack is None:
            return f"there is no stack {detail.get('stack')!r}"
        try:
            places.position(stack, cast(places.Place, detail.get("at")))
        except (UsageError, TypeError):
            return f"`at` is {detail.get('at')!r}, must be 1 to {stack.depth - 1}"
        if detail.get("head") not in HEADS:
            return f"`head` is {detail.get('head')!r}, must be one of {', '.join(HEADS)}"
        if detail.get("score") not in SCORES:
            return f"`score` is {detail.get('score')!r}, must be one of {', '.join(SCORES)}"
        if detail.get("candidates") is not None and detail["score"] in CHEAP:
            return f"`candidates` is {detail['candidates']!r}, and score={detail['score']} reads no rows of the head"
        if detail.get("per", "position") not in ("position", "sequence") or detail.get("rule", "first") not in RULES:
            return f"`per` is {detail.get('per')!r} and `rule` {detail.get('rule')!r}"
        if not isinstance(detail.get("threshold"), int | float | None):
            return f"`threshold` is {detail.get('threshold')!r}, must be a number or null"
        return None

    def fold(self, program: Program, sites: list[Site], prefix: str, weights: dict[str, torch.Tensor]) -> str | None:
        """Nothing to do where no exit can fire."""
        for site in sites:
            threshold = float(program.tensor(f"{prefix}.{places.tensor_part(site.detail['at'])}.threshold"))
            if threshold != NEVER:
                return f"its exit at {site.address} leaves at a score of {threshold:.3g}"
        return None

    def preserves(self, program: Program, plan: PassPlan) -> Contract:
        """Exact while no exit can fire."""
        return Exact() if all(s.detail["threshold"] in (None, NEVER) for s in plan.sites or ()) else Structural()

    def inert(self, name: str) -> str | None:
        """A gate's bias where its weights are still 0."""
        if not name.endswith("gate.bias"):
            return None
        return "all positions have one score at the start, and the weights of the check's loss sum to 0"

    def perturbed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Thresholds change sides: every position leaves, or none where all did."""
        if not name.endswith("threshold"):
            return super().perturbed(name, tensor)
        return torch.where(tensor < 0, torch.full_like(tensor, NEVER), torch.full_like(tensor, -NEVER))


def _answer(program: Program, stack: Stack) -> fx.Node | None:
    return answer_of(program.graph, len(program.output_names), stack)


def _misfit(program: Program, stack: Stack, head: str) -> str | None:
    """Why the scores of an exit cannot choose between the early and the late value."""
    answer = _answer(program, stack)
    if answer is None:
        return "no output can be read as logits: floating, two or more dimensions, two or more classes in the last one"
    scores = sizes(answer)[:-1]
    if head == "classifier" and len(scores) > 2:
        return f"a classifier gives one answer a row or a position, the model gives {_text(answer)}"
    return None


def _each_misfit(stack: Stack, place: places.Place, answer: tuple[str, ...]) -> str | None:
    """Why a classifier at each position of the stream does not answer at each one of the model's answer, or None."""
    stream = stream_shape(places.boundary(stack, place))
    if len(answer) == 2 or (len(stream) == 3 and stream[:-1] == answer[:-1]):
        return None
    return f"the stream is {list(stream)} here, the answer {list(answer)}: their positions differ".replace("'", "")


def _batches(program: Program) -> set[str]:
    """Sizes of this graph that are the number of rows of a call."""
    nodes = [n for n in program.graph.nodes if n.op == "placeholder"]
    return {
        sizes(n)[0] for n, spec in zip(nodes, program.inputs, strict=True) if spec.shape[:1] == ("batch",) and shape(n)
    }


def default_places(depth: int) -> tuple[int, ...]:
    """Two thirds and five sixths of the depth, where these are blocks before the last."""
    return tuple(sorted({k for k in (ceil(2 * depth / 3), ceil(5 * depth / 6)) if 0 < k < depth}))


def _text(node: fx.Node) -> str:
    return str([str(s) for s in traced(node).shape]).replace("'", "")
