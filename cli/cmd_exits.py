"""``hcx exits``: fit what exits have of their own, choose their thresholds, and cut a model at them."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hcx.rewrite.errors import UsageError

from .opening import check_artefact, check_output, folder_bytes, read_text
from .result import Progress, Result, silent

if TYPE_CHECKING:
    import torch
    from hcx.rewrite import Program

HELD_OUT = 1 / 3
"""Share of the text that thresholds are measured on where no other text is given: its end."""


def fit(
    artefact: str,
    *,
    text: str,
    output: str | None = None,
    overwrite: bool = False,
    length: int = 256,
    ridge: float = 1e-3,
    weights: str | None = None,
    progress: Progress = silent,
) -> Result:
    """Fit translators, classifiers, gates and candidates in closed form on a text; see :func:`hcx.passes.exits.fitting.fit`.

    Args:
        artefact: a ``.hcx`` folder whose Program has exits in select form.
        text: UTF-8 text file, read in windows of ``length`` tokens.
        output: folder to write; without it the given one is replaced, which needs ``overwrite``.

    Raises:
        UsageError: nothing to fit, a text that is too short, or no exits.
    """
    if not 0 <= ridge < math.inf:
        raise UsageError(f"--ridge {ridge:g} is no penalty", where="--ridge", hint="finite and at least 0, e.g. 1e-3")
    program, target, started = *_open(artefact, output, overwrite, weights, progress), time.perf_counter()
    from hcx.passes.exits import fit as fit_exits
    from hcx.passes.exits import token_batches

    batches = token_batches(program, _tokens(program, text), length)
    progress(f"fitting on {len(batches)} windows of {length} tokens")
    new, report = fit_exits(program, batches, ridge=ridge, skip=_skip(program))
    data = {**report.to_json(), "text": text, "windows": len(batches), "length": length}
    return _saved(new, target, overwrite, data, _fit_text(data), started, progress)


def calibrate(
    artefact: str,
    *,
    text: str,
    held_out: str | None = None,
    budget: float | None = None,
    agreement: float | None = None,
    risk: float | None = None,
    method: str = "eero",
    confidence: float | None = None,
    output: str | None = None,
    overwrite: bool = False,
    length: int = 256,
    weights: str | None = None,
    progress: Progress = silent,
) -> Result:
    """Choose thresholds for one target, and measure them on text that they were not chosen on.

    Args:
        artefact: a ``.hcx`` folder whose Program has exits in select form.
        text: UTF-8 text file, read in windows of ``length`` tokens.
        held_out: another one; by default the last third of ``text``.
        budget, agreement, risk: one of them, see :func:`hcx.passes.exits.fitting.calibrate`; ``method`` and ``confidence``
            belong to it.
        output: folder to write; without it the given one is replaced, which needs ``overwrite``.

    Raises:
        UsageError: not one target, or one that cannot be met; a text that is too short; no exits.
    """
    _check_target(budget, agreement, risk, method, confidence)
    program, target, started = *_open(artefact, output, overwrite, weights, progress), time.perf_counter()
    from hcx.passes.exits import calibrate as calibrate_exits
    from hcx.passes.exits import token_batches

    ids = _tokens(program, text)
    mine = token_batches(program, ids, length)
    if held_out is not None:
        other = token_batches(program, _tokens(program, held_out), length)
    else:
        mine, other = _cut(mine, len(ids), text, length)
    progress(f"calibrating on {len(mine)} windows of {length} tokens, measuring on {len(other)}")
    new, report = calibrate_exits(
        program,
        mine,
        other,
        budget=budget,
        agreement=agreement,
        risk=risk,
        method=method,
        confidence=confidence,
        skip=_skip(program),
    )
    data = {**report.to_json(), "text": text, "held_out_text": held_out or f"end of {text}", "length": length}
    return _saved(new, target, overwrite, data, _calibration_text(data), started, progress)


def split(
    artefact: str,
    *,
    output: str,
    overwrite: bool = False,
    weights: str | None = None,
    progress: Progress = silent,
) -> Result:
    """Write the pieces that a host runs one after the other; see :func:`hcx.passes.exits.save_pieces`.

    Args:
        artefact: a ``.hcx`` folder whose Program has exits in select form.
        output: folder to write, with ``piece-0.hcx`` and so on in it.

    Raises:
        UsageError: no exits that can be cut at, or an output that exists.
        ContractError: the pieces compute something else than the whole.
    """
    check_artefact(artefact)
    started = time.perf_counter()
    from hcx.passes.exits import save_pieces
    from hcx.passes.exits.run.saved import LIST

    check_output(output, overwrite=overwrite, replaceable=LIST)
    progress(f"opening {artefact}")
    from hcx.rewrite import load

    program = load(artefact, weights=weights)
    progress(f"cutting, writing and checking {output}")
    data = {"output": output, **save_pieces(program, output, overwrite=overwrite)}
    data.pop("format")
    for piece in data["pieces"]:
        piece["bytes"] = folder_bytes(Path(output) / piece["file"])
    data["seconds"] = time.perf_counter() - started
    return Result(data, f"{output}\n\n{_pieces_text(data['pieces'])}\n\n{data['seconds']:.1f} s")


def _check_target(
    budget: float | None, agreement: float | None, risk: float | None, method: str, confidence: float | None
) -> None:
    """Refuse what is not one target, or options that do not belong to it."""
    if sum(v is not None for v in (budget, agreement, risk)) != 1:
        raise UsageError(
            "give one target", where="hcx exits calibrate", hint="--budget 24, --agreement 0.95 or --risk 0.05"
        )
    if confidence is not None and (risk is None or not 0 < confidence < 1):
        wrong = "belongs to --risk" if risk is None else f"is a share, not {confidence:g}"
        raise UsageError(f"--confidence {wrong}", where="--confidence", hint="--risk 0.05 --confidence 0.95")
    if method not in ("eero", "quantile"):
        raise UsageError(f"there is no method {method!r}", where="--method", hint="eero or quantile")


def _cut(batches: list[Any], tokens: int, text: str, length: int) -> tuple[list[Any], list[Any]]:
    """The windows to calibrate on, and those at the end to measure on."""
    cut = len(batches) - max(1, round(HELD_OUT * len(batches)))
    if cut < 1:
        raise UsageError(
            f"{text} has {tokens} tokens, too few for two windows of {length}",
            where="--text",
            hint="give a longer text, or --held-out FILE",
        )
    return batches[:cut], batches[cut:]


def _open(
    artefact: str, output: str | None, overwrite: bool, weights: str | None, progress: Progress
) -> tuple[Program, str]:
    """The Program, and where the result goes; refused early where it could not be written."""
    check_artefact(artefact)
    if output is None and not overwrite:
        raise UsageError(
            f"{artefact} would be replaced", where=artefact, hint="choose another name with -o, or add --overwrite"
        )
    target = output or artefact
    if not target.rstrip("/").endswith(".hcx"):
        raise UsageError(f"the output is a folder that ends in .hcx, not {target}", where="-o", hint=f"-o {target}.hcx")
    check_output(target, overwrite=overwrite, replaceable="manifest.json")
    progress(f"opening {artefact}")
    from hcx.rewrite import load

    return load(artefact, weights=weights), target


def _tokens(program: Program, path: str) -> torch.Tensor:
    """Token ids of a text file, ``[n]``."""
    import torch
    from hcx.rewrite.source import tokenizer_from

    words = tokenizer_from(program.companions)
    return torch.tensor(words(read_text(path), add_special_tokens=False, verbose=False)["input_ids"])


def _skip(program: Program) -> int:
    """A decoder's first token is left out, see :func:`hcx.passes.exits.measure`."""
    return int(program.signature.has_cache)


