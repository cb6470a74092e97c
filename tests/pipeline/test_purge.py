"""Many deletions at once: a segment that the store refuses keeps its DELETE record.

It is published, and the next run deletes it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.job_services import PAUSES_S
from pipeline.maintenance.retain import delete_partitions, expire_partitions
from pipeline.maintenance.segment_purge import purge
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import build_segment, metadata_of
from tests.support.pipeline.inline_runner import InlineRunner
from tests.support.pipeline.job_bench import CLUSTER_ID, JobBench
from tests.support.tiers.workbench import POLICY
from tiers.errors import RemoteLogMetadataError
from tiers.metadata.metadata_log import MetadataPosition
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import LogStart
from tiers.model.segment_metadata import (
    RemoteLogSegmentState,
    RemotePartitionDeleteState,
)
from tiers.tasks.history.stored_facts import FactsTask, read_stored_facts
from tiers.upkeep.runner import Task


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[JobBench]:
    """Three segments of ten offsets; the broker has them too."""
    monkeypatch.setattr("pipeline.job_services.PAUSES_S", (0.0,) * len(PAUSES_S))
    (tmp_path / "store").mkdir()
    made = JobBench(tmp_path / "store", tmp_path)
    await made.open()
    for start in (0, 10, 20):
        batch = batch_of(start, 10, timestamp=made.wall_ms - 1000 + start)
        made.broker.append(batch)
        await made.store(build_segment(tmp_path / str(start), [batch], base_offset=start))
    await made.services.place.require(made.services)
    yield made
    await made.close()


async def dead(bench: JobBench) -> int:
    """Returns how many segments the stored facts call dead."""
    facts = (await read_stored_facts(bench.storage, CLUSTER_ID, bench.partition)).joined(None)
    assert facts is not None
    return len(facts.dead)


async def test_metadata_that_lost_records_purges_nothing(bench: JobBench) -> None:
    """Only the store knows the last segment."""
    [first, *_], built = bench.segments, build_segment(bench.folder / "30", [batch_of(30, 10)], base_offset=30)
    lost = metadata_of(built, bench.partition)
    await bench.storage.copy_log_segment_data(lost, built.log_segment_data(lost))
    done = await purge(bench.services, bench.config, InlineRunner(), [first])
    assert done.deleted == []
    assert str(lost.segment_id.id) in done.failed[0][1]
    assert len(bench.files(first)) == 2


class StuckRunner(InlineRunner):
    """One object cannot be deleted while the tasks run: a folder took its name."""

    def __init__(self, bench: JobBench, stuck: Path) -> None:
        super().__init__()
        self.bench, self.stuck = bench, stuck

    async def run(self, what: str, plan: Sequence[Any], task: Task[Any, Any]) -> list[Any]:
        self.stuck.unlink()
        (self.stuck / "full").mkdir(parents=True)
        try:
            return await super().run(what, plan, task)
        finally:
            (self.stuck / "full").rmdir()
            self.stuck.rmdir()


async def test_refused_deletions_are_published_and_done_by_the_next_run(bench: JobBench) -> None:
    first, second, _ = bench.segments
    indexes, _ = bench.files(first)
    done = await purge(bench.services, bench.config, StuckRunner(bench, indexes), [first, second])
    assert done.deleted == [second]
    assert [segment for segment, _ in done.failed] == [first]
    assert [each.segment for each in bench.failed_deletion_log.published.values()] == [str(first.segment_id.id)]
    assert await dead(bench) == 2
    [left, _] = bench.segments
    assert left.state is RemoteLogSegmentState.DELETE_SEGMENT_STARTED
    again = await purge(bench.services, bench.config, InlineRunner(), [left])
    assert (again.deleted, again.failed) == ([left], [])
    assert bench.failed_deletion_log.published == {}
    assert await dead(bench) == 2
    assert (bench.files(first), bench.files(second)) == ([], [])


async def test_a_segment_cut_since_it_was_chosen_is_left_to_an_operator(bench: JobBench) -> None:
    """Another member owned the partition for a moment, and found that the log diverged."""
    chosen = bench.segments[:2]
    await bench.metadata.put_cut(bench.partition, 1, 15)
    done = await purge(bench.services, bench.config, InlineRunner(), chosen)
    [(_, error), _] = done.failed
    assert "was cut meanwhile" in error
    assert len(bench.files(chosen[1])) == 2
    assert {each.state for each in bench.segments[1:]} == {RemoteLogSegmentState.COPY_SEGMENT_FINISHED}


async def test_segments_beyond_retention_are_deleted_and_never_offered(bench: JobBench) -> None:
    policy = replace(POLICY, retention_ms=985)
    starts: list[int | None] = []
    bench.log.on_record = lambda: starts.append(bench.state.log_start_offset(bench.partition))
    [done] = await expire_partitions(bench.services, bench.config, InlineRunner(), {bench.partition: policy})
    assert (done.error, done.log_start_offset, len(done.segments)) == (None, 10, 1)
    assert starts[1:] == [10] * len(starts[1:])
    assert bench.finished == [(10, 19), (20, 29)]
    assert (await bench.broker.bounds(bench.partition, 1000)).log_start_offset == 10


async def test_nothing_expires_after_the_metadata_lost_records(
    bench: JobBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The total retention may be an earlier one than the recorded one."""
    facts = FactsTask(bench.services, bench.partition)
    await facts.require_proved()
    await facts.store()

    async def confirms(partition: TopicIdPartition, position: MetadataPosition, timeout_ms: int) -> bool:
        return False

    monkeypatch.setattr(bench.metadata.log, "confirms", confirms)
    policy = replace(POLICY, retention_ms=985)
    [done] = await expire_partitions(bench.services, bench.config, InlineRunner(), {bench.partition: policy})
    assert "lost records since" in (done.error or "")
    assert bench.finished == [(0, 9), (10, 19), (20, 29)]


