"""What users hold: the Program with its verbs, and how one is made."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import torch

from . import driver
from .check.report import Check
from .check.suite import Progress
from .host import module as modules
from .host import optimiser
from .host import pretrained as transformers_form
from .host.retrace import cast
from .ir import program as core
from .ir.moving import asked
from .pipeline.passbase import Pass
from .pipeline.plan import Plan
from .run import inputs
from .sites.subject import Subject
from .store import checkpoints, loading, saving, verifying
from .tracing import tracer

if TYPE_CHECKING:
    from .host.module import ProgramModule

What: TypeAlias = "str | Plan | Pass | list[str | Pass]"
"""A pipeline: a string, pass objects, or a plan."""


class Program(Subject):
    """A traced model: called like it, with its parameter names, and open to rewriting.

    A Program is an ``nn.Module``: ``parameters()``, ``state_dict()``, ``to()``, ``train()`` and ``torch.compile`` work
    as usual. Made by :func:`hcx.rewrite.trace` or :func:`hcx.rewrite.load`, never directly. Every verb leaves the
    Program as it is and returns something new, but for ``train``, ``to`` and ``load_checkpoint``, which are those of a
    module.

    Attributes:
        graph: ATen graph; one placeholder an input tensor, one output tuple: the model's outputs, then the taps.
        signature: binds calls, rebuilds outputs.
        history: one entry a pass: pipeline, plan and certificate.
        origin: parameter or buffer name -> name of the pass that added it; base tensors are not listed.
        examples: flat example inputs.
        reference: the eager source model over flat tensors, while it is in memory.
        companions: small files that belong to the model (tokenizer, config), by name.
    """

    def plan(self, passes: What) -> Plan:
        """What a pipeline would do, without doing it; see :func:`hcx.rewrite.driver.plan`."""
        return driver.plan(self, passes)

    def rewrite(
        self,
        passes: What,
        *,
        check: bool = True,
        allow_partial: bool = False,
        progress: Progress | None = None,
    ) -> Self:
        """A new Program with the passes applied and checked; see :func:`hcx.rewrite.driver.rewrite`.

        The original is left unchanged; use the return value.
        """
        return driver.rewrite(self, passes, check=check, allow_partial=allow_partial, progress=progress)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write a ``.hcx`` folder; see :func:`hcx.rewrite.store.saving.save`."""
        saving.save(self, path, overwrite=overwrite)

    def as_pretrained(self, *, on_taps: transformers_form.OnTaps | None = None) -> Any:
        """A Transformers model over the same tensors; see :func:`hcx.rewrite.host.pretrained.as_pretrained`."""
        return transformers_form.as_pretrained(self, on_taps=on_taps)

    def as_module(self, checkpoint: str | None = None) -> ProgramModule:
        """An ordinary module over the same parameters, for training; see :func:`hcx.rewrite.host.module.as_module`."""
        return modules.as_module(self, checkpoint)

    def load_checkpoint(self, path: str | os.PathLike[str], **options: Any) -> None:
        """Take over weights that training has written; see :func:`hcx.rewrite.store.checkpoints.load_checkpoint`."""
        checkpoints.load_checkpoint(self, path, **options)

    def check_inputs(self, count: int = 2) -> list[list[torch.Tensor]]:
        """Flat inputs of several shapes for checking; see :mod:`hcx.rewrite.run.inputs`."""
        return inputs.check_inputs(self, count)

    def param_groups(self, train: str = "all", **options: Any) -> list[dict[str, Any]]:
        """Groups for an optimiser; see :func:`hcx.rewrite.host.optimiser.param_groups`."""
        return optimiser.param_groups(self, train, **options)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move or cast in place; a dtype narrower than float64 traces the source model again.

        See :func:`hcx.rewrite.ir.moving.move` and :func:`hcx.rewrite.host.retrace.cast`.
        """
        device, dtype = asked(*args, **kwargs)
        if dtype is not None and dtype != self.dtype:
            cast(self, dtype)
        return self if device is None else super().to(device)


def trace(
    model: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    cache: bool | None = None,
) -> Program:
    """Trace a model into a :class:`Program`; see :func:`hcx.rewrite.tracing.tracer.trace`.

    The model is left unchanged; its tensors are copied.
    """
    return Program.over(tracer.trace(model, args, kwargs, cache=cache))


def load(path: str | os.PathLike[str], *, weights: str | os.PathLike[str] | None = None, lazy: bool = False) -> Program:
    """Read an artefact back; see :func:`hcx.rewrite.store.loading.load`."""
    return Program.over(loading.load(path, weights=weights, lazy=lazy))


def save(program: core.Program, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a ``.hcx`` folder; see :func:`hcx.rewrite.store.saving.save`."""
    saving.save(program, path, overwrite=overwrite)


def verify(path: str | os.PathLike[str], *, weights: str | os.PathLike[str] | None = None) -> list[Check]:
    """Run every check that an artefact allows; see :func:`hcx.rewrite.store.verifying.verify`."""
    return verifying.verify(path, weights=weights)
