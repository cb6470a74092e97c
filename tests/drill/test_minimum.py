"""A drill that did too little reports so."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.drill.__main__ import too_little
from tests.drill.engine import DrillResult
from tests.drill.faults import FaultKind

ENOUGH: dict[str, Any] = {
    "faults": Counter({FaultKind.PROXY_KILL: 4}),
    "certain": 5_000,
    "checked": 10_000,
    "trimmed_offsets": 1_250,
}


def result(**changes: Any) -> DrillResult:
    numbers: dict[str, Any] = dict.fromkeys(DrillResult.__slots__, 0)
    return DrillResult(**numbers | ENOUGH | changes)


def test_enough_is_enough() -> None:
    assert too_little(result(), 100) == []


@pytest.mark.parametrize(
    ("name", "less"),
    [
        ("faults", Counter({FaultKind.PROXY_KILL: 3})),
        ("certain", 4_999),
        ("checked", 9_999),
        ("trimmed_offsets", 1_249),
    ],
)
def test_less_of_anything_is_too_little(name: str, less: Any) -> None:
    assert len(too_little(result(**{name: less}), 100)) == 1
