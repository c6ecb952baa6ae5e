"""``hcx inspect``: what hcx sees in a model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hcx.rewrite.errors import UsageError

from . import figures
from .cmd_plan import pipeline
from .inspect_text import text_of
from .opening import Opened, check_output, open_program, read_text
from .result import Progress, Result, silent

if TYPE_CHECKING:
    import torch
    from hcx.rewrite import Program
    from hcx.rewrite.sites.views import Block, BlockRun, Boundary, Sites, Stack
    from torch import fx


def inspect(
    model: str,
    *,
    why: bool = False,
    passes: str | None = None,
    mixers: bool = False,
    html: str | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
    **source: Any,
) -> Result:
    """The call, the stacks with their blocks and boundaries, tied tensors and figures of a model.

    Args:
        model: a MODEL argument; a ``.hcx`` folder also shows its history and certificate.
        why: text with every block and boundary, and the adds that are no residual.
        passes: a pipeline whose sites and skips are shown too.
        mixers: instead of all that, what hyper-connections do to the streams, measured on a run: the recorded inputs, or
            those of ``text`` or ``inputs``.
        html: with mixers, also write a page of pictures; ``overwrite`` allows that it exists.
        source: options of :func:`hcx.cli.opening.open_program`.
    """
    if html is not None and not mixers:
        raise UsageError("--html shows mixers", where="--html", hint="add --mixers")
    if mixers:
        if why or passes:
            raise UsageError("--mixers shows mixers alone", where="--mixers", hint="leave out --why and --pass")
        return _mixers(model, html, overwrite, progress, source)
    what = pipeline(passes) if passes else None
    opened = open_program(model, progress=progress, **source)
    program = opened.program
    progress("finding blocks")
    data = describe(opened, program.sites())
    if opened.kind == "hcx":
        data["versions"] = _versions(model)
    if what is not None:
        progress("planning")
        made = program.plan(what)
        data["plan"], data["plan_text"] = made.to_json(), str(made)
    return Result({k: v for k, v in data.items() if k != "plan_text"}, text_of(data, why=why))


def _mixers(model: str, html: str | None, overwrite: bool, progress: Progress, source: dict[str, Any]) -> Result:
    """Figures of every stack that is carried as several streams."""
    from . import mixer_report

    if html is not None:
        if not html.endswith((".html", ".htm")):
            raise UsageError(
                f"the page is a file that ends in .html, not {html}", where="--html", hint="--html FILE.html"
            )
        check_output(html, overwrite=overwrite)
    given = {k: source.pop(k, None) for k in ("text", "inputs")} if Path(model).suffix == ".hcx" else {}
    opened = open_program(model, progress=progress, **source)
    from hcx.passes.hyper_connections import inspect_mixers

    flat = _call_of(opened.program, **given) if any(given.values()) else None
    progress("running")
    stacks = inspect_mixers(opened.program, flat)
    data = {"model": opened.describe(), "mixers": [s.to_json() for s in stacks], "html": html}
    text = mixer_report.text_of(stacks)
    if html is not None:
        from .cmd_diff import write_page

        write_page(html, mixer_report.page(opened.label, stacks))
        text += f"\n\npage: {html}"
    return Result(data, text)


def _call_of(program: Program, text: str | None = None, inputs: str | None = None) -> list[torch.Tensor]:
    """Flat inputs of a call with a text's first tokens, or with a file's tensors.

    Raises:
        UsageError: both are given, or the program takes no token ids.
        SourceError: no such file, or no tokenizer.
    """
    if text and inputs:
        raise UsageError("--text and --inputs are two calls", where="--inputs", hint="leave out one")
    if inputs:
        from hcx.rewrite.source.inputs_file import from_file

        return program.signature.bind((), from_file(Path(inputs), None))
    import torch
    from hcx.rewrite.source import tokenizer_from

    tokens = program.signature.tokens
    if tokens is None:
        raise UsageError("this program takes no token ids", where="--text", hint="--inputs FILE.safetensors")
    ids = tokenizer_from(program.companions)(read_text(text))["input_ids"][:TOKENS]
    return program.signature.by_name({tokens: torch.tensor([ids])})


TOKENS = 512
"""Of a text, as many tokens are run: figures are means over positions, and a position costs a run."""


def describe(opened: Opened, sites: Sites) -> dict[str, Any]:
    program = opened.program
    names = _dim_names(program)
    signature = program.signature
    return {
        "model": opened.describe(),
        "figures": figures.sizes(program),
        "trace_exact": program.trace_exact,
        "inputs": [i.to_json() for i in program.inputs],
        "outputs": program.output_names,
        "other_arguments": signature.others,
        "notes": signature.notes,
        "taps": program.taps,
        "tied": program.tied_groups(),
        "stacks": [_stack(s, sites.main is s, names) for s in sites.stacks],
        "other_adds": [{**_place(n), "rule": sites.rejected[n].value} for n in sites.other_adds],
        "history": program.history,
    }


def _stack(stack: Stack, main: bool, names: dict[str, str]) -> dict[str, Any]:
    return {
        "label": stack.label,
        "main": main,
        "residual": stack.residual,
        "depth": stack.depth,
        "runs": [_run(r) for r in stack.runs],
        "blocks": [_block(b) for b in stack.blocks],
        "boundaries": [_boundary(b, names) for b in stack.boundaries],
    }


def _run(run: BlockRun) -> dict[str, Any]:
    return {"start": run.start, "end": run.end, "period": run.period, "roles": run.roles}


def _block(block: Block) -> dict[str, Any]:
    branches = [
        {"address": b.address, "kind": b.kind, "scaled": b.scaled, "parallel": len(r.branches) > 1}
        for r in block.residuals
        for b in r.branches
    ]
    return {"address": block.address, "index": block.index, "iteration": block.iteration, "branches": branches}


def _boundary(boundary: Boundary, names: dict[str, str]) -> dict[str, Any]:
    val = boundary.node.meta["val"]
    shape = [_named(size, names) for size in val.shape]
    found = {
        "index": boundary.index,
        "shape": shape,
        "dtype": str(val.dtype).removeprefix("torch."),
        "carrier": boundary.carrier.kind,
    }
    return {**found, **_place(boundary.node)}


def _dim_names(program: Program) -> dict[str, str]:
    """Symbols of the graph -> names of the call signature's dimensions."""
    import torch

    names: dict[str, str] = {}
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    for node, spec in zip(placeholders, program.inputs, strict=True):
        val = node.meta.get("val")
        for size, dim in zip(getattr(val, "shape", ()), spec.shape, strict=False):
            if isinstance(size, torch.SymInt) and isinstance(dim, str) and "+" not in dim:
                names.setdefault(str(size), dim)
    return names


def _named(size: Any, names: dict[str, str]) -> int | str:
    return size if isinstance(size, int) else re.sub(r"\w+", lambda m: names.get(m[0], m[0]), str(size))


def _place(node: fx.Node) -> dict[str, Any]:
    """Module path and source line of a node, where they are known."""
    stack = node.meta.get("nn_module_stack") or {}
    module = next((p for p, _ in reversed(list(stack.values())) if p), "")
    lines = [
        line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip().startswith("File ")
    ]
    return {"node": node.name, "module": module, "source": lines[-1].removeprefix("File ") if lines else ""}


def _versions(path: str) -> dict[str, str]:
    from hcx.rewrite.store.manifest import read_manifest

    return dict(read_manifest(Path(path)).get("versions") or {})
