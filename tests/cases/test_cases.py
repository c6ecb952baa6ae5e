"""Every model case of ``shared/cases`` is handled rightly or refused with a reason."""

from __future__ import annotations

import warnings

import pytest

from . import nasty, run_cases

CASES = run_cases.load_cases()
ALL = {c.id: c for c in [*run_cases.model_cases(CASES), *nasty.as_cases(CASES)]} if CASES else {}
pytestmark = pytest.mark.skipif(CASES is None, reason=f"no cases at {run_cases.cases_folder()}")


@pytest.mark.parametrize("name", ALL)
def test_case(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row = run_cases.run_case(CASES, ALL[name])
    assert not run_cases.failures(ALL[name], row), row
