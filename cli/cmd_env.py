"""``hcx env``: versions and threads, without importing any of the packages."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

from .result import Progress, Result, silent

PACKAGES = (
    "hcx-rewrite",
    "torch",
    "transformers",
    "onnx",
    "onnx-ir",
    "onnxscript",
    "onnxruntime",
    "safetensors",
    "gguf",
    "numpy",
)


def env(*, progress: Progress = silent) -> Result:
    """Versions of Python and of the packages that matter, and what decides on the number of threads."""
    data = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "threads": {
            "cores": os.cpu_count(),
            "usable_cores": _usable(),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        },
    }
    rows = [("python", data["python"]), ("platform", data["platform"])]
    rows += [(name, found or "not installed") for name, found in data["packages"].items()]
    rows += [(name, "not set" if value is None else value) for name, value in data["threads"].items()]
    return Result(data, "\n".join(f"{name:16s} {value}" for name, value in rows))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _usable() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
