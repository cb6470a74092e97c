"""Attempts of other owners and of jobs, and whole rounds of one partition."""

from __future__ import annotations

from uuid import UUID

from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import build_segment, metadata_of
from tests.support.tiers.segment_metadata import to
from tests.support.tiers.workbench import PARTITION, Workbench
from tiers.model.copy_plan import CopyPlan
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.tasks.partition_tasks import PartitionTasks


def batches(first: int, end: int, leader_epoch: int = 0) -> list[bytes]:
    return [batch_of(at, 10, value_bytes=15, leader_epoch=leader_epoch) for at in range(first, end, 10)]


async def begun(bench: Workbench, first: int, end: int, leader_epoch: int = 0) -> RemoteLogSegmentMetadata:
    """Makes a whole attempt of another owner."""
    built = build_segment(bench.folder / f"{first}-{end}.built", batches(first, end, leader_epoch), first)
    attempt = metadata_of(built, PARTITION)
    await bench.metadata.add_remote_log_segment_metadata(attempt)
    await bench.store.copy_log_segment_data(attempt, built.log_segment_data(attempt))
    return attempt


async def planned(bench: Workbench, first: int, end: int) -> RemoteLogSegmentMetadata:
    """Makes a whole attempt of a job, which only a plan announces."""
    plan = CopyPlan(
        PARTITION, "", bench.wall_ms, UUID(int=7), attempts=1, leader_epoch=0, copy_epoch=0, bounds=(first, end)
    )
    await bench.metadata.put_copy_plan(plan)
    built = build_segment(bench.folder / f"{first}-{end}.planned", batches(first, end), first)
    attempt = metadata_of(built, PARTITION, plan.segment_id(0, 0).id)
    await bench.store.copy_log_segment_data(attempt, built.log_segment_data(attempt))
    return attempt


async def copied(bench: Workbench, first: int, end: int, leader_epoch: int = 0) -> None:
    attempt = await begun(bench, first, end, leader_epoch)
    await bench.metadata.update_remote_log_segment_metadata(to(attempt, RemoteLogSegmentState.COPY_SEGMENT_FINISHED))


async def whole_rounds(bench: Workbench, tasks: PartitionTasks, count: int) -> None:
    """Runs whole rounds with all that they launch, a minute apart."""
    for _ in range(count):
        surveyed = await tasks.round()
        if surveyed is not None:
            await tasks.run_copy(surveyed)
            await tasks.run_trim(surveyed)
            await tasks.run_deletion(surveyed)
        bench.now_ms += 60_000
        bench.wall_ms += 60_000
