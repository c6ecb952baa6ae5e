"""Open a model from wherever it lies: folder, file or factory.

``open_model`` tells the forms apart by looking at the file, never by trying to load it. Nothing that a file contains is
run unless the caller passes ``trust=True``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .model_source import KINDS, ModelSource

if TYPE_CHECKING:
    from .text import text_windows as text_windows
    from .text import tokenizer_from as tokenizer_from

__all__ = ["KINDS", "ModelSource", "open_model", "text_windows", "tokenizer_from"]


def __getattr__(name: str) -> Any:
    """The helpers that need torch, imported on first use."""
    if name not in ("text_windows", "tokenizer_from"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import text

    return getattr(text, name)


def open_model(
    spec: str,
    *,
    trust: bool = False,
    arch: str | None = None,
    dtype: str | None = None,
    text: str | None = None,
    inputs: str | None = None,
    lazy: bool = False,
) -> ModelSource:
    """Open a model and make one example call for it.

    Args:
        spec: a Hugging Face folder, ``.gguf`` (or a folder with one), ``pkg.mod:factory``, ``.pt2``, ``.pt``, ``.pth``,
            ``.safetensors`` or a ``.hcx`` folder. A path that exists wins over a factory of the same spelling.
        trust: allow the file to run code: pickled classes, and Python files beside a config.
        arch: ``pkg.mod:factory`` that builds the module of a state dict.
        dtype: name of a floating torch dtype to convert to, such as "bfloat16"; default is the checkpoint's own.
        text: text for the example instead of the built-in paragraph, for models that read token ids.
        inputs: a .safetensors file whose tensors are the example's keyword arguments by name.
        lazy: leave the weights of a Hugging Face folder in their files; the model is then on ``meta``.

    Returns:
        The source. Its model is in eval mode and otherwise as it was built or saved.

    Raises:
        SourceError: missing, damaged, foreign, in need of code execution, or without an example call.
        UsageError: an option that this kind of source has no use for.

    >>> open_model("no_such_file.pt")  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    hcx.rewrite.errors.SourceError: there is no file no_such_file.pt
    """
    from .opening import open_any
    from .request import Request

    return open_any(Request(spec, trust, arch, dtype, text, inputs, lazy or None))
