"""The checks behind every rewrite. The driver runs them; a pass cannot skip or soften one."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from hcx.rewrite.ir.program import Program
from hcx.rewrite.pipeline import contracts
from hcx.rewrite.pipeline.contracts import Contract
from hcx.rewrite.run.generation import decode
from torch import fx

DECODE_STEPS = 6
DECODE_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 8e-3}
"""Cached decoding against the full forward, largest logit difference relative to the rms of the logits."""


@dataclass
class Check:
    """One finding: what was checked, whether it holds, and the figures."""

    name: str
    holds: bool
    measured: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "holds": self.holds, "measured": self.measured, "note": self.note}

    def __str__(self) -> str:
        figures = ", ".join(f"{k} {_short(v)}" for k, v in self.measured.items())
        return f"{'ok  ' if self.holds else 'FAIL'} {self.name}: {figures or self.note}{f' ({self.note})' if self.note and figures else ''}"


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def is_meta(program: Program) -> bool:
    """Whether the tensors are not there, so that nothing can be run."""
    return any(p.is_meta for p in program.parameters())


def outputs(program: Program, inputs: list[list[torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Named outputs of each input set, without gradients."""
    results = []
    with torch.no_grad():
        for flat in inputs:
            results.append(
                dict(
                    zip(
                        program.output_names,
                        program.run_flat([t.clone() for t in program.signature.complete(flat)]),
                        strict=True,
                    )
                )
            )
    return results


