"""``hcx generate``: greedy text from a model, a ``.hcx`` folder or an ONNX file."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hcx.rewrite.errors import SourceError, UsageError

from .cmd_export import need_onnx
from .opening import open_program
from .result import Progress, Result, silent

if TYPE_CHECKING:
    import torch
    from hcx.rewrite import Program
    from hcx.rewrite.ir.signature import CallSignature
    from hcx.rewrite.run.generation import Runner

DEPTH_TAP = "exits.depth"


@dataclass
class _Decoder:
    """Anything that decodes: flat inputs in; outputs, and taps where there are any, out."""

    signature: CallSignature
    run: Runner
    names: list[str]
    companions: dict[str, bytes]
    program: Program | None = None


def generate(
    model: str,
    *,
    prompt: str,
    tokens: int = 16,
    tokenizer: str | None = None,
    kv: str | None = None,
    speculate: int | None = None,
    at: int | None = None,
    river: str | None = None,
    progress: Progress = silent,
    **source: Any,
) -> Result:
    """Go on from a prompt, each time with the likeliest token, through the cache where the model has one.

    Args:
        model: a MODEL argument, or an ``.onnx`` file of ``hcx export``.
        tokens: most tokens to add; generation ends at the model's end-of-text token.
        tokenizer: for ``.onnx``: a ``.hcx`` folder or a folder with tokenizer files; by default those beside the file.
        kv: run a model with exits in pieces, so that blocks after an exit are skipped; ``recompute``, ``propagate``,
            ``mask`` or ``river`` says what later blocks get, see :mod:`hcx.passes.exits.run.runtime`.
        speculate: so many tokens are drafted by an exit, and checked by the rest of the model in one batch.
        at: blocks before the exit that drafts; default: the last exit.
        river: of ``kv=river``: the pipeline that makes the cheap blocks; default: :data:`hcx.passes.exits.RIVER`.
        source: options of :func:`hcx.cli.opening.open_program`.

    Raises:
        SourceError: there is no tokenizer.
        UsageError: the model does not take token ids, or has no exits where pieces are asked for.
    """
    _check(kv, speculate, at, river)
    is_onnx = model.endswith(".onnx") or (Path(model) / "model.onnx").is_file()
    if is_onnx and (kv or speculate):
        raise UsageError("an .onnx file is one piece", where="--kv" if kv else "--speculate",
                         hint="give the .hcx, or export the pieces of hcx.passes.exits.run.split")  # fmt: skip
    decoder = _onnx(model, tokenizer, source, progress) if is_onnx else _program(model, tokenizer, source, progress)
    ids = _encoded(words := _tokenizer(decoder), prompt)
    progress(f"generating {tokens} tokens")
    start, stop = time.perf_counter(), getattr(words, "eos_token_id", None)
    told: dict[str, Any] = {}
    if kv or speculate:
        all_ids, told = _in_pieces(decoder, ids, tokens, stop, kv, speculate, at, river)
        depths = told.get("depths", [])
    else:
        all_ids, depths = _decode(decoder, ids, tokens, stop)
    seconds = told.pop("seconds", time.perf_counter() - start)
    text, new = words.decode(all_ids, skip_special_tokens=True), all_ids[len(ids) :]
    data: dict[str, Any] = {
        "text": text,
        "prompt": prompt,
        "prompt_ids": ids,
        "ids": new,
        "new_text": words.decode(new, skip_special_tokens=True),
        "seconds": seconds,
        "tokens_per_second": len(new) / seconds if seconds else None,
    }
    if depths:
        data |= {"depths": depths, "mean_depth": sum(depths) / len(depths)}
        text += f"\n\nmean depth {data['mean_depth']:.2f} blocks over {len(depths)} tokens"
    return Result(data | told, text + _told(told))


def _program(model: str, tokenizer: str | None, source: dict[str, Any], progress: Progress) -> _Decoder:
    if tokenizer is not None:
        raise UsageError(
            "--tokenizer is for .onnx files; other models bring their own", where="--tokenizer", hint="leave it out"
        )
    program = open_program(model, progress=progress, **source).program
    has_depth = DEPTH_TAP in program.taps
    names = [*program.output_names, *(program.taps if has_depth else [])]
    return _Decoder(
        program.signature, lambda flat: program.run_flat(flat, taps=has_depth), names, program.companions, program
    )


def _onnx(model: str, tokenizer: str | None, source: dict[str, Any], progress: Progress) -> _Decoder:
    wrong = next((name for name, value in source.items() if value), None)
    if wrong:
        raise UsageError(f"--{wrong} has no effect on an .onnx file", where=model, hint=f"leave out --{wrong}")
    if not Path(model).exists():
        raise SourceError(f"there is no file {model}", where=model, hint="hcx export writes one")
    need_onnx("onnxruntime")
    progress(f"opening {model}")
    from hcx.export import OnnxSession

    session = OnnxSession(model)
    if session.signature is None:
        raise UsageError(
            f"{model} was not written by hcx export, so it is not known how to call it",
            where=model,
            hint="export the model with hcx export MODEL --to onnx",
        )
    return _Decoder(session.signature, session.run_flat, session.output_names, _companions_for(session.path, tokenizer))


def _companions_for(path: Path, tokenizer: str | None) -> dict[str, bytes]:
    from hcx.rewrite.source.text import has_tokenizer, read_companions

    folder = Path(tokenizer) if tokenizer else path.parent
    if not folder.is_dir():
        raise SourceError(
            f"there is no folder {folder}",
            where="--tokenizer",
            hint="give a .hcx folder, or a folder with tokenizer.json",
        )
    companions = read_companions(folder / "source" if folder.suffix == ".hcx" else folder)
    if not has_tokenizer(companions):
        raise SourceError(
            f"{folder} has no tokenizer files",
            where=str(folder),
            hint="give --tokenizer OUT.hcx, or a folder with tokenizer.json",
        )
    return companions


def _tokenizer(decoder: _Decoder) -> Any:
    from hcx.rewrite.source import tokenizer_from

    if "input_ids" not in [i.name for i in decoder.signature.inputs]:
        raise UsageError(
            "this model does not take `input_ids`, so it cannot generate text", where=decoder.signature.model
        )
    return tokenizer_from(decoder.companions)


def _encoded(words: Any, prompt: str) -> list[int]:
    ids = list(words(prompt, verbose=False)["input_ids"])
    if not ids:
        raise UsageError("the prompt has no tokens", where="--prompt", hint="give at least one word")
    return ids


def _decode(decoder: _Decoder, ids: list[int], tokens: int, stop: int | None) -> tuple[list[int], list[int]]:
    """All ids, and for each new token the number of blocks that it took (empty without exits)."""
    import torch
    from hcx.rewrite.run.generation import decode

    place = decoder.names.index(DEPTH_TAP) if DEPTH_TAP in decoder.names else None
    depths: list[int] = []

    def run(flat: list[torch.Tensor]) -> list[torch.Tensor]:
        outputs = decoder.run(flat)
        if place is not None:
            depths.append(int(outputs[place].reshape(-1)[-1]))
        return outputs

    found, _ = decode(decoder.signature, run, decoder.names, torch.tensor([ids]), tokens, stop=stop)
    return found[0].tolist(), depths


def _check(kv: str | None, speculate: int | None, at: int | None, river: str | None) -> None:
    """Options that do not go together."""
    if kv is not None and kv not in ("recompute", "propagate", "mask", "river"):
        raise UsageError(f"there is no policy `{kv}`", where="--kv", hint="recompute, propagate, mask or river")
    if river is not None and kv != "river":
        raise UsageError("--river says what the cheap blocks are", where="--river", hint="--kv river")
    if speculate and kv not in (None, "recompute"):
        raise UsageError(f"--speculate checks every draft, so it does not go with --kv {kv}", where="--kv",
                         hint="leave out one of them")  # fmt: skip
    if at is not None and not speculate:
        raise UsageError("--exit says which exit drafts", where="--exit", hint="--speculate 4")


def _in_pieces(
    decoder: _Decoder,
    ids: list[int],
    tokens: int,
    stop: int | None,
    kv: str | None,
    speculate: int | None,
    at: int | None,
    river: str | None,
) -> tuple[list[int], dict[str, Any]]:
    """All ids, and what the run took; operations are counted in a second run, so that the seconds are those of the first."""
    import torch
    from hcx.passes.exits import Decoder
    from hcx.passes.exits import speculate as speculated

    pieces = Decoder(decoder.program, kv or "recompute", river=river)
    prompt = torch.tensor([ids])

    def run() -> Any:
        if speculate:
            return speculated(pieces, prompt, tokens, draft=speculate, at=at, stop=stop)
        return pieces.generate(prompt, tokens, stop=stop)

    start = time.perf_counter()
    run()
    told: dict[str, Any] = {"seconds": time.perf_counter() - start, "kv": pieces.kv}
    pieces.pieces.count = True
    made = run()
    told["net_flops"] = made.net
    if speculate:
        told |= {
            "drafted": made.drafted,
            "accepted": made.accepted,
            "acceptance": made.acceptance,
            "rounds": made.rounds,
        }
    else:
        told["depths"] = made.depths[0].tolist()
        told["net_bytes"] = made.net_bytes
        told["exits"] = {str(k): told["depths"].count(k) for k in (*pieces.places, pieces.depth)}
    return made.tokens[0].tolist(), told


def _told(told: dict[str, Any]) -> str:
    """The lines under the text."""
    if not told:
        return ""
    if "exits" in told:
        ways = ", ".join(f"{count} after {k} blocks" for k, count in told["exits"].items())
        text = f"\ntokens that left: {ways}"
    else:
        text = (f"\n\n{told['accepted']} of {told['drafted']} drafts accepted ({told['acceptance']:.0%}), "
                f"checked in {told['rounds']} rounds")  # fmt: skip
    text += f"\noperations, heads included: {told['net_flops']:.3f} of those without exits (kv={told['kv']})"
    return text + (f"\nbytes of weights read: {told['net_bytes']:.3f} of those" if "net_bytes" in told else "")
