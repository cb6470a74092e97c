"""One partition's RLM tasks on fakes: an in-memory log and metadata manager, a folder as the remote tier."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import UUID

from prometheus_client import CollectorRegistry

from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.fakes.in_memory_rlmm import InMemoryRemoteLogMetadataManager
from tests.support.fakes.record_batches import batch_of
from tiers.config.topic_policy import TopicPolicy
from tiers.errors import RemoteLogError
from tiers.metadata.log_history import kept_log_start
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.model.log_start import LogStart, LogStartReason
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.storage.local import LocalRemoteStorageManager
from tiers.storage.object_key import marked_cluster
from tiers.tasks.copy.copy_attempts import CopyAttempts
from tiers.tasks.copy.copy_task import RLMCopyTask
from tiers.tasks.copy.spool import Spool
from tiers.tasks.deletion.failed_deletions import FailedDeletion, FailedDeletions
from tiers.tasks.deletion.segment_deletion import delete_attempts
from tiers.tasks.history.acceptance import accept_what_is_left
from tiers.tasks.history.align import RLMCutTask
from tiers.tasks.history.log_gap_task import LogGapTask
from tiers.tasks.history.stored_facts import FactsTask
from tiers.tasks.metrics import RemoteLogManagerMetrics
from tiers.tasks.partition_watch import PartitionWatch
from tiers.tasks.retention.expiration_task import RLMExpirationTask
from tiers.tasks.retention.trim_task import TrimTask
from tiers.tasks.task_services import RemoteLogManagerSettings, TaskServices

PARTITION = TopicIdPartition(UUID(int=1), 0, "orders")
POLICY = TopicPolicy(
    topic="orders",
    topic_id=PARTITION.topic_id,
    partition_count=1,
    retention_ms=-1,
    retention_bytes=-1,
    local_retention_ms=None,
    local_retention_bytes=None,
    segment_bytes=1000,
    segment_ms=60_000,
)


@dataclass
class Workbench:
    folder: Path
    store: LocalRemoteStorageManager
    log: InMemoryLog = field(default_factory=InMemoryLog)
    now_ms: int = 1_000_000
    wall_ms: int = 1_700_000_000_000
    steps: list[str] = field(default_factory=list)
    end_after: str = ""

    def __post_init__(self) -> None:
        self.registry = CollectorRegistry()
        self.share_groups = FakeShareGroups()
        self.failed_deletion_log = FakeFailedDeletionLog()
        self.metadata = InMemoryRemoteLogMetadataManager(lambda: self.now_ms, lambda: self.wall_ms)
        settings = RemoteLogManagerSettings(spool_dir=self.folder / "spool", fetch_bytes=500, verify_bytes=600)
        self.services = TaskServices(
            source=self.log,
            share_groups=self.share_groups,
            storage=self.store,
            metadata=self.metadata,
            settings=settings,
            metrics=RemoteLogManagerMetrics(self.registry),
            spool=Spool(settings.spool_dir, settings.spool_max_bytes, 1),
            failed_deletions=FailedDeletions(self.failed_deletion_log),
            cluster_id="cluster",
            clock_ms=lambda: self.now_ms,
            wall_clock_ms=lambda: self.wall_ms,
            checkpoint=self._checkpoint,
        )
        self._start()

    @property
    def state(self) -> RemoteLogMetadataState:
        return self.metadata.state

    def _checkpoint(self, name: str) -> None:
        self.steps.append(name)
        if name == self.end_after:
            raise ProcessEnded(name)

    def restart(self) -> None:
        """Restarts as after a crash: the memory and the files of the tasks are gone."""
        self._start()

    def _start(self) -> None:
        self.facts_task = FactsTask(self.services, PARTITION)
        self.attempts = CopyAttempts(self.services, PARTITION)
        self.copy_task = RLMCopyTask(self.services, PARTITION, self.attempts, self.facts_task)
        self.watch = PartitionWatch(self.services, PARTITION, self.copy_task)
        self.cut_task = RLMCutTask(self.services, PARTITION)
        self.gap_task = LogGapTask(self.services, PARTITION, self.facts_task, self.attempts)
        self.trim_task = TrimTask(self.services, PARTITION)
        self.expiration_task = RLMExpirationTask(self.services, PARTITION)

    async def survey(self) -> LocalLogBounds:
        """Asks the leader what a round asks it first."""
        size_bytes = await self.log.size_bytes(PARTITION, 1000)
        bounds = await self.log.bounds(PARTITION, 1000)
        self.copy_task.uncopied.survey(size_bytes, bounds)
        return bounds

    async def copy(self, policy: TopicPolicy = POLICY, retention_share: float = 0.0) -> bool:
        """A round's lineage check, attempts and copying."""
        bounds = await self.survey()
        if await self.cut_task.run(bounds):
            self.copy_task.start_over()
        bounds, log_start = await self.log.bounds(PARTITION, 1000), await self.log_start()
        if not await self.gap_task.make_known(bounds, log_start):
            return False
        has_announced = await self.attempts.announce_kept(log_start)
        start = await self.gap_task.copy_start(bounds, log_start)
        remote_end = self.metadata.state.remote_end_offset(PARTITION)
        await self.attempts.run(bounds, log_start)
        await delete_attempts(self.services, PARTITION, await self.attempts.give_up(bounds, log_start))
        if self.metadata.state.remote_end_offset(PARTITION) != remote_end:
            return True
        if has_announced or start is None:
            return has_announced
        start = self.attempts.start_behind(start, is_urgent=False)
        return await self.copy_task.run(policy, bounds, start, retention_share=retention_share)

    async def check_facts(self) -> None:
        """Does what a round does before it removes anything. Raises the doubt."""
        await self.facts_task.require_proved()

    async def accept(self) -> list[str]:
        """Accepts as an operator does. Returns what cannot be restored. The owner looks again in its next round."""
        bounds, log_start = await self.log.bounds(PARTITION, 1000), await self.log_start()
        return await accept_what_is_left(
            self.store, self.metadata, "cluster", PARTITION, bounds, log_start, timeout_ms=1000
        )

    async def log_start(self) -> int:
        return await kept_log_start(self.log, self.metadata.state, PARTITION, 1000)

    async def record_log_start(
        self, offset: int, leader_epoch: int = 0, reason: LogStartReason = LogStartReason.USER
    ) -> None:
        await self.metadata.put_log_start(PARTITION, LogStart(offset, leader_epoch, reason))

    async def copy_all(self, policy: TopicPolicy = POLICY) -> None:
        while await self.copy(policy):
            pass

    async def trim(self, policy: TopicPolicy) -> int | None:
        await self.check_facts()
        return await self.trim_task.run(policy)

    async def expire(self, policy: TopicPolicy) -> int:
        bounds = await self.log.bounds(PARTITION, 1000)
        log_start = await self.log_start()
        remote_end = self.metadata.state.remote_end_offset(PARTITION)
        log_start = await self.expiration_task.run(
            policy, bounds, log_start, self.copy_task.uncopied.at_least(), remote_end
        )
        return await self.expiration_task.delete(policy, log_start)

    @property
    def segments(self) -> list[RemoteLogSegmentMetadata]:
        return list(self.metadata.state.list_remote_log_segments(PARTITION))

    @property
    def finished(self) -> list[tuple[int, int]]:
        readable = RemoteLogSegmentState.COPY_SEGMENT_FINISHED
        return [(one.start_offset, one.end_offset) for one in self.segments if one.state is readable]

    async def remote_bytes(self) -> bytes:
        """The stored log objects of the readable segments, in order."""
        readable = RemoteLogSegmentState.COPY_SEGMENT_FINISHED
        parts = [
            bytes(await self.store.fetch_log_segment(one, 0, one.segment_size_bytes + 100))
            for one in self.segments
            if one.state is readable
        ]
        return b"".join(parts)

    async def objects(self) -> list[str]:
        """Returns the keys of all objects but the marker of the tier."""
        return sorted([each.key async for each in self.store.list_objects("") if marked_cluster(each.key) is None])

    def spooled(self) -> list[Path]:
        return list((self.folder / "spool").iterdir())

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"tidegate_{name}", labels) or 0.0

    def active(self, reason: str, topic: str = "orders") -> float:
        """Returns how many partitions, stages or topics have the alarm now."""
        return self.metric("remote_log_alarm", topic=topic, reason=reason)


