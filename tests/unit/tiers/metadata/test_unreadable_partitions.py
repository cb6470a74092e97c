"""Metadata partitions that brokers do not serve give one line together, and one when all are served again."""

from __future__ import annotations

import pytest

from tiers.metadata.topic.unreadable_partitions import UnreadablePartitions


def test_all_partitions_give_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    unreadable = UnreadablePartitions(lambda: 0)
    for number in range(50):
        unreadable.refused(number, 6 if number else 75)
    unreadable.log(lambda number: True)
    (line,) = caplog.records
    assert line.message == "some metadata partitions cannot be read yet"
    assert (line.__dict__["metadata_partitions"], line.__dict__["error_codes"]) == (50, [6, 75])
    for number in range(49):
        unreadable.answered(number)
    unreadable.log(lambda number: True)
    assert len(caplog.records) == 1
    unreadable.log(lambda number: number != 49)  # the follower stopped at it: another line says so
    assert [each.message for each in caplog.records[1:]] == ["all metadata partitions can be read"]
