"""How the page writes numbers."""

from __future__ import annotations

import pytest

from proxy.admin import words
from proxy.admin.facts import TopicSetting


def test_a_number_has_its_unit_and_what_is_unknown_is_a_dash() -> None:
    dash, space = "\N{EN DASH}", "\N{NARROW NO-BREAK SPACE}"
    assert [words.size(each) for each in (None, 0, 1536)] == [dash, "0 B", "1.50 KiB"]
    said = [words.duration(each) for each in (None, 0, 400, 61_000)]
    assert said == [dash, "0 s", "< 1 s", "1 min 1 s"]
    assert [words.count(each, "segment") for each in (0, 1, 2)] == ["0 segments", "1 segment", "2 segments"]
    assert words.count(12_345, "offset") == f"12{space}345 offsets"
    assert words.number(1_234_567) == f"1{space}234{space}567"
    assert [words.milliseconds(each) for each in (0.752, 1_500)] == ["0.75 ms", "1.50 s"]
    assert words.rate(2048) == "2.00 KiB/s"
    said = [words.moment(each) for each in (0, -1, 1 << 62)]
    assert said == ["1970-01-01 00:00:00 UTC", dash, str(1 << 62)], "no calendar has the last one"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("local.retention.ms", "21600000", "6 h"),
        ("local.retention.ms", "-2", "as the total"),
        ("remote.log.retention.minutes", "1440", "1 d"),
        ("remote.log.retention.minutes", "-2", "as the broker"),
        ("retention.bytes", "-1", "unlimited"),
        ("retention.bytes", "1073741824", "1.00 GiB"),
        ("remote.copy.lag.ms", "60000", "1 min"),
        ("remote.copy.lag.ms", "-1", "as the local retention"),
        ("cleanup.policy", "delete", "delete"),
    ],
)
def test_a_setting_is_written_in_its_unit(key: str, value: str, said: str) -> None:
    assert words.value_of(TopicSetting(key, value, "topic")) == said
