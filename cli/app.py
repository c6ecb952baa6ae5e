"""The commands as typer sees them; what they do lies in the function of the same name in ``hcx.cli``."""

from __future__ import annotations

import os
import sys
from functools import reduce
from typing import Annotated, Any

import typer

from . import options as shared
from .console import Console
from .options import Arch, Dtype, Inputs, Json, Lazy, Overwrite, Text, Trust, Verbose, Weights

if not sys.stdout.isatty():
    os.environ["_TYPER_FORCE_DISABLE_TERMINAL"] = "1"  # typer colours piped help where a CI variable is set

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Checked graph rewriting for PyTorch models: trace, rewrite, verify, save, export.",
    epilog="Exit codes: 0 ok, 1 a check failed, 2 usage or unusable input, 3 cannot trace, 4 nothing or too little "
    "matched, 5 export failed, 70 internal error, 130 interrupted.",
)


@app.callback(invoke_without_command=True)
def start(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def _run(context: typer.Context, json: bool, verbose: int, **options: Any) -> int:
    """Call the function of the command's name and print what it returns."""
    import hcx.cli

    names = context.command_path.split()[1:]
    console: Console = context.obj
    console.configure(" ".join(names), json, verbose)
    function = reduce(getattr, names, hcx.cli)
    console.show(function(**options, progress=console.say))
    return 0


# fmt: off
# (the options that commands share stay in rows)
Why = Annotated[bool, typer.Option("--why", help="also every block, boundary, and add that is no residual")]
Sites = Annotated[str | None, typer.Option("--pass", "-p", metavar="PIPELINE", help="also its sites and skips")]
Mixers = Annotated[bool, typer.Option("--mixers", help="instead: mixes and streams of hyper-connections, measured")]
Picture = Annotated[str | None, typer.Option("--html", metavar="FILE", help="with --mixers, also write a page of pictures")]


@app.command()
def inspect(
    context: typer.Context, model: shared.Model, why: Why = False, passes: Sites = None,
    mixers: Mixers = False, html: Picture = None, overwrite: Overwrite = False,
    arch: Arch = None, dtype: Dtype = None, text: Text = None, inputs: Inputs = None, trust: Trust = False,
    weights: Weights = None, lazy: Lazy = False,
    json: Json = False, verbose: Verbose = 0,
) -> int:
    """Show what hcx sees in a model: its call, stacks, blocks, boundaries and tensors; with --mixers, hyper-connections."""
    return _run(context, json, verbose, model=model, why=why, passes=passes,
                mixers=mixers, html=html, overwrite=overwrite,
                arch=arch, dtype=dtype, text=text, inputs=inputs, trust=trust, weights=weights, lazy=lazy)


Passes = Annotated[list[str] | None, typer.Option(
    "--pass", "-p", metavar="PIPELINE", help="e.g. looped,exits or looped{steps=3},exits{at=[20]}")]

Sweep = Annotated[str | None, typer.Option(
    "--sweep", metavar="FILE", help="keep what looped{start=auto} measures here, and go on from it")]
Most = Annotated[int, typer.Option("--tokens", metavar="N", min=2, help="most tokens of --text that it measures on")]


@app.command()
def plan(
    context: typer.Context, model: shared.Model, passes: Passes = None,
    sweep: Sweep = None, tokens: Most = 512,
    arch: Arch = None, dtype: Dtype = None, text: Text = None, inputs: Inputs = None, trust: Trust = False,
    weights: Weights = None, lazy: Lazy = False,
    json: Json = False, verbose: Verbose = 0,
) -> int:
    """Show what a pipeline would do. With --json: a plan that can be edited and given to rewrite --plan."""
    return _run(context, json, verbose, model=model, passes=passes, sweep=sweep, tokens=tokens,
                arch=arch, dtype=dtype, text=text, inputs=inputs, trust=trust, weights=weights, lazy=lazy)


PlanFile = Annotated[str | None, typer.Option("--plan", metavar="FILE", help="a plan from hcx plan --json")]
Folder = Annotated[str | None, typer.Option("-o", "--output", metavar="OUT.hcx", help="default: NAME.hcx here")]
Partial = Annotated[bool, typer.Option("--allow-partial", help="accept more skipped sites than changed ones")]


@app.command()
def rewrite(
    context: typer.Context, model: shared.Model, passes: Passes = None, plan: PlanFile = None,
    output: Folder = None, overwrite: Overwrite = False, allow_partial: Partial = False,
    arch: Arch = None, dtype: Dtype = None, text: Text = None, inputs: Inputs = None, trust: Trust = False,
    weights: Weights = None, lazy: Lazy = False,
    json: Json = False, verbose: Verbose = 0,
) -> int:
    """Apply passes, check them against the model, and write a .hcx folder; nothing is written when a check fails."""
    return _run(context, json, verbose, model=model, passes=passes, plan=plan,
                output=output, overwrite=overwrite, allow_partial=allow_partial,
                arch=arch, dtype=dtype, text=text, inputs=inputs, trust=trust, weights=weights, lazy=lazy)


@app.command()
def verify(context: typer.Context, artefact: shared.Artefact, weights: Weights = None,
           json: Json = False, verbose: Verbose = 0) -> int:
    """Check a .hcx folder: file hashes, recorded outputs bitwise, contracts again."""
    return _run(context, json, verbose, artefact=artefact, weights=weights)


Before = Annotated[str, typer.Argument(metavar="BEFORE", help="any MODEL", show_default=False)]
After = Annotated[str, typer.Argument(metavar="AFTER", help="any MODEL", show_default=False)]
Nodes = Annotated[bool, typer.Option("--nodes", help="also a line for each node that differs")]
Html = Annotated[str | None, typer.Option("--html", metavar="FILE", help="also write one self-contained page")]


@app.command()
def diff(
    context: typer.Context, before: Before, after: After, nodes: Nodes = False, html: Html = None,
    overwrite: Overwrite = False,
    arch: Arch = None, dtype: Dtype = None, text: Text = None, inputs: Inputs = None, trust: Trust = False,
    weights: Weights = None,
    json: Json = False, verbose: Verbose = 0,
) -> int:
    """Show what differs between two models: call, tensors, contracts, and the graph block by block."""
    return _run(context, json, verbose, before=before, after=after, nodes=nodes, html=html, overwrite=overwrite,
                arch=arch, dtype=dtype, text=text, inputs=inputs, trust=trust, weights=weights)


Format = Annotated[str, typer.Option("--to", metavar="FORMAT", help="onnx, hf (a Transformers folder) or pt2 (a torch.export archive)")]
File = Annotated[str | None, typer.Option(
    "-o", "--output", metavar="FILE", help="NAME.onnx (default), or a folder that also gets the tokenizer; a folder for hf")]
Opset = Annotated[int | None, typer.Option("--opset", metavar="N", help="ONNX opset, 18 to 26; default 23")]
Taps = Annotated[bool, typer.Option("--taps", help="also the auxiliary outputs")]
Upcast = Annotated[bool, typer.Option("--upcast", help="write bfloat16 as float32")]


@app.command()
def export(
    context: typer.Context, model: shared.Model, to: Format = "onnx", output: File = None,
    opset: Opset = None, taps: Taps = False, upcast: Upcast = False, overwrite: Overwrite = False,
    arch: Arch = None, dtype: Dtype = None, text: Text = None, inputs: Inputs = None, trust: Trust = False,
    weights: Weights = None,
    json: Json = False, verbose: Verbose = 0,
) -> int:
    """Write another format and run it there against the program before the file is put in place."""
    return _run(context, json, verbose, model=model, to=to, output=output,
                opset=opset, taps=taps, upcast=upcast, overwrite=overwrite,
                arch=arch, dtype=dtype, text=text, inputs=inputs, trust=trust, weights=weights)


AnyModel = Annotated[str, typer.Argument(
    metavar="MODEL", help="any MODEL, or an .onnx of hcx export", show_default=False)]
Prompt = Annotated[str, typer.Option("--prompt", metavar="TEXT", help="text to go on from", show_default=False)]
Tokens = Annotated[int, typer.Option("--tokens", "-n", metavar="N", min=1, help="most tokens to add")]
Tokenizer = Annotated[str | None, typer.Option(
    "--tokenizer", metavar="PATH", help="for .onnx: a .hcx or a folder with tokenizer files")]

Policy = Annotated[str | None, typer.Option(
    "--kv", metavar="POLICY", help="skip blocks after exits; what they cache: recompute, propagate, mask or river")]
Cheap = Annotated[str | None, typer.Option(
    "--river", metavar="PIPELINE", help="with --kv river, what makes its blocks cheap: quantize{bits=8}")]
Drafts = Annotated[int | None, typer.Option(
    "--speculate", metavar="N", min=1, help="draft N tokens with an exit, check them with the rest: greedy text")]
DraftExit = Annotated[int | None, typer.Option("--exit", metavar="K", help="with --speculate, the exit after K blocks")]


@app.command()
def generate(
    context: typer.Context, model: AnyModel, prompt: Prompt, tokens: Tokens = 16, tokenizer: Tokenizer = None,
    kv: Policy = None, speculate: Drafts = None, at: DraftExit = None, river: Cheap = None,
    arch: Arch = None, dtype: Dtype = None, text: Text = None, inputs: Inputs = None, trust: Trust = False,
    weights: Weights = None,
    json: Json = False, verbose: Verbose = 0,
) -> int:
    """Generate text greedily through the cache; with exits, --kv and --speculate skip work."""
    return _run(context, json, verbose, model=model, prompt=prompt, tokens=tokens, tokenizer=tokenizer,
                kv=kv, speculate=speculate, at=at, river=river,
                arch=arch, dtype=dtype, text=text, inputs=inputs, trust=trust, weights=weights)


PassName = Annotated[str | None, typer.Argument(metavar="NAME", help="one pass in full", show_default=False)]


@app.command()
def passes(context: typer.Context, name: PassName = None, json: Json = False, verbose: Verbose = 0) -> int:
    """List the passes with their options."""
    return _run(context, json, verbose, name=name)


@app.command()
def env(context: typer.Context, json: Json = False, verbose: Verbose = 0) -> int:
    """Show versions and threads, for a report of a problem."""
    return _run(context, json, verbose)


exits = typer.Typer(help="Fit exits, choose the thresholds they leave from, and cut a model at them.", no_args_is_help=True)
app.add_typer(exits, name="exits")
Corpus = Annotated[str, typer.Option("--text", metavar="FILE", help="UTF-8 text, read in windows", show_default=False)]
Replaced = Annotated[str | None, typer.Option("-o", "--output", metavar="NEW.hcx", help="else OUT.hcx with --overwrite")]
Length = Annotated[int, typer.Option("--length", metavar="N", min=2, help="tokens a window")]


@exits.command()
def fit(
    context: typer.Context, artefact: shared.Artefact, text: Corpus, output: Replaced = None,
    overwrite: Overwrite = False, length: Length = 256,
    ridge: Annotated[float, typer.Option("--ridge", help="penalty on leaving the identity, without a unit")] = 1e-3,
    weights: Weights = None, json: Json = False, verbose: Verbose = 0,
) -> int:
    """Fit affine heads, classifiers, learned scores and candidates in closed form; the model stays as it is."""
    return _run(context, json, verbose, artefact=artefact, text=text, output=output, overwrite=overwrite,
                length=length, ridge=ridge, weights=weights)


@exits.command()
def calibrate(
    context: typer.Context, artefact: shared.Artefact, text: Corpus,
    budget: Annotated[float | None, typer.Option("--budget", metavar="BLOCKS", help="mean depth")] = None,
    agreement: Annotated[float | None, typer.Option("--agreement", metavar="SHARE", help="with the model's answer")] = None,
    risk: Annotated[float | None, typer.Option("--risk", metavar="SHARE", help="of other answers, by Learn-then-Test")] = None,
    held_out: Annotated[str | None, typer.Option("--held-out", metavar="FILE", help="default: the last third of --text")] = None,
    method: Annotated[str, typer.Option("--method", metavar="NAME", help="eero or quantile")] = "eero",
    confidence: Annotated[float | None, typer.Option("--confidence", help="of --risk; default 0.95")] = None,
    output: Replaced = None, overwrite: Overwrite = False, length: Length = 256,
    weights: Weights = None, json: Json = False, verbose: Verbose = 0,
) -> int:
    """Choose thresholds for a target, and measure them on text that they were not chosen on."""
    return _run(context, json, verbose, artefact=artefact, text=text, held_out=held_out, budget=budget,
                agreement=agreement, risk=risk, method=method, confidence=confidence, output=output,
                overwrite=overwrite, length=length, weights=weights)


Pieces = Annotated[str, typer.Option(
    "-o", "--output", metavar="FOLDER", help="gets piece-0.hcx, piece-1.hcx, ...", show_default=False)]


@exits.command()
def split(
    context: typer.Context, artefact: shared.Artefact, output: Pieces, overwrite: Overwrite = False,
    weights: Weights = None, json: Json = False, verbose: Verbose = 0,
) -> int:
    """Cut at the exits into pieces that a host runs one after the other, each a .hcx folder."""
    return _run(context, json, verbose, artefact=artefact, output=output, overwrite=overwrite, weights=weights)
