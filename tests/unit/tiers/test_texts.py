"""Sizes, durations, times and names for people."""

from __future__ import annotations

import pytest

from tiers.texts import did_you_mean, duration_text, moment_text, size_text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        ((1 << 20) - 1, "1.00 MiB"),
        (52 << 20, "52.0 MiB"),
        (1 << 70, "1024 EiB"),
    ],
)
def test_a_size_has_three_digits(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0, "0 ms"), (999, "999 ms"), (61_000, "1 min 1 s"), (90_061_000, "1 d 1 h"), (-5, "-5 ms"), (7_200_000, "2 h")],
)
def test_a_duration_has_two_units(ms: int, text: str) -> None:
    assert duration_text(ms) == text


@pytest.mark.parametrize(
    ("time_ms", "text"), [(1_700_000_000_000, "2023-11-14T22:13:20+00:00"), (1 << 62, f"{1 << 62} ms")]
)
def test_a_time_is_in_utc(time_ms: int, text: str) -> None:
    assert moment_text(time_ms) == text


def test_the_nearest_known_name_is_offered_as_it_is_written() -> None:
    known = ["startingOffsets", "endingOffsets"]
    assert did_you_mean("StartingOffset", known) == "; did you mean startingOffsets?"
    assert did_you_mean("unlike", known) == did_you_mean("x", []) == ""