class FakeShareGroups:
    def __init__(self) -> None:
        self.start: int | None = None

    async def lowest_start(self, partition: TopicIdPartition, timeout_ms: int) -> int | None:
        return self.start


class FakeFailedDeletionLog:
    def __init__(self) -> None:
        self.published: dict[str, FailedDeletion] = {}
        self.failure: RemoteLogError | None = None

    async def publish(self, failed: FailedDeletion) -> None:
        if self.failure is not None:
            raise self.failure
        self.published[failed.segment] = failed

    async def retract(self, segment: UUID) -> None:
        if self.failure is not None:
            raise self.failure
        self.published.pop(str(segment), None)


class ProcessEnded(Exception):
    """The process is gone at this point."""


async def copied(bench: Workbench) -> None:
    """Offsets 0 to 89 in three segments; ten more are only local."""
    bench.log.append(*(batch_of(10 * number, 10, value_bytes=15) for number in range(10)))
    await bench.copy_all()


@asynccontextmanager
async def workbench(folder: Path) -> AsyncIterator[Workbench]:
    root = folder / "remote"
    root.mkdir()
    store = LocalRemoteStorageManager({"path": str(root), "cluster.id": "cluster"})
    await store.open()
    bench = Workbench(folder, store)
    await bench.services.spool.open()
    await bench.services.place.require(bench.services)
    bench.steps.clear()
    try:
        yield bench
    finally:
        bench.services.spool.close()
        await store.close()


def with_retention(**changes: int | None) -> TopicPolicy:
    return replace(POLICY, **changes)  # type: ignore[arg-type]  # the fields are named by the tests