async def test_a_log_start_whose_record_had_no_answer_is_recorded_again(
    bench: JobBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_log_start = bench.metadata.put_log_start

    async def unanswered(partition: TopicIdPartition, start: LogStart, **named: object) -> None:
        monkeypatch.undo()
        await put_log_start(partition, start)
        raise RemoteLogMetadataError("timed out")

    monkeypatch.setattr(bench.metadata, "put_log_start", unanswered)
    policy = replace(POLICY, retention_ms=985)
    [done] = await expire_partitions(bench.services, bench.config, InlineRunner(), {bench.partition: policy})
    assert (done.error, done.log_start_offset, len(done.segments)) == (None, 10, 1)
    assert bench.finished == [(10, 19), (20, 29)]


@pytest.mark.parametrize("said", ["clock", "has not cut the tier yet"])
async def test_a_wrong_clock_or_a_diverged_log_expires_nothing(bench: JobBench, said: str) -> None:
    if said == "clock":
        bench.wall_ms -= 3_600_000
    else:
        bench.broker.elect_unclean(15)
    policy = replace(POLICY, retention_bytes=0)
    [done] = await expire_partitions(bench.services, bench.config, InlineRunner(), {bench.partition: policy})
    assert said in (done.error or "")
    assert len(bench.finished) == 3


async def test_all_objects_of_a_deleted_topic_go_and_the_facts_last(bench: JobBench) -> None:
    [done] = await delete_partitions(bench.services, bench.config, InlineRunner(), [bench.partition])
    assert (done.error, len(done.segments)) == (None, 3)
    assert bench.state.partitions() == []
    assert list(bench.partition_folder.iterdir()) == []
    state = bench.state.remote_partition_delete_state(bench.partition)
    assert state is RemotePartitionDeleteState.DELETE_PARTITION_FINISHED


async def test_a_deleted_topic_of_which_anything_stays_keeps_its_facts(bench: JobBench) -> None:
    indexes, _ = bench.files(bench.segments[0])
    runner = StuckRunner(bench, indexes)
    [done] = await delete_partitions(bench.services, bench.config, runner, [bench.partition])
    assert done.purge is not None
    assert len(done.purge.failed) == 1
    assert await dead(bench) == 3
    [done] = await delete_partitions(bench.services, bench.config, InlineRunner(), [bench.partition])
    assert bench.state.partitions() == []
