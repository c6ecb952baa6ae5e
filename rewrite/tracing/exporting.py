"""One call of ``torch.export`` over flat tensors."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator

import torch
from hcx.rewrite.errors import HcxError, let_through
from hcx.rewrite.ir.structure import Structure, flatten

from .capture import Call, invoke, own_cache, reference_mode
from .explain import explained


class _Seen:
    """Keeps what a traced forward found out; torch.export resets plain attributes of the module it traces."""

    outputs: Structure | None = None


class Wrapper(torch.nn.Module):
    """Takes flat tensors, returns flat tensors; remembers the structure of the output."""

    def __init__(self, model: torch.nn.Module, structure: Structure, positions: dict[str, int], cache: str | None):
        super().__init__()
        self.m = model
        self._structure, self._positions, self.seen = [structure], positions, _Seen()
        self._cache = cache

    def forward(self, *flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        call = Call(self._structure[0].rebuild(list(flat)), self._positions)
        tensors, outputs = flatten(own_cache(invoke(self.m, call), self._cache))
        self.seen.outputs = outputs
        return tuple(tensors)


def exported_flat(model: torch.nn.Module, wrapper: Wrapper, flat: list[torch.Tensor]) -> torch.export.ExportedProgram:
    auto = torch.export.Dim.AUTO
    dynamic = (tuple({axis: auto for axis in range(t.dim())} for t in flat),)
    try:
        with reference_mode(model), _quiet():
            wrapper.training = False
            return torch.export.export(wrapper, tuple(flat), dynamic_shapes=dynamic, strict=False)
    except Exception as error:  # any type: the user's model, or torch.export about it
        let_through(error)
        if isinstance(error, HcxError):
            raise
        raise explained(error, model) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch.export logs the whole graph when it fails; what matters of it goes into our own message."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)
