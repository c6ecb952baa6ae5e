"""Tiny models with known structure for finder, tracing and pass tests.

    from tests.zoo import ZOO, available, build

    model, args, kwargs = build("llama")
    expected = ZOO["llama"].branches

Models with ``assets=True`` need the folder named by ``HCX_DIST``; ``available()`` leaves them out where it is not set.
The counting rules are in ``base``.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from torch import nn

from . import decoders, decoders_more, encdec, encoders, handwritten, ssm, trained, vision
from .base import ZooModel

__all__ = ["ZOO", "ZooModel", "available", "build", "traced"]

ZOO: dict[str, ZooModel] = {}
for _family in (decoders, decoders_more, encoders, encdec, vision, ssm, trained, handwritten):
    for _model in _family.MODELS:
        if _model.name in ZOO:
            raise ValueError(f"two zoo models are called {_model.name}")
        ZOO[_model.name] = _model


def build(name: str) -> tuple[nn.Module, tuple, dict]:
    """``(model, args, kwargs)`` of a zoo model, fresh at each call."""
    return ZOO[name].build()


@cache
def traced(name: str) -> tuple[nn.Module, tuple, dict, Any]:
    """``(model, args, kwargs, program)`` of a zoo model, traced once a process: for tests that change none of them."""
    from hcx.rewrite import trace

    model, args, kwargs = build(name)
    return model, args, kwargs, trace(model, args, kwargs)


def available(*, traceable: bool | None = None) -> list[str]:
    """Names that can be built here; with ``traceable`` set, only those that are (not) so."""
    assets = bool(os.environ.get("HCX_DIST"))
    return [
        name for name, model in ZOO.items() if (assets or not model.assets) and traceable in (None, model.traceable)
    ]
