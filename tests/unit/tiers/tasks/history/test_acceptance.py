"""Whole rounds of a partition that stopped, and that an operator accepts, on real records and a real state."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.fakes.metadata_topic import FakeMetadataTopic
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.tier_process import PARTITION, POLICY, VISIBLE_AFTER_MS, Clock, OneTopic, TierProcess
from tiers.errors import MetadataLostError
from tiers.metadata.partition_manifest import witness_of
from tiers.metadata.records.serde import decode_value
from tiers.model.log_start import LogGap
from tiers.model.segment_metadata import RemoteLogSegmentMetadataUpdate
from tiers.storage.object_key import partition_manifest_key

TRIMMED = replace(POLICY, local_retention_bytes=0)
KEY = partition_manifest_key("cluster", PARTITION)


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
        trim = self.process.metadata.local_log_start(PARTITION)
        assert trim is not None
        records = [value and decode_value(value) for _, _, (_, value) in self.metadata_log.records]
        ends = [at for at, each in enumerate(records) if isinstance(each, RemoteLogSegmentMetadataUpdate)]
        kept = ends[1] if is_next_started else ends[0] + 1
        self.metadata_log.records = self.metadata_log.records[:kept]
        await self.start_anew()
        assert self.process.metadata.remote_end_offset(PARTITION) == 29
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

    async def accept(self) -> str:
        witness = witness_of(await self.process.store.get_object(KEY))
        await self.process.metadata.accept(PARTITION, witness)
        return witness


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    site = Site(tmp_path)
    await site.lose_metadata()
    yield site
    await site.process.end()


async def test_an_acceptance_keeps_the_objects_of_a_copy_whose_end_was_lost(tmp_path: Path) -> None:
    """The broker has removed the records of that copy. They exist nowhere else."""
    site = Site(tmp_path)
    await site.lose_metadata(is_next_started=True)
    try:
        (lost,) = (one for one in site.process.metadata.list_remote_log_segments(PARTITION) if one.start_offset == 30)
        stored = site.stored()
        with pytest.raises(MetadataLostError):
            await site.process.manager.round()
        await site.accept()
        await site.rounds()
        assert site.process.metadata.gaps(PARTITION) == [LogGap(30, 90)]
        assert site.process.metadata.remote_log_segment_metadata_by_id(lost.segment_id) is None
        await site.start_anew()
        await site.rounds()
        assert site.stored() >= stored
    finally:
        await site.process.end()


@pytest.mark.parametrize("is_copied", [True, False])
async def test_an_acceptance_takes_effect_in_one_round_also_without_copying(site: Site, is_copied: bool) -> None:
    with pytest.raises(MetadataLostError):
        await site.process.manager.round()
    site.topics.policy = replace(TRIMMED, copy_disable=not is_copied)
    await site.accept()
    await site.process.manager.round()
    metadata = site.process.metadata
    assert metadata.acceptance(PARTITION) is None
    assert metadata.gaps(PARTITION) == [LogGap(30, 90)]
    assert metadata.local_log_start(PARTITION) == (30, 0)
    await site.start_anew()
    site.topics.policy = TRIMMED
    await site.rounds()
    site.clock.advance(POLICY.segment_ms)
    await site.rounds()
    assert site.process.metadata.remote_end_offset(PARTITION) == 99


async def test_an_acceptance_that_comes_back_has_no_effect(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """The metadata topic loses its tail once more: the end of the acceptance, and what was copied since."""
    witness = await site.accept()
    kept = len(site.metadata_log.records)
    await site.rounds()
    manifest = await site.process.store.get_object(KEY)
    site.clock.advance(POLICY.segment_ms)
    await site.rounds()
    assert site.process.metadata.remote_end_offset(PARTITION) == 99
    site.metadata_log.records = site.metadata_log.records[:kept]
    await site.start_anew()
    assert site.process.metadata.acceptance(PARTITION) == witness
    for _ in range(2):
        with pytest.raises(MetadataLostError, match="accepted segments"):
            await site.process.manager.round()
    assert site.process.metadata.acceptance(PARTITION) is None
    assert await site.process.store.get_object(KEY) != manifest
    said = [line for line in caplog.records if "accepted another state" in line.getMessage()]
    assert len(said) == 1
