"""Reads a partition's segments: single ones, and all of them in pieces.

A piece is read in a transaction of its own, which ends before the iterator yields anything of it. So no reader keeps
the writer from reusing pages. Changes are visible from the next piece on, as in a series of look-ups. The state may be
closed between two pieces: the next one then raises `RemoteLogMetadataNotReadyError`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice, repeat
from typing import NamedTuple

import lmdb

from tiers.errors import RemoteLogMetadataError, RemoteLogMetadataNotReadyError
from tiers.metadata.state.layout import (
    END_AND_ORDER,
    PARTITION_KEY_BYTES,
    U64,
    Databases,
    decode_partition,
    entries,
    recorded,
)
from tiers.model.segment_metadata import Cut, CutUpdate
from tiers.model.stored_segment import StoredSegment, stored_segment, with_cuts

_FIRST_PIECE, _PIECE = 4, 256
"""Most callers need the first few segments alone."""
_UUID_OFFSET = PARTITION_KEY_BYTES + U64.size


class SegmentRun(NamedTuple):
    """The offsets of a segment. `order` is higher for a copy that began later, and below 0 if it is not readable."""

    order: int
    start_offset: int
    end_offset: int
    uuid: bytes


def cuts_of(txn: lmdb.Transaction, db: Databases, key: bytes) -> list[Cut]:
    """Returns the CUTs of a partition, by leader epoch and offset."""
    return [each.cut for each in recorded(txn, db, CutUpdate, key)]


def named(txn: lmdb.Transaction, db: Databases, key: bytes, uuid: bytes, cuts: Sequence[Cut]) -> StoredSegment:
    """Returns a segment that another entry of the state names."""
    raw = txn.get(key + uuid, db=db.segments)
    if raw is None:
        raise RemoteLogMetadataError("the saved state names a segment that it does not contain")
    return with_cuts(key, uuid, bytes(raw), cuts)


def overlapping(txn: lmdb.Transaction, db: Databases, key: bytes, first: int, last: int) -> Iterator[SegmentRun]:
    """Yields every listable segment that has an offset in [first, last]."""
    for entry, value in entries(txn, db.starts, key, _lowest_start(txn, db, key, first)):
        start = U64.unpack_from(entry, PARTITION_KEY_BYTES)[0]
        if start > last:
            return
        end, order = END_AND_ORDER.unpack(value)
        if end >= first:
            yield SegmentRun(order, start, end, entry[_UUID_OFFSET:])


def answering(env: lmdb.Environment, db: Databases, key: bytes, offset: int) -> Iterator[StoredSegment]:
    """Yields `next_segment` of `offset`, then of the offset after that segment's valid end, and so on."""
    position = max(offset, 0)
    for _, last, answer in _cover(env, db, key, position):
        if last >= position:
            segment = stored_segment(key, answer)
            position = segment.valid_end_offset + 1
            yield segment


def answered(env: lmdb.Environment, db: Databases, key: bytes, offset: int) -> Iterator[tuple[int, int]]:
    """Yields the runs of the cover from the one that holds `offset`, or that follows it: first and next offset."""
    return ((first, last + 1) for first, last, _ in _cover(env, db, key, max(offset, 0)))


def listed(env: lmdb.Environment, db: Databases, key: bytes, min_offset: int) -> Iterator[StoredSegment]:
    """Yields every listable segment that ends at or above `min_offset`, by start offset."""
    begin = None
    for size in _piece_sizes():
        with _begin(env) as txn:
            begin = _lowest_start(txn, db, key, min_offset) if begin is None else begin
            starts = list(islice(entries(txn, db.starts, key, begin), size))
            uuids = [entry[_UUID_OFFSET:] for entry, value in starts if U64.unpack_from(value)[0] >= min_offset]
            cuts = cuts_of(txn, db, key)
            segments = [named(txn, db, key, uuid, cuts) for uuid in uuids]
        yield from segments
        if len(starts) < size:
            return
        begin = starts[-1][0][PARTITION_KEY_BYTES:] + b"\0"


def apart(env: lmdb.Environment, db: Databases, key: bytes) -> list[StoredSegment]:
    """Returns every listable segment that is not whole, by start offset."""
    with _begin(env) as txn:
        found = [entry[PARTITION_KEY_BYTES:] for entry, _ in entries(txn, db.apart, key)]
        cuts = cuts_of(txn, db, key) if found else []
        segments = [named(txn, db, key, uuid, cuts) for uuid in found]
    return sorted(segments, key=lambda each: (each.start_offset, each.id))


def _cover(env: lmdb.Environment, db: Databases, key: bytes, offset: int) -> Iterator[tuple[int, int, bytes]]:
    """Yields the runs that end at `offset` or later: first and last offset, and the answer."""
    for size in _piece_sizes():
        with _begin(env) as txn:
            piece = list(islice(entries(txn, db.cover, key, U64.pack(offset)), size))
        for entry, value in piece:
            last = U64.unpack_from(entry, PARTITION_KEY_BYTES)[0]
            yield U64.unpack_from(value)[0], last, value[U64.size :]
            offset = last + 1
        if len(piece) < size:
            return


def _lowest_start(txn: lmdb.Transaction, db: Databases, key: bytes, offset: int) -> bytes:
    """Returns the lowest start offset that a segment which has `offset` can have, as the keys of `starts` have it."""
    raw = txn.get(key, db=db.partitions)
    return U64.pack(0 if raw is None else max(0, offset - decode_partition(raw)[0]))


def _piece_sizes() -> Iterator[int]:
    return chain([min(_FIRST_PIECE, _PIECE)], repeat(_PIECE))


def _begin(env: lmdb.Environment) -> lmdb.Transaction:
    try:
        return env.begin()
    except lmdb.Error as error:
        raise RemoteLogMetadataNotReadyError(f"the saved state cannot be read any more: {error}") from error
