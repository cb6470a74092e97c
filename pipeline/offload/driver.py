"""`OffloadDriver`: the part of a run on the driver's event loop: the survey, the waves and their results."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from uuid import UUID

from pipeline.config import PipelineConfig
from pipeline.job_services import Sleep
from pipeline.offload.commit import OffloadCommitter, PartitionOffload
from pipeline.offload.log_probes import DamagedLogError, end_of_batch, first_damaged
from pipeline.offload.plan import TASKS_PER_CORE, WAVE_BYTES, Backlog, Wave, last_piece, tile_ends
from pipeline.offload.task import OffloadResult, OffloadTask
from protocol.errors import ErrorCode
from protocol.records.record_batch import iterate_batches
from tiers.access.open_tier import CLAIM_TIMEOUT_MS, OpenTier
from tiers.bounded_gather import bounded_gather
from tiers.config.topic_policy import TopicPolicy
from tiers.errors import BrokerError, RemoteLogError
from tiers.metadata.partition_facts import encode_partition_facts
from tiers.metadata.state.layout import StateIdentity
from tiers.metadata.state.writer import RemoteLogMetadataStateWriter
from tiers.metadata.topic.topic_based import TopicBasedMetadataLog
from tiers.model.ids import TopicIdPartition
from tiers.tasks.task_services import TaskServices

_AT_ONCE = 16
_PROBE_BYTES = 256 << 10
_MAX_FAILURES = 3
_BYTES_PER_OFFSET = 1_000.0
"""Assumed if no broker reports a size and no record can be read."""
_OVERSIZE = 4
_MAX_TILE_BYTES = 1 << 30
_MAX_TILES = 1_000
"""Limit of tiles per plan, because a plan is one record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadOptions:
    """`topics` is a regular expression for whole names of tiered topics. `min_bytes` None means a whole segment.
    `max_age_ms` None means the topic's `segment.ms`."""

    topics: str = ".*"
    min_bytes: int | None = None
    max_age_ms: int | None = None
    max_bytes: int | None = None
    max_bytes_per_second_per_broker: int | None = None
    wave_bytes: int = WAVE_BYTES
    claim_timeout_ms: int = CLAIM_TIMEOUT_MS
    failure_pause_s: float = 1.0


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """The result of one partition. The partition is remote up to `next_offset` (exclusive). `left_bytes` is an
    estimate."""

    topic: str
    partition: int
    first_offset: int
    next_offset: int
    segments: int
    log_bytes: int
    left_bytes: int
    lost_attempts: int
    missing_offsets: int
    error: str


@dataclass(frozen=True, slots=True)
class OffloadReport:
    partitions: tuple[PartitionReport, ...]
    waves: int
    seconds: float
    cpu_seconds: float
    """CPU time of the executors' Python processes."""

    @property
    def log_bytes(self) -> int:
        return sum(one.log_bytes for one in self.partitions)

    @property
    def troubles(self) -> list[PartitionReport]:
        return [one for one in self.partitions if one.error]


@dataclass(frozen=True, slots=True)
class PlannedPartition:
    """A line of a dry run. Sizes are estimates."""

    topic: str
    partition: int
    first_offset: int
    next_offset: int
    size_bytes: int
    segments: int


