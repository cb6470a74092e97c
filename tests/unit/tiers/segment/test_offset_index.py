from __future__ import annotations

import pytest

from tiers.errors import CorruptSegmentError
from tiers.segment.indexes.offset_index import OffsetPosition, decode_offset_index, encode_offset_index, look_up_offset

ENTRIES = [OffsetPosition(1010, 0x1001), OffsetPosition(1025, 0x2004)]
GOLDEN = bytes.fromhex(
    "0000000a 00001001"  # 1010 - 1000, position
    "00000019 00002004"
)


def test_entries_are_as_kafka_writes_them() -> None:
    assert encode_offset_index(1000, ENTRIES) == GOLDEN
    assert decode_offset_index(1000, GOLDEN) == ENTRIES


def test_look_up_gives_the_greatest_entry_at_or_below_the_offset() -> None:
    assert look_up_offset(ENTRIES, 1000, 1009) == (1000, 0)
    assert look_up_offset(ENTRIES, 1000, 1010) == (1010, 0x1001)
    assert look_up_offset(ENTRIES, 1000, 1024) == (1010, 0x1001)
    assert look_up_offset(ENTRIES, 1000, 9999) == (1025, 0x2004)


@pytest.mark.parametrize("damaged", [GOLDEN[:-1], GOLDEN + GOLDEN[:8], GOLDEN[8:] + GOLDEN[:8], b"\xff" * 8])
def test_entries_that_do_not_increase_are_corrupt(damaged: bytes) -> None:
    with pytest.raises(CorruptSegmentError):
        decode_offset_index(1000, damaged)
