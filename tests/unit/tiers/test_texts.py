"""Sizes, durations, times and names for people."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tiers.texts import did_you_mean, duration_text, moment_text, size_text


@pytest.mark.parametrize(
    ("written", "value", "said"),
    [
        (size_text, 0, "0 B"),
        (size_text, 1023, "1023 B"),
        (size_text, 1536, "1.50 KiB"),
        (size_text, (1 << 20) - 1, "1.00 MiB"),
        (size_text, 10 << 20, "10.0 MiB"),
        (size_text, 100 << 20, "100 MiB"),
        (size_text, 1 << 70, "1024 EiB"),
        (duration_text, 0, "0 ms"),
        (duration_text, 999, "999 ms"),
        (duration_text, 61_000, "1 min 1 s"),
        (duration_text, 90_061_000, "1 d 1 h"),
        (duration_text, -5, "-5 ms"),
        (duration_text, 7_200_000, "2 h"),
        (duration_text, 86_460_000, "1 d"),
        (moment_text, 1_700_000_000_000, "2023-11-14T22:13:20+00:00"),
        (moment_text, 1 << 62, f"{1 << 62} ms"),
    ],
)
def test_numbers_are_short_and_have_units(written: Callable[[int], str], value: int, said: str) -> None:
    assert written(value) == said


def test_the_nearest_known_name_is_offered_as_it_is_written() -> None:
    known = ["startingOffsets", "endingOffsets"]
    assert did_you_mean("StartingOffset", known) == "; did you mean startingOffsets?"
    assert did_you_mean("unlike", known) == did_you_mean("x", []) == ""
