"""One ONNX form for each ATen operator. Every file of this folder registers its own; see ``docs/onnx_operator.md``."""

from __future__ import annotations

import pkgutil
from importlib import import_module

FILES = sorted(module.name for module in pkgutil.iter_modules(__path__))

for _name in FILES:
    import_module(f"{__name__}.{_name}")
