"""The arguments of ``open_model``, and which of them a kind of source has a use for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hcx.rewrite.errors import UsageError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Request:
    """The arguments of ``open_model``."""

    spec: str
    trust: bool = False
    arch: str | None = None
    dtype: str | None = None
    text: str | None = None
    inputs: str | None = None
    lazy: bool | None = None

    def torch_dtype(self) -> torch.dtype | None:
        """The floating torch dtype asked for.

        Raises:
            UsageError: no such dtype.
        """
        if self.dtype is None:
            return None
        import torch

        found = getattr(torch, self.dtype.removeprefix("torch."), None)
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise UsageError(
                f"{self.dtype!r} is no floating dtype", where="dtype", hint="float32, bfloat16, float16 or float64"
            )
        return found

    def refuse(self, kind: str, *options: str) -> None:
        """Options that have no effect on this kind of source are a mistake, never ignored."""
        for option in options:
            if getattr(self, option) is not None:
                raise UsageError(
                    f"--{option} has no effect on a source of kind {kind}",
                    where=self.spec,
                    hint=f"leave out --{option}",
                )
