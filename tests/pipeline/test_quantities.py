"""Sizes and durations of the command line, and the defaults, which are numbers already."""

from __future__ import annotations

import pytest
import typer

from pipeline.commands.common import duration_ms, size_bytes


def test_units_are_those_of_the_configuration() -> None:
    assert [size_bytes(each) for each in ("64MiB", "5kB", "7", 9)] == [64 << 20, 5000, 7, 9]
    assert [duration_ms(each) for each in ("10s", "2h", "30", 9)] == [10_000, 7_200_000, 30, 9]


@pytest.mark.parametrize("given", ["5XB", "many", ""])
def test_an_invalid_size_is_refused(given: str) -> None:
    with pytest.raises(typer.BadParameter, match="expected a number"):
        size_bytes(given)
