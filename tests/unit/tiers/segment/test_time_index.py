from __future__ import annotations

import pytest

from tiers.errors import CorruptSegmentError
from tiers.segment.indexes.time_index import TimestampOffset, decode_time_index, encode_time_index, look_up_timestamp

ENTRIES = [TimestampOffset(1_600_000_000_000, 1010), TimestampOffset(1_600_000_000_005, 1025)]
GOLDEN = bytes.fromhex(
    "00000174876e8000 0000000a"  # timestamp, 1010 - 1000
    "00000174876e8005 00000019"
)


def test_entries_are_as_kafka_writes_them() -> None:
    assert encode_time_index(1000, ENTRIES) == GOLDEN
    assert decode_time_index(1000, GOLDEN) == ENTRIES


def test_look_up_gives_the_greatest_entry_at_or_below_the_timestamp() -> None:
    assert look_up_timestamp(ENTRIES, 1000, 1_599_999_999_999) == (-1, 1000)
    assert look_up_timestamp(ENTRIES, 1000, 1_600_000_000_004) == ENTRIES[0]
    assert look_up_timestamp(ENTRIES, 1000, 1_600_000_000_005) == ENTRIES[1]


@pytest.mark.parametrize("damaged", [GOLDEN[:-1], GOLDEN + GOLDEN[:12], GOLDEN[12:] + GOLDEN[:12], b"\xff" * 12])
def test_entries_that_do_not_increase_are_corrupt(damaged: bytes) -> None:
    with pytest.raises(CorruptSegmentError):
        decode_time_index(1000, damaged)
