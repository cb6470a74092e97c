"""Parameters of tests that only `make test-all` runs."""

from __future__ import annotations

from typing import Any

import pytest


def full(*cases: Any) -> list[Any]:
    """Returns the cases as parameters with the mark `full`. A tuple has one value for each argument."""
    return [pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.full) for one in cases]
