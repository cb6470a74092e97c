"""`TopicLog`: the appends to the metadata topic that need no ownership, in any process that reads the topic's records.

`topic_based` follows the topic, and `shared_log` shares the state: they learn in two ways that a record was read.

Some changes are made one after the other in the whole cluster, since they depend on those before: of a topic's tier
settings, of the marker of a location, and what an operator restores (`Append.IN_TURN`). The writer initializes a
transactional.id of the metadata partition, which fences every writer that has not committed yet, reads to the end,
checks and writes. So no other change came between. A fenced writer checks its change again.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import UUID

from tiers.broker.client import BrokerClient, monotonic_ms, wall_clock_ms
from tiers.errors import OwnershipLostError, RemoteLogMetadataNotReadyError
from tiers.log.broker_log import BrokerLogSource
from tiers.metadata.metadata_log import Append, MakeRecords, MetadataPosition, by_topic_id
from tiers.metadata.topic.metadata_producer import ClockSkew, MetadataProducer, TransactionalProducer
from tiers.metadata.topic.metadata_topic import MetadataTopic
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import OffsetAndEpoch

_BACKOFF_BASE_MS = 50
_BACKOFF_CAP_MS = 500


def in_turn_transactional_id(group_id: str, metadata_partition: int) -> str:
    return f"{group_id}-tier-configs-{metadata_partition}"


class TopicLog(ABC):
    """Implements the part of `MetadataLog` that both processes have in common."""

    def __init__(self, client: BrokerClient, group_id: str, write_timeout_ms: int) -> None:
        self._client = client
        self._group_id = group_id
        self._write_timeout_ms = write_timeout_ms
        self._clock_skew = ClockSkew(monotonic_ms, wall_clock_ms)
        self._topic: MetadataTopic | None = None
        self._appending: defaultdict[tuple[Append, int], asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def topic(self) -> MetadataTopic:
        if self._topic is None:
            raise RemoteLogMetadataNotReadyError("the remote log metadata is not open yet")
        return self._topic

    @property
    def topic_id(self) -> UUID:
        return self.topic.topic_id

    def metadata_partition(self, partition: TopicIdPartition) -> int:
        return by_topic_id(partition, self.topic.partition_count)

    def position(self, partition: TopicIdPartition) -> MetadataPosition:
        position = self._read_to(self.metadata_partition(partition))
        return MetadataPosition(self.topic.topic_id, position.leader_epoch, position.offset)

    async def confirms(self, partition: TopicIdPartition, position: MetadataPosition, timeout_ms: int) -> bool:
        if position.topic_id != self.topic.topic_id:
            return False
        if position.next_offset == 0:
            return True
        number = self.metadata_partition(partition)
        own = TopicIdPartition(self.topic.topic_id, number, self.topic.name)
        answer = await BrokerLogSource(self._client).end_offset_for_epoch(own, position.leader_epoch, timeout_ms)
        # A replica that copied the log after a compaction may answer with a lower epoch and the same end.
        is_known = 0 <= answer.leader_epoch <= position.leader_epoch
        return is_known and answer.end_offset >= position.next_offset

    async def append(
        self, partition: TopicIdPartition, records: MakeRecords, by: Append, timeout_ms: int | None = None
    ) -> None:
        number = self.metadata_partition(partition)
        timeout_ms = self._write_timeout_ms if timeout_ms is None else timeout_ms
        deadline_ms = monotonic_ms() + timeout_ms

        match by:
            case Append.AS_OWNER:
                await self._append_as_owner(number, records, timeout_ms)
            case Append.AT_ONCE:
                await self._send(number, records, deadline_ms)
            case Append.WHEN_FRESH:
                async with _held(self._appending[by, number], timeout_ms):
                    # The state must contain what this process wrote before. Otherwise it would write the same record
                    # again.
                    await self.ensure_fresh(partition, 0, deadline_ms - monotonic_ms())
                    await self._send(number, records, deadline_ms)
            case Append.IN_TURN:
                async with _held(self._appending[by, number], timeout_ms):
                    await self._append_in_turn(partition, number, records, deadline_ms)

    async def _append_in_turn(
        self, partition: TopicIdPartition, number: int, records: MakeRecords, deadline_ms: int
    ) -> None:
        cap_ms = _BACKOFF_BASE_MS
        while True:
            name = in_turn_transactional_id(self._group_id, number)
            producer = TransactionalProducer(self._client, self.topic, number, name)
            try:
                await producer.initialize(deadline_ms - monotonic_ms())
                await self._read_to_end(partition, deadline_ms - monotonic_ms())
                made, before = records(), self._known(number)
                if made:
                    written = await producer.commit(made, None, deadline_ms - monotonic_ms())
                    await self._read_past(number, written, before, deadline_ms - monotonic_ms())
                return
            except OwnershipLostError:
                if monotonic_ms() + cap_ms >= deadline_ms:
                    raise
                await asyncio.sleep(cap_ms * random.random() / 1000)
                cap_ms = min(_BACKOFF_CAP_MS, 2 * cap_ms)

    async def _send(self, number: int, records: MakeRecords, deadline_ms: int) -> None:
        made, before = records(), self._known(number)
        if made:
            producer = MetadataProducer(self._client, self.topic, clock_skew=self._clock_skew)
            written = await producer.send(number, made, deadline_ms - monotonic_ms())
            await self._read_past(number, written, before, deadline_ms - monotonic_ms())

    @abstractmethod
    async def ensure_fresh(self, partition: TopicIdPartition, max_age_ms: int, timeout_ms: int) -> None: ...

    @abstractmethod
    async def _append_as_owner(self, number: int, records: MakeRecords, timeout_ms: int) -> None: ...

    @abstractmethod
    def _read_to(self, number: int) -> OffsetAndEpoch:
        """Returns the next offset to read, and the leader epoch of the last batch before it."""

    @abstractmethod
    def _known(self, number: int) -> OffsetAndEpoch:
        """Returns the next offset to read, and the leader epoch that is known now; -1: none is."""

    @abstractmethod
    async def _read_to_end(self, partition: TopicIdPartition, timeout_ms: int) -> None:
        """Waits until the state has all records that were appended before the call."""

    @abstractmethod
    async def _read_past(self, number: int, written: int, before: OffsetAndEpoch, timeout_ms: int) -> None:
        """Waits until the state has the record at offset `written`. `before` is `_known` as of before the write.

        Raises `RemoteLogMetadataNotReadyError`, also when the topic lost records meanwhile."""


@asynccontextmanager
async def _held(lock: asyncio.Lock, timeout_ms: int) -> AsyncIterator[None]:
    """Holds the lock. Raises `RemoteLogMetadataNotReadyError` when another task holds it for `timeout_ms`."""
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            await lock.acquire()
    except TimeoutError as error:
        raise RemoteLogMetadataNotReadyError(f"an earlier write did not end in {timeout_ms} ms") from error
    try:
        yield
    finally:
        lock.release()
