from __future__ import annotations

from dataclasses import dataclass

import pytest

from tiers.metadata.topic.metadata_producer import ClockSkew


@dataclass
class Clocks:
    wall_ms: int = 1_700_000_000_000
    monotonic_ms: int = 5_000

    def pass_ms(self, elapsed_ms: int) -> None:
        self.wall_ms += elapsed_ms
        self.monotonic_ms += elapsed_ms


@pytest.mark.parametrize(
    ("appended_after_ms", "skew_ms"), [(0, 0), (40, 0), (100, 0), (101, 1), (-1, -1), (70_000, 69_900)]
)
def test_the_clocks_differ_by_what_lies_outside_sending_and_answer(appended_after_ms: int, skew_ms: int) -> None:
    clocks = Clocks()
    skew = ClockSkew(lambda: clocks.monotonic_ms, lambda: clocks.wall_ms)
    assert skew.skew_ms() is None
    sent = skew.now()
    clocks.pass_ms(100)
    skew.observe(sent, sent.wall_ms + appended_after_ms)
    assert skew.skew_ms() == skew_ms
    clocks.pass_ms(3_600_000)
    assert skew.skew_ms() == skew_ms


def test_a_clock_that_is_set_after_the_measurement_shows() -> None:
    clocks = Clocks()
    skew = ClockSkew(lambda: clocks.monotonic_ms, lambda: clocks.wall_ms)
    skew.observe(skew.now(), clocks.wall_ms)
    clocks.wall_ms += 86_400_000
    assert skew.skew_ms() == -86_400_000


def test_a_topic_without_log_append_time_measures_nothing() -> None:
    clocks = Clocks()
    skew = ClockSkew(lambda: clocks.monotonic_ms, lambda: clocks.wall_ms)
    skew.observe(skew.now(), -1)
    assert skew.skew_ms() is None
