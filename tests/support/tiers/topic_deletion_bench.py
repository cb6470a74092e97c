"""The shared parts of the tests of deleted and missing topics: brokers that may know a topic, and its segments."""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import build_segment, metadata_of
from tests.support.tiers.workbench import PARTITION, Workbench
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadataUpdate, RemoteLogSegmentState
from tiers.segment.segment_encryption import KeyRing
from tiers.tasks.deletion.topic_deletion import TopicDeletionTask
from tiers.upkeep.rebuild import plan_rebuild
from tiers.upkeep.rebuild_plan import PartitionPlan
from tiers.upkeep.runner import HereRunner, OpenedStore


class Existence:
    """`deleted`: what no broker knows."""

    def __init__(self, *deleted: UUID) -> None:
        self.deleted = set(deleted)
        self.asked: set[UUID] = set()

    async def gone(self, topic_ids: Iterable[UUID], timeout_ms: int) -> set[UUID]:
        self.asked = set(topic_ids)
        return self.deleted & self.asked


async def put_segments(bench: Workbench, count: int = 3, partition: TopicIdPartition = PARTITION) -> None:
    """Finished segments of 30 offsets each."""
    for number in range(count):
        folder = bench.folder / f"{partition.topic_id}-{partition.partition}-{number}"
        built = build_segment(folder, [batch_of(30 * number, 30, value_bytes=15)], base_offset=30 * number)
        metadata = metadata_of(built, partition)
        await bench.metadata.add_remote_log_segment_metadata(metadata)
        await bench.store.copy_log_segment_data(metadata, built.log_segment_data(metadata))
        finished = RemoteLogSegmentState.COPY_SEGMENT_FINISHED
        update = RemoteLogSegmentMetadataUpdate(metadata.segment_id, 1, 1, finished)
        await bench.metadata.update_remote_log_segment_metadata(update)


async def round_after(bench: Workbench, task: TopicDeletionTask, waited_ms: int) -> int:
    """The task's next round, so much later on every clock."""
    bench.now_ms += waited_ms
    bench.wall_ms += waited_ms
    return await task.run()


async def rounds_for(bench: Workbench, task: TopicDeletionTask, duration_ms: int, interval_ms: int) -> int:
    """A round after each interval, to the end of the duration; how many partitions they deleted."""
    deleted = 0
    for _ in range(duration_ms // interval_ms):
        deleted += await round_after(bench, task, interval_ms)
    return deleted


async def rebuilt(bench: Workbench) -> PartitionPlan | None:
    """Returns what `rebuild` finds in the store. None: the store has nothing of the partition."""
    plans = (await plan_rebuild(OpenedStore(bench.store, "cluster", KeyRing()), HereRunner())).plans
    return plans[0] if plans else None
