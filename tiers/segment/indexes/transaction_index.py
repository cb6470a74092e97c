"""Encodes and decodes the aborted transactions of a segment, in two formats (docs/semantics.md 7).

* Tidegate's own format has every aborted transaction that *overlaps* the segment, as `(producer id, first offset, last
  offset)`. So a read needs no later segment. `last_offset` is `MARKER_NOT_COPIED` if the ABORT marker lies beyond the
  segment.
* Kafka's `.txnindex` has the aborted transactions whose *marker* is in the segment. Kafka's own tools need it to read
  the segments; no reader of Tidegate depends on it.

The producer id and the first offset identify a transaction. The producer epoch does not, because it may change within
a transaction (KIP-890).
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from typing import NamedTuple

from tiers.errors import CorruptSegmentError
from tiers.model.log_source import AbortedTransaction
from tiers.segment.indexes.segment_index import AbortedTransactionRange

MARKER_NOT_COPIED = 2**63 - 1

_RANGE = Struct(">qqq")
_KAFKA_ENTRY = Struct(">hqqqq")
_KAFKA_VERSION = 0


class AbortedTxn(NamedTuple):
    """A `.txnindex` entry. `last_stable_offset` is the LSO right after the append of the marker at `last_offset`."""

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


def encode_aborted_ranges(ranges: Iterable[AbortedTransactionRange]) -> bytes:
    return b"".join([_RANGE.pack(one.producer_id, one.first_offset, one.last_offset) for one in ranges])


def decode_aborted_ranges(data: bytes | memoryview) -> tuple[AbortedTransactionRange, ...]:
    if len(data) % _RANGE.size:
        raise CorruptSegmentError(f"aborted transactions: {len(data)} bytes are not a multiple of {_RANGE.size}")
    ranges = tuple(AbortedTransactionRange(*fields) for fields in _RANGE.iter_unpack(data))
    for one in ranges:
        if one.last_offset < one.first_offset:
            raise CorruptSegmentError(f"an aborted transaction ends before it starts: {one}")
    return ranges


def encode_transaction_index(entries: Iterable[AbortedTxn]) -> bytes:
    return b"".join([_KAFKA_ENTRY.pack(_KAFKA_VERSION, *entry) for entry in entries])


def decode_transaction_index(data: bytes | memoryview) -> list[AbortedTxn]:
    """Decodes `.txnindex`.

    Raises `CorruptSegmentError` for a partial entry, another version, and markers that do not ascend.
    """
    if len(data) % _KAFKA_ENTRY.size:
        raise CorruptSegmentError(f"transaction index: {len(data)} bytes are not a multiple of {_KAFKA_ENTRY.size}")
    entries: list[AbortedTxn] = []
    for version, *fields in _KAFKA_ENTRY.iter_unpack(data):
        if version != _KAFKA_VERSION:
            raise CorruptSegmentError(f"transaction index: version {version} of an entry is not supported")
        entry = AbortedTxn(*fields)
        if entries and entry.last_offset <= entries[-1].last_offset:
            raise CorruptSegmentError(f"transaction index: {entry} follows {entries[-1]}")
        entries.append(entry)
    return entries


def open_at_the_end(ranges: Iterable[AbortedTransactionRange]) -> tuple[AbortedTransaction, ...]:
    """Returns the aborted transactions of a segment whose markers lie beyond it."""
    return tuple(
        AbortedTransaction(one.producer_id, one.first_offset) for one in ranges if one.last_offset == MARKER_NOT_COPIED
    )


def overlapping(
    ranges: Iterable[AbortedTransactionRange], first_offset: int, last_offset: int
) -> list[AbortedTransactionRange]:
    """Returns the ranges that overlap `[first_offset, last_offset]`.

    They are in ascending order of their first offsets, and each pair of producer id and first offset occurs once.
    Clients rely on these three properties (docs/semantics.md 7, emission rules). `first_offset` must be the first
    offset of the first returned batch. The caller may pass the ranges of several segments: of two entries for one
    transaction, the one with the lower last offset stays, which is the one that knows the marker.
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
