"""The cases that the drill's acknowledged reports as violations, and those that it must accept."""

from __future__ import annotations

import pytest

from tests.drill.acknowledged_records import AcknowledgedPartition, AcknowledgedRecords
from tests.drill.records import encode
from tests.drill.violations import ABORTED, BYTES, READ, Violations

PLACE = ("orders", 1)


@pytest.fixture
def violations() -> Violations:
    return Violations()


@pytest.fixture
def partition(violations: Violations) -> AcknowledgedPartition:
    return AcknowledgedRecords([PLACE], violations)[PLACE]


def test_acknowledged_records_that_are_read_are_right(partition: AcknowledgedPartition, violations: Violations) -> None:
    records = [partition.new_record() for _ in range(3)]
    partition.acknowledged((record.sequence, 10 + record.sequence) for record in records)
    seen = {10 + record.sequence for record in records}
    for record in records:
        assert partition.check(10 + record.sequence, encode(record, 100), "a proxy") == record.sequence
    partition.check_complete(partition.certain_from(0), seen, 0, 13, "a proxy")
    assert violations.total == 0


def test_an_unacknowledged_record_may_be_there(partition: AcknowledgedPartition, violations: Violations) -> None:
    partition.check(7, encode(partition.new_record(), 100), "a proxy")
    partition.check_complete(partition.certain_from(0), {7}, 0, 8, "a proxy")
    assert violations.total == 0


def test_a_missing_record_is_noticed_unless_the_log_starts_after_it(
    partition: AcknowledgedPartition, violations: Violations
) -> None:
    partition.acknowledged([(partition.new_record().sequence, 5)])
    partition.check_complete([5], set(), 6, 9, "a proxy")
    partition.check_complete([5], set(), 0, 5, "a proxy that did not come so far")
    assert violations.total == 0
    partition.check_complete([5], {4, 6}, 0, 9, "a proxy")
    assert violations.count == {READ: 1}


def test_another_record_at_an_offset_is_noticed(partition: AcknowledgedPartition, violations: Violations) -> None:
    one, other = partition.new_record(), partition.new_record()
    partition.acknowledged([(one.sequence, 5)])
    partition.check(5, encode(other, 100), "a proxy")
    assert violations.count == {READ: 1}


def test_a_record_that_is_there_twice_is_noticed(partition: AcknowledgedPartition, violations: Violations) -> None:
    one = partition.new_record()
    partition.acknowledged([(one.sequence, 5)])
    partition.check(6, encode(one, 100), "a proxy")
    assert violations.count == {READ: 1}


def test_an_aborted_record_is_noticed(partition: AcknowledgedPartition, violations: Violations) -> None:
    one = partition.new_record()
    partition.aborted([one.sequence])
    partition.check(5, encode(one, 100), "a proxy")
    assert violations.count == {ABORTED: 1}


@pytest.mark.parametrize("at", [0, 20, 99])
def test_a_changed_byte_is_noticed(partition: AcknowledgedPartition, violations: Violations, at: int) -> None:
    value = bytearray(encode(partition.new_record(), 100))
    value[at] ^= 1
    assert partition.check(5, bytes(value), "a proxy") is None
    assert violations.count == {BYTES: 1}


def test_a_record_of_another_partition_is_noticed(partition: AcknowledgedPartition, violations: Violations) -> None:
    other = AcknowledgedRecords([("orders", 2)], violations)["orders", 2]
    assert partition.check(5, encode(other.new_record(), 100), "a proxy") is None
    assert violations.count == {BYTES: 1}
