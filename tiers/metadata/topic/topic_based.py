"""`TopicBasedMetadataLog`: KIP-405's default, with the metadata in a topic of the cluster itself.

A follower of the topic keeps the state. Appends as the owner are transactions of the owner of a metadata partition. The
parts are `follower`, `ownership`, `metadata_producer`, `state` and `serde`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any
from uuid import UUID

from protocol.errors import ErrorCode
from tiers.broker.client import BrokerClient, monotonic_ms, wall_clock_ms
from tiers.errors import BrokerError, RemoteLogMetadataError, RemoteLogMetadataNotReadyError
from tiers.fitness import Probe
from tiers.lasting_trouble import LastingTrouble
from tiers.log.broker_log import BrokerLogSource
from tiers.metadata.metadata_log import Append, MakeRecords, MetadataPosition, MetadataStatus, Tenure, by_topic_id
from tiers.metadata.state.layout import StateIdentity
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.metadata.state.writer import RemoteLogMetadataStateWriter, saved_identity
from tiers.metadata.topic.follower import MetadataFollower
from tiers.metadata.topic.group.ownership import MetadataPartitionOwnership
from tiers.metadata.topic.metadata_producer import ClockSkew
from tiers.metadata.topic.metadata_topic import (
    STEPS,
    MetadataTopic,
    MetadataTopicLostError,
    MetadataTopicUnfitError,
    check_metadata_topic,
    open_metadata_topic,
)
from tiers.metadata.topic.settings import TopicBasedSettings
from tiers.metadata.topic.topic_appends import TopicAppends
from tiers.model.ids import TopicIdPartition

logger = logging.getLogger(__name__)

_CHECK_AGAIN_MS = 2_000


class TopicBasedMetadataLog:
    """Implements `MetadataLog`.

    The caller keeps and closes the client. It calls `open` and `close` once, in one event loop."""

    def __init__(self, client: BrokerClient, settings: TopicBasedSettings) -> None:
        self._client = client
        self._settings = settings
        self._clock_skew = ClockSkew(monotonic_ms, wall_clock_ms)
        self._topic: MetadataTopic | None = None
        self._writer = ""
        self._state: RemoteLogMetadataStateWriter | None = None
        self._follower: MetadataFollower | None = None
        self._appends: TopicAppends | None = None
        self._ownership: MetadataPartitionOwnership | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._running: list[asyncio.Task[None]] = []
        self._topic_alarm: str | None = None
        self._ended: str | None = None

    @property
    def state(self) -> RemoteLogMetadataStateWriter:
        if self._state is None:
            raise RemoteLogMetadataNotReadyError("the saved state of the remote log metadata is not open yet")
        return self._state

    @property
    def writer(self) -> str:
        return self._writer

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
        position = self.follower.read_to(self.metadata_partition(partition))
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

    async def open(self) -> None:
        """Creates or checks the topic, opens the state, and starts to follow the topic.

        If the topic of a saved state is gone, that state is the last place that knows the segments. It is then opened
        unchanged, final and never fresh, and `status` says so. Raises `MetadataTopicUnfitError` when an operator must
        act, and `BrokerError` when the cluster cannot be reached."""
        settings = self._settings
        saved, lost = await asyncio.to_thread(saved_identity, settings.state_folder), None
        try:
            topic = await open_metadata_topic(
                self._client, settings.topic, settings.open_timeout_ms, saved, settings.refusal_to_create
            )
        except MetadataTopicLostError as error:
            assert saved is not None
            topic = MetadataTopic(saved.cluster_id, settings.topic.name, saved.topic_id, saved.partition_count)
            lost = f"{error}, and remove the saved state in {settings.state_folder} after that"
        state = await asyncio.to_thread(
            RemoteLogMetadataStateWriter.open,
            settings.state_folder,
            StateIdentity(topic.cluster_id, topic.topic_id, topic.partition_count),
            clock_ms=monotonic_ms,
            is_kept=lost is not None,
        )
        self._topic, self._state = topic, state
        self._topic_alarm = self._ended = None
        # A record names its writer for operators. The name stays the same over restarts.
        self._writer = await asyncio.to_thread(state.writer_name, socket.gethostname())
        self._follower = MetadataFollower(
            self._client,
            topic,
            state,
            clock_ms=monotonic_ms,
            wall_clock_ms=wall_clock_ms,
            home_of=self.metadata_partition,
            max_age_ms=settings.max_age_ms,
        )
        self._appends = TopicAppends(self._client, topic, self._follower, settings.group_id, self._clock_skew)
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
            if settings.fitness is not None:
                settings.fitness.add(Probe("saved state of the metadata", self._check_state))
            self._ownership = MetadataPartitionOwnership(
                self._client,
                topic,
                self._follower,
                settings,
                clock_ms=monotonic_ms,
                clock_skew=self._clock_skew,
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
            state, self._state = self._state, None
            self._ownership = self._appends = None
            # A cancellation must not leave the state open, since the next process needs the lock of its folder.
            await asyncio.shield(asyncio.to_thread(_close, follower, state))

    def status(self) -> MetadataStatus:
        follower, ownership = self._follower, self._ownership
        return MetadataStatus(
            self._ended or self._topic_alarm or (None if follower is None else follower.trouble),
            None if follower is None else follower.oldest_age_ms(),
            frozenset() if ownership is None else ownership.owned(),
            0 if follower is None else follower.foreign_records_read,
            self._clock_skew.skew_ms(),
        )

    @property
    def follower(self) -> MetadataFollower:
        if self._follower is None:
            raise RemoteLogMetadataNotReadyError("the remote log metadata is not open yet")
        return self._follower

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

    async def append(
        self, partition: TopicIdPartition, records: MakeRecords, by: Append, timeout_ms: int | None = None
    ) -> None:
        number = self.metadata_partition(partition)
        timeout_ms = self._settings.write_timeout_ms if timeout_ms is None else timeout_ms
        if self._appends is None:
            raise RemoteLogMetadataNotReadyError("the remote log metadata is not open yet")
        if by is not Append.AS_OWNER:
            await self._appends.append(number, records, by, timeout_ms)
        elif self._ownership is None:
            raise RemoteLogMetadataError("this process is not a member of the group that owns metadata partitions")
        else:
            await self._ownership.write(number, records, timeout_ms)

    async def _check_topic(self) -> None:
        is_missing = False
        unchecked = LastingTrouble(
            logger,
            "the metadata topic cannot be checked",
            "the metadata topic can be checked again",
            clock_ms=monotonic_ms,
        )
        while True:
            interval_ms = self._settings.check_interval_ms
            # An error that may pass, or that counts only when it is seen twice, is checked again soon.
            soon = is_missing or self._topic_alarm is not None
            await asyncio.sleep((min(interval_ms, _CHECK_AGAIN_MS) if soon else interval_ms) / 1000)
            was_missing, is_missing = is_missing, False
            alarm: str | None = None
            try:
                topic = await check_metadata_topic(self._client, self._settings.topic, self._settings.open_timeout_ms)
            except MetadataTopicUnfitError as error:
                alarm = str(error)
            except BrokerError as error:
                unchecked.found(error=str(error))
                is_missing = error.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                if not (is_missing and was_missing):  # a single broker may not know the topic yet
                    continue
                self._mark_final(True)
                alarm = (
                    f"topic {self.topic.name} was deleted: the saved state still has what this process read of it,"
                    f" also after a restart: {STEPS}"
                )
            else:
                is_ours = topic.topic_id == self.topic.topic_id
                self._mark_final(not is_ours)
                if is_ours:
                    unchecked.ended()
                else:
                    alarm = f"topic {topic.name} was deleted and created again: {STEPS}"
            self._set_alarm(alarm)

    def _mark_final(self, is_final: bool) -> None:
        if self._state is not None and self._state.is_final() != is_final:
            self._state.mark_final(is_final)

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
