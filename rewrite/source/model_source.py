"""The record that every way of opening a model returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

    from .stored import Stored

KINDS = ("hf", "gguf", "factory", "pickle", "state_dict", "pt2", "hcx")


@dataclass(frozen=True)
class ModelSource:
    """A model, one example call of it, and the small files that travel with it.

    Attributes:
        model: the eager source module in eval mode; None for kinds "pt2" and "hcx".
        args: example positional arguments, mostly tensors with the batch in dimension 0.
        kwargs: example keyword arguments by the forward method's own names.
        kind: one of ``KINDS``.
        label: a name for people.
        companions: bytes of the small files beside the weights by file name: config, tokenizer, chat template.
        exported: the program of kind "pt2".
        path: the file or folder that was opened; None for a factory.
        stored: where the tensors lie of a model that was opened on ``meta``, by name.
    """

    model: torch.nn.Module | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    kind: str
    label: str
    companions: dict[str, bytes] = field(default_factory=dict)
    exported: ExportedProgram | None = None
    path: str | None = None
    stored: dict[str, Stored] = field(default_factory=dict)
