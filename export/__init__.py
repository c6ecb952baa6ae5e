"""Lowering to other formats. Importing this package loads neither ONNX nor ONNX Runtime."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .onnx_export import to_onnx
    from .report import OnnxReport
    from .session import OnnxSession

_WHERE = {"to_onnx": ".onnx_export", "OnnxReport": ".report", "OnnxSession": ".session"}

__all__ = ["OnnxReport", "OnnxSession", "to_onnx"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
