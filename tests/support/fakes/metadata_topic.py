"""`FakeTopicMetadataManager`: the product's manager and state over a list of records in place of the metadata topic.

Several processes share a `FakeMetadataTopic`, which has one partition and one owner at a time. Each process follows it
into its own LMDB file. A process reads on only when `follow` is called.

`in_memory_rlmm.py` is another thing: a model of a metadata log and its state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

from tiers.errors import OwnershipLostError
from tiers.metadata.metadata_log import Append, MakeRecords, MetadataPosition, MetadataStatus, Tenure
from tiers.metadata.records.serde import KeyAndValue
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataManager
from tiers.metadata.state.layout import StateIdentity
from tiers.metadata.state.replay import MetadataEvent, PartitionRead
from tiers.metadata.state.writer import RemoteLogMetadataStateWriter
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

    def append(self, records: Sequence[KeyAndValue]) -> None:
        for one in records:
            self.records.append((self.next_offset, self.wall_clock_ms(), one))
            self.next_offset += 1

    def confirms(self, position: MetadataPosition) -> bool:
        return position.next_offset <= self.next_offset

    def events_from(self, offset: int) -> list[MetadataEvent]:
        events = []
        for at, timestamp_ms, (key, value) in self.records:
            if at >= offset:
                event = MetadataEvent.of(at, timestamp_ms, key, value)
                assert event is not None
                events.append(event)
        return events


class FakeTopicLog:
    """Implements `MetadataLog` for one process."""

    def __init__(self, log: FakeMetadataTopic, name: str, folder: Path, clock_ms: Callable[[], int]) -> None:
        self._log, self.writer, self._folder, self._clock_ms = log, name, folder, clock_ms
        self._state: RemoteLogMetadataStateWriter | None = None
        self.topic_id = _IDENTITY.topic_id
        self.fresh_at_ms = 0
        """The time at which the log was last read to its end."""

    @property
    def state(self) -> RemoteLogMetadataStateWriter:
        assert self._state is not None
        return self._state

    async def open(self) -> None:
        self._state = RemoteLogMetadataStateWriter.open(
            self._folder,
            _IDENTITY,
            clock_ms=self._clock_ms,
            map_size_bytes=1 << 22,
        )
        self.follow()

    async def close(self) -> None:
        if self._state is not None:
            self._state.close()
            self._state = None

    def follow(self) -> None:
        events = self._log.events_from(self.state.next_offset(0))
        now_ms = self._clock_ms()
        if events:
            self.state.apply([PartitionRead(0, events, self._log.next_offset)])
        self.fresh_at_ms = now_ms

    async def ensure_fresh(self, partition: TopicIdPartition, max_age_ms: int, timeout_ms: int) -> None:
        if not self.is_fresh(partition, max_age_ms):
            self.follow()

    def is_fresh(self, partition: TopicIdPartition, max_age_ms: int) -> bool:
        return max_age_ms > 0 and self._clock_ms() - self.fresh_at_ms < max_age_ms

    def owns(self, partition: TopicIdPartition) -> bool:
        return self._log.owner == self.writer

    def tenure(self, partition: TopicIdPartition) -> Tenure | None:
        return Tenure(0, 0) if self.owns(partition) else None

    def status(self) -> MetadataStatus:
        return MetadataStatus(None, self._clock_ms() - self.fresh_at_ms, clock_skew_ms=0)

    def position(self, partition: TopicIdPartition) -> MetadataPosition:
        return MetadataPosition(_IDENTITY.topic_id, 0, self.state.next_offset(0))

    async def confirms(self, partition: TopicIdPartition, position: MetadataPosition, timeout_ms: int) -> bool:
        return position.topic_id == _IDENTITY.topic_id and self._log.confirms(position)

    async def append(
        self, partition: TopicIdPartition, records: MakeRecords, by: Append, timeout_ms: int | None = None
    ) -> None:
        """Appends as the owner's transaction does: fenced, based on the known state, and read back."""
        if by is Append.AS_OWNER and not self.owns(partition):
            raise OwnershipLostError(f"{self.writer} does not own the metadata partition")
        if by in (Append.WHEN_FRESH, Append.IN_TURN):
            self.follow()
        self._log.append(records())
        self.follow()


class FakeTopicMetadataManager(RemoteLogMetadataManager):
    """The product's manager of one process over the shared log."""

    log: FakeTopicLog

    def __init__(
        self,
        log: FakeMetadataTopic,
        name: str,
        folder: Path,
        clock_ms: Callable[[], int],
        wrap: Callable[[FakeTopicLog], FakeTopicLog] = lambda log: log,
    ) -> None:
        """The manager's own calls of its log go through what `wrap` returns."""
        self._own = FakeTopicLog(log, name, folder, clock_ms)
        super().__init__(wrap(self._own), log.wall_clock_ms)

    async def open(self) -> None:
        await self._own.open()

    async def close(self) -> None:
        await self._own.close()

    def follow(self) -> None:
        self._own.follow()
