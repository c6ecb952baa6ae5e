"""Custom operators ``torch.ops.hcx.*``: importing this package registers them."""

from .streams import DEFINITIONS as DEFINITIONS

__all__ = ["DEFINITIONS"]
