"""A tier whose metadata is in memory and whose store is a folder, as the commands see it when it is open."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest

from proxy.config import TidegateConfig
from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.fakes.in_memory_rlmm import InMemoryRemoteLogMetadataManager
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import PARTITION, build_segment, metadata_of
from tests.support.proxy.parsed_config import parse_config
from tiers.access.open_tier import OpenTier
from tiers.broker.cluster_metadata import ClusterMetadata, TopicMetadata
from tiers.metadata.partition_facts import facts_of
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentMetadataUpdate, RemoteLogSegmentState
from tiers.segment.segment_encryption import KeyRing, seal_segment
from tiers.storage.local import LocalRemoteStorageManager
from tiers.storage.locations import LocatedRemoteStorageManager
from tiers.tasks.history.stored_facts import put_facts

CLUSTER_ID = "cluster"
Tidegate = Callable[..., tuple[int, str, str]]
"""Runs `tidegate` with these arguments. Returns the exit code, and what was printed as output and as errors."""


class Tier(OpenTier):
    async def refresh(self) -> None:
        return


class CommandBench:
    """Segments have ten offsets each."""

    def __init__(self, folder: Path, storage: LocatedRemoteStorageManager) -> None:
        self.folder, self.root = folder, folder / "remote"
        self.storage = storage
        self.rlmm = InMemoryRemoteLogMetadataManager()
        self.ring = KeyRing()
        self.topics: set[UUID] = set()
        """The ids of the topics that the cluster has."""
        self._made = 0

    @property
    def state(self) -> RemoteLogMetadataState:
        return self.rlmm.state

    def tier(self) -> OpenTier:
        config: TidegateConfig = parse_config('[upstream]\nbootstrap.servers = "localhost:1"\n')
        none: Any = None
        log = cast(Any, self.rlmm.log)
        topics = {each: TopicMetadata(str(each), each, {}) for each in self.topics}
        cluster = ClusterMetadata(CLUSTER_ID, 1, {}, {}, 0, topics)
        return Tier(config, none, cluster, log, storage=self.storage, key_ring=self.ring)

    async def stored(self, start: int) -> RemoteLogSegmentMetadata:
        """Objects without a record."""
        self._made += 1
        path = self.folder / f"log{self._made}"
        built = build_segment(path, [batch_of(start, 10)], base_offset=start)
        metadata = metadata_of(built)
        if self.ring.current is not None:
            built = seal_segment(built, metadata.segment_id.id, self.ring, self.folder / f"sealed{self._made}")
        await self.storage.copy_log_segment_data(metadata, built.log_segment_data(metadata))
        return metadata

    async def tiered(self, start: int) -> RemoteLogSegmentMetadata:
        metadata = await self.stored(start)
        await self.rlmm.add_remote_log_segment_metadata(metadata)
        state = RemoteLogSegmentState.COPY_SEGMENT_FINISHED
        update = RemoteLogSegmentMetadataUpdate(metadata.segment_id, 1, 1, state)
        await self.rlmm.update_remote_log_segment_metadata(update)
        return replace(metadata, state=state)

    async def put_facts(self) -> str:
        return await put_facts(self.storage, facts_of(self.rlmm.log, CLUSTER_ID, PARTITION))

    def files(self) -> list[Path]:
        return sorted(path for path in self.root.rglob("*") if path.is_file())


@asynccontextmanager
async def command_bench(tmp_path: Path) -> AsyncIterator[CommandBench]:
    (tmp_path / "remote").mkdir()
    store = LocalRemoteStorageManager({"path": str(tmp_path / "remote"), "cluster.id": CLUSTER_ID})
    storage = LocatedRemoteStorageManager(store)
    await storage.open()
    yield CommandBench(tmp_path, storage)
    await storage.close()


def open_by(command: ModuleType, bench: CommandBench, log: InMemoryLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the command open the tier of the bench. `log` is that of the leader."""
    known = SimpleNamespace(topic_id=PARTITION.topic_id, partitions={PARTITION.partition: None})
    topics, ids = {PARTITION.topic: known}, {PARTITION.topic_id: known}
    cluster = SimpleNamespace(topics=topics, topics_by_id=ids, cluster_id=CLUSTER_ID)

    def opening(value: Any) -> Any:
        @asynccontextmanager
        async def opened(*_: object, **__: object) -> AsyncIterator[Any]:
            yield value

        return opened

    monkeypatch.setattr(command, "tiered_cluster", opening((None, cluster)))
    monkeypatch.setattr(command, "open_storage", opening(bench.storage), raising=False)
    monkeypatch.setattr(command, "metadata_to_now", opening(bench.rlmm.log))
    monkeypatch.setattr(command, "BrokerLogSource", lambda client: log)
