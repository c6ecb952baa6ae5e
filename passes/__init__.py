"""The passes that come with hcx; each family is a folder."""

from __future__ import annotations

_HOME = {
    "HyperConnections": "hyper_connections",
    "Looped": "looped",
    "Unloop": "looped",
    "Exits": "exits",
    "Skipping": "exits",
    "Lora": "adapters",
    "Quantize": "quantization",
    "NormFormer": "norms",
    "ScaleVectors": "norms",
    "Siamese": "norms",
    "Observe": "observation",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> type:
    """Import on first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'hcx.passes' has no attribute {name!r}")
    import importlib

    value: type = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
