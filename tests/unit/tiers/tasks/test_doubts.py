"""A doubt about the past stops trims, expiry and deletions, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.fakes.log_starts import user_log_start
from tests.support.tiers.attempts import batches, whole_rounds
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench
from tiers.metadata.metadata_log import Tenure
from tiers.tasks.partition_tasks import PartitionTasks, Surveyed

KEEPS_NOTHING = replace(POLICY, local_retention_bytes=0, retention_bytes=0)


async def about_to_trim(bench: Workbench) -> tuple[PartitionTasks, Surveyed]:
    """Copies 0 to 89, and surveys the partition. The brokers may trim what is copied."""
    bench.log.append(*batches(0, 100))
    await bench.copy_all()
    await bench.check_facts()
    bench.now_ms += 60_000
    tasks = PartitionTasks(bench.services, PARTITION, replace(POLICY, local_retention_bytes=0), Tenure(0, 1))
    await tasks.facts.check()
    surveyed = await tasks.survey()
    assert surveyed is not None
    return tasks, surveyed


async def test_in_doubt_records_are_copied_and_none_is_removed(bench: Workbench) -> None:
    """A user has deleted 0 to 34, and retention may take the rest. The metadata loses the segment 60 to 89."""
    bench.log.append(*batches(0, 100))
    await bench.copy_all()
    await bench.check_facts()
    await bench.facts_task.store()
    [lost] = [each for each in bench.segments if each.start_offset == 60]
    objects = await bench.objects()
    del bench.metadata.segments[lost.segment_id]
    bench.metadata.is_position_confirmed = False
    await bench.metadata.put_log_start(PARTITION, user_log_start(35, leader_epoch=0))
    bench.now_ms += 60_000
    tasks = PartitionTasks(bench.services, PARTITION, KEEPS_NOTHING, Tenure(0, 1))
    bench.log.append(*batches(100, 130))
    await whole_rounds(bench, tasks, 5)
    assert tasks.doubt
    assert bench.state.remote_end_offset(PARTITION) == 129
    assert (bench.log.log_start_offset, [each.offset for each in bench.state.log_starts(PARTITION)]) == (0, [35])
    assert set(objects) <= set(await bench.objects())
    alarm = {"topic": "orders", "reason": "metadata-lost"}
    assert (bench.active("metadata-lost"), bench.metric("remote_log_alarms_total", **alarm)) == (1, 1)
    bench.metadata.segments[lost.segment_id], bench.metadata.is_position_confirmed = lost, True
    await whole_rounds(bench, tasks, 20)
    assert (tasks.doubt, bench.active("metadata-lost")) == ("", 0)
    assert bench.log.log_start_offset == 130


async def test_only_an_owner_raises_the_alarm(bench: Workbench) -> None:
    """A process was stopped within a round. Another owner has copied and trimmed since. This one has not read that."""
    tasks, surveyed = await about_to_trim(bench)
    [not_read] = [each for each in bench.segments if each.start_offset == 60]
    del bench.metadata.segments[not_read.segment_id]
    bench.log.log_start_offset = 90
    surveyed = replace(surveyed, bounds=await bench.log.bounds(PARTITION, 1000))
    bench.metadata.owned = False
    await tasks.find_copy_start(surveyed)
    assert tasks.doubt
    assert bench.active("metadata-lost") == 0
    bench.metadata.owned = True
    await whole_rounds(bench, tasks, 1)
    assert bench.active("metadata-lost") == 1


async def test_a_doubt_that_begins_during_a_trim_ends_it(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks, surveyed = await about_to_trim(bench)
    bounds = bench.log.bounds

    async def lose_metadata(*args: object) -> object:
        monkeypatch.setattr(bench.log, "bounds", bounds)
        [lost] = [each for each in bench.segments if each.start_offset == 60]
        del bench.metadata.segments[lost.segment_id]
        tasks.facts = type(tasks.facts)(bench.services, PARTITION)
        await tasks.facts.check()
        return await bounds(*args)  # type: ignore[arg-type]  # handed through

    monkeypatch.setattr(bench.log, "bounds", lose_metadata)
    await tasks.trim(surveyed)
    assert bench.log.log_start_offset == 0


async def test_a_leader_that_was_not_compared_trims_nothing(bench: Workbench) -> None:
    tasks, surveyed = await about_to_trim(bench)
    bench.log.leader_epoch = 1
    await tasks.trim(surveyed)
    assert bench.log.log_start_offset == 0
    await whole_rounds(bench, tasks, 1)
    assert bench.log.log_start_offset > 0