class OffloadDriver:
    """Lives on the worker's loop. `policies` are those of the topics to offload."""

    def __init__(
        self,
        tier: OpenTier,
        config: PipelineConfig,
        options: OffloadOptions,
        policies: Sequence[TopicPolicy],
        parallelism: int,
        services: TaskServices,
        *,
        is_speculative: bool = False,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._tier = tier
        self._config = config
        self._options = options
        self._parallelism = parallelism
        self._services = services
        self._sleep = sleep
        self._committer = OffloadCommitter(self._services, is_speculative)
        self.partitions = [self._committer.of(each, policy) for policy in policies for each in policy.partitions()]
        self.under_way: dict[TopicIdPartition, PartitionOffload] = {}
        """The partitions of the last wave, until it is committed."""
        self._tasks: list[OffloadTask] = []
        self._leaders: dict[TopicIdPartition, int] = {}
        self.waves = 0
        self.is_failing = False
        """Whether nothing of the last wave was committed."""

    @property
    def copied_bytes(self) -> int:
        return sum(one.log_bytes for one in self.partitions)

    async def survey(self) -> None:
        """Estimates the backlog of every partition. Each partition is checked again when its wave comes."""
        await bounded_gather(self.partitions, self._look, _AT_ONCE)
        await bounded_gather([one for one in self.partitions if not one.is_over], self._estimate, _AT_ONCE)

    async def _look(self, one: PartitionOffload) -> None:
        timeout_ms = self._services.settings.request_timeout_ms
        try:
            bounds = await self._services.source.bounds(one.partition, timeout_ms)
        except BrokerError as error:
            one.is_over, one.error = True, str(error)
            return
        remote_end = self._tier.state.remote_end_offset(one.partition)
        log_start = self._tier.state.log_start_offset(one.partition) or 0
        one.next_offset = max(bounds.log_start_offset, -1 if remote_end is None else remote_end + 1, log_start)
        one.end_offset = bounds.last_stable_offset
        one.local_offsets = bounds.high_watermark - bounds.log_start_offset
        one.is_over = one.next_offset >= one.end_offset

    async def _estimate(self, one: PartitionOffload) -> None:
        """Estimates the bytes per offset from the size of the log, or from its first records to copy."""
        if one.bytes_per_offset is not None:
            return
        one.bytes_per_offset = _BYTES_PER_OFFSET
        source, timeout_ms = self._services.source, self._services.settings.request_timeout_ms
        with suppress(RemoteLogError):  # the partition's wave reports the error
            size_bytes = await source.size_bytes(one.partition, timeout_ms)
            if size_bytes and one.local_offsets > 0:
                one.bytes_per_offset = size_bytes / one.local_offsets
                return
            read = await source.read(one.partition, one.next_offset, _PROBE_BYTES, timeout_ms)
            batches = list(iterate_batches(read.records))
            if batches:
                one.bytes_per_offset = len(read.records) / max(1, batches[-1].next_offset - one.next_offset)

    async def collect(self) -> None:
        """Finishes or deletes the attempts of plans that no wave visits any more.

        They are of a driver that died, of executors that died, or of speculative tasks."""
        await bounded_gather(self.partitions, self._committer.collect, _AT_ONCE)

    async def planned(self, one: PartitionOffload) -> PlannedPartition:
        """Returns the dry run's line. If the partition cannot be examined, the line has no bytes and `one.error` holds
        the reason."""
        try:
            backlog = await self._backlog(one)
        except RemoteLogError as error:
            one.is_over, one.error = True, str(error) or repr(error)
            backlog = one.backlog(self._options.min_bytes)
        if one.error:
            self._services.say(f"offload: {one.partition}: {one.error}")
        ends = [] if one.is_over else tile_ends(backlog, self._options.max_bytes or 1 << 62)
        end = ends[-1] if ends else one.next_offset
        size_bytes = int((end - one.next_offset) * backlog.bytes_per_offset)
        partition = one.partition
        return PlannedPartition(partition.topic, partition.partition, one.next_offset, end, size_bytes, len(ends))

    async def next_wave(self) -> list[OffloadTask]:
        """Announces and returns the tasks of the next wave. The list is empty if nothing is left to do."""
        while wave := self._choose():
            tasks = await bounded_gather(wave.items(), lambda each: self._task(*each), _AT_ONCE)
            self._tasks = self._with_limits([one for one in tasks if one is not None])
            if self._tasks:
                self.waves += 1
                return self._tasks
            if any(one.failures for one in wave):
                await self._sleep(self._options.failure_pause_s)
        return []

    def _choose(self) -> dict[PartitionOffload, int]:
        """Returns the partitions of the next wave with the bytes that each may take."""
        left_bytes = self._options.wave_bytes
        if self._options.max_bytes is not None:
            left_bytes = min(left_bytes, self._options.max_bytes - self.copied_bytes)
        if left_bytes <= 0:
            return {}
        wave = Wave(TASKS_PER_CORE * self._parallelism, left_bytes)
        waiting = {one.partition: one for one in self.partitions if not one.is_over}
        chosen = wave.choose(one.backlog(self._options.min_bytes) for one in waiting.values())
        shares = wave.share_bytes(chosen)
        return {waiting[each.partition]: shares[each.partition] for each in chosen}

    async def _task(self, one: PartitionOffload, share_bytes: int) -> OffloadTask | None:
        try:
            continuation = await self._committer.prepare(one)
            backlog = await self._backlog(one)
            ends = await self._aligned(one, tile_ends(backlog, share_bytes)[:_MAX_TILES])
            if not ends:
                one.is_over, one.error = True, one.error if one.is_poisoned else ""
                return None
            if self._options.max_bytes_per_second_per_broker is not None:
                await self._leader(one)  # may fail, so it runs before the announcement
            epochs = continuation.carried.leader_epochs
            epoch = epochs[-1].epoch if epochs else 0
            self.under_way[one.partition] = one
            facts = encode_partition_facts(one.facts.present())
            plan = await self._committer.announce(one, [one.next_offset, *ends], epoch)
        except RemoteLogError as error:
            one.error, one.failures = str(error) or repr(error), one.failures + 1
            one.is_over = not error.retriable or one.failures >= _MAX_FAILURES
            return None
        return OffloadTask(
            config=self._config,
            cluster_id=self._tier.cluster.cluster_id,
            partition=one.partition,
            plan=plan,
            continuation=continuation,
            max_segment_bytes=min(_OVERSIZE * one.policy.segment_bytes, _MAX_TILE_BYTES),
            facts=facts,
        )

    async def _aligned(self, one: PartitionOffload, ends: Sequence[int]) -> list[int]:
        """Moves the ends to the ends of batches. If the log is damaged, the last tile ends at the damaged batch."""
        source, timeout_ms = self._services.source, self._services.settings.request_timeout_ms
        aligned = [one.next_offset]
        for end in ends:
            if end <= aligned[-1]:
                continue
            if end == one.end_offset:
                aligned.append(end)
                break
            try:
                end_of_it = await end_of_batch(source, one.partition, end - 1, timeout_ms)
            except DamagedLogError as error:
                damaged = await first_damaged(source, one.partition, aligned[-1], error, timeout_ms)
                one.end_offset, one.is_poisoned = damaged.offset, True
                one.error = f"offset {damaged.offset}: {damaged}"
                aligned.append(damaged.offset)
                break
            aligned.append(one.end_offset if end_of_it is None else end_of_it)
        return sorted(set(aligned[1:]) - {one.next_offset})

    async def _backlog(self, one: PartitionOffload) -> Backlog:
        """Returns the backlog, with its last piece if that is old enough."""
        backlog = one.backlog(self._options.min_bytes)
        piece = last_piece(backlog)
        if piece is None or one.is_over:
            return backlog
        timeout_ms = self._services.settings.request_timeout_ms
        max_age_ms = one.policy.segment_ms if self._options.max_age_ms is None else self._options.max_age_ms
        try:
            read = await self._services.source.read(one.partition, piece, 1, timeout_ms)
        except BrokerError as error:
            if error.code != ErrorCode.CORRUPT_MESSAGE:
                raise
            return one.backlog(self._options.min_bytes, takes_all=True)  # up to the damage, which is then reported
        oldest_ms = next((batch.max_timestamp for batch in iterate_batches(read.records)), None)
        is_old = oldest_ms is not None and self._services.wall_clock_ms() - oldest_ms >= max_age_ms
        return one.backlog(self._options.min_bytes, takes_all=is_old)

    def _with_limits(self, tasks: Sequence[OffloadTask]) -> list[OffloadTask]:
        limit = self._options.max_bytes_per_second_per_broker
        if limit is None:
            return list(tasks)
        counts = Counter(self._leaders[one.partition] for one in tasks)
        return [
            replace(one, bytes_per_second=max(1, limit // min(counts[self._leaders[one.partition]], self._parallelism)))
            for one in tasks
        ]

    async def _leader(self, one: PartitionOffload) -> int:
        """Returns the leader's node id and remembers it. Raises `BrokerError`."""
        leader = await self._tier.client.leader_of(one.partition, self._services.settings.request_timeout_ms)
        self._leaders[one.partition] = leader.node_id
        return leader.node_id

    async def commit(self, results: Sequence[OffloadResult]) -> None:
        """Commits the results of the last wave, given in its order."""
        before = self.copied_bytes
        given = list(zip(self._tasks, results, strict=True))

        async def commit(one: tuple[OffloadTask, OffloadResult]) -> None:
            task, result = one
            await self._committer.commit(self.under_way[task.partition], task.plan, result)

        await bounded_gather(given, commit, _AT_ONCE)
        for each in self.under_way.values():
            each.is_over = each.is_over or each.failures >= _MAX_FAILURES
        self.under_way.clear()
        self.is_failing = self.copied_bytes == before

    async def abandon(self) -> None:
        """Ends the plans of the last wave, and works on their attempts. Call it when no task writes any more."""
        await self._committer.abandon(list(self.under_way.values()))

    def report(self, seconds: float) -> OffloadReport:
        cpu_s = sum(one.cpu_s for one in self.partitions)
        return OffloadReport(tuple(_reported(one) for one in self.partitions), self.waves, seconds, cpu_s)


def _reported(one: PartitionOffload) -> PartitionReport:
    return PartitionReport(
        topic=one.partition.topic,
        partition=one.partition.partition,
        first_offset=one.next_offset if one.first_offset < 0 else one.first_offset,
        next_offset=one.next_offset,
        segments=one.segments,
        log_bytes=one.log_bytes,
        left_bytes=one.backlog(None).size_bytes,
        lost_attempts=one.lost,
        missing_offsets=one.missing_offsets,
        error=one.error,
    )


_NO_TOPIC = StateIdentity("", UUID(int=0), 1)


class NothingTieredYet(TopicBasedMetadataLog):
    """The metadata of a cluster without a metadata topic, for a caller that must create nothing.

    It knows no segment and no setting. That is all there is, so it is always fresh. It can write nothing."""

    async def open(self) -> None:
        self._state = RemoteLogMetadataStateWriter.open(self._settings.state_folder, _NO_TOPIC)

    def is_fresh(self, partition: TopicIdPartition, max_age_ms: int) -> bool:
        return True

    async def ensure_fresh(self, partition: TopicIdPartition, max_age_ms: int, timeout_ms: int) -> None:
        return
