"""The life of one partition in both tiers, in a process that may end at any of its calls."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from pathlib import Path

from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.fakes.metadata_topic import FakeMetadataTopic
from tests.support.fakes.tier_process import VISIBLE_AFTER_MS, Clock, OneTopic, TierProcess
from tests.support.tiers.workbench import PARTITION, POLICY
from tests.support.written_log import WrittenLog
from tiers.model.segment_metadata import RemoteLogSegmentState
from tiers.storage.object_key import indexes_key, log_key
from tiers.storage.remote_storage_manager import RemoteStorageManager

TRIMMED = replace(POLICY, local_retention_bytes=600)
EXPIRED = replace(TRIMMED, retention_bytes=1500)
STEPS = (POLICY, TRIMMED, EXPIRED)
RETRIED_AFTER_MS = 3_600_000


class Life:
    """One partition from its first copy to its first expiry, by one process and, after a crash, by its successor."""

    def __init__(self, folder: Path) -> None:
        (folder / "remote").mkdir(parents=True)
        self.folder = folder
        self.clock = Clock()
        self.model = WrittenLog()
        self.log = InMemoryLog()
        self.metadata_log = FakeMetadataTopic(lambda: self.clock.wall_ms, owner="a")
        self.topics = OneTopic(POLICY)
        self.process = self._process()
        for number in range(9):
            producer_id = 7 if number in (2, 4) else -1
            self.log.append(self.model.append(10, self.clock.wall_ms, producer_id))
        self.log.append(self.model.end_transaction(7, self.clock.wall_ms, commit=False))
        self.log.append(self.model.append(10, self.clock.wall_ms))
        self.log.aborted = self.model.aborted()

    def _process(self) -> TierProcess:
        return TierProcess("a", self.folder, self.log, self.metadata_log, self.topics, self.clock, self.wrap_store)

    def wrap_store(self, store: RemoteStorageManager) -> RemoteStorageManager:
        return store

    async def live(self) -> None:
        """Copies everything, trims, expires: each in a round of its own, repeated until nothing more happens."""
        for policy in STEPS:
            self.topics.policy = policy
            while await self.process.manager.round():
                pass
            self.clock.advance(VISIBLE_AFTER_MS)

    async def restart(self) -> None:
        await self.process.end()
        self.process = self._process()
        await self.process.open()

    async def check_what_is_readable(self) -> None:
        self.process.metadata.follow()
        metadata = self.process.metadata
        start = metadata.state.log_start_offset(PARTITION) or 0
        async with self.process.reader() as reader:
            await self.model.read_all(reader, start, max(start, self.log.log_start_offset))

    async def check_the_end(self, strangers: Set[str] = frozenset()) -> None:
        """All records are remote except the expired ones.

        All segments are finished and have their objects. No other objects exist, except `strangers`, which are
        unchanged."""
        metadata = self.process.metadata
        start = metadata.state.log_start_offset(PARTITION)
        assert start is not None
        segments = list(metadata.state.list_remote_log_segments(PARTITION))
        assert {one.state for one in segments} == {RemoteLogSegmentState.COPY_SEGMENT_FINISHED}
        async with self.process.reader() as reader:
            end = segments[-1].end_offset
            await self.model.read_all(reader, start, end + 1)
            await self.model.find_nothing_outside(reader, start, end)
        assert 0 < start < self.log.log_start_offset <= end
        kept_bytes = self.model.size_bytes_from(start)
        assert kept_bytes >= EXPIRED.retention_bytes
        named = {key("cluster", one) for one in segments for key in (log_key, indexes_key)}
        stored = {str(path.relative_to(self.folder / "remote")) for path in (self.folder / "remote").rglob("*.*")}
        found = {name for name in stored if name.endswith((".log", ".indexes")) or name.startswith(".tmp/")}
        found -= {name for name in stored if name.startswith(".tmp/object.")}  # an opening removes the old ones
        assert found == named | strangers
        await self.restart()
        assert self.process.spooled() == []
