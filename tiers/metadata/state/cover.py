"""`StateCover` keeps which segment answers for which offsets, as runs that do not overlap.

See docs/semantics.md 6.4, 11.2.

Of overlapping segments, the one whose copy began last answers. A run has the bounds within which its segment is
readable, so a look-up is one seek.
"""

from __future__ import annotations

import lmdb

from tiers.metadata.state.layout import COVER_SIZE, PARTITION_KEY_BYTES, U64, Databases
from tiers.metadata.state.segment_cursors import SegmentRun, cuts_of, named, overlapping
from tiers.model.stored_segment import stored_segment

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

    def again(self, key: bytes, first: int, last: int, finished: SegmentRun | None = None) -> None:
        """Decides again which readable segment answers for the offsets in [first, last].

        `finished` is a segment with these offsets that has just become readable. If no segment answered there, no
        other segment can: any segment that is readable there and not cut off would have answered."""
        was_answered = self._cut(key, first, last)
        if finished is None or was_answered:
            runs = [run for run in overlapping(self._txn, self._db, key, first, last) if run.order >= 0]
        else:
            runs = [finished]
        cuts = cuts_of(self._txn, self._db, key) if runs else []
        holes = [(first, last)]
        for run in sorted(runs, reverse=True):
            if not holes:
                return
            uncovered = []
            segment = named(self._txn, self._db, key, run.uuid, cuts)
            for hole_first, hole_last in holes:
                run_first, run_last = max(hole_first, run.start_offset), min(hole_last, segment.valid_end_offset)
                if run_first > run_last:
                    uncovered.append((hole_first, hole_last))
                    continue
                self._put_run(key, run_first, run_last, segment.answer)
                if hole_first < run_first:
                    uncovered.append((hole_first, run_first - 1))
                if run_last < hole_last:
                    uncovered.append((run_last + 1, hole_last))
            holes = uncovered

    def _put_run(self, key: bytes, first: int, last: int, answer: bytes) -> None:
        self._txn.put(key + U64.pack(last), U64.pack(first) + answer, db=self._db.cover)
        self._count(1, key, first, last, answer)

    def _count(self, sign: int, key: bytes, first: int, last: int, answer: bytes) -> None:
        """Counts a run that was added (`sign` 1) or removed (-1)."""
        segment = stored_segment(key, answer)
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
        cut: list[tuple[int, int, bytes]] = []
        cursor = self._txn.cursor(self._db.cover)
        found = cursor.set_range(key + U64.pack(first))
        while found and cursor.key()[:PARTITION_KEY_BYTES] == key:
            run_last = U64.unpack_from(cursor.key(), PARTITION_KEY_BYTES)[0]
            run_first = U64.unpack_from(cursor.value())[0]
            if run_first > last:
                break
            cut.append((run_first, run_last, bytes(cursor.value()[8:])))
            found = cursor.delete()
        for run_first, run_last, answer in cut:
            self._count(-1, key, run_first, run_last, answer)
            if run_first < first:
                self._put_run(key, run_first, first - 1, answer)
            if run_last > last:
                self._put_run(key, last + 1, run_last, answer)
        return bool(cut)
