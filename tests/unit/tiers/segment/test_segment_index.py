"""The entries of the founding remote log index: golden bytes, torn appends and damage."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers.errors import CorruptSegmentError
from tiers.segment.indexes.segment_index import (
    Chunk,
    decode_chunks,
    decode_remote_log_index,
    encode_chunk,
    encode_remote_log_index,
)

FIRST = Chunk(100, 199, 1_600_000_000_000, 1_600_000_000_099, 0, 4096, 4096, 0xE3069283)
SECOND = Chunk(200, 299, 1_600_000_000_100, 1_600_000_000_199, 4096, 10, 20, 7)
ENTRY = bytes.fromhex(
    "0000 003b fddaf02e"  # magic, length of what follows it, CRC-32 of all that follows
    "0000000000000064 00000000000000c7"  # first and last offset
    "00000174876e8000 00000174876e8063"  # first and last timestamp
    "00001000 0011"  # data length, RDI length
    "00 0000000000000000 00001000 e3069283"  # version, stored position, stored length, CRC-32C of the log
)


def test_entries_are_the_founding_format() -> None:
    assert encode_chunk(FIRST) == ENTRY
    both = encode_remote_log_index([FIRST, SECOND])
    assert decode_chunks(both) == ([(FIRST, b""), (SECOND, b"")], len(both))
    with_tail = encode_chunk(SECOND, 1, b"tail")
    assert decode_chunks(with_tail, 1, 4) == ([(SECOND, b"tail")], len(with_tail))


@given(st.integers(0, len(ENTRY) - 1))
def test_a_torn_append_ends_where_the_last_whole_entry_ends(kept: int) -> None:
    torn = ENTRY + encode_chunk(SECOND)[:kept]
    assert decode_chunks(torn) == ([(FIRST, b"")], len(ENTRY))
    if kept:
        with pytest.raises(CorruptSegmentError, match="after the last entry"):
            decode_remote_log_index(torn)


@given(st.integers(0, len(ENTRY) * 8 - 1))
def test_a_flipped_bit_is_corruption_or_a_length_that_runs_past_the_end(bit: int) -> None:
    damaged = bytearray(ENTRY)
    damaged[bit // 8] ^= 0x80 >> bit % 8
    try:
        found = decode_chunks(bytes(damaged))
    except CorruptSegmentError:
        return
    assert (bit // 8 in (2, 3), found) == (True, ([], 0))


def entry_of(body: bytes) -> bytes:
    return struct.pack(">hhI", 0, len(body) + 4, zlib.crc32(body)) + body


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (ENTRY + ENTRY, "199 after 199"),
        (encode_chunk(FIRST, 1), "version 1"),
        (encode_chunk(FIRST, 0, b"tail"), "an RDI of 21 bytes"),
        (entry_of(ENTRY[8:45]), "length 41 is invalid"),
        (entry_of(ENTRY[8:44] + b"\x00\x10" + ENTRY[46:]), "an RDI of 16 bytes"),
    ],
)
def test_entries_of_another_format_are_corrupt(entries: bytes, said: str) -> None:
    with pytest.raises(CorruptSegmentError, match=said):
        decode_chunks(entries)
