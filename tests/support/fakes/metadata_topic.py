"""`FakeTopicMetadataManager`: the product's metadata manager over a list of records in place of the metadata topic.

Several processes share a `FakeMetadataTopic`, which has one partition and one owner at a time. Each process follows it
into its own LMDB file. A process reads on only when `follow` is called. With a journal, the processes may be real ones,
and a record survives the process that wrote it, also after SIGKILL.

`in_memory_rlmm.py` is another thing: a model of a metadata manager, which shares only values with the product.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

from tiers.errors import OwnershipLostError
from tiers.metadata.record_backed_manager import MakeRecords, RecordBackedMetadataManager
from tiers.metadata.records.record_types import KeyAndValue
from tiers.metadata.records.serde import decode_key, decode_value, key_of
from tiers.metadata.remote_log_metadata_manager import MetadataPosition, MetadataStatus
from tiers.metadata.state.layout import StateIdentity
from tiers.metadata.state.replay import MetadataEvent, PartitionRead
from tiers.metadata.state.writer import RemoteLogMetadataStateWriter
from tiers.metadata.tenure import Tenure
from tiers.model.ids import TopicIdPartition

_IDENTITY = StateIdentity("cluster", UUID(int=9), 1)


@dataclass
class FakeMetadataTopic:
    wall_clock_ms: Callable[[], int]
    owner: str = ""
    """The name of the only process whose segment records the log accepts."""
    records: list[tuple[int, int, KeyAndValue]] = field(default_factory=list)
    """The records: offset, LogAppendTime, key and value."""
    next_offset: int = 0
    journal: Path | None = None
    """The file that has the records too. Only the owner writes it."""
    journal_position: int = 0

    def append(self, records: Sequence[KeyAndValue]) -> None:
        self._read_journal()
        for one in records:
            self.records.append((self.next_offset, self.wall_clock_ms(), one))
            self.next_offset += 1
        if self.journal is not None:
            with self.journal.open("ab") as file:
                for record in self.records[len(self.records) - len(records) :]:
                    pickle.dump(record, file)
                file.flush()
                os.fsync(file.fileno())
                self.journal_position = file.tell()

    def _read_journal(self) -> None:
        """Reads the records that another process wrote, up to one that a crash cut short."""
        if self.journal is None or not self.journal.exists():
            return
        with self.journal.open("rb") as file:
            file.seek(self.journal_position)
            with contextlib.suppress(EOFError, pickle.UnpicklingError):
                while True:
                    self.records.append(pickle.load(file))
                    self.next_offset = self.records[-1][0] + 1
                    self.journal_position = file.tell()

    def confirms(self, position: MetadataPosition) -> bool:
        return position.next_offset <= self.next_offset

    def compact(self) -> None:
        """Removes records as the cleaner does: keeps the last record of each key, tombstones included."""
        last = {one[0]: offset for offset, _, one in self.records}
        self.records = [each for each in self.records if last[each[2][0]] == each[0]]

    def events_from(self, offset: int) -> list[MetadataEvent]:
        self._read_journal()
        events = []
        for at, timestamp_ms, (key, value) in self.records:
            if at >= offset:
                record = None if value is None else decode_value(value)
                named = decode_key(key) if record is None else key_of(record)
                events.append(MetadataEvent(at, timestamp_ms, named, record))
        return events


class FakeTopicMetadataManager(RecordBackedMetadataManager):
    def __init__(self, log: FakeMetadataTopic, name: str, folder: Path, clock_ms: Callable[[], int]) -> None:
        super().__init__(name, clock_ms, log.wall_clock_ms)
        self._log, self._name, self._folder = log, name, folder
        self._state_writer: RemoteLogMetadataStateWriter | None = None
        self.fresh_at_ms = 0
        """The time at which the log was last read to its end."""

    async def open(self) -> None:
        self._state_writer = self._opened_state = RemoteLogMetadataStateWriter.open(
            self._folder, _IDENTITY, wall_clock_ms=self._log.wall_clock_ms, map_size_bytes=1 << 22
        )
        self._seen.opened_at_ms = self._clock_ms()
        self.follow()

    async def close(self) -> None:
        if self._state_writer is not None:
            self._state_writer.close()
            self._state_writer = self._opened_state = None

    def follow(self) -> None:
        assert self._state_writer is not None
        events = self._log.events_from(self._state_writer.next_offset(0))
        now_ms = self._clock_ms()
        if events:
            self._seen.finished(self._state_writer.apply([PartitionRead(0, events, self._log.next_offset)]))
        self.fresh_at_ms = now_ms

    async def ensure_fresh(self, partition: TopicIdPartition, max_age_ms: int, timeout_ms: int) -> None:
        if not self.is_fresh(partition, max_age_ms):
            self.follow()

    def is_fresh(self, partition: TopicIdPartition, max_age_ms: int) -> bool:
        return max_age_ms > 0 and self._clock_ms() - self.fresh_at_ms < max_age_ms

    def owns(self, partition: TopicIdPartition) -> bool:
        return self._log.owner == self._name

    def tenure(self, partition: TopicIdPartition) -> Tenure | None:
        return Tenure(0, 0) if self.owns(partition) else None

    def status(self) -> MetadataStatus:
        return MetadataStatus(None, self._clock_ms() - self.fresh_at_ms, frozenset(), 0, 0, 0)

    async def clock_skew_ms(self, partition: TopicIdPartition, anew: bool = False) -> int:
        return 0

    def metadata_topic_id(self) -> UUID:
        return _IDENTITY.topic_id

    def position(self, partition: TopicIdPartition) -> MetadataPosition:
        return MetadataPosition(_IDENTITY.topic_id, 0, self._state.next_offset(0))

    async def confirms(self, partition: TopicIdPartition, position: MetadataPosition, timeout_ms: int) -> bool:
        return position.topic_id == _IDENTITY.topic_id and self._log.confirms(position)

    async def _append(self, partition: TopicIdPartition, records: Sequence[KeyAndValue]) -> None:
        self._send(records)

    async def _append_as_owner(self, partition: TopicIdPartition, records: MakeRecords) -> None:
        self._write(records)

    def _write(self, records: MakeRecords) -> None:
        """Writes records as the owner's transaction does: fenced, based on the known state, and read back."""
        if self._log.owner != self._name:
            raise OwnershipLostError(f"{self._name} does not own the metadata partition")
        self._send(records())

    def _send(self, records: Sequence[KeyAndValue]) -> None:
        self._log.append(records)
        self.follow()

    async def _append_when_fresh(
        self, partition: TopicIdPartition, records: MakeRecords, timeout_ms: int | None
    ) -> None:
        self.follow()
        self._send(records())

    async def _append_in_turn(self, partition: TopicIdPartition, records: MakeRecords) -> None:
        await self._append_when_fresh(partition, records, None)
