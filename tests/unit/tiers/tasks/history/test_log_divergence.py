"""A broker was emptied: the leader has another history at the copied offsets. Nothing of the old one is deleted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protocol.records.record_batch import iterate_batches
from proxy.commands.tier.cut import named_cuts
from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.fakes.metadata_topic import FakeMetadataTopic
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.tier_process import PARTITION, POLICY, Clock, OneTopic, TierProcess
from tiers.errors import (
    BrokerError,
    LogDivergedError,
    OwnershipLostError,
    RemoteLogMetadataNotReadyError,
)
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import EpochEndOffset
from tiers.model.log_start import LogStart, LogStartReason
from tiers.reader.remote_log_reader import RemoteReadRequest, monotonic_ms
from tiers.tasks.history.align import find_parting, open_cut, require_aligned
from tiers.tasks.history.stored_facts import read_stored_facts

KEEPS_LITTLE = replace(POLICY, local_retention_bytes=500, segment_ms=0)
OLD_END = 200
HOUR_MS = 3_600_000


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

    async def cut(self, offset: int) -> None:
        """Does what `tidegate tier cut` does."""
        metadata = self.process.metadata
        bounds = await self.log.bounds(PARTITION, 1000)
        parting = await find_parting(self.log, metadata.state, PARTITION, bounds, 1000)
        for each in named_cuts(metadata.state, PARTITION, bounds, offset, parting):
            await metadata.put_named_cut(PARTITION, each.leader_epoch, each.offset)

    def cuts(self) -> list[tuple[int, int, bool]]:
        return [(each.leader_epoch, each.offset, each.is_proved) for each in self.process.state.cuts(PARTITION)]

    @property
    def is_held(self) -> bool:
        """Whether a CUT that is not proved holds every expiry and deletion."""
        metadata = self.process.metadata
        return open_cut(metadata.state, PARTITION, metadata.state.log_start_offset(PARTITION) or 0) is not None

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
        return [one.cut_at for one in self.process.state.list_remote_log_segments(PARTITION)]

    async def read(self, offset: int) -> bytes:
        """The remote tier's records from `offset` on."""
        end, found = self.process.state.remote_end_offset(PARTITION), b""
        async with self.process.reader() as reader:
            while end is not None and offset <= end:
                read = await reader.read(RemoteReadRequest(
                    PARTITION, offset, 700, min_one_message=True, isolation_level=0,
                    deadline_ms=monotonic_ms() + 30_000, connection_id=1,
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
    assert made.process.state.remote_end_offset(PARTITION) == OLD_END - 1
    assert made.log.log_start_offset > 0
    yield made
    await made.process.end()


async def test_a_broker_that_was_emptied_stops_until_an_operator_cuts(tier: Tier) -> None:
    """Its log is shorter than the tier. The recorded trim and log start of the void history count no more."""
    old, metadata = tier.stored(), tier.process.metadata
    await metadata.put_log_start(PARTITION, LogStart(10, 0, LogStartReason.USER))
    await tier.rounds()
    await tier.empty(end_offset=150)
    await tier.stops()
    await tier.restart()
    await tier.stops()
    assert tier.cuts() == []
    await tier.cut(0)
    await tier.rounds()
    metadata = tier.process.metadata
    assert tier.cuts() == [(3, 0, True)]
    assert old < tier.stored()
    assert (metadata.state.earliest_offset(PARTITION), metadata.state.remote_end_offset(PARTITION)) == (0, 149)
    assert (metadata.state.gaps(PARTITION), metadata.state.log_starts(PARTITION)) == ([], [])
    assert await tier.read(0) == tier.log.records
    trimmed = metadata.state.local_log_start(PARTITION)
    assert trimmed == (tier.log.log_start_offset, 3)
    # The new history is trimmed, expired and deleted as ever. The old one stays for as long as the retention.
    await tier.delete_records(140)
    await tier.rounds()
    assert old < tier.stored()
    stored = await read_stored_facts(tier.process.store, "cluster", PARTITION)
    facts = stored.joined(None)
    assert facts is not None
    assert [cut.offset for cut in facts.cuts] == [0]


async def test_a_log_that_has_grown_beyond_the_tier_is_cut_at_its_start(tier: Tier) -> None:
    """The broker was emptied. Nothing of the tier is below the CUT, so void records go after the total retention."""
    old = tier.stored()
    await tier.empty()
    await tier.rounds()
    assert (tier.cuts(), tier.is_held) == ([(3, 0, False)], False)
    assert old < tier.stored()
    assert await tier.read(0) == tier.log.records
    tier.topics.policy = replace(KEEPS_LITTLE, retention_ms=HOUR_MS)
    tier.clock.advance(HOUR_MS // 2)
    await tier.rounds(1)
    assert old <= tier.stored()
    tier.clock.advance(HOUR_MS)
    await tier.rounds(1)
    assert not old & tier.stored()


async def test_a_cut_that_is_not_proved_keeps_all_until_an_operator_looked(tier: Tier) -> None:
    """The leader has forgotten where its log parts from the tier, and its log is longer."""
    old = tier.stored()
    await tier.empty(log_start=100)
    await tier.rounds()
    metadata = tier.process.metadata
    assert (tier.cuts(), tier.is_held) == ([(3, 100, False)], True)
    assert (metadata.state.earliest_offset(PARTITION), metadata.state.remote_end_offset(PARTITION)) == (0, 299)
    assert tier.log.trims > tier.trims, "copying and trimming go on"
    tier.topics.policy = replace(KEEPS_LITTLE, retention_ms=HOUR_MS)
    tier.clock.advance(2 * HOUR_MS)
    await tier.restart()
    await tier.rounds()
    assert old <= tier.stored()
    assert (tier.process.state.earliest_offset(PARTITION), tier.is_held) == (0, True)
    tier.log.leader_epoch = 5  # a clean election
    await tier.cut(60)
    await tier.rounds(1)
    assert (tier.cuts(), tier.is_held) == ([(3, 60, True), (3, 100, False)], False)
    tier.clock.advance(2 * HOUR_MS)
    await tier.rounds()
    assert not old & tier.stored()


async def test_a_log_start_above_a_cut_that_is_not_proved_ends_the_doubt(tier: Tier) -> None:
    await tier.empty(log_start=100)
    await tier.rounds()
    await tier.delete_records(250)
    await tier.rounds()
    assert not tier.is_held
    assert tier.process.state.log_start_offset(PARTITION) == 250


async def test_a_leader_that_has_forgotten_all_copied_records_confirms_them(tier: Tier) -> None:
    """The rest is a gap, as after any retention."""
    await tier.empty(log_start=250)
    await tier.rounds()
    assert tier.cuts() == []
    assert tier.process.state.gaps(PARTITION) == [(OLD_END, 250)]


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
            await tier.empty(end_offset=150)
        return answer

    monkeypatch.setattr(tier.log, "end_offset_for_epoch", last_answer)
    tier.topics.policy = replace(POLICY, retention_bytes=2000)
    assert await tier.process.manager.round()
    assert tier.log.leader_epoch == 3
    with pytest.raises(LogDivergedError):
        await tier.process.manager.round()
    assert tier.log.trims == tier.trims
    assert tier.process.state.log_starts(PARTITION) == []


async def test_a_log_start_that_moves_during_a_survey_proves_nothing(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader's answers are then those of a log that begins later than its bounds say."""
    await tier.empty(log_start=30)
    ask, asked = tier.log.end_offset_for_epoch, 0

    async def remove_and_answer(partition: TopicIdPartition, leader_epoch: int, timeout_ms: int) -> EpochEndOffset:
        nonlocal asked
        answer, asked = await ask(partition, leader_epoch, timeout_ms), asked + 1
        if asked == 1:
            tier.log.log_start_offset = 100
        return answer

    monkeypatch.setattr(tier.log, "end_offset_for_epoch", remove_and_answer)
    with pytest.raises(BrokerError, match="or has removed records"):
        await tier.rounds(1)
    assert tier.cuts() == []


async def test_a_leader_with_the_copied_records_ends_a_stop(tier: Tier) -> None:
    records, start = tier.log.records, tier.log.log_start_offset
    await tier.empty(end_offset=150)
    await tier.stops()
    tier.log.records, tier.log.log_start_offset, tier.log.leader_epoch = records, start, 5
    tier.produce(260)
    await tier.rounds()
    assert tier.cuts() == []
    assert tier.process.state.remote_end_offset(PARTITION) == 259


async def test_an_owner_that_dies_meanwhile_leaves_the_next_one_the_same_work(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, put = tier.stored(), tier.process.metadata.put_cut
    await tier.empty()

    async def last_write(*arguments: Any, **options: Any) -> None:
        await put(*arguments, **options)
        raise OwnershipLostError("gone")

    monkeypatch.setattr(tier.process.metadata, "put_cut", last_write)
    with pytest.raises(OwnershipLostError, match="gone"):
        await tier.rounds(1)
    await tier.restart()
    await tier.rounds()
    assert old < tier.stored()
    assert await tier.read(0) == tier.log.records


async def test_a_broker_that_was_restored_is_cut_where_its_epoch_ends(tier: Tier) -> None:
    """Its log ends below what was trimmed. The records of both histories stay in the store."""
    old, trimmed = tier.stored(), tier.process.state.local_log_start(PARTITION)
    assert trimmed is not None
    restored = trimmed.offset - 20
    tier.log.log_start_offset = 0
    tier.log.elect_unclean(restored)
    tier.produce(300)
    await tier.rounds()
    assert await tier.read(0) == tier.log.records
    assert tier.cuts() == [(1, restored, True)]
    assert old < tier.stored()


async def test_a_log_start_of_a_void_history_never_counts_again(tier: Tier) -> None:
    """A whole cluster was restored from an older copy, so its leader epochs go back too, and are reached once more."""
    tier.log.leader_epoch = 5
    tier.produce(300)
    await tier.rounds()
    await tier.delete_records(250)
    await tier.rounds()
    metadata = tier.process.metadata
    assert [start.offset for start in metadata.state.log_starts(PARTITION)] == [250]
    await tier.empty(leader_epoch=0, end_offset=150)
    with pytest.raises(LogDivergedError, match=r"`tidegate tier cut orders:0 OFFSET`"):
        await tier.rounds(1)
    await tier.cut(0)
    assert tier.cuts() == [(6, 0, True)]
    for leader_epoch in (0, 1, 4, 5, 6):
        tier.log.leader_epoch = leader_epoch
        tier.produce(tier.log.end_offset + 60)
        await tier.rounds()
    assert (metadata.state.earliest_offset(PARTITION), metadata.state.log_starts(PARTITION)) == (0, [])
    assert await tier.read(0) == tier.log.records


async def test_a_user_may_delete_only_what_continues_the_copied_records(tier: Tier) -> None:
    async def check() -> None:
        bounds = await tier.log.bounds(PARTITION, 1000)
        await require_aligned(tier.log, tier.process.state, PARTITION, bounds, 1000)

    await check()
    tier.log.elect_unclean(OLD_END - 10)
    with pytest.raises(RemoteLogMetadataNotReadyError, match="has not cut the tier yet"):
        await check()
    await tier.empty(end_offset=150)
    with pytest.raises(LogDivergedError, match="emptied or restored"):
        await check()


async def test_a_leader_that_returns_gets_its_records_copied_again(tier: Tier) -> None:
    """A, then B, which lacks A's last records, then A again: what was copied of B is void."""
    tier.log.log_start_offset = 0
    records = tier.log.records
    tier.log.elect_unclean(150)
    tier.produce(180)
    await tier.rounds()
    assert tier.process.state.remote_end_offset(PARTITION) == 179
    tier.log.records, tier.log.leader_epoch, tier.log.log_start_offset = records, 2, 0
    tier.produce(220)
    await tier.rounds()
    assert tier.cuts() == [(1, 150, True), (2, 150, True)]
    assert await tier.read(0) == tier.log.records
