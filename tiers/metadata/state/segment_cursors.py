"""Iterates over a partition's segments: one seek for each piece of them, then from each to the next.

A piece is read in a transaction of its own, which ends before the iterator yields anything of it. So no reader keeps
the writer from reusing pages. Changes are visible from the next piece on, as in a series of look-ups. The state may be
closed between two pieces: the next one then raises `RemoteLogMetadataNotReadyError`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice, repeat
from typing import cast

import lmdb

from tiers.errors import RemoteLogMetadataError, RemoteLogMetadataNotReadyError
from tiers.metadata.state.layout import (
    PARTITION_KEY_BYTES,
    U64,
    Databases,
    decode_partition,
    entries,
    recorded,
    start_key,
)
from tiers.model.segment_metadata import Cut, CutUpdate, first_void
from tiers.model.stored_segment import (
    NOT_CUT,
    StoredSegment,
    encode_answer,
    stored_fields,
    stored_leader_epoch,
    stored_segment,
)

_FIRST_PIECE, _PIECE = 4, 256
"""Most callers need the first few segments alone."""
_UUID_OFFSET = PARTITION_KEY_BYTES + U64.size

Entry = tuple[bytes, bytes]


def valid_end_offset(cuts: Sequence[Cut], raw: bytes, end_offset: int) -> int:
    """Returns the end (inclusive) that the CUTs leave of a segment. `raw` is its stored form."""
    void_from = first_void(cuts, stored_leader_epoch(raw, stored_fields(raw))) if cuts else None
    return end_offset if void_from is None else min(end_offset, void_from - 1)


def cuts_of(txn: lmdb.Transaction, db: Databases, key: bytes) -> list[Cut]:
    """Returns the CUTs of a partition, by leader epoch and offset."""
    cuts = recorded(txn, db, CutUpdate, key)
    return [Cut(each.leader_epoch, each.offset, each.event_timestamp_ms, each.is_proved) for each in cuts]


def answering(env: lmdb.Environment, db: Databases, key: bytes, offset: int) -> Iterator[StoredSegment]:
    """Yields `next_segment` of `offset`, then of the offset after that segment's valid end, and so on."""
    position = max(offset, 0)
    for size in _piece_sizes():
        piece = _cover_piece(env, db, key, position, size)
        for entry, value in piece:
            if U64.unpack_from(entry, PARTITION_KEY_BYTES)[0] >= position:
                segment = stored_segment(key, value[U64.size :])
                position = segment.valid_end_offset + 1
                yield segment
        if len(piece) < size:
            return
        position = max(position, U64.unpack_from(piece[-1][0], PARTITION_KEY_BYTES)[0] + 1)


def answered(env: lmdb.Environment, db: Databases, key: bytes, offset: int) -> Iterator[tuple[int, int]]:
    """Yields the runs of the cover from the one that holds `offset`, or that follows it: first and next offset."""
    position = max(offset, 0)
    for size in _piece_sizes():
        piece = _cover_piece(env, db, key, position, size)
        for entry, value in piece:
            position = U64.unpack_from(entry, PARTITION_KEY_BYTES)[0] + 1
            yield U64.unpack_from(value)[0], position
        if len(piece) < size:
            return


def _piece_sizes() -> Iterator[int]:
    return chain([min(_FIRST_PIECE, _PIECE)], repeat(_PIECE))


def _begin(env: lmdb.Environment) -> lmdb.Transaction:
    try:
        return env.begin()
    except lmdb.Error as error:
        raise RemoteLogMetadataNotReadyError(f"the saved state cannot be read any more: {error}") from error


def _cover_piece(env: lmdb.Environment, db: Databases, key: bytes, position: int, size: int) -> list[Entry]:
    with _begin(env) as txn:
        cursor = txn.cursor(db.cover)
        if not cursor.set_range(key + U64.pack(position)):
            return []
        return _of_partition(key, _entries(cursor, size))


def _entries(cursor: lmdb.Cursor, size: int) -> list[Entry]:
    # The keys and values are bytes, since the transaction was not begun with `buffers`.
    return list(islice(cast("Iterator[Entry]", cursor.iternext()), size))


def _of_partition(key: bytes, entries: list[Entry]) -> list[Entry]:
    """Returns the entries of the partition. `entries` are in the order of their keys."""
    while entries and not entries[-1][0].startswith(key):
        entries.pop()
    return entries


def listed(env: lmdb.Environment, db: Databases, key: bytes, min_offset: int) -> Iterator[StoredSegment]:
    """Yields every listable segment that ends at or above `min_offset`, by start offset."""
    after: bytes | None = None
    for size in _piece_sizes():
        with _begin(env) as txn:
            starts = _starts_piece(txn, db, key, min_offset, after, size)
            segments = list(_segments_of(txn, db, key, min_offset, starts))
        yield from segments
        if len(starts) < size:
            return
        after = starts[-1][0]


def apart(env: lmdb.Environment, db: Databases, key: bytes) -> list[StoredSegment]:
    """Returns every listable segment that is not whole, by start offset."""
    with _begin(env) as txn:
        found = [entry[PARTITION_KEY_BYTES:] for entry, _ in entries(txn, db.apart, key)]
        cuts = cuts_of(txn, db, key) if found else []
        segments = [_stored(txn, db, key, uuid, cuts) for uuid in found]
    return sorted(segments, key=lambda each: (each.start_offset, each.id))


def _starts_piece(
    txn: lmdb.Transaction, db: Databases, key: bytes, min_offset: int, after: bytes | None, size: int
) -> list[Entry]:
    cursor = txn.cursor(db=db.starts)
    if after is None:
        raw = txn.get(key, db=db.partitions)
        lowest_start = 0 if raw is None else max(0, min_offset - decode_partition(raw)[0])
        found = cursor.set_range(start_key(key, lowest_start, b""))
    else:
        found = cursor.set_range(after)
        if found and cursor.key() == after:
            found = cursor.next()
    return _of_partition(key, _entries(cursor, size)) if found else []


def _segments_of(
    txn: lmdb.Transaction, db: Databases, key: bytes, min_offset: int, starts: Sequence[Entry]
) -> Iterator[StoredSegment]:
    cuts = cuts_of(txn, db, key)
    for entry, value in starts:
        end = U64.unpack_from(value)[0]
        if end < min_offset:
            continue
        yield _stored(txn, db, key, entry[_UUID_OFFSET:], cuts)


def _stored(txn: lmdb.Transaction, db: Databases, key: bytes, uuid: bytes, cuts: Sequence[Cut]) -> StoredSegment:
    raw = txn.get(key + uuid, db=db.segments)
    if raw is None:
        raise RemoteLogMetadataError("the saved state names a segment that it does not contain")
    raw = bytes(raw)
    return stored_segment(key, encode_answer(uuid, valid_end_offset(cuts, raw, NOT_CUT), raw))
