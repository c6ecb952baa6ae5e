"""The transformers package: imported when it is needed, quiet while it loads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hcx.rewrite.errors import SourceError

INSTALL = "pip install 'hcx-rewrite[hf]'"


def transformers() -> Any:
    """The transformers package, imported when a model of its kind is opened.

    Raises:
        SourceError: it is not installed.
    """
    try:
        import transformers as package
    except ImportError as error:
        raise SourceError(
            "this model needs the transformers package", where="import transformers", hint=INSTALL
        ) from error
    return package


@contextmanager
def quiet() -> Iterator[None]:
    """Hold back transformers' progress bars and advice; what matters of it is raised or logged by hcx itself."""
    log = transformers().utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()
