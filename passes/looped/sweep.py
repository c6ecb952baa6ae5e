"""Which window loses least: every candidate measured on text, without training."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from hcx.rewrite.driver import rewrite
from hcx.rewrite.errors import UsageError
from hcx.rewrite.ir.fingerprint import fingerprint
from hcx.rewrite.ir.program import Program
from hcx.rewrite.sites.finder import find

from .window import candidate_windows, measured_jumps

if TYPE_CHECKING:
    from .looped import Looped

SCALARS = (0.1, 0.3)
CHUNK = 256
"""Tokens of one forward; each chunk is read from its own beginning."""


@dataclass(frozen=True)
class Measured:
    """One row of the table; losses in nats a token."""

    start: int
    end: int
    scalar: float
    loss: float
    base_loss: float

    @property
    def ratio(self) -> float:
        """Perplexity over that of the model without a loop."""
        return math.exp(min(self.loss - self.base_loss, 700.0))


def sweep(
    program: Program,
    step: Looped,
    ids: torch.Tensor,
    *,
    scalars: tuple[float, ...] = SCALARS,
    notes: Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Measured]:
    """Loss of every candidate window at a few scalars, in the mix and steps of ``step``.

    Args:
        ids: token ids ``[tokens]`` of the text.
        scalars: values of the mixing scalar; 0 would give the model's own loss.
        notes: file of one JSON object a line that measurements are added to as they are made, and taken from where they
            are there: an interrupted sweep goes on.
        progress: called with a line before each measurement.

    Raises:
        UsageError: the model does not go from tokens to logits, the text is too short, or nothing can be looped.
    """
    _require(program, ids, step)
    stack = find(program).stack(step.stack)
    windows = candidate_windows(stack, measured_jumps(program, stack)) if stack is not None and stack.residual else []
    if not windows:
        raise UsageError("there is no window of equal blocks to measure", where="start", hint="give start and end")
    key = {"fingerprint": fingerprint(program), "text": zlib.crc32(ids.cpu().numpy().tobytes()), "mix": step.mix,
           "steps": step.steps, "stack": stack.label}  # fmt: skip
    known, total = _known(notes, key), len(windows) * len(scalars)
    progress(f"measuring the model on {ids.numel()} tokens")
    base = text_loss(program, ids)
    rows: list[Measured] = []
    for start, end in windows:
        looped = None
        for scalar in scalars:
            loss = known.get((start, end, scalar))
            if loss is None:
                progress(f"window [{start},{end}) at scalar {scalar:g} ({len(rows) + 1} of {total})")
                made = replace(step, start=start, end=end, scalar=scalar)
                if looped is None or step.mix == "input_linear":
                    looped = rewrite(program, made, check=False)
                _set_scalar(looped, scalar)
                loss = text_loss(looped, ids)
                _note(notes, {**key, "start": start, "end": end, "scalar": scalar, "loss": loss})
            rows.append(Measured(start, end, scalar, loss, base))
    return rows


def best(rows: list[Measured]) -> tuple[int, int]:
    """The window with the least mean loss over the scalars; of equal ones the first."""
    windows = dict.fromkeys((r.start, r.end) for r in rows)
    return min(windows, key=lambda w: sum(r.loss for r in rows if (r.start, r.end) == w))


def table(rows: list[Measured]) -> str:
    """Perplexities as a table: windows down, scalars across, best window marked."""
    scalars, chosen = list(dict.fromkeys(r.scalar for r in rows)), best(rows)
    lines = [f"perplexity without a loop {math.exp(rows[0].base_loss):.2f}; with one, by scalar:"]
    lines.append("  window   " + "".join(f"{s:>12g}" for s in scalars))
    for start, end in dict.fromkeys((r.start, r.end) for r in rows):
        values = [math.exp(min(r.loss, 700.0)) for r in rows if (r.start, r.end) == (start, end)]
        mark = "  <" if (start, end) == chosen else ""
        lines.append(
            f"  {f'[{start},{end})':9s}" + "".join(f"{v:12.2f}" if v < 1e6 else f"{v:12.2g}" for v in values) + mark
        )
    return "\n".join(lines)


def to_json(rows: list[Measured]) -> list[dict[str, Any]]:
    """Rows as JSON values, with the ratio of perplexities."""
    return [{**asdict(r), "ratio": r.ratio} for r in rows]


def example_text(program: Program) -> torch.Tensor:
    """Tokens of the example, as one text; empty where the model reads none."""
    names = [i.name for i in program.inputs]
    tokens = program.signature.tokens
    return torch.empty(0, dtype=torch.int64) if tokens is None else program.examples[0][names.index(tokens)].flatten()


def text_loss(program: Program, ids: torch.Tensor, chunk: int = CHUNK) -> float:
    """Mean next-token cross entropy in nats over chunks of a text ``[tokens]``."""
    place, losses = program.output_names.index("logits"), []
    for part in ids.split(chunk):
        if part.numel() > 1:
            flat = program.signature.by_name({program.signature.tokens: part[None]})
            with torch.no_grad():
                logits = program.run_flat(flat)[place][0, :-1].float()
            losses.append(F.cross_entropy(logits, part[1:], reduction="none"))
    return float(torch.cat(losses).double().mean())


def _require(program: Program, ids: torch.Tensor, step: Looped) -> None:
    if program.signature.tokens is None or "logits" not in program.output_names:
        raise UsageError(
            "start=auto measures windows on text, and this model does not go from tokens to logits",
            where="start",
            hint="give start and end, or leave both out for the window that the structure suggests",
        )
    if step.mix == "full":
        raise UsageError("mix=full has one window, the whole stack", where="start", hint="leave start out")
    if ids.numel() < 2:
        raise UsageError("the text has fewer than two tokens", where="--text", hint="give a longer text")


def _set_scalar(program: Program, scalar: float) -> None:
    for name, parameter in program.new_parameters().items():
        if name.endswith("scalar"):
            parameter.data.fill_(scalar)


def _known(notes: Path | None, key: dict[str, Any]) -> dict[tuple[int, int, float], float]:
    """Measurements that a file has of this model, text and form; a line that was cut off is passed over."""
    found = {}
    for line in notes.read_text().splitlines() if notes is not None and notes.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if all(row.get(k) == v for k, v in key.items()):
            found[row["start"], row["end"], row["scalar"]] = float(row["loss"])
    return found


def _note(notes: Path | None, row: dict[str, Any]) -> None:
    if notes is not None:
        with notes.open("a") as file:
            file.write(json.dumps(row) + "\n")
