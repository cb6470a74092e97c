"""Whole rounds of a partition that stopped, and that an operator accepts, on real records and a real state."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.fakes.metadata_topic import FakeMetadataTopic
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import build_segment, metadata_of
from tests.support.fakes.tier_process import PARTITION, POLICY, VISIBLE_AFTER_MS, Clock, OneTopic, TierProcess
from tests.support.tiers.segment_metadata import copied
from tests.support.tiers.workbench import Workbench
from tiers.metadata.records.serde import decode_value
from tiers.metadata.remote_log import RemoteLog
from tiers.metadata.tenure import Tenure
from tiers.model.log_start import LogGap
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentMetadataUpdate
from tiers.tasks.history.acceptance import accept_what_is_left
from tiers.tasks.partition_tasks import PartitionTasks, Surveyed

TRIMMED = replace(POLICY, local_retention_bytes=0)


class Site:
    """The broker has 90 to 99, the store has 0 to 99, and the metadata lost all that came after the first segment."""

    def __init__(self, folder: Path) -> None:
        (folder / "remote").mkdir()
        self.folder = folder
        self.clock, self.log, self.topics = Clock(), InMemoryLog(), OneTopic(TRIMMED)
        self.metadata_log = FakeMetadataTopic(lambda: self.clock.wall_ms, owner="a")
        self.process = self._process()

    def _process(self) -> TierProcess:
        return TierProcess("a", self.folder, self.log, self.metadata_log, self.topics, self.clock)

    def stored(self) -> set[str]:
        paths = (self.folder / "remote").rglob("*.*")
        return {path.name for path in paths if path.suffix in (".log", ".indexes")}

    @property
    def finished(self) -> list[tuple[int, int]]:
        segments = self.process.state.stored_segments(PARTITION)
        return [(each.start_offset, each.metadata.end_offset) for each in segments if each.is_finished]

    async def doubt(self) -> str:
        """Returns the owner's doubt after one round more."""
        await self.process.manager.round()
        return self.process.manager._managed[PARTITION].doubt

    def lose_objects(self, first_offset: int) -> None:
        for path in (self.folder / "remote").rglob(f"*{first_offset:020}-*"):
            path.unlink()

    async def lose_metadata(self, *, is_next_started: bool = False) -> None:
        """`is_next_started`: the record that the copy of the second segment began is not lost."""
        self.log.append(*(batch_of(10 * number, 10, value_bytes=15) for number in range(10)))
        await self.process.open()
        await self.rounds()
        self.clock.advance(POLICY.segment_ms)
        await self.rounds()
        self.clock.advance(VISIBLE_AFTER_MS)
        await self.rounds()
        assert self.log.log_start_offset == 90
        trim = self.process.state.local_log_start(PARTITION)
        assert trim is not None
        records = [value and decode_value(value) for _, _, (_, value) in self.metadata_log.records]
        ends = [at for at, each in enumerate(records) if isinstance(each, RemoteLogSegmentMetadataUpdate)]
        kept = ends[1] if is_next_started else ends[0] + 1
        self.metadata_log.records = self.metadata_log.records[:kept]
        await self.start_anew()
        assert self.process.state.remote_end_offset(PARTITION) == 29
        await self.process.metadata.put_local_log_start(PARTITION, trim)

    async def rounds(self) -> None:
        while await self.process.manager.round():
            pass

    async def start_anew(self) -> None:
        """Starts as on a new machine: the state is read from the topic."""
        await self.process.end()
        for file in (self.folder / "a-state").iterdir():
            file.unlink()
        self.process = self._process()
        await self.process.open()

    async def accept(self) -> list[str]:
        metadata, bounds = self.process.metadata, await self.log.bounds(PARTITION, 1000)
        await metadata.log.ensure_fresh(PARTITION, 0, 1000)
        return await accept_what_is_left(self.process.store, metadata, "cluster", PARTITION, bounds, 0, 1000)

    async def doubt_later(self) -> str:
        """Returns the owner's doubt after it has looked again."""
        self.clock.advance(3_600_000)
        return await self.doubt()


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    site = Site(tmp_path)
    await site.lose_metadata()
    yield site
    await site.process.end()


