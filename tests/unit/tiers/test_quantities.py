"""Sizes and durations on a command line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import typer

from tiers.commands.quantities import duration_ms, size_bytes


def test_units_are_those_of_the_configuration() -> None:
    assert [size_bytes(each) for each in ("64MiB", "5kB", "7", 9)] == [64 << 20, 5000, 7, 9]
    assert [duration_ms(each) for each in ("10s", "2h", "30ms", 9)] == [10_000, 7_200_000, 30, 9]


@pytest.mark.parametrize(
    ("parsed", "given", "units"),
    [
        (size_bytes, "5XB", "B, kB, MB, GB, TB, KiB, MiB, GiB, TiB, such as 64MiB"),
        (size_bytes, "", "B, kB, MB, GB, TB, KiB, MiB, GiB, TiB, such as 64MiB"),
        (duration_ms, "7", "ms, s, m, min, h, d, such as 10s"),
        (duration_ms, "soon", "ms, s, m, min, h, d, such as 10s"),
    ],
)
def test_another_text_is_refused_with_the_units(parsed: Callable[[str], int], given: str, units: str) -> None:
    with pytest.raises(typer.BadParameter) as raised:
        parsed(given)
    assert str(raised.value) == f"{given!r}: expected a number and one of the units {units}"
