"""Faults during a merge end one group or one partition, and delete no segment that counts."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.job_services import PAUSES_S
from pipeline.maintenance.merge import Merge, merge_groups
from pipeline.maintenance.merge_plan import plan_merges
from pipeline.maintenance.merge_task import MergeTask, MergeTaskResult
from tests.support.pipeline.inline_runner import InlineRunner
from tests.support.pipeline.job_bench import FINISHED, JobBench
from tests.support.pipeline.merge_bench import DATA, LIMITS, STARTED, bench_of, log_bytes, merged
from tests.support.tiers.transactional_log import copied, log_of
from tests.support.tiers.workbench import POLICY
from tests.support.written_log import WrittenLog
from tiers.errors import RemoteLogMetadataError
from tiers.metadata.records.serde import KeyAndValue, decode_value
from tiers.metadata.remote_log_metadata_manager import records_of_update
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import (
    RemoteLogSegmentMetadata,
    RemoteLogSegmentMetadataUpdate,
    RemoteLogSegmentState,
)
from tiers.upkeep.runner import JobError, Task


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture
def log() -> WrittenLog:
    return log_of(DATA * 3)


async def test_a_merge_whose_answer_was_lost_stays_after_its_parts_are_gone(
    root: Path, log: WrittenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench_of(root, log, [3, 6, 9, len(log.batches)]) as bench:
        whole = await log_bytes(bench)
        update = bench.metadata.update_remote_log_segment_metadata

        async def answer_lost(written: RemoteLogSegmentMetadataUpdate) -> None:
            await update(written)
            if written.state is FINISHED:
                monkeypatch.undo()
                await bench.owners_round(POLICY)  # another member owned it for a while
                raise RemoteLogMetadataError("timed out")

        monkeypatch.setattr(bench.metadata, "update_remote_log_segment_metadata", answer_lost)
        done = await merged(bench)
        assert (len(done.merged), done.failed) == (1, [])
        assert len(bench.finished) == 2
        assert await log_bytes(bench) == whole


async def test_the_parts_stay_while_the_store_lacks_the_merged_segment(
    root: Path, log: WrittenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executor wrote it to another place."""
    async with bench_of(root, log, [3, 6, 9, len(log.batches)]) as bench:
        before = sorted(bench.partition_folder.iterdir())

        class WritesElsewhere(InlineRunner):
            async def run(self, what: str, plan: Sequence[Any], task: Task[Any, Any]) -> list[Any]:
                results = await super().run(what, plan, task)
                for path in {*bench.partition_folder.iterdir()} - {*before}:
                    path.unlink()
                return results

        done = await merged(bench, runner=WritesElsewhere())
        [(_, error)] = done.failed
        assert "the store does not have the merged segment" in error
        await bench.owners_round(POLICY)
        assert {*before} <= {*bench.partition_folder.iterdir()}
        assert len(bench.finished) == 4


