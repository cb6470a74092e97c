from __future__ import annotations

from tiers.segment.indexes.offset_index import OffsetPosition, encode_offset_index

ENTRIES = [OffsetPosition(1010, 0x1001), OffsetPosition(1025, 0x2004)]
GOLDEN = bytes.fromhex(
    "0000000a 00001001"  # 1010 - 1000, position
    "00000019 00002004"
)


def test_entries_are_as_kafka_writes_them() -> None:
    assert encode_offset_index(1000, ENTRIES) == GOLDEN
