"""What a recorded log start does under another leader: the owner asks, and applies the log start or ends it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proxy.commands.tier.cut import named_cuts
from tests.support.fakes.log_starts import user_log_start
from tests.support.tiers.attempts import batches, whole_rounds
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench
from tiers.errors import LogDivergedError
from tiers.metadata.remote_log import RemoteLog
from tiers.metadata.tenure import Tenure
from tiers.model.log_start import UNKNOWN_EPOCH, OffsetAndEpoch
from tiers.tasks.history.align import find_parting
from tiers.tasks.partition_tasks import PartitionTasks

DELETED = user_log_start(90, leader_epoch=0, last_epoch=0)


class Partition:
    """A partition whose leader of epoch 0 wrote 0 to 99, which are copied."""

    def __init__(self, bench: Workbench) -> None:
        self.bench = bench
        self.log = bench.log
        self.metadata = bench.metadata
        self.new_owner()

    def new_owner(self, **policy: int | bool) -> None:
        self.bench.restart()
        changed = replace(POLICY, segment_ms=0, **policy)  # type: ignore[arg-type]  # the tests name the fields
        self.tasks = PartitionTasks(self.bench.services, PARTITION, changed, Tenure(0, 1))

    async def rounds(self) -> None:
        await whole_rounds(self.bench, self.tasks, 5)
        assert (self.tasks.doubt, self.tasks.stopped) == ("", "")

    async def delete_to_90(self) -> None:
        """A user's deletion, which the owner applies to the tier."""
        self.log.log_start_offset = 90
        await self.metadata.put_log_start(PARTITION, DELETED)
        await self.rounds()
        assert self.readable == (90, [(90, 99)])

    def elect(self, common_end: int, log_start: int = 0, end: int = 150) -> None:
        """An unclean election. The new leader has none of the records from `common_end` on, and appends others."""
        self.log.elect_unclean(common_end)
        self.log.log_start_offset = log_start
        self.log.append(*batches(common_end, end, self.log.leader_epoch))

    @property
    def readable(self) -> tuple[int | None, list[tuple[int, int]]]:
        """The first offset that clients can read, and the runs of remote offsets behind it."""
        start = RemoteLog(self.metadata.state, PARTITION).earliest(self.log.log_start_offset)
        runs: list[tuple[int, int]] = []
        for first, end in self.metadata.state.answered_offsets(PARTITION, start or 0):
            is_next = runs and runs[-1][1] + 1 == first
            runs[-1:] = [(runs[-1][0], end - 1)] if is_next else [*runs[-1:], (first, end - 1)]
        return start, runs


@pytest.fixture
async def partition(bench: Workbench) -> Partition:
    made = Partition(bench)
    made.log.append(*batches(0, 100))
    await made.rounds()
    return made


@pytest.mark.parametrize("last_epoch", [0, UNKNOWN_EPOCH])
@pytest.mark.parametrize("offset", [90, 130])
async def test_the_history_of_another_leader_stays_readable(partition: Partition, offset: int, last_epoch: int) -> None:
    """The log start may lie above all that was copied."""
    await partition.metadata.put_log_start(PARTITION, user_log_start(offset, leader_epoch=0, last_epoch=last_epoch))
    partition.elect(50)
    await partition.rounds()
    assert (partition.log.trims, partition.readable) == ([], (0, [(0, 149)]))
    assert not any(start.deletes for start in partition.metadata.state.recorded_log_starts(PARTITION))


async def test_the_common_records_are_readable_before_others_are_copied(partition: Partition) -> None:
    """The log start lies above that of the new leader."""
    await partition.metadata.put_log_start(PARTITION, DELETED)
    partition.elect(50, log_start=30)
    assert partition.readable[0] == 0
    partition.new_owner(copy_disable=True)
    await partition.rounds()
    assert partition.readable == (0, [(0, 49)])


async def test_a_leader_that_was_cut_off_ends_no_later_log_start(partition: Partition) -> None:
    """The owner still asks the former leader, which does not know the leader epoch of the deletion."""
    former = partition.log.records
    partition.log.leader_epoch = 1
    partition.log.append(*batches(100, 150, 1))
    present, partition.log.log_start_offset = partition.log.records, 120
    deleted = user_log_start(120, leader_epoch=1, last_epoch=1)
    await partition.metadata.put_log_start(PARTITION, deleted)
    partition.log.records, partition.log.log_start_offset, partition.log.leader_epoch = former, 0, 0
    await partition.rounds()
    assert (partition.metadata.state.log_starts(PARTITION), partition.log.trims) == ([deleted], [])
    partition.log.records, partition.log.log_start_offset, partition.log.leader_epoch = present, 120, 1
    await partition.rounds()
    assert partition.readable == (120, [(120, 149)])


async def test_what_the_owner_deleted_before_is_copied_again(partition: Partition) -> None:
    await partition.delete_to_90()
    partition.elect(50)
    await partition.rounds()
    assert (partition.log.trims, partition.readable) == ([], (0, [(0, 149)]))


async def test_a_deletion_that_ends_leaves_no_doubt_about_a_trim(partition: Partition) -> None:
    """The trim was before the deletion of its records, and the new leader confirms it."""
    partition.new_owner(local_retention_bytes=300)
    await partition.rounds()
    [trimmed_to] = partition.log.trims
    assert RemoteLog(partition.metadata.state, PARTITION).last_trim() == (trimmed_to, 0)
    await partition.delete_to_90()
    partition.elect(80, log_start=trimmed_to)
    partition.new_owner()
    await partition.rounds()
    assert partition.readable == (trimmed_to, [(trimmed_to, 149)])


