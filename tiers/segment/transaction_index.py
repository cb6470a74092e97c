"""Aborted transactions of a segment, in two shapes (semantics 7).

* Ours: every aborted transaction that *overlaps* the segment, `(producer id, first offset, last offset)`, so that a
  read needs no later segment. `last_offset` is `MARKER_NOT_COPIED` while the ABORT marker lies beyond the segment.
* Kafka's `.txnindex`: an entry lies in the segment that holds the *marker*. Written so that Kafka's own tools can read
  our segments; no read of ours depends on it.

A transaction is known by its producer id and first offset: the producer epoch may change within it (KIP-890).
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from typing import NamedTuple

from tiers.errors import CorruptSegmentError
from tiers.segment.segment_index import AbortedTransactionRange

MARKER_NOT_COPIED = 2**63 - 1

_RANGE = Struct(">qqq")
_KAFKA_ENTRY = Struct(">hqqqq")
_KAFKA_VERSION = 0


class AbortedTxn(NamedTuple):
    """A `.txnindex` entry. `last_stable_offset`: as it became when the marker at `last_offset` was written."""

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


def encode_aborted_ranges(ranges: Iterable[AbortedTransactionRange]) -> bytes:
    return b"".join([_RANGE.pack(one.producer_id, one.first_offset, one.last_offset) for one in ranges])


def decode_aborted_ranges(data: bytes | memoryview) -> tuple[AbortedTransactionRange, ...]:
    if len(data) % _RANGE.size:
        raise CorruptSegmentError(f"aborted transactions of {len(data)} bytes: not a multiple of {_RANGE.size}")
    ranges = tuple(AbortedTransactionRange(*fields) for fields in _RANGE.iter_unpack(data))
    for one in ranges:
        if one.last_offset < one.first_offset:
            raise CorruptSegmentError(f"aborted transaction that ends before it starts: {one}")
    return ranges


def encode_transaction_index(entries: Iterable[AbortedTxn]) -> bytes:
    return b"".join([_KAFKA_ENTRY.pack(_KAFKA_VERSION, *entry) for entry in entries])


def decode_transaction_index(data: bytes | memoryview) -> list[AbortedTxn]:
    """Raises `CorruptSegmentError` for half an entry, another version, or markers that do not ascend."""
    if len(data) % _KAFKA_ENTRY.size:
        raise CorruptSegmentError(f"transaction index of {len(data)} bytes: not a multiple of {_KAFKA_ENTRY.size}")
    entries: list[AbortedTxn] = []
    for version, *fields in _KAFKA_ENTRY.iter_unpack(data):
        if version != _KAFKA_VERSION:
            raise CorruptSegmentError(f"transaction index entry of version {version}")
        entry = AbortedTxn(*fields)
        if entries and entry.last_offset <= entries[-1].last_offset:
            raise CorruptSegmentError(f"transaction index: {entry} after {entries[-1]}")
        entries.append(entry)
    return entries


def overlapping(
    ranges: Iterable[AbortedTransactionRange], first_offset: int, last_offset: int
) -> list[AbortedTransactionRange]:
    """Those that overlap `[first_offset, last_offset]`, by ascending first offset, each (producer, first offset) once.

    Clients count on all three (semantics 7, emission rules). `first_offset` must be that of the first returned batch.
    Of two entries for one transaction the one that knows its marker is kept, so ranges of several segments may be
    passed together, oldest first.
    """
    found: dict[tuple[int, int], AbortedTransactionRange] = {}
    for one in ranges:
        if one.last_offset < first_offset or one.first_offset > last_offset:
            continue
        key = (one.producer_id, one.first_offset)
        known = found.get(key)
        if known is None or one.last_offset < known.last_offset:
            found[key] = one
    return sorted(found.values(), key=_first_offset_then_producer)


def _first_offset_then_producer(one: AbortedTransactionRange) -> tuple[int, int]:
    return one.first_offset, one.producer_id
