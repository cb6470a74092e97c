"""`AcknowledgedRecords`: the records of the drill's producers that every reader must see, and those that none may see.

The drill does not know the whole log, since a producer may get no answer. `tests/support/written_log.py` is for logs
that a test writes itself.

* A record is certain with its offset when it was acknowledged. A record of a transaction is certain when the commit was
  acknowledged. A record without an answer may exist or not.
* Clients asked to delete the records below `asked_start`. The broker acknowledged the deletion below `deleted_start`.
* One lock protects everything. Every method may be called from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable

from tests.drill.records import DamagedRecordError, DrillRecord, decode, topic_number
from tests.drill.violations import ABORTED, BYTES, READ, Violations

Place = tuple[str, int]
"""A topic and a partition."""


class AcknowledgedPartition:
    def __init__(self, place: Place, violations: Violations) -> None:
        self.place = place
        self._violations = violations
        self._lock = threading.Lock()
        self._next_sequence = 0
        self._sequence_at: dict[int, int] = {}
        self._offset_of: dict[int, int] = {}
        self._aborted: set[int] = set()
        self.asked_start = 0
        self.deleted_start = 0

    def new_record(self) -> DrillRecord:
        with self._lock:
            self._next_sequence += 1
            return DrillRecord(topic_number(self.place[0]), self.place[1], self._next_sequence - 1)

    def acknowledged(self, records: Iterable[tuple[int, int]]) -> None:
        """Notes acknowledged records, as pairs of sequence and offset."""
        with self._lock:
            for sequence, offset in records:
                known = self._sequence_at.setdefault(offset, sequence)
                if known != sequence:
                    self._violations.add(READ, f"{self.place} {offset} was given to two records: {known}, {sequence}")
                self._offset_of[sequence] = offset

    def aborted(self, sequences: Iterable[int]) -> None:
        with self._lock:
            self._aborted.update(sequences)

    def ask_to_delete(self, offset: int) -> None:
        with self._lock:
            self.asked_start = max(self.asked_start, offset)

    def deleted(self, offset: int) -> None:
        with self._lock:
            self.deleted_start = max(self.deleted_start, offset)

    @property
    def count(self) -> int:
        """The number of certain records."""
        with self._lock:
            return len(self._sequence_at)

    @property
    def aborted_count(self) -> int:
        with self._lock:
            return len(self._aborted)

    def certain_from(self, offset: int) -> list[int]:
        """Returns the offsets of all certain records from `offset` on, ascending."""
        with self._lock:
            return sorted(each for each in self._sequence_at if each >= offset)

    def check(self, offset: int, value: bytes, reader: str) -> int | None:
        """Judges a record that a read_committed reader got. Returns its sequence. None: the record is damaged."""
        where = f"{self.place} {offset} through {reader}"
        try:
            record = decode(value)
        except DamagedRecordError as error:
            self._violations.add(BYTES, f"{where}: {error}")
            return None
        if (record.topic, record.partition) != (topic_number(self.place[0]), self.place[1]):
            self._violations.add(BYTES, f"{where}: a record of partition {record.partition}, topic {record.topic}")
            return None
        with self._lock:
            known, at = self._sequence_at.get(offset), self._offset_of.get(record.sequence)
            is_aborted = record.sequence in self._aborted
        if is_aborted:
            self._violations.add(ABORTED, f"{where}: record {record.sequence}")
        if known is not None and known != record.sequence:
            self._violations.add(READ, f"{where}: record {record.sequence} instead of {known}")
        elif at is not None and at != offset:
            self._violations.add(READ, f"{where}: record {record.sequence}, which is at {at}, appears again")
        return record.sequence

    def check_complete(self, certain: Iterable[int], seen: Collection[int], log_start: int, end: int, who: str) -> None:
        """Checks that the reader has seen all certain records in [log_start, end).

        `certain` are the offsets that were certain before the reading."""
        missing = [each for each in certain if log_start <= each < end and each not in seen]
        if missing:
            self._violations.add(
                READ, f"{self.place} through {who}: {len(missing)} records missing, {missing[0]} to {missing[-1]}"
            )


class AcknowledgedRecords:
    def __init__(self, places: Iterable[Place], violations: Violations) -> None:
        self.partitions = {place: AcknowledgedPartition(place, violations) for place in places}

    def __getitem__(self, place: Place) -> AcknowledgedPartition:
        return self.partitions[place]

    @property
    def count(self) -> int:
        return sum(each.count for each in self.partitions.values())

    @property
    def aborted_count(self) -> int:
        return sum(each.aborted_count for each in self.partitions.values())
