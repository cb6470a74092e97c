"""A broker was emptied: the leader has another history at the copied offsets. Nothing of the old one is deleted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from protocol.records.record_batch import iterate_batches
from proxy.commands.tier.accept import ReplacedRecords, replaced_records
from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.fakes.metadata_topic import FakeMetadataTopic
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.tier_process import PARTITION, POLICY, Clock, OneTopic, TierProcess
from tiers.errors import (
    BrokerError,
    LogDivergedError,
    OwnershipLostError,
    RemoteLogMetadataNotReadyError,
    RetriableRemoteStorageError,
)
from tiers.metadata.log_history import LogStartConfirmation
from tiers.metadata.partition_manifest import decode_partition_manifest
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import EpochEndOffset, LocalLogBounds
from tiers.model.log_start import LogStart, LogStartReason, OffsetAndEpoch
from tiers.reader.remote_log_reader import RemoteReadRequest, monotonic_ms
from tiers.storage.object_key import partition_manifest_key
from tiers.tasks.history.lineage import NOTHING_IN_COMMON, check_before_deletion, surviving_end
from tiers.tasks.history.partition_manifest import PartitionManifestTask
from tiers.tasks.history.stop_check import AcceptedState, state_to_accept

KEEPS_LITTLE = replace(POLICY, local_retention_bytes=500, segment_ms=0)
OLD_END = 200


class Tier:
    """One process. The old history is 0 to 199 of leader epoch 0, all of it copied, and a part of it trimmed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "remote").mkdir()
        self.clock = Clock()
        self.log = InMemoryLog()
        self.metadata_log = FakeMetadataTopic(lambda: self.clock.wall_ms, owner="a")
        self.topics = OneTopic(KEEPS_LITTLE)
        self.trims: list[int] = []
        self.process = self.started()

    def started(self) -> TierProcess:
        return TierProcess("a", self.folder, self.log, self.metadata_log, self.topics, self.clock)

    async def restart(self) -> None:
        await self.process.end()
        self.process = self.started()
        await self.process.open()

    def produce(self, end_offset: int) -> None:
        while self.log.end_offset < end_offset:
            first = max(self.log.end_offset, self.log.log_start_offset)
            self.log.append(batch_of(first, 10, value_bytes=15, leader_epoch=self.log.leader_epoch))

    async def rounds(self, count: int = 3) -> None:
        for _ in range(count):
            while await self.process.manager.round():
                pass
            self.clock.advance(60_000)

    async def empty(self, leader_epoch: int = 3, log_start: int = 0, end_offset: int = 300) -> None:
        """The broker comes back without its log, and takes records."""
        self.log.records, self.log.log_start_offset, self.log.leader_epoch = b"", log_start, leader_epoch
        self.produce(end_offset)

    async def accept(self) -> None:
        """Accepts as an operator does, with the state that the command shows now."""
        await self.process.metadata.accept(PARTITION, (await self.state()).witness)

    async def state(self) -> AcceptedState:
        manifest = await self.process.store.get_object(partition_manifest_key("cluster", PARTITION))
        bounds = await self.log.bounds(PARTITION, 1000)
        metadata = self.process.metadata
        log_start = await LogStartConfirmation(self.log, metadata).confirmed(PARTITION, bounds.leader_epoch, 1000)
        return await state_to_accept(self.log, metadata, PARTITION, bounds, log_start.offset, manifest, 1000)

    async def replaced(self) -> ReplacedRecords | None:
        return replaced_records(self.process.metadata, PARTITION, (await self.state()).log)

    async def stops(self) -> None:
        before = self.stored()
        for _ in range(2):
            with pytest.raises(LogDivergedError):
                await self.rounds(1)
        assert self.stored() == before
        assert self.log.trims == self.trims

    async def delete_records(self, offset: int) -> None:
        """Deletes records as a proxy does that does not check the history."""
        start = LogStart(offset, self.log.leader_epoch, LogStartReason.USER)
        self.log.log_start_offset = max(self.log.log_start_offset, offset)
        await self.process.metadata.put_log_start(PARTITION, start)

    def stored(self) -> set[str]:
        paths = (self.folder / "remote").rglob("*.*")
        return {path.name for path in paths if path.suffix in (".log", ".indexes")}

    def cut_at(self) -> list[int | None]:
        return [one.cut_at for one in self.process.metadata.list_remote_log_segments(PARTITION)]

    async def read(self, offset: int) -> bytes:
        """The remote tier's records from `offset` on."""
        end, found = self.process.metadata.remote_end_offset(PARTITION), b""
        async with self.process.reader() as reader:
            while end is not None and offset <= end:
                read = await reader.read(RemoteReadRequest(
                    PARTITION, offset, 700, min_one_message=True, isolation_level=0,
                    deadline_ms=monotonic_ms() + 30_000, connection_id=1, log_start_offset=0,
                ))  # fmt: skip
                found += b"".join(bytes(view) for view in read.records)
                offset = list(iterate_batches(found))[-1].next_offset
        return found


