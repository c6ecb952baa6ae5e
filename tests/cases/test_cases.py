"""Every model case of ``shared/cases`` is handled rightly or refused with a reason."""

from __future__ import annotations

import warnings

import pytest

from . import nasty, run_cases

CASES = run_cases.load_cases()
ALL = {c.id: c for c in [*run_cases.model_cases(CASES), *nasty.as_cases(CASES)]} if CASES else {}
pytestmark = pytest.mark.skipif(CASES is None, reason=f"no cases at {run_cases.cases_folder()}")


OPEN = {
    "kwargs-order", "shared-block", "complex-rope", "inplace-input", "shared-buffer", "inplace-view", "shape-outputs",
    "float-of-shape", "noise", "awkward-names", "window-constant", "log-probs",
}  # fmt: skip
"""Cases that are not handled as demanded yet."""


def cases():
    for name in ALL:
        marks = [pytest.mark.xfail(strict=False, reason="not handled as demanded yet")] if name in OPEN else []
        yield pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", list(cases()))
def test_case(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row = run_cases.run_case(CASES, ALL[name])
    assert not run_cases.failures(ALL[name], row), row
