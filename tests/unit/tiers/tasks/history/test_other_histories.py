"""What is recorded of one history under a leader with another: copies, log starts, trims and CUTs.

The owner asks the leader. It applies a log start or ends it, cuts the tier, or stops."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from proxy.commands.tier.cut import named_cuts
from tests.support.fakes.log_starts import user_log_start
from tests.support.tiers.attempts import batches, begun, whole_rounds
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench
from tiers.errors import BrokerError, LogDivergedError
from tiers.metadata.metadata_log import Tenure
from tiers.metadata.remote_log import RemoteLog
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import EpochEndOffset
from tiers.model.log_start import UNKNOWN_EPOCH
from tiers.tasks.history.align import find_parting, open_cut, require_later_than_cuts
from tiers.tasks.partition_tasks import PartitionTasks

DELETED = user_log_start(90, leader_epoch=0, last_epoch=0)
DIVERGED = {"topic": "orders", "reason": "diverged"}
HOUR_MS = 3_600_000


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

    def elect(self, common_end: int, log_start: int = 0, end: int = 150) -> None:
        """An unclean election. The new leader has none of the records from `common_end` on, and appends others."""
        self.log.elect_unclean(common_end)
        self.log.log_start_offset = log_start
        self.log.append(*batches(common_end, end, self.log.leader_epoch))

    def empty(self, leader_epoch: int, log_start: int = 0, end: int = 150) -> None:
        """The broker comes back without its log, and takes records."""
        self.log.records, self.log.log_start_offset, self.log.leader_epoch = b"", log_start, leader_epoch
        self.log.append(*batches(log_start, end, leader_epoch))

    async def cut(self, offset: int) -> None:
        """Does what `tidegate tier cut` does."""
        state, bounds = self.metadata.state, await self.log.bounds(PARTITION, 1000)
        require_later_than_cuts(state, PARTITION, bounds.leader_epoch)
        parting = await find_parting(self.log, state, PARTITION, bounds, 1000)
        for each in named_cuts(state, PARTITION, bounds, offset, parting):
            await self.metadata.put_named_cut(PARTITION, each)

    async def stops(self, until: str = "`tidegate tier cut orders:0 OFFSET`") -> None:
        with pytest.raises(LogDivergedError, match=re.escape(until)):
            await self.tasks.round()

    @property
    def cuts(self) -> list[tuple[int, int, bool]]:
        return [(each.leader_epoch, each.offset, each.is_proved) for each in self.metadata.state.cuts(PARTITION)]

    @property
    def is_held(self) -> bool:
        """Whether a CUT that is not proved holds every expiry and deletion."""
        return (
            open_cut(self.metadata.state, PARTITION, self.metadata.state.log_start_offset(PARTITION) or 0) is not None
        )

    async def stored(self) -> set[str]:
        return {key for key in await self.bench.objects() if not key.endswith(".facts")}

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


async def test_restored_controllers_end_no_log_start_while_the_partition_stops(partition: Partition) -> None:
    """The broker was emptied, and its log has grown beyond the tier. Only an operator voids copies of later epochs."""
    log, deleted = partition.log, user_log_start(90, leader_epoch=5, last_epoch=5)
    log.append(*batches(100, 120, 5))
    log.leader_epoch = 5
    await partition.rounds()
    await partition.metadata.put_log_start(PARTITION, deleted)
    log.records, log.leader_epoch = b"".join(batches(0, 150, 1)), 1
    await partition.stops("restart brokers until the leader epoch is above 5")
    assert partition.metadata.state.recorded_log_starts(PARTITION)[-1] == deleted


async def test_an_emptied_broker_stops_until_an_operator_cuts(partition: Partition) -> None:
    """Its log is shorter than the tier. The recorded trim and log start of the void history count no more."""
    partition.new_owner(local_retention_bytes=300)
    await partition.metadata.put_log_start(PARTITION, user_log_start(10, leader_epoch=0))
    await partition.rounds()
    stored, trims = await partition.stored(), list(partition.log.trims)
    partition.empty(3, end=80)
    for _ in range(2):
        await partition.stops()
        partition.new_owner(local_retention_bytes=300)
    assert (partition.cuts, await partition.stored(), partition.log.trims) == ([], stored, trims)
    await partition.cut(0)
    await partition.rounds()
    assert partition.cuts == [(3, 0, True)]
    assert stored < await partition.stored()
    assert (partition.readable, partition.metadata.state.log_starts(PARTITION)) == ((0, [(0, 79)]), [])
    assert partition.metadata.state.local_log_start(PARTITION) == (partition.log.log_start_offset, 3)


async def test_a_cut_that_is_not_proved_keeps_all_until_an_operator_looked(partition: Partition) -> None:
    """The leader has forgotten where its log parts from the tier, and its log is longer."""
    bench, old = partition.bench, await partition.stored()
    partition.empty(3, log_start=50, end=200)
    await partition.rounds()
    assert (partition.cuts, partition.is_held, partition.readable) == ([(3, 50, False)], True, (0, [(0, 199)]))
    assert bench.active("diverged") == 1
    state = partition.metadata.state
    assert (open_cut(state, PARTITION, 49) is not None, open_cut(state, PARTITION, 50)) == (True, None)
    partition.new_owner(retention_ms=HOUR_MS)
    bench.wall_ms += 2 * HOUR_MS
    await partition.rounds()
    assert old <= await partition.stored()
    partition.log.leader_epoch = 5  # a clean election
    await partition.cut(30)
    await partition.rounds()
    assert (partition.cuts, partition.is_held) == ([(3, 30, True), (3, 50, False)], False)
    assert (bench.active("diverged"), bench.metric("remote_log_alarms_total", **DIVERGED)) == (0, 1)
    bench.wall_ms += 2 * HOUR_MS
    await partition.rounds()
    assert not old & await partition.stored()


async def test_expiry_deletes_nothing_of_a_leader_that_came_during_the_survey(
    partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker is emptied right after it confirmed the history."""
    log = partition.log
    confirm, left = log.end_offset_for_epoch, [partition.empty]

    async def last_answer(asked: TopicIdPartition, leader_epoch: int, timeout_ms: int) -> EpochEndOffset:
        answer = await confirm(asked, leader_epoch, timeout_ms)
        if left:
            left.pop()(3, end=60)
        return answer

    monkeypatch.setattr(log, "end_offset_for_epoch", last_answer)
    partition.new_owner(retention_bytes=500)
    await partition.tasks.round()
    assert log.leader_epoch == 3
    await partition.stops()
    assert (log.trims, partition.metadata.state.log_starts(PARTITION)) == ([], [])


