from __future__ import annotations

from tiers.segment.indexes.time_index import TimestampOffset, encode_time_index

ENTRIES = [TimestampOffset(1_600_000_000_000, 1010), TimestampOffset(1_600_000_000_005, 1025)]
GOLDEN = bytes.fromhex(
    "00000174876e8000 0000000a"  # timestamp, 1010 - 1000
    "00000174876e8005 00000019"
)


def test_entries_are_as_kafka_writes_them() -> None:
    assert encode_time_index(1000, ENTRIES) == GOLDEN