async def test_a_copy_whose_end_was_lost_is_finished_without_an_operator(tmp_path: Path) -> None:
    """The broker has removed the records of that copy. They exist nowhere else."""
    site = Site(tmp_path)
    await site.lose_metadata(is_next_started=True)
    try:
        await site.rounds()
        assert site.finished == [(0, 29), (30, 59)]
        assert "metadata was lost" in await site.doubt()
    finally:
        await site.process.end()


async def test_a_doubt_holds_back_what_destroys_and_copying_goes_on(site: Site) -> None:
    stored = site.stored()
    site.topics.policy = replace(TRIMMED, retention_bytes=0)
    site.log.append(*(batch_of(10 * number, 10, value_bytes=15) for number in range(10, 16)))
    await site.rounds()
    site.clock.advance(VISIBLE_AFTER_MS)
    assert "metadata was lost" in await site.doubt()
    assert site.finished == [(0, 29), (90, 119), (120, 149)]
    assert site.log.log_start_offset == 90
    assert site.process.state.log_starts(PARTITION) == []
    assert site.process.state.gaps(PARTITION) == []
    assert site.stored() > stored


@pytest.mark.parametrize("is_copied", [True, False])
async def test_an_acceptance_finishes_what_only_the_store_knows(site: Site, is_copied: bool) -> None:
    assert await site.doubt()
    site.topics.policy = replace(TRIMMED, copy_disable=not is_copied)
    assert await site.accept() == []
    assert await site.doubt_later() == ""
    assert site.finished[:3] == [(0, 29), (30, 59), (60, 89)]
    assert site.process.state.gaps(PARTITION) == []
    await site.start_anew()
    assert await site.doubt() == ""


@pytest.mark.parametrize(("missing", "gap"), [((30, 60), (30, 90)), ((30,), (30, 60)), ((60,), (60, 90))])
async def test_an_acceptance_takes_effect_without_the_objects(
    site: Site, missing: tuple[int, ...], gap: tuple[int, int]
) -> None:
    for first in missing:
        site.lose_objects(first)
    assert "goes on without" in await site.doubt()
    assert await site.accept() == []
    for _ in range(4):
        assert await site.doubt_later() == ""
    metadata = site.process.metadata
    assert metadata.state.gaps(PARTITION) == [LogGap(*gap)]
    assert RemoteLog(metadata.state, PARTITION).lost_trim(gap[0]) is None
    await site.start_anew()
    await site.rounds()
    site.clock.advance(POLICY.segment_ms)
    await site.rounds()
    assert site.process.state.remote_end_offset(PARTITION) == 99


def batches(first: int, end: int, leader_epoch: int = 0) -> list[bytes]:
    return [batch_of(at, 10, value_bytes=15, leader_epoch=leader_epoch) for at in range(first, end, 10)]


async def rounds(bench: Workbench, tasks: PartitionTasks, count: int) -> None:
    """Runs whole rounds of one partition, a minute apart."""
    for _ in range(count):
        launched: list[tuple[Surveyed, int | None]] = []
        await tasks.round(lambda *each, to=launched: to.append(each))
        for surveyed, start in launched:
            await tasks.run_copy(surveyed, start)
        bench.now_ms += 60_000
        bench.wall_ms += 60_000


async def stored(bench: Workbench, first: int, end: int, leader_epoch: int = 0) -> RemoteLogSegmentMetadata:
    """Stores a segment that the metadata does not know."""
    built = build_segment(bench.folder / f"{first}.built", batches(first, end, leader_epoch), first)
    segment = metadata_of(built, PARTITION)
    await bench.store.copy_log_segment_data(segment, built.log_segment_data(segment))
    return segment