async def test_a_log_start_that_moves_during_a_survey_proves_nothing(
    partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader's answers are then those of a log that begins later than its bounds say."""
    log, ask = partition.log, partition.log.end_offset_for_epoch
    partition.empty(3, log_start=30)

    async def answer_and_remove(asked: TopicIdPartition, leader_epoch: int, timeout_ms: int) -> EpochEndOffset:
        answer, log.log_start_offset = await ask(asked, leader_epoch, timeout_ms), 60
        return answer

    bounds = await log.bounds(PARTITION, 1000)
    monkeypatch.setattr(log, "end_offset_for_epoch", answer_and_remove)
    with pytest.raises(BrokerError, match="or has removed records"):
        await partition.bench.cut_task.run(bounds)
    assert partition.cuts == []


async def test_a_log_start_of_a_void_history_never_counts_again(partition: Partition) -> None:
    """A whole cluster was restored from an older copy, and its leaders have used later leader epochs again."""
    log = partition.log
    log.leader_epoch = 5
    log.append(*batches(100, 150, 5))
    await partition.rounds()
    await partition.metadata.put_log_start(PARTITION, user_log_start(120, leader_epoch=5))
    await partition.rounds()
    assert [start.offset for start in partition.metadata.state.log_starts(PARTITION)] == [120]
    partition.empty(0, end=100)
    too_old, used_again = (
        "restart brokers until the leader epoch is above 5",
        "epochs do not show from which offset",
    )
    for leader_epoch, why in ((0, too_old), (4, too_old), (5, used_again)):
        log.leader_epoch = leader_epoch
        await partition.stops(why)
        with pytest.raises(LogDivergedError, match=too_old):
            await partition.cut(0)
        log.append(*batches(log.end_offset, log.end_offset + 60, leader_epoch))
    log.leader_epoch, trims = 6, list(log.trims)
    await partition.stops(used_again)
    await partition.cut(0)
    await partition.rounds()
    assert (partition.cuts, log.trims) == ([(6, 0, True)], trims)
    assert (partition.readable[0], partition.metadata.state.log_starts(PARTITION)) == (0, [])


async def test_a_leader_that_knows_no_epoch_confirms_nothing(partition: Partition) -> None:
    log = partition.log
    log.leader_epoch = 1
    log.append(*batches(100, 150, 1))
    await partition.rounds()
    log.epoch_answer = EpochEndOffset(-1, -1)
    bounds = await log.bounds(PARTITION, 1000)
    with pytest.raises(BrokerError, match="the leader of epoch 1 names no epoch"):
        await partition.bench.cut_task.run(bounds)
    assert partition.cuts == []


@pytest.mark.parametrize(("copied_from", "now_at"), [(100, 110), (110, 100)])
async def test_an_epoch_may_begin_elsewhere_in_a_hole_of_the_log(
    partition: Partition, copied_from: int, now_at: int
) -> None:
    """The log was compacted once. A replica that was added since has no batch at the offset of the election."""
    log = partition.log
    log.leader_epoch, log.elections[1] = 1, copied_from
    log.append(*batches(110, 150, 1))
    await partition.rounds()
    log.elections[1] = now_at
    partition.new_owner()
    await partition.rounds()
    assert (partition.cuts, partition.readable) == ([], (0, [(0, 149)]))


async def test_a_broker_that_has_lost_a_log_start_and_epochs_goes_on(partition: Partition) -> None:
    """A trim removed the beginning of epoch 1 from the broker's list of epochs. Its log start went back by a kill."""
    log = partition.log
    log.leader_epoch = 1
    log.append(*batches(100, 150, 1))
    await partition.rounds()
    log.leader_epoch, log.elections[1] = 2, 130
    partition.new_owner()
    log.append(*batches(150, 160, 2))
    await partition.rounds()
    assert (partition.cuts, partition.readable) == ([], (0, [(0, 159)]))


async def test_an_attempt_of_a_former_leader_voids_no_later_copy(partition: Partition) -> None:
    """A member kept records before an unclean election, and announces them after others were copied."""
    partition.log.leader_epoch = 1
    partition.elect(100)
    await partition.rounds()
    await begun(partition.bench, 100, 200, leader_epoch=1)
    await partition.rounds()
    partition.log.leader_epoch = 3
    await partition.rounds()
    assert partition.cuts == [(2, 150, True)]
    assert partition.readable == (0, [(0, 149)])


async def test_records_that_contradict_their_leader_epochs_stop_it(partition: Partition) -> None:
    """The controllers were restored from an older copy, and the broker has dropped the later epochs of its log."""
    partition.log.leader_epoch = 2
    partition.log.epoch_answer = EpochEndOffset(1, 50)
    await partition.stops("do not show from which offset")
    assert (partition.cuts, partition.readable) == ([], (0, [(0, 99)]))


async def test_a_restored_log_that_ends_below_the_tier_stops_it(partition: Partition) -> None:
    """All of the log lies below the tier, and the leader knows no epoch of the copies."""
    partition.log.leader_epoch = 1
    partition.log.append(*batches(100, 150, 1))
    await partition.rounds()
    await partition.metadata.put_log_start(PARTITION, user_log_start(120, leader_epoch=1))
    await partition.rounds()
    partition.empty(0, end=40)
    await partition.stops("was the broker emptied or restored?")
    with pytest.raises(LogDivergedError, match="restart brokers until the leader epoch is above 1"):
        await partition.cut(40)


async def test_a_former_leader_whose_log_begins_behind_the_tier_cuts_it(partition: Partition) -> None:
    """A replica without most records led for a while. Then the former leader is brought back, whose log was trimmed."""
    log, former = partition.log, partition.log.records
    partition.elect(50, end=60)
    await partition.rounds()
    log.records, log.leader_epoch, log.log_start_offset = former, 2, 80
    log.append(*batches(100, 120, 2))
    await whole_rounds(partition.bench, partition.tasks, 5)
    assert partition.cuts == [(1, 50, True), (2, 50, True)]
    assert partition.readable == (0, [(0, 49), (80, 119)])
    assert "Clients wait for the offsets 50 to 79" in partition.tasks.doubt


async def test_a_deletion_up_to_the_remote_end_may_be_recorded_late(partition: Partition) -> None:
    log = partition.log
    log.leader_epoch = 1
    log.append(*batches(100, 120, 1))
    await partition.rounds()
    log.elect_unclean(100)
    log.append(*batches(100, 150, 2))
    log.log_start_offset = 120
    await partition.rounds()
    await partition.metadata.put_log_start(PARTITION, user_log_start(120, leader_epoch=2, last_epoch=2))
    await partition.rounds()
    assert partition.readable == (120, [(120, 149)])


async def test_a_leader_older_than_a_cut_stops_the_partition(partition: Partition) -> None:
    """The broker was cut off before the election, and has the void records. An operator cannot make it count."""
    log, stored = partition.log, await partition.stored()
    await partition.metadata.put_cut(PARTITION, 2, 50)
    log.leader_epoch = 1
    await partition.stops("restart brokers until the leader epoch is above 2")
    with pytest.raises(LogDivergedError, match="was cut in leader epoch 2"):
        await partition.cut(50)
    assert (await partition.stored(), partition.readable) == (stored, (0, [(0, 49)]))
    log.leader_epoch = 2
    await partition.rounds()
    assert partition.readable == (0, [(0, 99)])


async def test_a_leader_that_returns_gets_its_records_copied_again(partition: Partition) -> None:
    """A, then B, which lacks A's last records, then A again: what was copied of B is void."""
    log, records = partition.log, partition.log.records
    partition.elect(50, end=80)
    await partition.rounds()
    log.records, log.leader_epoch = records, 2
    log.append(*batches(100, 120, 2))
    await partition.rounds()
    assert partition.cuts == [(1, 50, True), (2, 50, True)]
    assert partition.readable == (0, [(0, 119)])
    assert RemoteLog(partition.metadata.state, PARTITION).epoch_at(60) == 0