@pytest.fixture
async def tier(tmp_path: Path) -> AsyncIterator[Tier]:
    made = Tier(tmp_path)
    await made.process.open()
    made.produce(OLD_END)
    await made.rounds()
    made.trims = list(made.log.trims)
    assert made.process.metadata.remote_end_offset(PARTITION) == OLD_END - 1
    assert made.log.log_start_offset > 0
    yield made
    await made.process.end()


async def test_a_trim_past_the_copied_records_does_not_hide_a_divergence(tier: Tier) -> None:
    """A log that begins behind all copied records confirms every earlier history."""
    await tier.empty()
    await tier.stops()
    assert tier.process.metadata.is_diverged(PARTITION)
    await tier.delete_records(250)
    await tier.restart()
    await tier.stops()
    tier.log.log_start_offset = 0  # after an unclean stop of the broker; the leader still confirms 250
    await tier.stops()
    assert tier.cut_at() == [None] * len(tier.cut_at())


async def test_retention_past_the_copied_records_does_not_hide_a_divergence(tier: Tier) -> None:
    await tier.empty()
    await tier.stops()
    tier.log.log_start_offset = 250
    await tier.stops()
    assert tier.process.metadata.gaps(PARTITION) == []


async def test_expiry_deletes_nothing_of_a_leader_that_came_during_the_survey(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker is emptied right after it confirmed the history."""
    tier.produce(1000)
    confirm, confirmed = tier.log.end_offset_for_epoch, 0

    async def last_answer(partition: TopicIdPartition, leader_epoch: int, timeout_ms: int) -> EpochEndOffset:
        nonlocal confirmed
        answer, confirmed = await confirm(partition, leader_epoch, timeout_ms), confirmed + 1
        if confirmed == 1:
            await tier.empty(end_offset=400)
        return answer

    monkeypatch.setattr(tier.log, "end_offset_for_epoch", last_answer)
    tier.topics.policy = replace(POLICY, retention_bytes=2000)
    assert await tier.process.manager.round()
    assert tier.log.leader_epoch == 3
    with pytest.raises(LogDivergedError):
        await tier.process.manager.round()
    assert tier.log.trims == tier.trims
    assert tier.process.metadata.log_starts(PARTITION) == []


@pytest.mark.parametrize("is_recorded", [True, False])
async def test_a_log_that_begins_among_the_copied_records_is_no_cut_one(tier: Tier, is_recorded: bool) -> None:
    """If no trim is recorded, it looks like one that an unclean election cut."""
    await tier.empty()
    if is_recorded:
        await tier.stops()
    await tier.process.metadata.put_local_log_start(PARTITION, OffsetAndEpoch(0, 0))
    tier.log.log_start_offset = 100
    await tier.stops()
    assert tier.process.metadata.is_diverged(PARTITION)


@pytest.mark.parametrize(("is_recorded", "log_start"), [(False, 100), (True, 100), (True, 250)])
async def test_a_log_start_that_moves_during_a_survey_hides_no_divergence(
    tier: Tier, monkeypatch: pytest.MonkeyPatch, is_recorded: bool, log_start: int
) -> None:
    await tier.empty()
    await tier.process.metadata.put_local_log_start(PARTITION, OffsetAndEpoch(0, 0))
    tier.log.log_start_offset = 30
    if is_recorded:
        await tier.stops()
    ask = tier.log.end_offset_for_epoch

    async def remove_and_answer(partition: TopicIdPartition, leader_epoch: int, timeout_ms: int) -> EpochEndOffset:
        tier.log.log_start_offset = log_start
        return await ask(partition, leader_epoch, timeout_ms)

    monkeypatch.setattr(tier.log, "end_offset_for_epoch", remove_and_answer)
    with pytest.raises(BrokerError, match="or has removed records"):
        await tier.rounds(1)
    await tier.stops()
    assert tier.process.metadata.is_diverged(PARTITION)


async def test_a_leader_with_the_copied_records_ends_a_divergence(tier: Tier) -> None:
    records, start = tier.log.records, tier.log.log_start_offset
    await tier.empty()
    await tier.stops()
    tier.log.records, tier.log.log_start_offset, tier.log.leader_epoch = records, start, 5
    tier.produce(260)
    await tier.rounds()
    assert not tier.process.metadata.is_diverged(PARTITION)
    assert tier.process.metadata.remote_end_offset(PARTITION) == 259


@pytest.mark.parametrize("log_start", [0, 50, 250])
async def test_the_command_shows_what_an_acceptance_cuts_off(tier: Tier, log_start: int) -> None:
    metadata = tier.process.metadata
    assert await tier.replaced() is None
    segments = list(metadata.list_remote_log_segments(PARTITION))
    await tier.empty(log_start=log_start)
    await metadata.put_log_divergence(PARTITION, is_diverged=True)
    expected = 0, len(segments), sum(one.segment_size_bytes for one in segments)
    assert await tier.replaced() == expected
    await tier.accept()
    await tier.rounds(1)
    assert sum(one.is_cut_off for one in metadata.list_remote_log_segments(PARTITION)) == len(segments)
    assert await tier.replaced() is None


@pytest.mark.parametrize("log_start", [0, 50, 250])
async def test_an_operator_accepts_the_new_history(tier: Tier, log_start: int) -> None:
    old = tier.stored()
    await tier.empty(log_start=log_start)
    if log_start < OLD_END:
        await tier.stops()
    else:
        await tier.process.metadata.put_log_divergence(PARTITION, is_diverged=True)
    await tier.accept()
    await tier.rounds()
    metadata = tier.process.metadata
    assert not metadata.is_diverged(PARTITION)
    assert metadata.acceptance(PARTITION) is None
    assert old < tier.stored()
    cut = [one for one in metadata.list_remote_log_segments(PARTITION) if one.is_cut_off]
    assert {one.end_offset for one in cut} >= {OLD_END - 1}
    assert len({f"{one.cut_at}" for one in cut}) == 1
    assert (metadata.earliest_offset(PARTITION), metadata.remote_end_offset(PARTITION)) == (log_start, 299)
    assert metadata.gaps(PARTITION) == []
    assert await tier.read(log_start) == tier.log.records
    trimmed = metadata.local_log_start(PARTITION)
    assert trimmed is not None
    assert trimmed == (tier.log.log_start_offset, 3)
    assert trimmed.offset > log_start
    # The new history is trimmed, expired and deleted as ever. The old one stays for as long as the retention.
    await tier.delete_records(260)
    await tier.rounds()
    assert old < tier.stored()
    key = partition_manifest_key("cluster", PARTITION)
    manifest = decode_partition_manifest((tier.folder / "remote" / key).read_bytes())
    assert {*manifest.accepted().values()} == {None, 0}


async def test_the_manifest_remembers_a_divergence(tier: Tier) -> None:
    await tier.empty()
    await tier.stops()
    stored = await tier.process.store.get_object(partition_manifest_key("cluster", PARTITION))
    assert decode_partition_manifest(stored).is_diverged


@pytest.mark.parametrize("call", ["put_log_divergence", "begin_accepted_history", "put_cut"])
async def test_an_owner_that_dies_meanwhile_leaves_the_next_one_the_same_work(
    tier: Tier, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    old, metadata = tier.stored(), tier.process.metadata
    await tier.empty(log_start=50)
    await tier.accept()
    write = getattr(metadata, call)

    async def last_write(*arguments: object, **options: object) -> None:
        await write(*arguments, **options)
        raise OwnershipLostError("gone")

    monkeypatch.setattr(metadata, call, last_write)
    with pytest.raises(OwnershipLostError, match="gone"):
        await tier.rounds(1)
    await tier.restart()
    await tier.rounds()
    assert old < tier.stored()
    assert await tier.read(50) == tier.log.records
    assert tier.process.metadata.earliest_offset(PARTITION) == 50


async def test_an_acceptance_covers_no_divergence_that_came_later(tier: Tier, caplog: pytest.LogCaptureFixture) -> None:
    """The operator saw no divergence, or the log of another leader."""
    await tier.accept()
    await tier.empty()
    await tier.stops()
    assert tier.process.metadata.acceptance(PARTITION) is None
    await tier.accept()
    await tier.empty(leader_epoch=4)
    await tier.stops()
    await tier.accept()
    tier.produce(400)
    await tier.rounds()
    assert await tier.read(0) == tier.log.records
    said = [line for line in caplog.records if "accepted another state" in line.getMessage()]
    assert len(said) == 2


async def test_an_acceptance_covers_no_leader_that_comes_after_its_check(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader changes between the check of the acceptance and the cut."""
    await tier.empty()
    await tier.stops()
    await tier.accept()
    check, next_epochs = PartitionManifestTask.check, [4]

    async def check_and_elect(task: PartitionManifestTask, bounds: LocalLogBounds, log_start: int | None) -> None:
        await check(task, bounds, log_start)
        tier.log.leader_epoch = next_epochs.pop() if next_epochs else tier.log.leader_epoch

    monkeypatch.setattr(PartitionManifestTask, "check", check_and_elect)
    await tier.stops()


async def test_the_manifest_names_a_divergence_after_a_failure_of_the_store(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def put_object(key: str, data: bytes, if_match: object = None) -> None:
        raise RetriableRemoteStorageError("503")

    with monkeypatch.context() as failing:
        failing.setattr(tier.process.store, "put_object", put_object)
        await tier.empty()
        await tier.stops()
    await tier.stops()
    stored = await tier.process.store.get_object(partition_manifest_key("cluster", PARTITION))
    assert decode_partition_manifest(stored).is_diverged


async def test_records_of_both_histories_stay(tier: Tier) -> None:
    """A broker was restored from an older copy: its log ends below what was trimmed."""
    trimmed = tier.process.metadata.local_log_start(PARTITION)
    assert trimmed is not None
    restored = trimmed.offset - 20
    tier.log.log_start_offset = 0
    tier.log.elect_unclean(restored)
    tier.produce(300)
    await tier.stops()
    await tier.accept()
    await tier.rounds()
    assert await tier.read(0) == tier.log.records
    assert restored in tier.cut_at()


async def test_a_log_start_of_a_history_that_was_given_up_never_counts_again(tier: Tier) -> None:
    """A whole cluster was restored from an older copy, so its leader epochs go back too, and are reached once more."""
    tier.log.leader_epoch = 5
    tier.produce(300)
    await tier.rounds()
    await tier.delete_records(250)
    await tier.rounds()
    metadata = tier.process.metadata
    assert [start.offset for start in metadata.log_starts(PARTITION)] == [250]
    await tier.empty(leader_epoch=0, end_offset=150)
    with pytest.raises(LogDivergedError):
        await tier.rounds(1)
    await tier.accept()
    for leader_epoch in (0, 1, 4, 5, 6):
        tier.log.leader_epoch = leader_epoch
        tier.produce(tier.log.end_offset + 60)
        await tier.rounds()
    assert (metadata.earliest_offset(PARTITION), metadata.log_starts(PARTITION)) == (0, [])
    assert await tier.read(0) == tier.log.records


async def test_the_end_that_the_leader_surely_shares(tier: Tier) -> None:
    async def common(local_log_start: int) -> int:
        found = await surviving_end(tier.log, tier.process.metadata, PARTITION, local_log_start, 1000)
        return found.offset

    tier.log.log_start_offset = 0
    assert await common(0) == OLD_END - 1
    for answer, local_log_start in (((0, 120), 0), ((0, 120), 119)):
        tier.log.epoch_answer = EpochEndOffset(*answer)
        assert await common(local_log_start) == 119
    for answer, local_log_start in (((0, 0), 0), ((-1, -1), 0), ((0, 120), 120), ((0, 250), 250)):
        tier.log.epoch_answer = EpochEndOffset(*answer)
        assert await common(local_log_start) == NOTHING_IN_COMMON.offset


async def test_a_user_may_delete_only_what_continues_the_copied_records(tier: Tier) -> None:
    async def check() -> None:
        await check_before_deletion(tier.log, tier.process.metadata, PARTITION, tier.log.log_start_offset, None, 1000)

    await check()
    records, start = tier.log.records, tier.log.log_start_offset
    tier.log.elect_unclean(OLD_END - 10)
    with pytest.raises(RemoteLogMetadataNotReadyError, match="the owner cuts the tier, or stops"):
        await check()
    await tier.empty()
    with pytest.raises(LogDivergedError):
        await check()
    tier.log.records, tier.log.log_start_offset, tier.log.leader_epoch = records, start, 4
    await tier.process.metadata.put_log_divergence(PARTITION, is_diverged=True)
    with pytest.raises(LogDivergedError):
        await check()
