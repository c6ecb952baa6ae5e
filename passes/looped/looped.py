"""Dense blocks to a loop: a window runs T times with shared weights, mixed by one learned scalar.

Sources: docs/sources.md, loop-mixing; docs/sources.md, loop-caches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from hcx.rewrite.edit.editor import Editor
from hcx.rewrite.errors import UsageError
from hcx.rewrite.ir.dataflow import shape
from hcx.rewrite.ir.program import Program
from hcx.rewrite.ir.tags import MIX
from hcx.rewrite.ir.traced import traced
from hcx.rewrite.pipeline.contracts import Contract, Exact, Structural
from hcx.rewrite.pipeline.passbase import Pass
from hcx.rewrite.pipeline.plan import PassPlan, Reason, Site, Skip
from hcx.rewrite.sites.finder import cache_nodes, find
from hcx.rewrite.sites.spans import span_of
from hcx.rewrite.sites.views import Stack
from torch import fx

from . import restart, runtime, sweep
from .forms import NAMES, Form, form, is_neutral
from .marks import close
from .readouts import add_readouts
from .uses import outside_notes, shared_uses
from .window import Jump, after_norm, default_window, grows, measured_jumps, run_windows, sink_notes


@dataclass(frozen=True)
class Looped(Pass):
    """Run blocks ``[start, end)`` ``steps`` times.

    Args:
        start, end: half-open range of original block numbers; default: a window of equal blocks near the middle, away
            from the block in which the attention sink appears. ``start=auto``: the window that loses least on the
            example, or on the text that ``hcx plan --text`` is given. ``start=runs``: every run of equal blocks (the
            stages of an image network), each as a loop of its own with a scalar of its own.
        steps: number of passes T over the window.
        scalar: initial mixing scalar; 0 keeps the model's function bitwise.
        mix: ``input`` mixes what an iteration reads, ``input_rms`` does so at the norm of the window's input,
            ``input_linear`` with a matrix; ``output`` mixes what it returns, ``output_vector`` with a gate a channel;
            ``damped`` takes T sub-steps of 1/T and mixes their end with the first pass; ``full`` feeds the whole stack
            and its final norm back (Ouro; changes the function unless steps=1); ``restart`` begins every pass at the
            window's input and lets branches hear from the pass before. See :mod:`hcx.passes.looped.mixing` and ``restart``.
        readout: ``steps`` taps the logits and state of every iteration; ``final`` leaves the answer alone.
        gate: ``ouro`` taps the probability to stop after each iteration, a linear gate on its state, for training.
        cache: ``per_iteration`` gives every pass cache slots of its own, which decodes exactly; with ``last`` all passes
            read what the last one left of earlier tokens, an approximation that costs no more cache than the model.
        runtime: take the number of passes as an input ``steps`` of the call, ``steps`` where it is left out; see
            :mod:`hcx.passes.looped.runtime`.
        stack: label of the stack to loop, where a model has several; default: the one the output is read from.
    """

    name: ClassVar[str] = "looped"
    rank: ClassVar[int | None] = 20
    aliases: ClassVar[dict[str, str]] = {
        "loop_layer_index_start": "start",
        "loop_layer_index_end": "end",
        "loop_num_passes": "steps",
    }

    start: int | Literal["auto", "runs"] | None = None
    end: int | None = None
    steps: int = 2
    scalar: float = 0.0
    mix: Literal["input", "input_rms", "input_linear", "output", "output_vector", "damped", "full", "restart"] = "input"
    readout: Literal["final", "steps"] = "final"
    gate: Literal["none", "ouro"] = "none"
    cache: Literal["per_iteration", "last"] = "per_iteration"
    runtime: bool = False
    stack: str | None = None

    def __post_init__(self) -> None:
        if self.runtime and self.steps < 2:
            raise UsageError("looped{runtime=true,steps=1}: as it is called, it does not loop", where="steps",
                             hint="give the usual number of steps; a call may pass steps=1")  # fmt: skip
        if not math.isfinite(self.scalar):
            raise UsageError(f"looped{{scalar={self.scalar}}}: not a number", where="scalar", hint="0 keeps the model")
        if self.steps < 1:
            raise UsageError(f"looped{{steps={self.steps}}}: at least one step is needed", where="steps")
        if isinstance(self.start, int) != (self.end is not None):
            raise UsageError(
                "looped needs both start and end, or neither", where="start, end", hint="e.g. looped{start=12,end=16}"
            )
        plain = self.mix in ("input", "input_rms", "output") and (self.readout, self.gate) == ("final", "none")
        if self.runtime and not (plain and self.cache == "per_iteration"):
            raise UsageError(
                "looped{runtime=true} takes mix=input, input_rms or output, without readouts, gate or shared cache",
                where="runtime",
                hint="leave runtime out, or the other options",
            )
        if self.start == "runs" and (self.runtime or (self.readout, self.gate) != ("final", "none")):
            raise UsageError(
                "looped{start=runs} takes no runtime, readout or gate: they are of one window",
                where="start",
                hint="give start and end, or leave the other options out",
            )
        if self.mix == "restart" and (self.scalar or self.start == "auto"):
            raise UsageError(
                "looped{mix=restart} has no scalar: its gates start at 0",
                where="scalar" if self.scalar else "start",
                hint="leave it out, or choose another mix",
            )
        if self.mix == "full" and (self.scalar or isinstance(self.start, str)):
            raise UsageError(
                "looped{mix=full} has no scalar and one window: it feeds the whole stack back",
                where="scalar" if self.scalar else "start",
                hint="leave it out, or choose another mix",
            )

    def order(self) -> int | None:
        """After passes that look for blocks: they do not find the ones of the loop's body."""
        return 80 if self.runtime else self.rank

    def plan(self, program: Program) -> PassPlan:
        """One window, or the reason why there is none."""
        plan = self.new_plan(sites=[])
        assert plan.sites is not None
        sites = find(program)
        stack = sites.stack(self.stack)
        if stack is None or not stack.residual:
            if self.stack is not None and sites.stacks:
                raise UsageError(
                    f"there is no stack `{self.stack}`",
                    where="stack",
                    hint="stacks: " + ", ".join(s.label for s in sites.stacks),
                )
            reason = (
                "no residual stream: a loop feeds a block's output back as its input"
                if stack is None or not stack.residual
                else ""
            )
            plan.skips.append(Skip(stack.label if stack else "model", Reason.NO_STREAM, reason))
            return plan
        if self.cache == "last" and not program.signature.has_cache:
            raise UsageError("looped{cache=last}: this model keeps no cache", where="cache", hint="leave it out")
        jumps = measured_jumps(program, stack)
        uses = shared_uses(program.graph, stack)
        shared = self.end is None and uses is not None and 2 * (uses.end - uses.start) > len(stack.blocks)
        windows = [] if shared else self._windows(program, stack, jumps)
        if not windows:
            plan.skips.append(
                Skip(
                    stack.label,
                    Reason.SHARED if shared else Reason.NO_BLOCKS,
                    str(uses) if shared else "no two consecutive blocks are equal; give start and end",
                )
            )
            return plan
        for window in windows:
            self._plan_window(program, stack, *window, jumps, plan)
        if uses is not None and not plan.skips:
            plan.notes.append(
                f"the model loops by itself: {uses}; every pass keeps the constants of the blocks it repeats"
            )
        return plan

    def _windows(self, program: Program, stack: Stack, jumps: list[Jump]) -> list[tuple[int, int]]:
        if self.end is not None:
            assert isinstance(self.start, int)  # both are given, or neither
            return [(self.start, self.end)]
        if self.mix == "full":
            return [(0, stack.depth)]
        if self.start == "auto":
            rows = sweep.sweep(program, self, sweep.example_text(program))
            return [sweep.best(rows)]
        if self.start == "runs":
            return run_windows(stack)
        window = default_window(stack, jumps)
        return [window] if window else []

    def _plan_window(
        self, program: Program, stack: Stack, start: int, end: int, jumps: list[Jump], plan: PassPlan
    ) -> None:
        address = f"{stack.label}[{start}:{end}]"
        if not 0 <= start < end <= stack.depth:
            raise UsageError(
                f"blocks [{start},{end}) are not in {stack.label}, which has {stack.depth}",
                where="start, end",
                hint=f"0 <= start < end <= {stack.depth}",
            )
        if self.mix == "full" and (start, end) != (0, stack.depth):
            raise UsageError(
                f"looped{{mix=full}} loops all {stack.depth} blocks of {stack.label}",
                where="start, end",
                hint="leave start and end out, or choose another mix",
            )
        entry, exit_ = self._cut(program, stack, start, end)
        heard = restart.listeners(stack, start, end) if self.mix == "restart" else []
        refused = self._refusal(program, stack, entry, exit_, heard)
        if refused is not None:
            plan.skips.append(Skip(address, *refused))
            return
        plan.notes += sink_notes(jumps, stack, start, end) if self.mix.startswith("input") or self.mix == "full" else []
        plan.notes += outside_notes(stack, start, end)
        detail = {
            "stack": stack.label,
            "start": start,
            "end": end,
            "steps": self.steps,
            "mix": self.mix,
            "scalar": self.scalar,
            "readout": self.readout,
            "gate": self.gate,
            "cache": self.cache,
            **({"runtime": True} if self.runtime else {}),
        }
        assert plan.sites is not None
        plan.sites.append(Site(address, "window", detail))
        so_far = plan.estimate or {"extra block applications": 0, "new parameters": 0}
        new = self._new_parameters(stack, entry, len(heard))
        plan.estimate = {
            "extra block applications": so_far["extra block applications"] + (self.steps - 1) * (end - start),
            "new parameters": so_far["new parameters"] + new,
        }

    def _refusal(
        self, program: Program, stack: Stack, entry: fx.Node, exit_: fx.Node, heard: list[restart.Listener]
    ) -> tuple[Reason, str] | None:
        """Why this window cannot be looped with these options, or None."""
        if shape(entry) != shape(exit_) or traced(entry).dtype != traced(exit_).dtype:
            text = f"the stream is {list(traced(entry).shape)} before and {list(traced(exit_).shape)} after"
            return Reason.WIDTH_CHANGES, text
        loop = span_of(program.graph, entry, exit_, cache_nodes(program))
        if self.runtime and loop.caches:
            return Reason.UNSUPPORTED, runtime.CACHE
        plain = stack.boundaries[0].carrier.kind == "plain"
        if self.mix == "restart" and (not heard or _axis(stack, entry) != -1 or not plain):
            return Reason.UNSUPPORTED, "mix=restart needs branches that read one plain stream with its features last"
        if self.cache == "last" and (state := next((n for n in loop.caches if not grows(program, n)), None)):
            text = f"cache=last: `{state.name}` is a state, and every pass needs its own"
            return Reason.UNSUPPORTED, text
        if loop.leaks:
            text = f"`{loop.leaks[0].name}` is used after the window: a loop carries the stream only"
            return Reason.LEAK, text
        return None

    def _new_parameters(self, stack: Stack, entry: fx.Node, heard: int) -> int:
        """Number of parameters that a window with so many branches that hear adds."""
        width = int(traced(entry).shape[_axis(stack, entry)])
        made = dict(form(self.mix, scalar=self.scalar, width=width, steps=self.steps).parameters)
        made |= {f"{n}.{k}": t for n in range(heard) for k, t in restart.start(width, n).items()}
        return sum(t.numel() for t in made.values()) if self.steps > 1 else 0

    def _cut(self, program: Program, stack: Stack, start: int, end: int) -> tuple[fx.Node, fx.Node]:
        """The stream before and after the window; of the whole stack, behind the model's final norm."""
        entry, exit_ = stack.boundary(start).node, stack.boundary(end).node
        return entry, after_norm(program, exit_) if self.mix == "full" else exit_

    def apply(self, program: Program, plan: PassPlan, editor: Editor) -> None:
        """Copy the window once for each further step; weights stay shared, caches get slots of their own."""
        sites = [(n, s) for n, s in enumerate(plan.sites or ()) if s.detail["steps"] > 1]
        if not sites:
            return
        stack = find(program).stack(sites[0][1].detail["stack"])  # once: a loop changes what is found
        assert stack is not None  # the plan is of this graph
        cuts = [self._cut(program, stack, s.detail["start"], s.detail["end"]) for _, s in sites]
        ends: dict[fx.Node, fx.Node] = {}
        for (number, site), (entry, exit_) in zip(sites, cuts, strict=True):
            ends[exit_] = self._apply_window(program, editor, number, site, stack, ends.get(entry, entry), exit_)

    def _apply_window(
        self, program: Program, editor: Editor, number: int, site: Site, stack: Stack, entry: fx.Node, exit_: fx.Node
    ) -> fx.Node:
        """Loop one window; returns what the rest of the model now reads in the place of its exit."""
        detail = site.detail
        loop = span_of(program.graph, entry, exit_, cache_nodes(program))
        readers = set(exit_.users)
        output_nodes = set(program.graph.output_node().all_input_nodes)
        ways = _form(stack, entry, detail)
        like: dict[str, Any] = {"dtype": traced(entry).dtype, "device": traced(entry).device}
        label = f"{number}." if number else ""
        tensors = [editor.parameter(f"{label}{n}", t.to(**like)) for n, t in ways.parameters.items()]
        key = f"{self.name}_{editor.number}{f'.{number}' if number else ''}"
        if detail.get("runtime"):
            return runtime.insert(program, editor, loop, ways.mix, tensors[0], detail["steps"], readers)
        state, last = exit_, max([exit_, *loop.nodes])
        states = [exit_]
        before: dict[fx.Node, fx.Node] = {}
        heard = restart.listeners(stack, detail["start"], detail["end"]) if detail["mix"] == "restart" else []
        for step in range(2, detail["steps"] + 1):
            with editor.after(last, role=MIX, iteration=step, loop=key):
                if step == 2 and ways.start:
                    state = editor.inline(ways.start, entry, exit_, *tensors)
                read = editor.inline(ways.mix, entry, state, *tensors) if ways.mix else state
                shared = detail["cache"] == "last"
                mapping = {entry: read, **({} if shared else editor.add_cache_slots(loop.caches))}
                editor.clone(loop.nodes, mapping, iteration=step, loop=key)
                if heard:
                    restart.insert(editor, heard, mapping, before, label, like, iteration=step, loop=key)
                    before = mapping
                result = mapping[exit_]
                state = editor.inline(ways.update, state, result, *tensors) if ways.update else result
                if step == detail["steps"] and ways.end:
                    state = editor.inline(ways.end, exit_, state, *tensors)
                states.append(state)
                last = max([state, *(mapping[n] for n in loop.nodes)])
            present = {n: mapping[n] for n in loop.nodes if n in output_nodes and n is not exit_}
            if not shared:
                editor.add_cache_outputs(present)
            elif step == detail["steps"]:
                for old, new in present.items():
                    program.graph.output_node().replace_input_with(old, new)
        editor.redirect(exit_, state, only=readers.__contains__)
        close(state, exit_, key, site.address, detail)
        if detail["readout"] == "steps" or detail["gate"] != "none":
            add_readouts(program, editor, stack, states, detail, label)
        return state

    def fold(self, program: Program, sites: list[Site], prefix: str, weights: dict[str, torch.Tensor]) -> str | None:
        """Nothing to do for a loop that changes nothing: its mix is still neutral, or it has one step."""
        for number, site in enumerate(sites):
            if not is_neutral(site.detail["mix"], site.detail["steps"], tensors_of(program, prefix, number)):
                return f"its loop over {site.address} mixes with {_described(program, prefix, number)}"
        return None

    def approximates(self, plan: PassPlan) -> str | None:
        """A cache that passes share is not what a full forward gives once the mix has moved."""
        shared = any(s.detail["cache"] == "last" and s.detail["steps"] > 1 for s in plan.sites or ())
        return "the passes of a loop share the cache of the last one" if shared else None

    def undo(self, program: Program, sites: list[Site], prefix: str) -> Pass | None:
        """Take out loops that change nothing at present."""
        from .unloop import Unloop

        still = [
            is_neutral(s.detail["mix"], s.detail["steps"], tensors_of(program, prefix, n)) for n, s in enumerate(sites)
        ]
        return Unloop(separate=False) if any(still) and any(s.detail["steps"] > 1 for s in sites) else None

    def inert(self, name: str) -> str | None:
        """The channel gate of ``output_vector`` learns once its scalar has moved, an exit gate by a loss that reads it."""
        if "gate." in name:
            return "it learns from a loss on the exit distribution"
        if self.mix == "restart" and name.endswith((".query", ".down")):
            return "its gradient is zero until a gate has moved"
        gate = self.mix == "output_vector" and not name.endswith("scalar")
        return "its gradient is zero until the scalar has moved" if gate else None

    def changes(self, plan: PassPlan) -> bool:
        """A loop of one step is meant to do nothing."""
        return any(s.detail["steps"] > 1 for s in plan.sites or ())

    def misfit(self, program: Program, detail: dict[str, Any]) -> str | None:
        """An edited number of steps or mix that there is none of."""
        if detail["steps"] < 1:
            return f"`steps` is {detail['steps']}, must be 1 or more"
        return None if detail["mix"] in NAMES else f"`mix` is {detail['mix']!r}, must be one of {', '.join(NAMES)}"

    def preserves(self, program: Program, plan: PassPlan) -> Contract:
        """Exact with the scalar at 0 or a single step."""
        details = [s.detail for s in plan.sites or ()]
        neutral = all((d["scalar"] == 0 and d["mix"] != "full") or d["steps"] == 1 for d in details)
        return Exact() if neutral else Structural()


