"""Lowering to other formats. Importing this package loads neither ONNX nor ONNX Runtime."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .handed_on import HandedOn
    from .hf_export import to_hf
    from .onnx_export import to_onnx
    from .pt2_export import to_pt2
    from .report import OnnxReport
    from .session import OnnxSession

_WHERE = {
    "to_hf": ".hf_export",
    "to_onnx": ".onnx_export",
    "to_pt2": ".pt2_export",
    "HandedOn": ".handed_on",
    "OnnxReport": ".report",
    "OnnxSession": ".session",
}

__all__ = ["HandedOn", "OnnxReport", "OnnxSession", "to_hf", "to_onnx", "to_pt2"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