async def test_an_acceptance_restores_a_cut_and_both_segments(bench: Workbench) -> None:
    bench.log.append(*batches(0, 70))
    await bench.check_facts()
    await bench.copy_all()
    bench.log.elect_unclean(40)
    bench.log.append(*batches(40, 140, leader_epoch=1))
    await bench.copy_all()
    await bench.check_facts()
    answers = [(each.start_offset, each.cut_at) for each in bench.segments]
    assert answers == [(0, None), (30, 40), (40, None), (70, None), (100, None)]
    for lost in bench.segments[1:]:
        del bench.metadata.segments[lost.segment_id]
    bench.metadata.recorded_cuts.clear()
    bench.log.log_start_offset = 100
    bench.restart()
    await bench.accept()
    await rounds(bench, PartitionTasks(bench.services, PARTITION, POLICY, Tenure(0, 1)), 3)
    assert bench.state.gaps(PARTITION) == []
    assert [(each.start_offset, each.cut_at) for each in bench.segments][:4] == answers[:4]
    assert all(each.is_finished for each in bench.state.stored_segments(PARTITION))


async def test_an_acceptance_ends_though_it_cannot_restore_a_segment(bench: Workbench) -> None:
    """A later release wrote the segment. The doubt stays, and copying goes on."""
    bench.log.append(*batches(0, 40))
    await bench.check_facts()
    await stored(bench, 30, 60)
    [path] = (bench.folder / "remote").rglob("*.indexes")
    raw = path.read_bytes()
    path.write_bytes(raw[:5] + bytes([raw[5] + 1]) + raw[6:])
    await bench.copy_all()
    assert bench.finished == [(0, 29)]
    bench.restart()
    bench.log.append(*batches(40, 300))
    bench.log.log_start_offset = 60
    tasks = PartitionTasks(bench.services, PARTITION, POLICY, Tenure(0, 1))
    await rounds(bench, tasks, 1)
    await bench.accept()
    await rounds(bench, tasks, 3)
    assert tasks.doubt
    assert bench.state.gaps(PARTITION) == []
    assert bench.state.remote_end_offset(PARTITION) == 299


async def test_a_doubt_about_one_hole_records_no_gap_over_the_next(bench: Workbench) -> None:
    bench.log.append(*batches(0, 40))
    await bench.check_facts()
    await stored(bench, 30, 60)
    [path] = (bench.folder / "remote").rglob("*.indexes")
    raw = path.read_bytes()
    path.write_bytes(raw[:5] + bytes([raw[5] + 1]) + raw[6:])
    await bench.copy_all()
    segment = await stored(bench, 60, 90)
    await copied(bench.metadata, segment)
    bench.restart()
    bench.log.append(*batches(40, 300))
    bench.log.log_start_offset = 120
    tasks = PartitionTasks(bench.services, PARTITION, POLICY, Tenure(0, 1))
    await bench.accept()
    await rounds(bench, tasks, 3)
    assert tasks.doubt
    assert bench.state.gaps(PARTITION) == []


async def test_an_acceptance_records_a_gap_over_a_segment_of_another_history(bench: Workbench) -> None:
    bench.log.leader_epoch = 4
    bench.log.append(*batches(0, 300, leader_epoch=4))
    await bench.check_facts()
    await bench.record_log_start(0)
    await stored(bench, 30, 60, leader_epoch=5)
    bench.log.log_start_offset = 60
    await bench.copy_all()
    tasks = PartitionTasks(bench.services, PARTITION, POLICY, Tenure(0, 1))
    await rounds(bench, tasks, 1)
    assert tasks.doubt
    await bench.accept()
    await rounds(bench, tasks, 5)
    assert tasks.doubt == ""
    assert bench.state.gaps(PARTITION) == [LogGap(30, 60)]
    assert RemoteLog(bench.state, PARTITION).attempt_at_head(0, 60) is None
    assert RemoteLog(bench.state, PARTITION).earliest(60) == 60