async def test_a_late_merge_of_a_deleted_leftover_is_deleted_by_its_name(
    root: Path, log: WrittenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench_of(root, log, [3, 6, 9, len(log.batches)]) as bench:
        before, files = bench.segments, sorted(bench.partition_folder.iterdir())

        class OwnedInBetween(InlineRunner):
            async def run(self, what: str, plan: Sequence[Any], task: Task[Any, Any]) -> list[Any]:
                await bench.owners_round(POLICY)
                return await super().run(what, plan, task)

        [(_, error)] = (await merged(bench, runner=OwnedInBetween())).failed
        assert "from an unknown segment" in error
        assert bench.segments == before
        assert sorted(bench.partition_folder.iterdir()) == files


async def test_a_full_disk_of_an_executor_ends_its_merge_and_nothing_else(
    root: Path, log: WrittenLog, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scratch: list[str] = []

    def full(*args: object) -> None:
        scratch.extend(each.name for each in tmp_path.iterdir())
        raise OSError(errno.ENOSPC, "No space left on device")

    async with bench_of(root, log, [3, 6, 9, len(log.batches)]) as bench:
        before = bench.finished
        monkeypatch.setattr("pipeline.maintenance.merge_task.SegmentBuilder.append", full)
        monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
        [(_, error)] = (await merged(bench)).failed
        assert "No space left" in error
        assert bench.finished == before
        assert [each.startswith("tidegate-merge-") for each in scratch] == [True]
        assert not await asyncio.to_thread(os.listdir, tmp_path)


@asynccontextmanager
async def bench_of_two(root: Path, log: WrittenLog) -> AsyncIterator[tuple[JobBench, TopicIdPartition]]:
    """The bench's own partition, and another one of the same records."""
    async with bench_of(root, log, [3, 6, 9, len(log.batches)]) as bench:
        mine, bench.partition = bench.partition, replace(bench.partition, partition=1)
        for built in copied(bench.folder / "copied", log, [3, 6, 9, len(log.batches)]):
            await bench.store(built)
        other, bench.partition = bench.partition, mine
        yield bench, other


async def merged_both(bench: JobBench, other: TopicIdPartition) -> Merge:
    async def no_time(seconds: float) -> None:
        bench.now_ms += int(seconds * 1000)

    groups = [group for each in (bench.partition, other) for group in plan_merges(bench.state, each, LIMITS)]
    return await merge_groups(bench.services, bench.config, InlineRunner(), groups, no_time)


@pytest.mark.parametrize(("state", "lands_at_last"), [(STARTED, False), (FINISHED, False), (FINISHED, True)])
async def test_metadata_that_cannot_be_written_ends_its_partition_and_no_other(
    root: Path,
    log: WrittenLog,
    monkeypatch: pytest.MonkeyPatch,
    state: RemoteLogSegmentState,
    lands_at_last: bool,
) -> None:
    async with bench_of_two(root, log) as (bench, other):
        whole, before = await log_bytes(bench), bench.finished
        topic, attempts = bench.metadata.log._log, 0
        written = topic.append

        def unanswered(records: Sequence[KeyAndValue]) -> None:
            nonlocal attempts
            values = [decode_value(value) for _, value in records if value is not None]
            if not any(is_refused(each) for each in values):
                written(records)
                return
            attempts += 1
            if lands_at_last and attempts == len(PAUSES_S) + 1:
                written(records)
            raise RemoteLogMetadataError("TOPIC_AUTHORIZATION_FAILED")

        def is_refused(value: object) -> bool:
            if not isinstance(value, RemoteLogSegmentMetadata | RemoteLogSegmentMetadataUpdate):
                return False
            return value.state is state and value.segment_id.topic_id_partition == bench.partition

        with monkeypatch.context() as failing:
            failing.setattr("pipeline.job_services.PAUSES_S", (0.0,) * len(PAUSES_S))
            failing.setattr(topic, "append", unanswered)
            done = await merged_both(bench, other)
        [(group, error)] = done.failed
        assert (group.partition, "TOPIC_AUTHORIZATION_FAILED" in error) == (bench.partition, True)
        assert [each.topic_id_partition for each in done.merged] == [other]
        assert {each.topic_id_partition for each in done.replaced} == {other}
        assert set(before) <= set(bench.finished)
        assert await log_bytes(bench) == whole
        await bench.owners_round(POLICY)
        await bench.owners_round(POLICY)
        assert len(bench.segments) == (2 if lands_at_last and state is FINISHED else len(before))
        assert await log_bytes(bench) == whole


class FailedAtLast(InlineRunner):
    """The segment is stored, and the executor says that it failed."""

    is_over = False

    async def run(self, what: str, plan: Sequence[Any], task: Task[Any, Any]) -> list[Any]:
        results = await super().run(what, plan, task)
        if not plan or not isinstance(plan[0], MergeTask):
            return results
        self.is_over = True
        return [MergeTaskResult(error="503") for _ in plan]


async def test_a_merge_that_is_seen_after_a_lost_ownership_is_not_deleted(
    root: Path, log: WrittenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench_of(root, log, [3, 6, 9, len(log.batches)]) as bench:
        whole, runner, owns = await log_bytes(bench), FailedAtLast(), bench.metadata.log.owns

        def owns_again(partition: TopicIdPartition) -> bool:
            for each in bench.segments:
                if runner.is_over and each.state is STARTED:
                    update = RemoteLogSegmentMetadataUpdate(each.segment_id, 1, bench.wall_ms, FINISHED, None)
                    bench.metadata.log._log.append(records_of_update(bench.state, update))
                    bench.metadata.follow()
            return owns(partition)

        monkeypatch.setattr(bench.metadata.log, "owns", owns_again)
        assert [error for _, error in (await merged(bench, runner=runner)).failed] == ["503"]
        assert [each.state for each in bench.segments] == [FINISHED] * 5
        assert all(len(bench.files(each)) == 2 for each in bench.segments)
        assert await log_bytes(bench) == whole


class LosingRunner(InlineRunner):
    async def run(self, what: str, plan: Sequence[Any], task: Task[Any, Any]) -> list[Any]:
        if plan and isinstance(plan[0], MergeTask) and not hasattr(self, "tasks"):
            self.tasks = list(plan)
            return [MergeTaskResult(error="its executor was lost", is_lost=True) for _ in plan]
        return await super().run(what, plan, task)


async def test_the_work_of_a_lost_executor_is_deleted_and_done_under_a_new_name(root: Path, log: WrittenLog) -> None:
    async with bench_of(root, log, [3, 6, 9, 12]) as bench:
        runner = LosingRunner()
        [one] = (await merged(bench, runner=runner)).merged
        [lost] = runner.tasks
        assert lost.merged.segment_id != one.segment_id
        assert bench.state.remote_log_segment_metadata_by_id(lost.merged.segment_id) is None


@pytest.mark.parametrize("end", [JobError("a Python worker was killed"), asyncio.CancelledError()])
async def test_a_run_that_spark_gave_up_is_owned_until_its_tasks_write_no_more(
    root: Path, log: WrittenLog, end: BaseException
) -> None:
    class GivenUp(InlineRunner):
        async def run(self, what: str, plan: Sequence[Any], task: Task[Any, Any]) -> list[Any]:
            raise end

    async with bench_of(root, log, [3, 6, 9, 12]) as bench:
        groups, waited = plan_merges(bench.state, bench.partition, LIMITS), []

        async def sleep(seconds: float) -> None:
            waited.append(seconds)

        with pytest.raises(type(end)):
            await merge_groups(bench.services, bench.config, GivenUp(), groups, sleep)
        assert waited == [3.0]


async def test_a_part_that_is_damaged_ends_its_merge_and_nothing_else(root: Path, log: WrittenLog) -> None:
    async with bench_of(root, log, [3, 6, 9, 12]) as bench:
        before = bench.finished
        _, file = bench.files(bench.segments[1])
        file.write_bytes(file.read_bytes()[:-1] + b"?")
        done = await merged(bench)
        [(_, error)] = done.failed
        assert "is not what was stored" in error
        assert bench.finished == before
        assert len(list(bench.partition_folder.glob("*.log"))) == 4
