"""How the page writes numbers."""

from __future__ import annotations

import pytest

from proxy.admin import words
from proxy.admin.facts import TopicSetting


@pytest.mark.parametrize(("value", "said"), [(None, "\N{EN DASH}"), (0, "0 B"), (1536, "1.50 KiB")])
def test_an_unknown_size_is_a_dash(value: int | None, said: str) -> None:
    assert words.size(value) == said


@pytest.mark.parametrize(
    ("ms", "said"),
    [
        (None, "\N{EN DASH}"),
        (0, "0 s"),
        (400, "< 1 s"),
        (61_000, "1 min 1 s"),
    ],
)
def test_a_duration_below_a_second_has_no_milliseconds(ms: int | None, said: str) -> None:
    assert words.duration(ms) == said


def test_a_number_has_its_noun() -> None:
    assert [words.count(each, "segment") for each in (0, 1, 2)] == ["0 segments", "1 segment", "2 segments"]
    assert words.count(12_345, "offset") == f"12{words.number(1000)[1]}345 offsets"


def test_a_latency_and_a_rate_have_units() -> None:
    assert words.milliseconds(0.752) == "0.75 ms"
    assert words.milliseconds(1_500) == "1.50 s"
    assert words.rate(2048) == "2.00 KiB/s"
    assert words.number(1_234_567) == "1\N{NARROW NO-BREAK SPACE}234\N{NARROW NO-BREAK SPACE}567"


def test_a_time_that_no_calendar_has_is_a_number() -> None:
    assert words.moment(0) == "1970-01-01 00:00:00 UTC"
    assert words.moment(-1) == "\N{EN DASH}"
    assert words.moment(1 << 62) == str(1 << 62)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("local.retention.ms", "21600000", "6 h"),
        ("local.retention.ms", "-2", "as the total"),
        ("remote.log.retention.minutes", "1440", "1 d"),
        ("remote.log.retention.minutes", "-2", "as the broker"),
        ("retention.bytes", "-1", "unlimited"),
        ("retention.bytes", "1073741824", "1.00 GiB"),
        ("cleanup.policy", "delete", "delete"),
    ],
)
def test_a_setting_is_written_in_its_unit(key: str, value: str, said: str) -> None:
    assert words.value_of(TopicSetting(key, value, "topic")) == said
