from __future__ import annotations

import pytest

from tiers.model.log_source import LocalLogBounds
from tiers.tasks.bounds import violated_bounds


@pytest.mark.parametrize(
    ("start", "lso", "high_watermark", "remote", "violated"),
    [
        (0, 0, 0, (None, None), []),
        (10, 20, 30, (0, 19), []),
        (10, 20, 30, (0, 20), ["Ly>Ry"]),
        (10, 20, 19, (0, 5), ["Lz>=Ly"]),
        (21, 20, 20, (None, None), ["Ly>=Lx"]),
        (10, 20, 30, (7, 6), ["Ry>=Rx"]),
    ],
)
def test_bounds(
    start: int, lso: int, high_watermark: int, remote: tuple[int | None, int | None], violated: list[str]
) -> None:
    assert violated_bounds(LocalLogBounds(start, lso, high_watermark, 0), *remote) == violated
