"""Custom operators ``torch.ops.hcx.*``: importing this package registers them."""

if __name__ == "hcx.kernels":
    from .maps import DEFINITIONS as _MAPS
    from .streams import DEFINITIONS as _STREAMS

    DEFINITIONS = _STREAMS | _MAPS

    __all__ = ["DEFINITIONS"]
else:
    # With the repository root on the path, another package's `import kernels` (it looks for PyPI's) finds this folder.
    # Registering the operators a second time would fail; without `__file__` it counts as a stray folder, which it is.
    del __file__
