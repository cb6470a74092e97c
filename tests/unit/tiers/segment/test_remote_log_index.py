from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers.errors import CorruptSegmentError
from tiers.segment.indexes.remote_log_index import (
    MAX_RDI_BYTES,
    RemoteLogIndex,
    RemoteLogIndexEntry,
    chunk_of_entry,
    decode_entries,
    encode_entry,
    encode_remote_log_index,
    entry_of_chunk,
)
from tiers.segment.indexes.segment_index import Chunk

SHORT = RemoteLogIndexEntry(0, 99, 0, 999, 50, b"aaa")
LONG = RemoteLogIndexEntry(1000121, 1000220, 1600000000000, 1600000009999, 4096, b"s3://b/k")
SHORT_BYTES = bytes.fromhex(
    "0000 002d cf4869be"  # magic, length of what follows it, CRC-32 of all that follows
    "0000000000000000 0000000000000063"  # first and last offset
    "0000000000000000 00000000000003e7"  # first and last timestamp
    "00000032 0003 616161"  # data length, RDI length, RDI
)
LONG_BYTES = bytes.fromhex(
    "00000032dd6f384600000000000f42b900000000000f431c00000174876e800000000174876ea70f00001000000873333a2f2f622f6b"
)
CHUNK = Chunk(100, 199, 1_600_000_000_000, 1_600_000_000_099, 0, 4096, 4096, 0xE3069283)
WHOLE = encode_remote_log_index([CHUNK])


def test_entries_are_the_founding_format() -> None:
    assert (encode_entry(SHORT), encode_entry(LONG)) == (SHORT_BYTES, LONG_BYTES)
    assert decode_entries(SHORT_BYTES + LONG_BYTES) == ([SHORT, LONG], len(SHORT_BYTES + LONG_BYTES))


@given(st.integers(0, len(LONG_BYTES) - 1))
def test_a_torn_append_ends_where_the_last_whole_entry_ends(kept: int) -> None:
    assert decode_entries(SHORT_BYTES + LONG_BYTES[:kept]) == ([SHORT], len(SHORT_BYTES))


@given(st.integers(0, len(SHORT_BYTES) * 8 - 1))
def test_a_flipped_bit_is_corruption_or_a_length_that_runs_past_the_end(bit: int) -> None:
    damaged = bytearray(SHORT_BYTES)
    damaged[bit // 8] ^= 0x80 >> bit % 8
    try:
        found = decode_entries(bytes(damaged))
    except CorruptSegmentError:
        return
    assert (bit // 8 in (2, 3), found) == (True, ([], 0))


BODY = SHORT_BYTES[8:44] + b"\x00\x02aaa"


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (SHORT_BYTES + SHORT_BYTES, "99 after 99"),
        (struct.pack(">hhI", 0, 45, zlib.crc32(BODY)) + BODY, "RDI of 2"),
    ],
)
def test_entries_that_contradict_themselves_are_corrupt(entries: bytes, said: str) -> None:
    with pytest.raises(CorruptSegmentError, match=said):
        decode_entries(entries)


def test_an_rdi_that_the_length_field_cannot_hold_is_refused() -> None:
    assert decode_entries(encode_entry(SHORT._replace(rdi=bytes(MAX_RDI_BYTES))))[0][0].rdi == bytes(MAX_RDI_BYTES)
    with pytest.raises(ValueError, match="RDI"):
        encode_entry(SHORT._replace(rdi=bytes(MAX_RDI_BYTES + 1)))


def test_our_remote_data_identifier() -> None:
    entry = entry_of_chunk(CHUNK)
    # The version, the stored position, the stored length, and the CRC-32C of the log's bytes.
    assert entry.rdi == bytes.fromhex("00 0000000000000000 00001000 e3069283")
    assert chunk_of_entry(entry) == CHUNK


@pytest.mark.parametrize("rdi", [b"", b"\x01" + bytes(16), bytes(16), b"s3://b/k"])
def test_a_foreign_remote_data_identifier_is_corrupt(rdi: bytes) -> None:
    with pytest.raises(CorruptSegmentError):
        chunk_of_entry(SHORT._replace(rdi=rdi))


def test_an_index_that_is_torn_or_has_a_hole_is_corrupt() -> None:
    assert RemoteLogIndex.decode(WHOLE, (), ()).chunks() == (CHUNK,)
    beyond = encode_remote_log_index([CHUNK, Chunk(200, 299, 0, 0, 5000, 10, 10, 0)])
    for content, said in ((WHOLE + WHOLE[:10], "after the last entry"), (beyond, "position 4096 is expected")):
        with pytest.raises(CorruptSegmentError, match=said):
            RemoteLogIndex.decode(content, (), ())
