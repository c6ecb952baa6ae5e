"""The error tree of hcx and the exit codes that go with it.

Every message answers three questions: what happened, where, and what to do about it.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of the command line; part of the public interface."""

    OK = 0
    CONTRACT = 1
    USAGE = 2
    TRACE = 3
    NO_MATCH = 4
    EXPORT = 5
    INTERNAL = 70
    INTERRUPTED = 130


class HcxError(Exception):
    """Base of everything hcx raises on purpose.

    Args:
        what: one sentence, what happened.
        where: module path, file, argument or source line concerned.
        hint: what the user can do.

    Attributes:
        after: passes of the same pipeline that had run before, with their options.

    >>> print(HcxError("no model", where="a.pt", hint="pass a folder"))
    no model
      where: a.pt
      try:   pass a folder
    """

    exit_code: ExitCode = ExitCode.INTERNAL

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None):
        super().__init__(what)
        self.what, self.where, self.hint = what, where, hint
        self.after: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.after:
            lines.append(f"  after: {', '.join(self.after)}")
        if self.hint:
            lines.append(f"  try:   {self.hint}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, str | int | list[str] | None]:
        """The form printed by ``--json``."""
        return {
            "error": type(self).__name__,
            "exit_code": int(self.exit_code),
            "what": self.what,
            "where": self.where,
            "try": self.hint,
            **({"after": list(self.after)} if self.after else {}),
        }


class UsageError(HcxError):
    """An argument, option, pipeline string or call that cannot be meant."""

    exit_code = ExitCode.USAGE


class SourceError(UsageError):
    """A model, file or folder that cannot be opened or is not what it claims to be."""


class TraceError(HcxError):
    """The model cannot be turned into one graph."""

    exit_code = ExitCode.TRACE


class NoMatchError(HcxError):
    """A pass found nothing, or less than half of what it was asked for."""

    exit_code = ExitCode.NO_MATCH


class PlanError(UsageError):
    """A plan that does not fit the model, or passes that cannot follow each other."""


class ContractError(HcxError):
    """A rewrite did not keep what its pass promised."""

    exit_code = ExitCode.CONTRACT


class ExportError(HcxError):
    """Lowering to another format failed or the result disagreed with the Program."""

    exit_code = ExitCode.EXPORT


class ArtefactError(SourceError):
    """A .hcx folder that is damaged, foreign, or asks for something that is not allowed."""


def is_own_fault(error: BaseException) -> bool:
    """Whether hcx's own code raised an exception that is no finding of its: a bug, which must reach the user as one."""
    if isinstance(error, HcxError) or error.__traceback__ is None:
        return False
    innermost = error.__traceback__
    while innermost.tb_next is not None:
        innermost = innermost.tb_next
    return str(innermost.tb_frame.f_globals.get("__name__", "")).startswith("hcx.")


def let_through(error: BaseException) -> None:
    """In a handler that expects a model or a library to fail: raise what is hcx's own fault."""
    if is_own_fault(error):
        raise error
