"""Standard output holds the result and nothing else; standard error holds progress, logs and messages."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

from hcx.rewrite.errors import ArtefactError, ExitCode, HcxError

from .result import SCHEMA_VERSION, Result, plain


class Console:
    """Where one run of the command line writes.

    Args:
        arguments: the command line. ``--json`` and ``-v`` are looked for at once, for mistakes found while parsing it.
    """

    def __init__(self, arguments: list[str]):
        self.arguments = arguments
        self.command = next((a for a in arguments if not a.startswith("-")), None)
        self.json = "--json" in arguments
        self.verbosity = sum(len(a) - 1 for a in arguments if re.fullmatch(r"-v+", a)) + arguments.count("--verbose")
        self._start = time.perf_counter()

    def configure(self, command: str, json: bool, verbosity: int) -> None:
        """What the parsed command line says."""
        self.command, self.json, self.verbosity = command, json, verbosity

    def say(self, text: str) -> None:
        """A line of progress, with the seconds since the start."""
        print(f"{time.perf_counter() - self._start:7.1f} s  {text}", file=sys.stderr, flush=True)

    def show(self, result: Result) -> None:
        """Print a result."""
        try:
            if self.json:
                self._print_json(result.data)
            else:
                print(result.text, flush=True)
        except BrokenPipeError:  # `hcx passes | head`: no error, and none at the interpreter's last flush
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def fail(self, error: HcxError) -> int:
        """Print an error; returns the exit code."""
        result: Result | None = getattr(error, "result", None)
        error.hint = error.hint or _usual_hint(error, self.command)
        corrected = corrected_command(self.arguments, error.hint)
        if self.verbosity >= 2:
            traceback.print_exception(error)
        if self.json:
            data = {**(result.data if result else {}), **error.as_dict()}
            self._print_json({**data, "command_line": corrected} if corrected else data)
        elif result is not None:
            print(result.text, flush=True)
        print(f"hcx: {error}" + (f"\n         {corrected}" if corrected else ""), file=sys.stderr, flush=True)
        return int(error.exit_code)

    def _print_json(self, data: dict[str, Any]) -> None:
        envelope = {"schema_version": SCHEMA_VERSION, "command": self.command, "exit_code": 0}
        print(json.dumps(plain({**envelope, **data}), indent=1, allow_nan=False), flush=True)

    @contextlib.contextmanager
    def quiet_libraries(self) -> Iterator[None]:
        """Route hcx's log to standard error; other libraries' warnings, logs and progress bars only with ``-v``."""
        log, root, nothing = logging.getLogger("hcx"), logging.getLogger(), logging.NullHandler()
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("hcx: %(levelname)s: %(message)s"))
        level = log.level
        log.addHandler(handler)
        log.setLevel([logging.WARNING, logging.INFO, logging.DEBUG][min(self.verbosity, 2)])
        try:
            with warnings.catch_warnings(), environment({} if self.verbosity else _QUIET):
                if not self.verbosity:
                    warnings.simplefilter("ignore")
                    root.addHandler(nothing)
                yield
        finally:
            log.removeHandler(handler)
            root.removeHandler(nothing)
            log.setLevel(level)


_QUIET = {"TQDM_DISABLE": "1", "TORCH_LOGS": "-all"}
"""What tqdm and torch read when they are imported."""


@contextlib.contextmanager
def environment(wanted: dict[str, str]) -> Iterator[None]:
    """Environment variables for a while; what the user has set stays."""
    added = [name for name in wanted if name not in os.environ]
    os.environ.update({name: wanted[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


_FLAGS = {
    "--trust": "",
    "--overwrite": "",
    "--allow-partial": "",
    "--upcast": "",
    "--arch": " pkg.mod:factory",
    "--inputs": " FILE.safetensors",
}


def corrected_command(arguments: list[str], hint: str | None) -> str | None:
    """The whole command line with the option that a hint names, ready to be copied; None where it names none."""
    import shlex

    for flag in re.findall(r"--[a-z-]+", hint or ""):
        if flag in _FLAGS and flag not in arguments:
            return f"hcx {shlex.join(arguments)} {flag}{_FLAGS[flag]}"
    return None


def _usual_hint(error: HcxError, command: str | None) -> str:
    """What to try where the error itself does not say."""
    if isinstance(error, ArtefactError):
        return "take an intact copy of the folder, or write it again with hcx rewrite"
    return f"hcx {command} --help" if command else "hcx --help"


def internal(error: BaseException) -> HcxError:
    """The short form of an exception that nobody expected."""
    what = f"internal error: {type(error).__name__}: {' '.join(str(error).split())[:300]}".rstrip(": ")
    return HcxError(what, where=_innermost(error), hint="please report this; -vv shows the whole traceback")


def _innermost(error: BaseException) -> str | None:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None


INTERRUPTED = int(ExitCode.INTERRUPTED)