@pytest.mark.parametrize("is_trimmed", [False, True])
async def test_a_log_start_that_is_recorded_late_hides_nothing(partition: Partition, is_trimmed: bool) -> None:
    """A proxy was slow. The new leader's records are copied, and perhaps trimmed."""
    partition.elect(50)
    await partition.rounds()
    partition.log.log_start_offset = 120 if is_trimmed else 0
    await partition.metadata.put_log_start(PARTITION, DELETED)
    assert partition.readable == (0, [(0, 149)])
    await partition.rounds()
    assert (partition.log.trims, partition.readable) == ([], (0, [(0, 149)]))


async def test_a_late_log_start_deletes_nothing_of_a_log_that_is_not_copied(partition: Partition) -> None:
    partition.elect(50)
    surveyed = await partition.tasks.survey()
    assert surveyed is not None
    await partition.metadata.put_log_start(PARTITION, DELETED)
    await partition.tasks.expire(surveyed)
    assert partition.log.trims == []
    await partition.rounds()
    assert (partition.log.trims, partition.readable) == ([], (0, [(0, 149)]))


async def test_a_broker_that_lost_its_log_start_deletes_again(partition: Partition) -> None:
    await partition.delete_to_90()
    partition.log.log_start_offset, partition.log.leader_epoch = 30, 1
    assert partition.readable[0] == 30
    await partition.rounds()
    assert (partition.log.trims, partition.readable) == ([90], (90, [(90, 99)]))


async def test_an_emptied_brokers_new_records_stay(partition: Partition) -> None:
    """While the partition stops, the log start stays: the broker's log may come back."""
    await partition.metadata.put_log_start(PARTITION, DELETED)
    partition.elect(0, end=60)
    with pytest.raises(LogDivergedError):
        await partition.tasks.round(lambda *surveyed: None)
    assert partition.metadata.state.log_starts(PARTITION) == [DELETED]
    assert RemoteLog(partition.metadata.state, PARTITION).earliest(0) == 0
    partition.log.append(*batches(60, 150, 1))
    partition.new_owner()
    await partition.rounds()
    assert (partition.log.trims, partition.readable) == ([], (0, [(0, 149)]))


async def test_restored_controllers_end_no_log_start_while_the_partition_stops(partition: Partition) -> None:
    """The broker was emptied, and its log has grown beyond the tier. Only an operator voids copies of later epochs."""
    log, deleted = partition.log, user_log_start(90, leader_epoch=5, last_epoch=5)
    log.append(*batches(100, 120, 5))
    log.leader_epoch = 5
    await partition.rounds()
    await partition.metadata.put_log_start(PARTITION, deleted)
    log.records, log.leader_epoch = b"".join(batches(0, 150, 1)), 1
    with pytest.raises(LogDivergedError, match="tier cut"):
        await partition.tasks.round(lambda *surveyed: None)
    assert partition.metadata.state.recorded_log_starts(PARTITION)[-1] == deleted


async def test_the_new_leaders_lower_deletion_counts(partition: Partition) -> None:
    await partition.metadata.put_log_start(PARTITION, DELETED)
    partition.elect(50, log_start=60)
    lower = user_log_start(60, leader_epoch=1, last_epoch=1)
    await partition.metadata.put_log_start(PARTITION, lower)
    await partition.rounds()
    assert partition.metadata.state.log_starts(PARTITION) == [lower]
    assert partition.readable == (60, [(60, 149)])


async def test_a_cut_ends_no_deletion_of_the_leaders_own_history(partition: Partition) -> None:
    """The leader reached another epoch before the owner saw its log."""
    partition.elect(50, log_start=60)
    deleted = user_log_start(60, leader_epoch=1, last_epoch=1)
    await partition.metadata.put_log_start(PARTITION, deleted)
    partition.log.leader_epoch = 2
    await partition.rounds()
    assert [cut.leader_epoch for cut in partition.metadata.state.cuts(PARTITION)] == [2]
    assert partition.metadata.state.log_starts(PARTITION) == [deleted]
    assert partition.readable == (60, [(60, 149)])


async def test_after_restored_controllers_a_later_trim_counts(bench: Workbench) -> None:
    """They count leader epochs anew, so the CUT has a later epoch than the trims that follow it."""
    partition, log = Partition(bench), bench.log
    log.leader_epoch = 5
    log.append(*batches(0, 100, 5))
    await partition.rounds()
    await bench.metadata.put_local_log_start(PARTITION, OffsetAndEpoch(60, 5))
    log.records, log.leader_epoch = b"", 0
    bounds = await log.bounds(PARTITION, 1000)
    parting = await find_parting(log, bench.state, PARTITION, bounds, 1000)
    for cut in named_cuts(bench.state, PARTITION, bounds, 0, parting):
        assert cut.leader_epoch == 6
        await bench.metadata.put_named_cut(PARTITION, cut.leader_epoch, cut.offset)
    assert RemoteLog(bench.state, PARTITION).last_trim() is None
    log.leader_epoch = 1
    log.append(*batches(0, 150, 1))
    partition.new_owner(local_retention_bytes=300)
    await partition.rounds()
    [trimmed_to] = log.trims
    assert RemoteLog(bench.state, PARTITION).last_trim() == (trimmed_to, 1)
    assert partition.readable == (0, [(0, 149)])
