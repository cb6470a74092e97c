"""`RemoteLogMetadataManager` for several processes over one list of records: real records and state, no brokers.

`MetadataLog` is the metadata topic, with one partition and one owner at a time. Each process follows it into its own
LMDB file. A process reads on only when `follow` is called. With a journal, the processes may be real ones, and a record
survives the process that wrote it, also after SIGKILL.

`in_memory_rlmm.py` is for tests of one process. It has neither records nor a state file, but faults that a test sets.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import UUID

from tiers.errors import OwnershipLostError
from tiers.metadata.records.serde import (
    decode_key,
    decode_value,
    key_of,
    log_divergence_key,
    log_gap_key,
    operator_acceptance_key,
    topic_deletion_key,
    topic_missing_key,
)
from tiers.metadata.remote_log_metadata_manager import MetadataPosition
from tiers.metadata.state.layout import StateIdentity
from tiers.metadata.state.replay import MetadataEvent, PartitionRead
from tiers.metadata.state.state_backed_reader import StateBackedReader
from tiers.metadata.state.writer import RemoteLogMetadataStateWriter
from tiers.metadata.topic.metadata_producer import KeyAndValue
from tiers.metadata.topic.written_records import (
    is_log_start_known,
    key_and_value,
    records_of_accepted_history,
    records_of_deletion,
    records_of_forgotten_copies,
    records_of_log_start,
    records_of_new_segment,
    records_of_plan_end,
    records_of_update,
    tombstone,
)
from tiers.model.copy_plan import CopyPlan
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_start import LogGap, LogStart, OffsetAndEpoch
from tiers.model.segment_metadata import (
    LocalLogStartUpdate,
    LogDivergenceUpdate,
    LogGapUpdate,
    LogStartOffsetUpdate,
    OperatorAcceptanceUpdate,
    QuarantineDeletionUpdate,
    RemoteLogClampUpdate,
    RemoteLogSegmentMetadata,
    RemoteLogSegmentMetadataUpdate,
    RemotePartitionDeleteMetadata,
    TopicDeletionUpdate,
    TopicMissingUpdate,
)
from tiers.model.segment_state import RemoteLogSegmentState

_IDENTITY = StateIdentity("cluster", UUID(int=9), 1)


@dataclass
class MetadataLog:
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


class FollowingMetadataManager(StateBackedReader):
    def __init__(self, log: MetadataLog, name: str, folder: Path, clock_ms: Callable[[], int]) -> None:
        super().__init__()
        self._log, self._name, self._folder, self._clock_ms = log, name, folder, clock_ms
        self._seen_at_ms: dict[RemoteLogSegmentId, int] = {}
        self._opened_at_ms = 0
        self._writer: RemoteLogMetadataStateWriter | None = None
        self.fresh_at_ms = 0
        """The time at which the log was last read to its end."""

    async def open(self) -> None:
        self._writer = self._opened_state = RemoteLogMetadataStateWriter.open(
            self._folder, _IDENTITY, wall_clock_ms=self._log.wall_clock_ms, map_size_bytes=1 << 22
        )
        self._opened_at_ms = self._clock_ms()
        self.follow()

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = self._opened_state = None

    def follow(self) -> None:
        assert self._writer is not None
        events = self._log.events_from(self._writer.next_offset(0))
        now_ms = self._clock_ms()
        if events:
            for finished in self._writer.apply([PartitionRead(0, events, self._log.next_offset)]):
                self._seen_at_ms.setdefault(finished, now_ms)
        self.fresh_at_ms = now_ms

    async def ensure_fresh(self, partition: TopicIdPartition, max_age_ms: int, timeout_ms: int) -> None:
        if not self.is_fresh(partition, max_age_ms):
            self.follow()

    def is_fresh(self, partition: TopicIdPartition, max_age_ms: int) -> bool:
        return max_age_ms > 0 and self._clock_ms() - self.fresh_at_ms < max_age_ms

    def owns(self, partition: TopicIdPartition) -> bool:
        return self._log.owner == self._name

    def seen_at_ms(self, segment_id: RemoteLogSegmentId) -> int | None:
        known = self.remote_log_segment_metadata_by_id(segment_id)
        if known is None or known.state < RemoteLogSegmentState.COPY_SEGMENT_FINISHED:
            return None
        return self._seen_at_ms.get(segment_id, self._opened_at_ms)

    async def clock_skew_ms(self, partition: TopicIdPartition, anew: bool = False) -> int:
        return 0

    async def add_remote_log_segment_metadata(self, metadata: RemoteLogSegmentMetadata) -> None:
        self._write(lambda: records_of_new_segment(self._state, metadata))

    async def update_remote_log_segment_metadata(self, update: RemoteLogSegmentMetadataUpdate) -> None:
        self._write(lambda: records_of_update(self._state, update))

    async def forget_unfinished_copies(self, segments: Sequence[RemoteLogSegmentId]) -> None:
        self._write(lambda: records_of_forgotten_copies(self._state, segments))

    async def put_copy_plan(self, plan: CopyPlan) -> None:
        self._write(lambda: [key_and_value(replace(plan, writer=self._name))])

    async def end_copy_plan(self, plan: CopyPlan) -> None:
        self._write(lambda: records_of_plan_end(self._state, plan))

    async def put_remote_partition_delete_metadata(self, metadata: RemotePartitionDeleteMetadata) -> None:
        self._write(lambda: records_of_deletion(self._state, metadata))

    async def put_remote_log_clamp(self, clamp: RemoteLogClampUpdate) -> None:
        self._write(lambda: [key_and_value(replace(clamp, writer=self._name))])

    async def put_local_log_start(self, partition: TopicIdPartition, start: OffsetAndEpoch) -> None:
        update = LocalLogStartUpdate(partition, self._name, self._log.wall_clock_ms(), start)
        self._write(lambda: [key_and_value(update)])

    async def begin_accepted_history(self, partition: TopicIdPartition, start: OffsetAndEpoch) -> None:
        update = LocalLogStartUpdate(partition, self._name, self._log.wall_clock_ms(), start)
        self._write(lambda: records_of_accepted_history(self._state, update))

    async def put_log_start(
        self,
        partition: TopicIdPartition,
        start: LogStart,
        timeout_ms: int | None = None,
        denied: Collection[LogStart] = (),
    ) -> None:
        self.follow()
        if not is_log_start_known(self._state, partition, start, denied):
            update = LogStartOffsetUpdate(partition, self._name, self._log.wall_clock_ms(), start)
            self._send(*records_of_log_start(self._state, update))

    async def put_log_gap(self, partition: TopicIdPartition, gap: LogGap, leader_epoch: int) -> None:
        update = LogGapUpdate(partition, self._name, self._log.wall_clock_ms(), gap, leader_epoch)
        self._write(lambda: [key_and_value(update)])

    async def end_log_gap(self, partition: TopicIdPartition, gap: LogGap) -> None:
        self._write(lambda: [tombstone(log_gap_key(partition, gap.first_offset))])

    async def accept(self, partition: TopicIdPartition, witness: str) -> None:
        self._send(key_and_value(OperatorAcceptanceUpdate(partition, self._name, self._log.wall_clock_ms(), witness)))

    async def end_acceptance(self, partition: TopicIdPartition) -> None:
        self._write(lambda: [tombstone(operator_acceptance_key(partition))])

    async def put_log_divergence(self, partition: TopicIdPartition, *, is_diverged: bool) -> None:
        update = LogDivergenceUpdate(partition, self._name, self._log.wall_clock_ms())
        self._write(lambda: [key_and_value(update) if is_diverged else tombstone(log_divergence_key(partition))])

    async def put_topic_deletion(self, topic_id: UUID, topic: str) -> None:
        partition = TopicIdPartition(topic_id, 0, topic)
        self._send(key_and_value(TopicDeletionUpdate(partition, self._name, self._log.wall_clock_ms())))

    async def end_topic_deletion(self, topic_id: UUID) -> None:
        self._write(lambda: [tombstone(topic_deletion_key(TopicIdPartition(topic_id, 0)))])

    async def put_topic_missing(self, topic_id: UUID, topic: str, *, is_missing: bool) -> None:
        partition = TopicIdPartition(topic_id, 0, topic)
        update = TopicMissingUpdate(partition, self._name, self._log.wall_clock_ms())
        self._write(lambda: [key_and_value(update) if is_missing else tombstone(topic_missing_key(partition))])

    def position(self, partition: TopicIdPartition) -> MetadataPosition:
        return MetadataPosition(_IDENTITY.topic_id, 0, self._state.next_offset(0))

    async def confirms(self, partition: TopicIdPartition, position: MetadataPosition, timeout_ms: int) -> bool:
        return position.topic_id == _IDENTITY.topic_id and self._log.confirms(position)

    def _send(self, *records: KeyAndValue) -> None:
        """Appends records as a producer without ownership does."""
        self._log.append(records)
        self.follow()

    async def ask_for_quarantine_deletion(self, segment_id: RemoteLogSegmentId) -> None:
        self._send(key_and_value(QuarantineDeletionUpdate(segment_id, self._name, self._log.wall_clock_ms())))

    async def change_topic_tier_config(
        self,
        topic_id: UUID,
        topic: str,
        changes: Mapping[str, str | None],
        check: Callable[[Mapping[str, str]], None] = lambda before: None,
    ) -> None:
        raise NotImplementedError("the test sets the topic's tier settings itself")

    def _write(self, records: Callable[[], Sequence[KeyAndValue]]) -> None:
        """Writes records as the owner's transaction does: fenced, based on the known state, and read back."""
        if self._log.owner != self._name:
            raise OwnershipLostError(f"{self._name} does not own the metadata partition")
        self._log.append(records())
        self.follow()