def compared(got: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Worst difference over input sets, by output name; outputs that only one side has are left out."""
    return contracts.merge(
        [
            contracts.compare([g[n] for n in e if n in g], [e[n] for n in e if n in g])
            for g, e in zip(got, expected, strict=True)
        ]
    )


def check_contract(contract: Contract, got: list[dict], expected: list[dict], name: str) -> Check:
    """Outputs against what they must be."""
    measured = compared(got, expected)
    return Check(name, contract.check(measured), measured, f"contract {contract}")


def check_source(
    program: Program,
    contract: Contract,
    inputs: list[list[torch.Tensor]],
    got: list[dict],
    base: list[dict] | None = None,
) -> Check | None:
    """Outputs against the source model's own eager run; None where it is not in memory.

    Args:
        base: outputs of the Program before this rewrite. Where they are no longer what the source gives, what
            earlier passes added has been trained, and the source is no oracle any more.
    """
    if program.reference is None:
        return None
    if not reference_is_current(program):
        note = "left out: the weights were changed since the trace"
        return Check("against the source model in eager", True, {}, note)
    count = len(program.reference.structure.names) if hasattr(program.reference, "structure") else None
    expected = []
    for flat in inputs:
        tensors = program.reference([t.clone() for t in flat[:count]])
        expected.append(dict(zip(program.output_names[: len(tensors)], tensors, strict=False)))
    if isinstance(contract, contracts.Exact) and not program.trace_exact:
        contract = contracts.Rounding(64)
    if base is not None and not contract.check(compared(base, expected)):
        note = "left out: what earlier passes added was changed since"
        return Check("against the source model in eager", True, {}, note)
    return check_contract(contract, got, expected, "against the source model in eager")


def reference_is_current(program: Program) -> bool:
    """Whether the source model still holds the weights of the Program: either may have been trained since the trace."""
    model = getattr(program.reference, "model", None)
    theirs = dict(model.state_dict()) if model is not None else {}
    mine = dict(program.named_tensors())
    return all(n not in mine or mine[n].shape != t.shape or _same(mine[n], t) for n, t in theirs.items())


def check_grad_mode(program: Program, inputs: list[list[torch.Tensor]], got: list[dict]) -> Check:
    """The same numbers with gradients recorded: a kernel chosen while tracing may not fit the other mode."""
    flat = program.signature.complete(inputs[0])
    with torch.enable_grad():
        result = dict(zip(program.output_names, program.run_flat([t.clone() for t in flat]), strict=True))
    measured = contracts.compare([result[n].detach() for n in got[0]], list(got[0].values()))
    return Check(
        "with gradients recorded",
        measured["ulps"] <= 64,
        {"bitwise": measured["bitwise"], "max_diff": measured["max_diff"]},
    )


def check_decode(program: Program, flat: list[torch.Tensor]) -> Check | None:
    """Decoding through the cache against full forwards, token by token; None for models without a cache."""
    names, tokens = [i.name for i in program.inputs], program.signature.tokens
    if not program.signature.has_cache or tokens is None or "logits" not in program.output_names:
        return None
    ids = flat[names.index(tokens)][:, :5]
    others = {s.name: t for s, t in zip(program.inputs, flat, strict=False) if s.fill is None and s.name != tokens}
    worst, agree = _decode_gap(program, ids, others)
    holds = worst <= DECODE_TOLERANCE.get(program.dtype, 1e-4) and agree
    figures = {"tokens": DECODE_STEPS, "max_relative_diff": worst, "argmax_equal": agree}
    note = ""
    if not holds and program.dtype != torch.float64:  # a rough function amplifies rounding; a wrong cache stays wrong
        others = {n: t.double() if t.is_floating_point() else t for n, t in others.items()}
        worst, agree = _decode_gap(copy.deepcopy(program).to(torch.float64), ids, others)
        holds = worst <= DECODE_TOLERANCE[torch.float64] and agree
        note = f"in float64 {worst:.3g}: {'rounding only' if holds else 'not rounding'}"
    reason = next((e["approximate_cache"] for e in program.history if e.get("approximate_cache")), None)
    if reason is not None and not holds:  # measured, and meant
        holds, note = True, f"approximate: {reason}"
    return Check("cached decoding equals the full forward", holds, figures, note)


def _decode_gap(program: Program, ids: torch.Tensor, others: dict[str, torch.Tensor]) -> tuple[float, bool]:
    """Largest logit difference relative to the rms, and whether clear winners agree."""
    signature, logits_at = program.signature, program.output_names.index("logits")
    tokens, cached = decode(signature, program.run_flat, program.output_names, ids, DECODE_STEPS, inputs=others)
    worst, agree = 0.0, True
    for step, logits in enumerate(cached):
        prefix = tokens[:, : ids.shape[1] + step]
        with torch.no_grad():
            full = program.run_flat(signature.by_name({**others, signature.tokens: prefix}))[logits_at][:, -1]
        scale = full.double().square().mean().sqrt().item()
        worst = max(worst, (full.double() - logits.double()).abs().max().item() / max(scale, 1e-12))
        top2 = full.double().topk(2, -1).values
        clear = (top2[:, 0] - top2[:, 1]) > 1e-3 * max(scale, 1e-12)
        agree &= bool(((full.argmax(-1) == logits.argmax(-1)) | ~clear).all())
    return worst, agree


def check_not_vacuous(program: Program, step: Any, plan_number: str, flat: list[torch.Tensor]) -> Check | None:
    """Changing what the pass added must move an output or a tap; None where it added no tensor."""
    own = {n: t for n, t in program.named_tensors() if n.startswith(f"hcx.{plan_number}.") and ".constant." not in n}
    if not own:
        return None
    complete = program.signature.complete(flat)
    saved = {n: t.detach().clone() for n, t in own.items()}
    moved = 0.0
    with torch.no_grad():
        before = [t.clone() for t in program.run_flat([t.clone() for t in complete], taps=True)]
        try:
            for _ in range(3):  # a switch may have to go to its other side
                for name, tensor in own.items():
                    tensor.copy_(step.perturbed(name, tensor.detach().clone()))
                moved = _movement(program.run_flat([t.clone() for t in complete], taps=True), before)
                if moved > 0:
                    break
        finally:
            for name, tensor in own.items():
                tensor.copy_(saved[name])
    finite = all(t.isfinite().all() for t in before if t.is_floating_point())
    note = "" if finite else "the outputs are not finite before any change: look for NaN in the weights or the example"
    figures = {"tensors": len(own), "moved": moved}
    return Check(f"not vacuous: {step.name}", moved > 0 and math.isfinite(moved), figures, note)


def check_changed(step: Any, before: Any, after: Any) -> Check:
    """A pass that reports sites has changed the graph or a tensor; ``before`` and ``after`` are of :func:`state_of`."""
    return Check(f"not vacuous: {step.name}", before != after, {"tensors": 0})


def state_of(program: Program) -> tuple:
    """What a pass may change, cheaply: operations, their operands, and which tensors there are."""
    number = {node: i for i, node in enumerate(program.graph.nodes)}
    nodes = [(n.op, str(n.target), *(number[i] for i in n.all_input_nodes)) for n in program.graph.nodes]
    literals = [repr([a for a in (*n.args, *n.kwargs.values()) if not isinstance(a, fx.Node)]) for n in number]
    tensors = [(n, t.data_ptr(), t._version, t.dtype) for n, t in program.named_tensors()]
    return nodes, literals, tensors, tuple(program.taps)


def _movement(after: list[torch.Tensor], before: list[torch.Tensor]) -> float:
    pairs = [(a, b) for a, b in zip(after, before, strict=True) if a.numel()]
    wide = [(a.to(torch.complex128 if a.is_complex() else torch.float64), b) for a, b in pairs]
    return max((a - b.to(a.dtype)).nan_to_num().abs().max().item() for a, b in wide)


def check_shapes(program: Program, base: Program) -> Check:
    """Without values: the graph computes in shapes and dtypes from its inputs on, and outputs have those of before."""
    from hcx.rewrite.host.optimiser import drop_values
    from hcx.rewrite.ir.values import propagate
    from hcx.rewrite.pipeline.walk import fork

    def described(one: Program) -> list[tuple]:
        copied = fork(one)
        copied.examples = [copied.signature.complete(flat) for flat in one.examples[:1]]
        drop_values(copied)
        propagate(copied)
        results = copied.graph.output_node().args[0][: len(base.output_names)]
        return [(r.meta["val"].dtype, tuple(map(str, r.meta["val"].shape))) for r in results]

    different = [n for n, a, b in zip(base.output_names, described(program), described(base), strict=True) if a != b]
    figures = {"nodes": len(program.graph.nodes), "outputs": len(base.output_names)}
    return Check("graph in shapes and dtypes", not different, figures, ", ".join(different))


def check_base_untouched(program: Program, base: Program) -> Check:
    """Every tensor of the base is bitwise what it was."""
    theirs = dict(base.named_tensors())
    changed = [n for n, t in program.named_tensors() if n in theirs and not t.is_meta and not _same(t, theirs[n])]
    return Check(
        "base parameters untouched", not changed, {"tensors": len(theirs)}, f"changed: {changed[:3]}" if changed else ""
    )


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() or torch.equal(a, b) or torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
