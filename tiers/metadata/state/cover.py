"""`StateCover` keeps which segment answers for which offsets, as runs that do not overlap.

See docs/semantics.md 6.4, 11.2.

Of overlapping segments, the one whose copy began last answers. A run has the bounds within which its segment is
readable, so a look-up is one seek.
"""

from __future__ import annotations

import lmdb

from tiers.metadata.state.layout import COVER_SIZE, PARTITION_KEY_BYTES, U64, Databases
from tiers.metadata.state.segment_cursors import valid_end_offset
from tiers.metadata.state.state import RemoteLogMetadataState, SegmentRun
from tiers.model.stored_segment import encode_answer, stored_segment

LAST_OFFSET = (1 << 63) - 1
_NOTHING = bytes(COVER_SIZE.size)


class StateCover:
    """The cover within one write transaction. `key` is a partition's key, and offsets are inclusive."""

    def __init__(self, state: RemoteLogMetadataState, databases: Databases, txn: lmdb.Transaction) -> None:
        self._state = state
        self._db = databases
        self._txn = txn

    def all_above(self, key: bytes, offset: int) -> None:
        """Decides again for all offsets above `offset`, from the start of the first segment that reaches above it.

        The runs below `offset` of such a segment also contain the segment's valid end."""
        overlapping = self._state.overlapping(self._txn, key, offset + 1, LAST_OFFSET)
        first = min([offset + 1, *(run.start_offset for run in overlapping)])
        self.again(key, first, LAST_OFFSET)

    def finished(self, key: bytes, run: SegmentRun, stored: bytes) -> None:
        """Covers the offsets of a segment that has just become readable.

        If no segment answered there, no other segment can: any segment that is readable there and not cut off would
        have answered."""
        _, first, last, uuid = run
        if self._cut(key, first, last):
            self.again(key, first, last)
            return
        run_end = valid_end_offset(self._state.cuts_of(self._txn, key), stored, last)
        if run_end >= first:
            self._put_run(key, first, run_end, encode_answer(uuid, run_end, stored))

    def again(self, key: bytes, first: int, last: int) -> None:
        """Decides again which readable segment answers for the offsets in [first, last]."""
        self._cut(key, first, last)
        overlapping = self._state.overlapping(self._txn, key, first, last)
        runs = [run for run in overlapping if run.order >= 0]
        if not runs:
            return
        holes = [(first, last)]
        cuts = self._state.cuts_of(self._txn, key)
        for run in sorted(runs, reverse=True):
            uncovered = []
            stored = self._state.stored(self._txn, key, run.uuid) if cuts else b""
            run_end = valid_end_offset(cuts, stored, run.end_offset)
            answer = b""
            for hole_first, hole_last in holes:
                run_first, run_last = max(hole_first, run.start_offset), min(hole_last, run_end)
                if run_first > run_last:
                    uncovered.append((hole_first, hole_last))
                    continue
                stored = stored or self._state.stored(self._txn, key, run.uuid)
                answer = answer or encode_answer(run.uuid, run_end, stored)
                self._put_run(key, run_first, run_last, answer)
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
