"""Dense blocks to a loop: a window runs T times with shared weights, mixed by one learned scalar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from hcx.rewrite.contracts import Contract, Exact, Structural
from hcx.rewrite.dataflow import value
from hcx.rewrite.editor import Editor
from hcx.rewrite.errors import UsageError
from hcx.rewrite.finder import cache_nodes, find
from hcx.rewrite.passbase import Pass
from hcx.rewrite.plan import PassPlan, Reason, Site, Skip
from hcx.rewrite.program import Program
from hcx.rewrite.sites import Stack

from . import runtime
from .mixing import mix_input, mix_input_rms, update_output
from .window import default_window, keeps_shape, loop_of, measured_jumps


@dataclass(frozen=True)
class Looped(Pass):
    """Run blocks ``[start, end)`` ``steps`` times.

    Args:
        start, end: half-open range of original block numbers; default: a window of equal blocks near the middle, away
            from the block in which the attention sink appears.
        steps: number of passes T over the window.
        scalar: initial mixing scalar; 0 keeps the model's function bitwise.
        mix: ``input`` mixes what an iteration reads, ``input_rms`` does so at the norm of the window's input, ``output``
            mixes what it returns; see :mod:`hcx.passes.looped.mixing`.
        runtime: take the number of passes as an input ``steps`` of the call, ``steps`` where it is left out; see
            :mod:`hcx.passes.looped.runtime`.
        stack: label of the stack to loop, where a model has several; default: the one the output is read from.
    """

    name: ClassVar[str] = "looped"
    rank: ClassVar[int | None] = 20

    start: int | None = None
    end: int | None = None
    steps: int = 2
    scalar: float = 0.0
    mix: Literal["input", "input_rms", "output"] = "input"
    runtime: bool = False
    stack: str | None = None

    def __post_init__(self) -> None:
        if self.runtime and self.steps < 2:
            raise UsageError("looped{runtime=true,steps=1}: as it is called, it does not loop", where="steps",
                             hint="give the usual number of steps; a call may pass steps=1")  # fmt: skip
        if self.steps < 1:
            raise UsageError(f"looped{{steps={self.steps}}}: at least one step is needed", where="steps")
        if (self.start is None) != (self.end is None):
            raise UsageError(
                "looped needs both start and end, or neither", where="start, end", hint="e.g. looped{start=12,end=16}"
            )

    def order(self) -> int | None:
        """After passes that look for blocks: they do not find the ones of the loop's body."""
        return 80 if self.runtime else self.rank

    def plan(self, program: Program) -> PassPlan:
        """One window, or the reason why there is none."""
        plan = self.new_plan(sites=[])
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
        jumps = measured_jumps(program, stack)
        window = (self.start, self.end) if self.start is not None else default_window(stack, jumps)
        shared = self.start is None and _shared_blocks(stack)
        if window is None or shared:
            plan.skips.append(
                Skip(
                    stack.label,
                    Reason.SHARED if shared else Reason.NO_BLOCKS,
                    "the blocks already share one set of weights"
                    if shared
                    else "no two consecutive blocks are equal; give start and end",
                )
            )
            return plan
        self._plan_window(program, stack, *window, jumps, plan)
        return plan

    def _plan_window(
        self, program: Program, stack: Stack, start: int, end: int, jumps: list[int], plan: PassPlan
    ) -> None:
        address = f"{stack.label}[{start}:{end}]"
        if not 0 <= start < end <= stack.depth:
            raise UsageError(
                f"blocks [{start},{end}) are not in {stack.label}, which has {stack.depth}",
                where="start, end",
                hint=f"0 <= start < end <= {stack.depth}",
            )
        entry, exit_ = self._cut(stack, start, end)
        if not keeps_shape(stack, start, end):
            plan.skips.append(
                Skip(
                    address,
                    Reason.WIDTH_CHANGES,
                    f"the stream is {list(value(entry).shape)} before and {list(value(exit_).shape)} after",
                )
            )
            return
        loop = loop_of(program.graph, entry, exit_, cache_nodes(program))
        if self.runtime and loop.caches:
            plan.skips.append(Skip(address, Reason.UNSUPPORTED, runtime.CACHE))
            return
        leaks = loop.leaks
        if leaks:
            plan.skips.append(
                Skip(
                    address, Reason.LEAK, f"`{leaks[0].name}` is used after the window: a loop carries the stream only"
                )
            )
            return
        inside = [j for j in jumps if start <= j < end]
        if inside and self.mix == "input":
            plan.notes.append(
                f"the attention sink appears in block {inside[0]}, inside the window: mix=input_rms or mix=output is gentler there"
            )
        plan.notes += (
            [f"blocks {start}..{end - 1} are not all equal in code; the loop repeats them as they are"]
            if not _one_run(stack, start, end)
            else []
        )
        detail = {
            "stack": stack.label,
            "start": start,
            "end": end,
            "steps": self.steps,
            "mix": self.mix,
            "scalar": self.scalar,
            **({"runtime": True} if self.runtime else {}),
        }
        plan.sites.append(Site(address, "window", detail))
        plan.estimate = {
            "extra block applications": (self.steps - 1) * (end - start),
            "new parameters": int(self.steps > 1),
        }

    @staticmethod
    def _cut(stack: Stack, start: int, end: int):
        return stack.boundary(start).node, stack.boundary(end).node

    def apply(self, program: Program, plan: PassPlan, editor: Editor) -> None:
        """Copy the window once for each further step; weights stay shared, caches get slots of their own."""
        for number, site in enumerate(plan.sites or ()):
            if site.detail["steps"] > 1:
                self._apply_window(program, editor, number, site.detail)

    def _apply_window(self, program: Program, editor: Editor, number: int, detail: dict) -> None:
        stack = find(program).stack(detail["stack"])
        entry, exit_ = self._cut(stack, detail["start"], detail["end"])
        loop = loop_of(program.graph, entry, exit_, cache_nodes(program))
        readers = set(exit_.users)
        output_nodes = set(program.graph.output_node().args[0])
        label = f"{number}." if number else ""
        scalar = editor.parameter(
            f"{label}scalar", torch.full((1,), detail["scalar"], dtype=value(entry).dtype, device=value(entry).device)
        )
        streams = int(stack.boundaries[0].carrier.kind == "streams")
        channels_first = value(entry).dim() - streams >= 4
        rms = mix_input_rms(1 + streams if channels_first else -1)
        mix = {"input": mix_input, "input_rms": rms, "output": None}[detail["mix"]]
        if detail.get("runtime"):
            runtime.insert(program, editor, loop, mix, scalar, detail["steps"], readers)
            return
        state, last = exit_, max([exit_, *loop.nodes])
        for step in range(2, detail["steps"] + 1):
            with editor.after(last, role="mix", iteration=step):
                read = editor.inline(mix, entry, state, scalar) if mix else state
                mapping = {entry: read, **editor.add_cache_slots(loop.caches)}
                editor.clone(loop.nodes, mapping, iteration=step)
                result = mapping[exit_]
                state = result if mix else editor.inline(update_output, state, result, scalar)
                last = max([state, *(mapping[n] for n in loop.nodes)])
            editor.add_cache_outputs({n: mapping[n] for n in loop.nodes if n in output_nodes})
        editor.redirect(exit_, state, only=readers.__contains__)

    def fold(self, program: Program, sites: list[Site], prefix: str, weights: dict[str, torch.Tensor]) -> str | None:
        """Nothing to do for a loop that changes nothing: its scalar is still 0, or it has one step."""
        for number, site in enumerate(sites):
            scalar = (
                program.tensor(f"{prefix}.{f'{number}.' if number else ''}scalar") if site.detail["steps"] > 1 else 0
            )
            if float(scalar) != 0:
                return f"its loop over {site.address} mixes with a scalar of {float(scalar):.3g}"
        return None

    def preserves(self, program: Program, plan: PassPlan) -> Contract:
        """Exact with the scalar at 0 or a single step."""
        neutral = all(s.detail["scalar"] == 0 or s.detail["steps"] == 1 for s in plan.sites or ())
        return Exact() if neutral else Structural()


def _shared_blocks(stack: Stack) -> bool:
    used = [{o.target for n in b.body for o in n.all_input_nodes if o.op == "get_attr"} for b in stack.blocks]
    common = set.intersection(*used)
    return len(used) > 1 and all(2 * len(common) > len(names) for names in used)


def _one_run(stack: Stack, start: int, end: int) -> bool:
    first, last = stack.position(start), stack.position(end - 1)
    return end - start == 1 or any(r.start <= first and last < r.end for r in stack.runs)
