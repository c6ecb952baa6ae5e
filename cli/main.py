"""Entry point of ``hcx``: runs a command and turns whatever happens into an exit code and a message."""

from __future__ import annotations

import errno
import os
import re
import sys

import typer
from hcx.rewrite.errors import HcxError, UsageError

from .app import app
from .console import INTERRUPTED, Console, internal

ParseError = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
"""Base of what typer raises for a command line that cannot be read, in its own copy of click or in click itself."""

_NOT_OURS = (errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EFBIG)


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; by default those of the process.

    Returns:
        the exit code, see :class:`hcx.rewrite.errors.ExitCode`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    console = Console(arguments)
    try:
        with console.quiet_libraries():
            code = app(arguments, prog_name="hcx", obj=console, standalone_mode=False) or 0
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:  # noqa: BLE001  the last line of defence: nothing reaches the user as a traceback
        return console.fail(_explained(error))
    if code == INTERRUPTED:
        print("hcx: interrupted", file=sys.stderr)
    return code


def _errno(error: Exception) -> int | None:
    """The operating system's number; safetensors only tells it in its message."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"os error (\d+)", str(error))
    return int(found[1]) if found else None


def _explained(error: Exception) -> HcxError:
    """Any exception as one of ours, with the original as its cause."""
    if isinstance(error, HcxError):
        return error
    if isinstance(error, ParseError):
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "hcx"
        own: HcxError = UsageError(error.format_message().rstrip("."), where=path, hint=f"{path} --help")
    elif (number := _errno(error)) in _NOT_OURS:
        place = getattr(error, "filename", None)
        own = UsageError(
            os.strerror(number) + (f": {place}" if place else ""),
            where=place and str(place),
            hint="check rights and space",
        )
    else:
        own = internal(error)
    own.__cause__ = error
    return own