def _saved(
    program: Program, target: str, overwrite: bool, data: dict[str, Any], text: str, started: float, progress: Progress
) -> Result:
    progress(f"saving {target}")
    program.save(target, overwrite=overwrite)
    data = {"output": target, **data, "seconds": time.perf_counter() - started}
    return Result(data, f"{target}\n\n{text}\n\n{data['seconds']:.1f} s")


def _fit_text(data: dict[str, Any]) -> str:
    lines = [f"{'exit':>6s}  agreement with the model's answer, before and after"]
    lines += [f"{k:>6s}  {100 * data['before'][k]:5.1f} % -> {100 * v:5.1f} %" for k, v in data["agreement"].items()]
    lines += [f"fitted on {data['positions']['heads']} positions for heads, {data['positions']['gates']} for gates"]
    return "\n".join([*lines, *data["notes"]])


def _calibration_text(data: dict[str, Any]) -> str:
    ((name, value),) = data["target"].items()
    lines = [
        f"target {name} {value:g} by {data['method']}",
        f"{'exit':>6s}  {'leaves from':>12s}  {'held out':>9s}  net",
    ]
    for k, share in data["held_out"]["shares"].items():
        limit = data["thresholds"].get(k)
        shown = "never" if limit is None else f"{limit:.4g}"
        lines.append(
            f"{k:>6s}  {shown if k in data['thresholds'] else '(all)':>12s}  {100 * share:7.1f} %  {data['ways'][k]:.3f}"
        )
    for label, key in (("calibration", "calibration"), ("held out", "held_out")):
        f = data[key]
        lines.append(
            f"{label:11s}  mean depth {f['mean_depth']:.2f}, agreement {100 * f['agreement']:.1f} %, "
            f"net operations {f['net_flops']:.3f} of the plain model's, {f['positions']} positions"
        )
    if data["useless"]:
        lines.append(f"useless: less than 5 % leave at {', '.join(map(str, data['useless']))}")
    return "\n".join([*lines, *([data["note"]] if data["note"] else [])])


def _pieces_text(pieces: list[dict[str, Any]]) -> str:
    lines = []
    for piece in pieces:
        if "exit" not in piece:
            leaving = "the rest"
        else:
            limit = piece["threshold"]
            leaving = f"to the exit after {piece['exit']} blocks, " + (
                "never leaves" if limit is None else f"leaves from {limit:.4g}"
            )
        lines.append(f"{piece['file']}  {piece['bytes'] / 1e6:8.2f} MB  {leaving}")
        lines += [f"    {word} {', '.join(piece[word])}" for word in ("takes", "gives")]
    return "\n".join(lines)
