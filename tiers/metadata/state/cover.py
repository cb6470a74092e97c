"""`StateCover` keeps which segment answers for which offsets, as runs that do not overlap.

See docs/semantics.md 6.4, 11.2.

Of overlapping segments, the one whose copy began last answers. A run has the bounds within which its segment is
readable, so a look-up is one seek.
"""

from __future__ import annotations

import lmdb

from tiers.metadata.state.layout import COVER_SIZE, PARTITION_KEY_BYTES, U64, Databases
from tiers.metadata.state.segment_cursors import cuts_of, named, overlapping
from tiers.model.stored_segment import StoredSegment, stored_segment

LAST_OFFSET = (1 << 63) - 1
_NOTHING = bytes(COVER_SIZE.size)


class StateCover:
    """The cover within one write transaction. `key` is a partition's key, and offsets are inclusive."""

    def __init__(self, databases: Databases, txn: lmdb.Transaction) -> None:
        self._db = databases
        self._txn = txn

    def all_above(self, key: bytes, offset: int) -> None:
        """Decides again for all offsets above `offset`, from the start of the first segment that reaches above it.

        The runs below `offset` of such a segment also contain the segment's valid end."""
        runs = overlapping(self._txn, self._db, key, offset + 1, LAST_OFFSET)
        self.again(key, min([offset + 1, *(run.start_offset for run in runs)]), LAST_OFFSET)

    def again(self, key: bytes, first: int, last: int, finished: bytes | None = None) -> None:
        """Decides again which readable segment answers for the offsets in [first, last].

        `finished` is the uuid of a segment with these offsets that has just become readable. If no segment answered
        there, no other one can: any segment that is readable there and not cut off would have answered."""
        was_answered = self._cut(key, first, last)
        if finished is None or was_answered:
            runs = sorted(overlapping(self._txn, self._db, key, first, last), reverse=True)
            uuids = [run.uuid for run in runs if run.order >= 0]
        else:
            uuids = [finished]
        cuts = cuts_of(self._txn, self._db, key) if uuids else []
        holes = [(first, last)]
        for uuid in uuids:
            if not holes:
                return
            uncovered = []
            segment = named(self._txn, self._db, key, uuid, cuts)
            for hole_first, hole_last in holes:
                run_first, run_last = max(hole_first, segment.start_offset), min(hole_last, segment.valid_end_offset)
                if run_first > run_last:
                    uncovered.append((hole_first, hole_last))
                    continue
                self._put_run(run_first, run_last, segment)
                if hole_first < run_first:
                    uncovered.append((hole_first, run_first - 1))
                if run_last < hole_last:
                    uncovered.append((run_last + 1, hole_last))
            holes = uncovered

    def _put_run(self, first: int, last: int, segment: StoredSegment) -> None:
        self._txn.put(segment.partition_key + U64.pack(last), U64.pack(first) + segment.answer, db=self._db.cover)
        self._count(1, first, last, segment)

    def _count(self, sign: int, first: int, last: int, segment: StoredSegment) -> None:
        """Counts a run that was added (`sign` 1) or removed (-1)."""
        key = segment.partition_key
        segments, size_bytes, offsets = COVER_SIZE.unpack(self._txn.get(key, _NOTHING, db=self._db.cover_sizes))
        offsets += sign * (last + 1 - first)
        if (first, last) == (segment.start_offset, segment.end_offset):
            segments += sign
            size_bytes += sign * segment.segment_size_bytes
            if sign > 0:
                self._txn.delete(key + segment.id, db=self._db.apart)
            else:
                self._txn.put(key + segment.id, b"", db=self._db.apart)
        self._txn.put(key, COVER_SIZE.pack(segments, size_bytes, offsets), db=self._db.cover_sizes)

    def _cut(self, key: bytes, first: int, last: int) -> bool:
        """Removes [first, last] from the cover, and keeps the parts of runs outside. Returns whether there was any."""
        cut: list[tuple[int, int, StoredSegment]] = []
        cursor = self._txn.cursor(self._db.cover)
        found = cursor.set_range(key + U64.pack(first))
        while found and cursor.key()[:PARTITION_KEY_BYTES] == key:
            run_last = U64.unpack_from(cursor.key(), PARTITION_KEY_BYTES)[0]
            run_first = U64.unpack_from(cursor.value())[0]
            if run_first > last:
                break
            cut.append((run_first, run_last, stored_segment(key, bytes(cursor.value()[8:]))))
            found = cursor.delete()
        for run_first, run_last, segment in cut:
            self._count(-1, run_first, run_last, segment)
            if run_first < first:
                self._put_run(run_first, first - 1, segment)
            if run_last > last:
                self._put_run(last + 1, run_last, segment)
        return bool(cut)
