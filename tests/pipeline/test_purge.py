"""Many deletions at once: what the store refuses keeps its DELETE record, is published, and is done by the next run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.jobs.retain import delete_partitions, expire_partitions
from pipeline.segment_purge import purge
from tests.fakes.record_batches import batch_of
from tests.fakes.segments import build_segment
from tests.pipeline.job_bench import CLUSTER_ID, InlineRunner, JobBench
from tests.tiers.manager.workbench import POLICY
from tiers.metadata.partition_manifest import decode_partition_manifest
from tiers.model.segment_state import RemoteLogSegmentState, RemotePartitionDeleteState
from tiers.storage.object_key import partition_manifest_key


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[JobBench]:
    """Three segments of ten offsets; the broker has them too."""
    (tmp_path / "store").mkdir()
    made = JobBench(tmp_path / "store", tmp_path)
    await made.open()
    for start in (0, 10, 20):
        batch = batch_of(start, 10, timestamp=made.wall_ms - 1000 + start)
        made.broker.append(batch)
        await made.store(build_segment(tmp_path / str(start), [batch], base_offset=start))
    await made.write_manifest()
    yield made
    await made.close()


async def manifest_of(bench: JobBench) -> tuple[int, int]:
    """How many segments it accepts, and how many it calls dead."""
    found = decode_partition_manifest(
        await bench.storage.get_object(partition_manifest_key(CLUSTER_ID, bench.partition))
    )
    return len(found.segments), len(found.dead)


class StuckRunner(InlineRunner):
    """One object cannot be deleted while the tasks run: a folder took its name."""

    def __init__(self, bench: JobBench, stuck: Path) -> None:
        self.bench, self.stuck = bench, stuck
        self.manifests: list[tuple[int, int]] = []

    def run(self, what, plan, task):  # type: ignore[no-untyped-def]  # as its base
        self.stuck.unlink()
        (self.stuck / "full").mkdir(parents=True)
        try:
            return super().run(what, plan, task)
        finally:
            (self.stuck / "full").rmdir()
            self.stuck.rmdir()


async def test_what_the_store_refuses_is_published_and_done_by_the_next_run(bench: JobBench) -> None:
    first, second, _ = bench.segments
    indexes, _ = bench.files(first)
    done = await purge(bench.services, bench.config, StuckRunner(bench, indexes), [first, second])
    assert done.deleted == [second]
    assert [segment for segment, _ in done.failed] == [first]
    assert [each.segment for each in bench.failed_deletion_log.published.values()] == [str(first.segment_id.id)]
    assert await manifest_of(bench) == (1, 1)
    [left, _] = bench.segments
    assert left.state is RemoteLogSegmentState.DELETE_SEGMENT_STARTED
    again = await purge(bench.services, bench.config, InlineRunner(), [left])
    assert (again.deleted, again.failed) == ([left], [])
    assert bench.failed_deletion_log.published == {}
    assert await manifest_of(bench) == (1, 0)
    assert (bench.files(first), bench.files(second)) == ([], [])


async def test_what_retention_does_not_cover_goes_and_is_never_offered_meanwhile(bench: JobBench) -> None:
    policy = replace(POLICY, retention_ms=985)
    starts: list[int | None] = []
    bench.log.on_record = lambda: starts.append(bench.metadata.log_start_offset(bench.partition))
    [done] = await expire_partitions(bench.services, bench.config, InlineRunner(), {bench.partition: policy})
    assert (done.error, done.log_start_offset, len(done.segments)) == (None, 10, 1)
    assert starts[1:] == [10] * len(starts[1:])
    assert bench.finished == [(10, 19), (20, 29)]
    assert (await bench.broker.bounds(bench.partition, 1000)).log_start_offset == 10


async def test_a_log_that_diverged_loses_nothing(bench: JobBench) -> None:
    bench.broker.elect_unclean(15)
    policy = replace(POLICY, retention_ms=1)
    [done] = await expire_partitions(bench.services, bench.config, InlineRunner(), {bench.partition: policy})
    assert done.error is not None
    assert "the leader ends epoch" in done.error
    assert len(bench.finished) == 3


async def test_of_a_deleted_topic_everything_goes_the_manifest_last(bench: JobBench) -> None:
    [done] = await delete_partitions(bench.services, bench.config, InlineRunner(), [bench.partition])
    assert (done.error, len(done.segments)) == (None, 3)
    assert bench.metadata.partitions() == []
    assert list(bench.partition_folder.iterdir()) == []
    state = bench.metadata.remote_partition_delete_state(bench.partition)
    assert state is RemotePartitionDeleteState.DELETE_PARTITION_FINISHED


async def test_a_deleted_topic_of_which_anything_stays_keeps_its_manifest(bench: JobBench) -> None:
    indexes, _ = bench.files(bench.segments[0])
    runner = StuckRunner(bench, indexes)
    [done] = await delete_partitions(bench.services, bench.config, runner, [bench.partition])
    assert done.purge is not None
    assert len(done.purge.failed) == 1
    assert await manifest_of(bench) == (0, 1)
    [done] = await delete_partitions(bench.services, bench.config, InlineRunner(), [bench.partition])
    assert bench.metadata.partitions() == []
