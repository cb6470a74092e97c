"""The verifier of the demo finds the errors that a broken tier would make."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench.demo_records import PARTITIONS, Verifier, aborted_value, batches, key, value

RECORDS = 40
FIRST_TIMESTAMP_MS = 1_000

# partition, sequence
Position = tuple[int, int]


def all_records() -> list[Position]:
    return [(partition, sequence) for sequence in range(RECORDS) for partition in range(PARTITIONS)]


def verified(read: list[Position]) -> Verifier:
    verifier = Verifier(RECORDS, FIRST_TIMESTAMP_MS)
    for partition, sequence in read:
        verifier.check(
            partition, sequence, key(partition, sequence), value(partition, sequence), FIRST_TIMESTAMP_MS + sequence
        )
    return verifier


def test_every_record_once_in_order_is_complete() -> None:
    verifier = verified(all_records())
    assert verifier.complete
    assert verifier.mismatches == []
    assert verifier.value_bytes == sum(len(value(*position)) for position in all_records())


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda records: records.pop(10), id="a gap"),
        pytest.param(lambda records: records.insert(10, records[10]), id="a duplicate"),
        pytest.param(lambda records: records.insert(10, records.pop(10 + PARTITIONS)), id="another order"),
        pytest.param(lambda records: records.insert(10, records[0]), id="a reset"),
    ],
)
def test_records_out_of_sequence_are_a_mismatch(damage: Callable[[list[Position]], object]) -> None:
    records = all_records()
    damage(records)
    assert verified(records).mismatches != []


def test_a_record_that_is_missing_at_the_end_leaves_the_read_incomplete() -> None:
    assert not verified(all_records()[:-1]).complete


@pytest.mark.parametrize(
    ("its_key", "its_value", "timestamp_ms"),
    [
        (key(0, 0), value(0, 0)[:-1] + b"!", FIRST_TIMESTAMP_MS),
        (b"0-1", value(0, 0), FIRST_TIMESTAMP_MS),
        (key(0, 0), value(0, 0), FIRST_TIMESTAMP_MS + 1),
        (None, aborted_value(0), FIRST_TIMESTAMP_MS),
        (None, None, FIRST_TIMESTAMP_MS),
    ],
)
def test_another_value_key_or_timestamp_is_a_mismatch(
    its_key: bytes | None, its_value: bytes | None, timestamp_ms: int
) -> None:
    verifier = Verifier(RECORDS, FIRST_TIMESTAMP_MS)
    verifier.check(0, 0, its_key, its_value, timestamp_ms)
    assert len(verifier.mismatches) == 1


@pytest.mark.parametrize("records", [1, 7, 32_768])
def test_batches_hold_every_sequence_number_once(records: int) -> None:
    covered = [number for batch in batches(records) for number in range(batch.first, batch.last + 1)]
    assert covered == list(range(records))
