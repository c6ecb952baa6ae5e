"""Python's cyclic garbage collector during long graph work."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def young_only() -> Iterator[None]:
    """Keep the collector off what exists already; garbage made inside is collected as always.

    Tracing and rewriting make so many objects that the collector starts full collections, each of which walks every
    object of the process: with Transformers loaded and one model traced half a second to a second each, as much as
    the work itself. A process that has frozen objects itself, or turned the collector off, is left as it is.
    """
    if not gc.isenabled() or gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
