"""`TopicBasedRemoteLogMetadataManager`: KIP-405's default manager, with the metadata in a topic of the cluster itself.

Reads use the materialised state, which a follower of the topic keeps. Writes are transactions of the owner of a
metadata partition. The parts are `follower`, `ownership`, `metadata_producer`, `state` and `serde`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any
from uuid import UUID

from protocol.errors import ErrorCode
from tiers.broker.client import BrokerClient, monotonic_ms
from tiers.errors import BrokerError, RemoteLogMetadataError, RemoteLogMetadataNotReadyError
from tiers.fitness import Probe
from tiers.lasting_trouble import LastingTrouble
from tiers.log.broker_log import BrokerLogSource
from tiers.metadata.record_backed_manager import MakeRecords, RecordBackedMetadataManager
from tiers.metadata.record_log import MetadataManagerContext
from tiers.metadata.records.record_types import KeyAndValue
from tiers.metadata.records.serde import nothing_key
from tiers.metadata.remote_log_metadata_manager import MetadataPosition, MetadataStatus
from tiers.metadata.state.layout import StateIdentity
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.metadata.state.state_backed_reader import in_turn
from tiers.metadata.state.writer import RemoteLogMetadataStateWriter, saved_identity
from tiers.metadata.tenure import Tenure
from tiers.metadata.topic.follower import MetadataFollower
from tiers.metadata.topic.group.membership import MembershipSettings
from tiers.metadata.topic.group.ownership import MetadataPartitionOwnership
from tiers.metadata.topic.metadata_producer import ClockSkew, MetadataProducer
from tiers.metadata.topic.metadata_topic import (
    MetadataTopic,
    MetadataTopicLostError,
    MetadataTopicUnfitError,
    check_metadata_topic,
    open_metadata_topic,
)
from tiers.metadata.topic.settings import TopicBasedSettings
from tiers.metadata.topic.tier_config_writer import TierConfigWriter
from tiers.metadata.written_records import tombstone
from tiers.model.ids import TopicIdPartition
from tiers.storage.settings import read_settings

__all__ = ["TopicBasedRemoteLogMetadataManager", "TopicBasedSettings", "wall_clock_ms"]

logger = logging.getLogger(__name__)

_CHECK_AGAIN_MS = 2_000


def wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


class TopicBasedRemoteLogMetadataManager(RecordBackedMetadataManager):
    """Implements `RemoteLogMetadataManager`.

    The caller keeps and closes the client. It calls `open` and `close` once, in one event loop."""

    def __init__(
        self,
        client: BrokerClient,
        settings: TopicBasedSettings,
        *,
        clock_ms: Callable[[], int] = monotonic_ms,
        wall_clock_ms: Callable[[], int] = wall_clock_ms,
    ) -> None:
        super().__init__(settings.writer or "", clock_ms, wall_clock_ms)
        self._client = client
        self._settings = settings
        self._writing_log_start: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._tier_configs = TierConfigWriter(client, settings.group_id, clock_ms=clock_ms)
        self._topic: MetadataTopic | None = None
        self._follower: MetadataFollower | None = None
        self._ownership: MetadataPartitionOwnership | None = None
        self._producer: MetadataProducer | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._running: list[asyncio.Task[None]] = []
        self._clock_skew = ClockSkew(clock_ms, wall_clock_ms)
        self._topic_alarm: str | None = None
        self._ended: str | None = None

    @classmethod
    def create(cls, settings: Mapping[str, str], context: MetadataManagerContext) -> TopicBasedRemoteLogMetadataManager:
        """Returns a manager that is not yet open. It has no settings but `remote.log.metadata.topic.*`."""
        read_settings("topic-based", settings, {}, kind="metadata manager")
        topic_settings = TopicBasedSettings(
            context.state_folder,
            topic=context.topic,
            max_age_ms=context.max_age_ms,
            fitness=context.fitness,
            declares=context.declares,
            refusal_to_create=context.refusal_to_create,
        )
        return cls(context.client, topic_settings)

    async def open(self) -> None:
        """Creates or checks the topic, opens the state, and starts to follow the topic.

        If the topic of a saved state is gone, that state is the last place that knows the segments. It is then opened
        unchanged, final and never fresh, and `alarm` says so. Raises `MetadataTopicUnfitError` when an operator must
        act, and `BrokerError` when the cluster cannot be reached."""
        settings = self._settings
        saved, lost = await asyncio.to_thread(saved_identity, settings.state_folder), None
        try:
            topic = await open_metadata_topic(
                self._client, settings.topic, settings.open_timeout_ms, saved, settings.refusal_to_create
            )
        except MetadataTopicLostError as error:
            assert saved is not None
            topic = MetadataTopic(saved.cluster_id, settings.topic.name, saved.topic_id, saved.partition_count, 0)
            lost = f"{error}, and remove the saved state in {settings.state_folder} after that"
        state = await asyncio.to_thread(
            RemoteLogMetadataStateWriter.open,
            settings.state_folder,
            StateIdentity(topic.cluster_id, topic.topic_id, topic.partition_count),
            wall_clock_ms=self._wall_clock_ms,
            is_kept=lost is not None,
        )
        self._topic, self._opened_state, self._seen.opened_at_ms = topic, state, self._clock_ms()
        self._topic_alarm = self._ended = None
        # A record names its writer for operators. The name stays the same over restarts.
        if not self._writer:
            self._writer = await asyncio.to_thread(state.writer_name, socket.gethostname())
        self._producer = MetadataProducer(self._client, topic, clock_ms=self._clock_ms, clock_skew=self._clock_skew)
        self._follower = MetadataFollower(
            self._client,
            topic,
            state,
            clock_ms=self._clock_ms,
            wall_clock_ms=self._wall_clock_ms,
            on_finished=self._seen.finished,
            home_of=self.metadata_partition,
            max_age_ms=settings.max_age_ms,
        )
        if lost is not None:
            self._set_alarm(lost)
            state.mark_final(True)
            return
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        self._running = [
            self._start("follower", self._follower.run),
            self._start("topic-check", self._check_topic),
        ]
        if settings.is_member:
            fitness = settings.fitness
            if fitness is not None:
                fitness.add(Probe("saved state of the metadata", self._check_state))
            self._ownership = MetadataPartitionOwnership(
                self._client,
                topic,
                self._follower,
                MembershipSettings(settings.group_id, claims=settings.claims, declares=settings.declares),
                transactional_id_prefix=settings.group_id,
                clock_ms=self._clock_ms,
                clock_skew=self._clock_skew,
                is_fit=lambda: fitness is None or fitness.is_fit,
            )
            self._running.append(self._start("owner", self._ownership.run))

    async def _check_state(self) -> None:
        trouble = None if self._follower is None else self._follower.trouble_of_all
        if trouble is not None:
            raise RemoteLogMetadataError(trouble)

    def _start(self, what: str, work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """Starts a task. An exception becomes an alarm, and does not end the other tasks."""

        async def run() -> None:
            try:
                await work()
            except Exception as error:
                logger.exception("a task of the remote log metadata failed: nothing is written until a restart")
                failed = f"the {what} of the remote log metadata failed: {error!r}"
                self._ended = f"{failed}: restart this process, and report the defect"

        assert self._tasks is not None
        return self._tasks.create_task(run(), name=f"remote-log-metadata-{what}")

    async def close(self) -> None:
        """Leaves the group and closes the state. Safe to call twice, and after `open` failed."""
        try:
            if self._tasks is not None:
                for task in self._running:
                    task.cancel()
                tasks, self._tasks = self._tasks, None
                await tasks.__aexit__(None, None, None)
        finally:
            follower, self._follower = self._follower, None
            state, self._opened_state = self._opened_state, None
            self._ownership = self._producer = None
            # A cancellation must not leave the state open, since the next process needs the lock of its folder.
            await asyncio.shield(asyncio.to_thread(_close, follower, state))

    @property
    def alarm(self) -> str | None:
        """Returns the trouble with the metadata topic or the saved state, as a text for an operator; None without any.

        While there is trouble, nothing is written."""
        follower = self._follower
        return self._ended or self._topic_alarm or (None if follower is None else follower.trouble)

    def status(self) -> MetadataStatus:
        """Returns the status. It may be called at any time, also before `open` and after `close`."""
        follower = self._follower
        return MetadataStatus(
            self.alarm,
            None if follower is None else follower.oldest_age_ms(),
            self.owned_metadata_partitions(),
            0 if follower is None else follower.events_read,
            0 if follower is None else follower.foreign_records_read,
            self._clock_skew.skew_ms(),
        )

    @property
    def topic(self) -> MetadataTopic:
        if self._topic is None:
            raise RemoteLogMetadataNotReadyError("the metadata manager is not open")
        return self._topic

    @property
    def follower(self) -> MetadataFollower:
        if self._follower is None:
            raise RemoteLogMetadataNotReadyError("the metadata manager is not open")
        return self._follower

    def metadata_partition(self, partition: TopicIdPartition) -> int:
        return self._settings.partitioner(partition, self.topic.partition_count)

    def owned_metadata_partitions(self) -> frozenset[int]:
        return frozenset() if self._ownership is None else self._ownership.owned()

    async def ensure_fresh(self, partition: TopicIdPartition, max_age_ms: int, timeout_ms: int) -> None:
        await self.follower.ensure_fresh(self.metadata_partition(partition), max_age_ms, timeout_ms)

    def is_fresh(self, partition: TopicIdPartition, max_age_ms: int) -> bool:
        return self.follower.is_fresh(self.metadata_partition(partition), max_age_ms)

    def owns(self, partition: TopicIdPartition) -> bool:
        if self._ownership is None or self._ended or self._topic_alarm or self.follower.trouble_of_all:
            return False
        return self._ownership.owns(self.metadata_partition(partition))

    def tenure(self, partition: TopicIdPartition) -> Tenure | None:
        return None if self._ownership is None else self._ownership.tenure(self.metadata_partition(partition))

    async def _append_as_owner(self, partition: TopicIdPartition, records: MakeRecords) -> None:
        if self._ownership is None:
            raise RemoteLogMetadataError("this process is not a member of the group that owns metadata partitions")
        await self._ownership.write(self.metadata_partition(partition), records, self._settings.write_timeout_ms)

    async def _append(self, partition: TopicIdPartition, records: Sequence[KeyAndValue]) -> None:
        if self._producer is None:
            raise RemoteLogMetadataNotReadyError("the metadata manager is not open")
        metadata_partition = self.metadata_partition(partition)
        timeout_ms = self._settings.write_timeout_ms
        position = self.follower.position(metadata_partition)
        epoch = self.follower.leader_epoch(metadata_partition)
        written = await self._producer.send(metadata_partition, records, timeout_ms)
        await self.follower.read_past(metadata_partition, written, timeout_ms, position=position, leader_epoch=epoch)

    async def _append_when_fresh(
        self, partition: TopicIdPartition, records: MakeRecords, timeout_ms: int | None
    ) -> None:
        metadata_partition = self.metadata_partition(partition)
        timeout_ms = self._settings.write_timeout_ms if timeout_ms is None else timeout_ms
        deadline_ms = self._clock_ms() + timeout_ms
        if self._producer is None:
            raise RemoteLogMetadataNotReadyError("the metadata manager is not open")
        async with in_turn(self._writing_log_start[metadata_partition], timeout_ms):
            # The state must contain what this process wrote before. Otherwise it would write the same record again.
            await self.follower.ensure_fresh(metadata_partition, 0, deadline_ms - self._clock_ms())
            to_write = records()
            if not to_write:
                return
            position = self.follower.position(metadata_partition)
            epoch = self.follower.leader_epoch(metadata_partition)
            written = await self._producer.send(metadata_partition, to_write, deadline_ms - self._clock_ms())
            left_ms = deadline_ms - self._clock_ms()
            await self.follower.read_past(metadata_partition, written, left_ms, position=position, leader_epoch=epoch)

    async def _append_in_turn(self, partition: TopicIdPartition, records: MakeRecords) -> None:
        metadata_partition = self.metadata_partition(partition)
        timeout_ms = self._settings.write_timeout_ms

        async def read_to_end(left_ms: int) -> None:
            await self.follower.ensure_fresh(metadata_partition, 0, left_ms)

        position = self.follower.position(metadata_partition)
        epoch = self.follower.leader_epoch(metadata_partition)
        written = await self._tier_configs.write(self.topic, metadata_partition, read_to_end, records, timeout_ms)
        if written is not None:
            await self.follower.read_past(
                metadata_partition, written, timeout_ms, position=position, leader_epoch=epoch
            )

    def metadata_topic_id(self) -> UUID:
        return self.topic.topic_id

    def position(self, partition: TopicIdPartition) -> MetadataPosition:
        return self.follower.metadata_position(self.metadata_partition(partition))

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

    async def clock_skew_ms(self, partition: TopicIdPartition, anew: bool = False) -> int:
        """Returns how far the brokers' clock is ahead of this machine's clock.

        If there is no measurement, or with `anew`, it writes a record without meaning to measure it."""
        skew_ms = None if anew else self._clock_skew.skew_ms()
        if skew_ms is None:
            if self._producer is None:
                raise RemoteLogMetadataNotReadyError("the metadata manager is not open")
            nothing = tombstone(nothing_key(partition))
            await self._producer.send(self.metadata_partition(partition), [nothing], self._settings.write_timeout_ms)
            skew_ms = self._clock_skew.skew_ms()
        if skew_ms is None:
            raise RemoteLogMetadataError("the brokers return no append time: the metadata topic has no LogAppendTime")
        return skew_ms

    async def _check_topic(self) -> None:
        is_missing = False
        unchecked = LastingTrouble(
            logger,
            "the metadata topic cannot be checked",
            "the metadata topic can be checked again",
            clock_ms=self._clock_ms,
        )
        while True:
            interval_ms = self._settings.check_interval_ms
            # An error that may pass, or that counts only when it is seen twice, is checked again soon.
            soon = is_missing or self._topic_alarm is not None
            await asyncio.sleep((min(interval_ms, _CHECK_AGAIN_MS) if soon else interval_ms) / 1000)
            was_missing, is_missing = is_missing, False
            try:
                topic = await check_metadata_topic(self._client, self._settings.topic, self._settings.open_timeout_ms)
                is_ours = topic.topic_id == self.topic.topic_id
                self._mark_final(not is_ours)
                if not is_ours:
                    raise MetadataTopicUnfitError(
                        f"topic {topic.name} was deleted and created again: see 'The metadata topic is lost' in"
                        " docs/operations.md"
                    )
            except MetadataTopicUnfitError as error:
                self._set_alarm(str(error))
            except BrokerError as error:
                unchecked.found(error=str(error))
                is_missing = error.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                if is_missing and was_missing:  # a single broker may not know the topic yet
                    self._mark_final(True)
                    self._set_alarm(
                        f"topic {self.topic.name} was deleted: the saved state still has what this process read of it,"
                        " also after a restart: see 'The metadata topic is lost' in docs/operations.md"
                    )
            else:
                unchecked.ended()
                self._set_alarm(None)

    def _mark_final(self, is_final: bool) -> None:
        state = self._opened_state
        if isinstance(state, RemoteLogMetadataStateWriter) and state.is_final() != is_final:
            state.mark_final(is_final)

    def _set_alarm(self, alarm: str | None) -> None:
        if alarm is not None and alarm != self._topic_alarm:
            logger.error("the metadata topic must not be used as it is: nothing is written", extra={"error": alarm})
        self._topic_alarm = alarm
        if self._ownership is not None:
            self._ownership.suspended_for = alarm


def _close(follower: MetadataFollower | None, state: RemoteLogMetadataState | None) -> None:
    try:
        if follower is not None:
            follower.close()
    finally:
        if state is not None:
            state.close()
