"""A partition with a real log of metadata records and objects in files, and a driver over it.

After every record `on_record` is called, as a reader of the metadata sees it then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from prometheus_client import CollectorRegistry

from pipeline.config import PipelineConfig, parse_pipeline_config
from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.fakes.metadata_topic import FakeMetadataTopic, FakeTopicMetadataManager
from tests.support.fakes.segments import metadata_of
from tests.support.tiers.workbench import FakeFailedDeletionLog, FakeShareGroups
from tiers.config.topic_policy import TopicPolicy
from tiers.metadata.log_history import kept_log_start
from tiers.metadata.records.serde import KeyAndValue
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.segment.segment_builder import BuiltSegment
from tiers.segment.segment_encryption import seal_segment
from tiers.storage.local import LocalRemoteStorageManager
from tiers.storage.locations import LocatedRemoteStorageManager
from tiers.storage.object_key import partition_prefix
from tiers.tasks.copy.copy_attempts import CopyAttempts
from tiers.tasks.copy.spool import Spool
from tiers.tasks.deletion.failed_deletions import FailedDeletions
from tiers.tasks.deletion.segment_deletion import delete_attempts
from tiers.tasks.metrics import RemoteLogManagerMetrics
from tiers.tasks.retention.expiration_task import RLMExpirationTask
from tiers.tasks.task_services import RemoteLogManagerSettings, TaskServices

CLUSTER_ID = "cluster"
FINISHED = RemoteLogSegmentState.COPY_SEGMENT_FINISHED


class WatchedLog(FakeMetadataTopic):
    on_record: Callable[[], None] = staticmethod(lambda: None)

    def append(self, records: Sequence[KeyAndValue]) -> None:
        for one in records:
            super().append([one])
            self.on_record()


@dataclass
class JobBench:
    """`root` is the store's folder, which several may share; `folder` is this one's alone."""

    root: Path
    folder: Path
    more_config: str = ""
    now_ms: int = 1_000_000
    wall_ms: int = 1_700_000_000_000
    partition: TopicIdPartition = field(default_factory=lambda: TopicIdPartition(uuid4(), 0, "orders"))

    def __post_init__(self) -> None:
        self.config: PipelineConfig = parse_pipeline_config(self.toml(self.more_config))
        self.log = WatchedLog(lambda: self.wall_ms, owner="driver")
        self.metadata = FakeTopicMetadataManager(self.log, "driver", self.folder / "state", lambda: self.now_ms)
        self.storage = LocatedRemoteStorageManager(
            LocalRemoteStorageManager({"path": str(self.root), "cluster.id": CLUSTER_ID})
        )
        self.failed_deletion_log = FakeFailedDeletionLog()
        self.checkpoint: Callable[[str], None] = lambda name: None
        settings = RemoteLogManagerSettings(spool_dir=self.folder / "spool")
        self.key_ring = self.config.encryption.key_ring()
        self.broker = InMemoryLog()
        metadata: Any = self.metadata
        self.services = TaskServices(
            source=self.broker,
            share_groups=FakeShareGroups(),
            storage=self.storage,
            metadata=metadata,
            settings=settings,
            metrics=RemoteLogManagerMetrics(CollectorRegistry()),
            spool=Spool(settings.spool_dir, settings.spool_max_bytes, 1),
            key_ring=self.key_ring,
            cluster_id=CLUSTER_ID,
            failed_deletions=FailedDeletions(self.failed_deletion_log, publish_after=1),
            clock_ms=lambda: self.now_ms,
            wall_clock_ms=lambda: self.wall_ms,
            checkpoint=lambda name: self.checkpoint(name),
        )

    @property
    def state(self) -> RemoteLogMetadataState:
        return self.metadata.state

    def toml(self, more: str = "") -> str:
        return (
            f'[upstream]\nbootstrap.servers = "localhost:1"\n'
            f'[storage]\nimplementation = "local"\npath = "{self.root}"\ncluster.id = "{CLUSTER_ID}"\n{more}'
        )

    async def open(self) -> None:
        await self.storage.open()
        await self.metadata.open()

    async def close(self) -> None:
        await self.metadata.close()
        await self.storage.close()
        self.services.spool.close()

    async def store(self, built: BuiltSegment) -> RemoteLogSegmentMetadata:
        metadata = metadata_of(built, self.partition)
        await self.metadata.add_remote_log_segment_metadata(metadata)
        if self.key_ring.current is not None:
            built = seal_segment(
                built, metadata.segment_id.id, self.key_ring, self.folder / str(metadata.segment_id.id)
            )
        await self.storage.copy_log_segment_data(metadata, built.log_segment_data(metadata))
        await self.services.write_state(metadata, FINISHED)
        found = self.metadata.state.remote_log_segment_metadata_by_id(metadata.segment_id)
        assert found is not None
        return found

    @property
    def segments(self) -> list[RemoteLogSegmentMetadata]:
        return list(self.metadata.state.list_remote_log_segments(self.partition))

    @property
    def finished(self) -> list[tuple[int, int]]:
        return [(each.start_offset, each.end_offset) for each in self.segments if each.state is FINISHED]

    def files(self, segment: RemoteLogSegmentMetadata) -> list[Path]:
        return sorted(self.partition_folder.glob(f"*{segment.segment_id.id}*"))

    @property
    def partition_folder(self) -> Path:
        return self.root / partition_prefix(CLUSTER_ID, self.partition)

    async def owners_round(self, policy: TopicPolicy) -> None:
        """The rounds of an owner of the partition, much later."""
        bounds = await self.broker.bounds(self.partition, 1000)
        log_start = await kept_log_start(self.broker, self.metadata.state, self.partition, 1000)
        attempts = CopyAttempts(self.services, self.partition)
        for _ in range(2):
            self.now_ms += 60_000
            await attempts.run(bounds, log_start)
        needless = await attempts.give_up(bounds, log_start or 0)
        await delete_attempts(self.services, self.partition, needless)
        task = RLMExpirationTask(self.services, self.partition)
        remote_end = self.services.metadata.state.remote_end_offset(self.partition)
        await task.delete(policy, await task.run(policy, bounds, log_start, 0, remote_end))
