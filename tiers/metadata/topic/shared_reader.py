"""`SharedRemoteLogMetadataReader` gives a worker process the same answers, from the state that another process keeps.

It reads no metadata from the cluster. The process that keeps the state writes into shared memory how fresh each
metadata partition is, by the same monotonic clock. So waiting for freshness means looking there again. That process may
remove the state and build a new one. The file is then another one, and the reader opens it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from uuid import UUID

from tiers.broker.client import BrokerClient, monotonic_ms
from tiers.errors import RemoteLogMetadataNotReadyError
from tiers.metadata.records.record_types import KeyAndValue
from tiers.metadata.records.serde import encode_key, nothing_key
from tiers.metadata.state.layout import STATE_FILE, StateIdentity
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.metadata.state.state_backed_reader import StateBackedReader, in_turn
from tiers.metadata.topic.metadata_producer import MetadataProducer
from tiers.metadata.topic.metadata_topic import DEFAULT_TOPIC_NAME, MetadataTopic
from tiers.metadata.topic.settings import metadata_group_id
from tiers.metadata.topic.tier_config_writer import TierConfigWriter
from tiers.metadata.topic_partitioner import TopicPartitioner, by_topic_id
from tiers.metadata.written_records import (
    CheckTierConfig,
    changed_tier_config,
    is_log_start_known,
    key_and_value,
    records_of_log_start,
)
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import LogStart
from tiers.model.segment_metadata import LogStartOffsetUpdate, TopicDeletionUpdate, TopicTierConfigUpdate

_LOOK_AGAIN_MS = 20
_WRITE_TIMEOUT_MS = 8_000


class SharedRemoteLogMetadataReader(StateBackedReader):
    """Implements `RemoteLogMetadataReader`, and the writes that need no ownership. It must be opened after a fork.

    `name` distinguishes the processes that share the folder. Two running processes must not have the same name."""

    def __init__(
        self,
        client: BrokerClient,
        state_folder: Path,
        name: str,
        *,
        topic_name: str = DEFAULT_TOPIC_NAME,
        partitioner: TopicPartitioner = by_topic_id,
        clock_ms: Callable[[], int] = monotonic_ms,
        wall_clock_ms: Callable[[], int],
    ) -> None:
        super().__init__()
        self._client = client
        self._state_folder = state_folder
        self._name = name
        self._topic_name = topic_name
        self._partitioner = partitioner
        self._clock_ms = clock_ms
        self._wall_clock_ms = wall_clock_ms
        self._topic: MetadataTopic | None = None
        self._identity: StateIdentity | None = None
        self._file: tuple[int, int] | None = None
        self._writing_log_start: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        prefix = metadata_group_id(topic_name)
        self._tier_configs = TierConfigWriter(client, prefix, clock_ms=clock_ms)

    async def open(self) -> None:
        """Opens the state. Does not wait for the process that keeps it: until that process starts, nothing is fresh."""
        self.reopen_if_replaced()

    async def close(self) -> None:
        self._close_state()

    @property
    def _state(self) -> RemoteLogMetadataState:
        if self._opened_state is None:
            self.reopen_if_replaced()
        return super()._state

    def _close_state(self) -> None:
        if self._opened_state is not None:
            self._opened_state.close()
        self._opened_state = self._topic = self._file = None

    def reopen_if_replaced(self) -> bool:
        """Opens the state again if its file was replaced. Returns whether a state is open."""
        try:
            status = (self._state_folder / STATE_FILE).stat()
        except OSError:
            self._close_state()
            return False
        file = (status.st_dev, status.st_ino)
        if file == self._file and self._opened_state is not None and self._opened_state.identity() == self._identity:
            return True
        self._close_state()
        try:
            state = RemoteLogMetadataState.open_shared(self._state_folder)
        except RemoteLogMetadataNotReadyError:
            return False
        identity = state.identity()
        if identity is None:
            state.close()
            return False
        self._opened_state, self._file, self._identity = state, file, identity
        self._topic = MetadataTopic(
            identity.cluster_id, self._topic_name, identity.topic_id, identity.partition_count, 0
        )
        return True

    def metadata_partition(self, partition: TopicIdPartition) -> int:
        if self._topic is None:
            raise RemoteLogMetadataNotReadyError("the saved state of the remote log metadata is not open yet")
        return self._partitioner(partition, self._topic.partition_count)

    def is_fresh(self, partition: TopicIdPartition, max_age_ms: int) -> bool:
        return self._is_fresh_since(partition, self._clock_ms() - max_age_ms)

    def _is_fresh_since(self, partition: TopicIdPartition, not_before_ms: int) -> bool:
        if not self.reopen_if_replaced():
            return False
        fresh_at_ms = self._state.fresh_at_ms(self.metadata_partition(partition))
        return fresh_at_ms is not None and fresh_at_ms >= not_before_ms

    def is_all_fresh(self, max_age_ms: int) -> bool:
        """Returns whether every metadata partition was read to its high watermark at most `max_age_ms` ago."""
        if not self.reopen_if_replaced() or self._topic is None:
            return False
        not_before_ms = self._clock_ms() - max_age_ms
        return all(
            (self._state.fresh_at_ms(number) or 0) >= not_before_ms for number in range(self._topic.partition_count)
        )

    async def ensure_fresh(self, partition: TopicIdPartition, max_age_ms: int, timeout_ms: int) -> None:
        # The time must be later, not equal: two events in the same millisecond have no order.
        not_before_ms = self._clock_ms() - max_age_ms + 1
        await self._look_until(lambda: self._is_fresh_since(partition, not_before_ms), partition, timeout_ms)

    async def put_log_start(self, partition: TopicIdPartition, start: LogStart, timeout_ms: int | None = None) -> None:
        timeout_ms = _WRITE_TIMEOUT_MS if timeout_ms is None else timeout_ms
        deadline_ms = self._clock_ms() + timeout_ms
        async with in_turn(self._writing_log_start[self.metadata_partition(partition)], timeout_ms):
            # The state must contain what this process wrote before. Otherwise it would write the same record again.
            await self.ensure_fresh(partition, 0, deadline_ms - self._clock_ms())
            if is_log_start_known(self._state, partition, start):
                return
            update = LogStartOffsetUpdate(partition, self._writer_name(), self._wall_clock_ms(), start)
            await self._send(partition, records_of_log_start(self._state, update), deadline_ms)

    async def put_topic_deletion(self, topic_id: UUID, topic: str, *, is_confirmed: bool) -> None:
        partition = TopicIdPartition(topic_id, 0, topic)
        update = TopicDeletionUpdate(partition, self._writer_name(), self._wall_clock_ms(), is_confirmed)
        await self._send(partition, [key_and_value(update)], self._clock_ms() + _WRITE_TIMEOUT_MS)

    def _writer_name(self) -> str:
        keeper = self._state.writer()
        if keeper is None:
            raise RemoteLogMetadataNotReadyError("the process that keeps the state has not chosen its writer name yet")
        return f"{keeper}/{self._name}"

    async def _send(self, partition: TopicIdPartition, records: Sequence[KeyAndValue], deadline_ms: int) -> None:
        """Writes records that need no ownership, and waits until the process that keeps the state has read them."""
        number = self.metadata_partition(partition)
        if self._topic is None:
            raise RemoteLogMetadataNotReadyError("the saved state of the remote log metadata is not open yet")
        producer = MetadataProducer(self._client, self._topic, clock_ms=self._clock_ms)
        position = self._state.next_offset(number)
        written = await producer.send(number, records, deadline_ms - self._clock_ms())
        if written < position:
            raise RemoteLogMetadataNotReadyError(
                f"a record was written at offset {written} of metadata partition {number}, which was read to"
                f" {position}: the topic lost records"
            )
        left_ms = deadline_ms - self._clock_ms()
        await self._look_until(lambda: self._state.next_offset(number) > written, partition, left_ms)

    async def change_topic_tier_config(
        self,
        topic_id: UUID,
        topic: str,
        changes: Mapping[str, str | None],
        check: CheckTierConfig = lambda before: None,
    ) -> None:
        partition = TopicIdPartition(topic_id, 0, topic)
        deadline_ms = self._clock_ms() + _WRITE_TIMEOUT_MS
        number = self.metadata_partition(partition)
        if self._topic is None:
            raise RemoteLogMetadataNotReadyError("the saved state of the remote log metadata is not open yet")

        def records() -> Sequence[KeyAndValue]:
            before = self.topic_tier_config(topic_id)
            check(before)
            known = TopicTierConfigUpdate(partition, self._name, self._wall_clock_ms(), before)
            changed = changed_tier_config(known, changes)
            return [] if changed is None else [changed]

        async def until_read(offset: int) -> None:
            left_ms = deadline_ms - self._clock_ms()
            await self._look_until(lambda: self._state.next_offset(number) > offset, partition, left_ms)

        async def read_to_end(left_ms: int) -> None:
            # A record ends the long poll of the process that keeps the state. A change that waits for the poll's own
            # end would often be fenced by another one.
            nothing = (encode_key(nothing_key(partition)), None)
            await until_read(await producer.send(number, [nothing], left_ms))

        producer = MetadataProducer(self._client, self._topic, clock_ms=self._clock_ms)
        written = await self._tier_configs.write(self._topic, number, read_to_end, records, _WRITE_TIMEOUT_MS)
        if written is not None:
            await until_read(written)

    async def _look_until(self, holds: Callable[[], bool], partition: TopicIdPartition, timeout_ms: int) -> None:
        deadline_ms = self._clock_ms() + timeout_ms
        while not holds():
            if self._clock_ms() >= deadline_ms:
                raise RemoteLogMetadataNotReadyError(
                    f"the process that keeps the metadata of {partition} did not read it in {timeout_ms} ms"
                )
            await asyncio.sleep(_LOOK_AGAIN_MS / 1000)
