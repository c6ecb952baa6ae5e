"""Errors of torch.export in the terms of the user's model."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import torch
from hcx.rewrite.errors import TraceError, is_own_fault

from .capture import invoke


def explained(error: Exception, model: torch.nn.Module) -> TraceError:
    """An error a user can act on, with the line of the model that caused it."""
    name, text = type(error).__name__, str(error)
    where = last_frame(error) or _frame_in_text(text) or type(model).__name__
    if "GuardOnDataDependent" in name or "data-dependent" in text.lower():
        return TraceError(
            "the model decides on a tensor's value, so one graph cannot stand for it",
            where=where,
            hint="rewrite the branch with torch.where or torch.cond",
        )
    if "Constraints violated" in text:
        return TraceError(
            f"a dimension was fixed by the model: {first_line(error)}",
            where=where,
            hint="give examples with sizes of 2 or more",
        )
    return TraceError(
        f"torch.export cannot trace the model: {name}: {first_line(error)}",
        where=where,
        hint="see the line above; -vv shows the whole traceback",
    )


def first_line(error: Exception) -> str:
    """The first line of an error that says something, at most 300 characters."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]


def raised_by_model(error: Exception) -> bool:
    """Whether an exception comes out of a call of the user's model, and not from hcx's own code around or in it."""
    if is_own_fault(error):
        return False
    return any(frame.f_code is invoke.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))


def last_frame(error: Exception) -> str | None:
    """The innermost source line outside torch itself."""
    inside = (f"{torch.__path__[0]}/",)
    own = str(Path(__file__).resolve().parent.parent) + "/"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*inside, own, "<")):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return None


def _frame_in_text(text: str) -> str | None:
    found = re.findall(r'File "([^"]+)", line (\d+)', text)
    for file, line in reversed(found):
        if not file.startswith(torch.__path__[0]):
            return f"{file}:{line}"
    return None
