"""Open segments that a new leader denies: none of their records is copied, and no last copy is lost."""

from __future__ import annotations

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench
from tiers.errors import BrokerError
from tiers.metadata.tenure import Tenure
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import EpochEndOffset, LocalLogBounds
from tiers.tasks.partition_tasks import PartitionTasks, Surveyed


def produce(bench: Workbench, count: int) -> None:
    for _ in range(count):
        bench.log.append(batch_of(bench.log.end_offset, 10, value_bytes=15, leader_epoch=bench.log.leader_epoch))


async def round_of_all(bench: Workbench, tasks: PartitionTasks, rounds: int) -> None:
    """Lets so many rounds' time pass, and runs a round and its copy."""
    bench.now_ms += rounds * bench.services.settings.remote_log.task_interval_ms
    launched: list[tuple[Surveyed, int | None]] = []
    await tasks.round(lambda surveyed, start: launched.append((surveyed, start)))
    for surveyed, start in launched:
        await tasks.run_copy(surveyed, start)


@pytest.mark.parametrize("is_denied", [False, True], ids=["confirms", "denies"])
async def test_a_copy_that_follows_the_leader_meanwhile_loses_no_last_copy(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, is_denied: bool
) -> None:
    """Before the owner has the answer of a new leader, a copy beside the round reads from the log that leads then.

    If the leader denied the records, the log that has them leads again. Later, the broker removes a part of them."""
    log = bench.log
    tasks = PartitionTasks(bench.services, PARTITION, POLICY, Tenure(0, 0))

    produce(bench, 8)
    await round_of_all(bench, tasks, 1)
    bounds, records, ask = await log.bounds(PARTITION, 1000), log.records, log.end_offset_for_epoch
    log.leader_epoch = 1
    if is_denied:
        log.elect_unclean(70)
        log.leader_epoch = 1
    else:
        produce(bench, 1)

    async def answer_late(partition: TopicIdPartition, leader_epoch: int, timeout_ms: int) -> EpochEndOffset:
        answer = await ask(partition, leader_epoch, timeout_ms)
        monkeypatch.setattr(log, "end_offset_for_epoch", ask)
        if is_denied:
            log.records, log.leader_epoch = records, 2
        await tasks.copy.run(POLICY, bounds, 60)
        log.log_start_offset = 70
        return answer

    ask_leader = tasks.copy.ask_leader

    async def ask_leader_late(leader_epoch: int) -> None:
        monkeypatch.setattr(tasks.copy, "ask_leader", ask_leader)
        monkeypatch.setattr(log, "end_offset_for_epoch", answer_late)
        await ask_leader(leader_epoch)

    monkeypatch.setattr(tasks.copy, "ask_leader", ask_leader_late)
    await round_of_all(bench, tasks, 0)
    for _ in range(3):
        await round_of_all(bench, tasks, 20)
    tasks.copy.discard()
    assert bench.metadata.gaps(PARTITION) == []
    assert (60, 79 if is_denied else 89) in bench.finished


@pytest.mark.parametrize(
    "later",
    ["the same leader", "another leader of the same log", "a leader with the old log"],
)
async def test_a_denial_holds_until_a_leader_shows_the_records(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, later: str
) -> None:
    """The round that learns of the denial fails. Before the next one, the broker removes the offsets.

    Then no leader denies the records. Only a leader with later records of their epoch shows that it had them."""
    log = bench.log
    tasks = PartitionTasks(bench.services, PARTITION, POLICY, Tenure(0, 0))

    produce(bench, 8)
    await round_of_all(bench, tasks, 1)
    old_records = log.records + b"".join(batch_of(offset, 10, value_bytes=15) for offset in (80, 90, 100, 110))
    log.elect_unclean(60)
    produce(bench, 8)
    ask, bounds = log.end_offset_for_epoch, log.bounds

    async def refuse(partition: TopicIdPartition, timeout_ms: int) -> LocalLogBounds:
        raise BrokerError("the leader does not answer", retriable=True)

    async def answer_and_go(partition: TopicIdPartition, leader_epoch: int, timeout_ms: int) -> EpochEndOffset:
        answer = await ask(partition, leader_epoch, timeout_ms)
        if answer.end_offset == 60:
            monkeypatch.setattr(log, "bounds", refuse)
        return answer

    monkeypatch.setattr(log, "end_offset_for_epoch", answer_and_go)
    await round_of_all(bench, tasks, 1)
    assert tasks.stages["survey"].last_error == "the leader does not answer"
    monkeypatch.setattr(log, "end_offset_for_epoch", ask)
    monkeypatch.setattr(log, "bounds", bounds)
    if later != "the same leader":
        log.leader_epoch += 1
    if later == "a leader with the old log":
        log.records = old_records
    log.log_start_offset = 100
    for _ in range(3):
        await round_of_all(bench, tasks, 20)
    tasks.copy.discard()
    denied = [one for one in bench.segments if one.end_offset >= 60 and one.segment_leader_epochs[0].epoch == 0]
    found = [(one.start_offset, one.end_offset) for one in denied if one.start_offset < 100]
    assert found == ([(60, 79)] if later == "a leader with the old log" else [])
