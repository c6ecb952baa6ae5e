"""Options that several commands share; their texts stand once."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Hugging Face folder, .gguf, .hcx, .pt2, .pt, .pth, .safetensors, or pkg.mod:factory",
        show_default=False,
    ),
]
Artefact = Annotated[str, typer.Argument(metavar="OUT.hcx", help="a folder written by hcx rewrite", show_default=False)]
Trust = Annotated[bool, typer.Option("--trust", help="allow the model's files to run code")]
Arch = Annotated[
    str | None, typer.Option("--arch", metavar="pkg.mod:factory", help="builds the module that a state dict belongs to")
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", metavar="NAME", help="float32, bfloat16, float16 or float64; default: as stored"),
]
Text = Annotated[
    str | None,
    typer.Option("--text", metavar="FILE", help="text for the example call instead of the built-in paragraph"),
]
Inputs = Annotated[
    str | None,
    typer.Option("--inputs", metavar="FILE", help=".safetensors with the example's keyword arguments by name"),
]
Weights = Annotated[
    str | None,
    typer.Option("--weights", metavar="FOLDER", help="source model of a .hcx that was written with rewrite --lazy"),
]
Lazy = Annotated[
    bool, typer.Option("--lazy", help="leave a Hugging Face folder's weights in their files; checks of values are owed")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace the output if it exists")]
Json = Annotated[bool, typer.Option("--json", help="print the result (or the error) as JSON")]
Verbose = Annotated[
    int, typer.Option("-v", "--verbose", count=True, help="more on standard error; -vv: tracebacks", show_default=False)
]