def tensors_of(program: Program, prefix: str, number: int) -> dict[str, torch.Tensor]:
    """Parameters of one window of a loop by their short names: ``scalar``, or those of its form."""
    start = f"{prefix}.{number}." if number else f"{prefix}."
    found = {n.removeprefix(start): p for n, p in program.named_parameters() if n.startswith(start)}
    return {n: p.detach() for n, p in found.items() if not n[0].isdigit()}


def _described(program: Program, prefix: str, number: int) -> str:
    tensors = tensors_of(program, prefix, number)
    if "scalar" in tensors:
        return f"a scalar of {float(tensors['scalar']):.3g}"
    if any(n.endswith(".inject") for n in tensors):
        return "messages"
    return "a matrix" if tensors else "the whole state"


def _form(stack: Stack, entry: fx.Node, detail: dict[str, Any]) -> Form:
    axis = _axis(stack, entry)
    width = int(traced(entry).shape[axis])
    return form(detail["mix"], scalar=detail["scalar"], width=width, steps=detail["steps"], axis=axis)


def _axis(stack: Stack, entry: fx.Node) -> int:
    """Dimension of the features: the last one, or the channels of images, behind the streams where there are several."""
    streams = int(stack.boundaries[0].carrier.kind == "streams")
    return 1 + streams if traced(entry).dim() - streams >= 4 else -1
