"""A process of the remote log on fakes: the rounds of the real manager, with a folder as the store."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import UUID

from prometheus_client import CollectorRegistry

from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.fakes.io_calls import IoCalls, ProcessEnded
from tests.support.fakes.metadata_topic import FakeMetadataTopic, FakeTopicMetadataManager
from tests.support.tiers.workbench import PARTITION, FakeShareGroups
from tiers.config.settings import RemoteLogConfig
from tiers.config.topic_policy import TopicPolicy
from tiers.errors import BrokerError, OwnershipLostError, RemoteLogMetadataNotReadyError, RetriableRemoteStorageError
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.reader.remote_log_reader import RemoteLogReader
from tiers.storage.local import LocalRemoteStorageManager
from tiers.storage.remote_storage_manager import RemoteStorageManager
from tiers.tasks.copy.spool import Spool
from tiers.tasks.metrics import RemoteLogManagerMetrics
from tiers.tasks.remote_log_manager import RemoteLogManager
from tiers.tasks.task_services import RemoteLogManagerSettings, TaskServices

VISIBLE_AFTER_MS = 10_000


class Clock:
    def __init__(self) -> None:
        self.now_ms = 1_000_000
        self.wall_ms = 1_700_000_000_000

    def advance(self, by_ms: int) -> None:
        self.now_ms += by_ms
        self.wall_ms += by_ms


class OneTopic:
    """The topics of a manager, set by the test."""

    def __init__(self, policy: TopicPolicy) -> None:
        self.policy = policy

    @property
    def policies(self) -> Mapping[UUID, TopicPolicy]:
        return {self.policy.topic_id: self.policy}

    async def refresh(self, timeout_ms: int) -> object:
        return None


class SteppedManager(RemoteLogManager):
    """A manager that does a round only when `round` is called."""

    async def round(self) -> bool:
        """Does one round, one stage after the other. Returns True when more records are ready to be copied.

        A stage that fails fails the round."""
        list(self._assign())
        managed = self._managed.get(PARTITION)
        if managed is None:
            raise OwnershipLostError(f"{PARTITION} is owned by another member")
        surveyed = await managed.survey()
        if surveyed is None:
            return True
        if managed.facts.is_check_due:
            await managed.facts.check()
        surveyed = await managed.find_copy_start(surveyed)
        if not managed.doubt:
            surveyed = await managed.expire(surveyed)
        more = await managed.copy_segments(surveyed)
        if not managed.doubt:
            await managed.trim(surveyed)
            await managed.delete(surveyed)
            await managed.facts.run()
        return more

    def give_up(self) -> None:
        self._give_up(PARTITION)


class TierProcess:
    """A process with `open` and `end`. The same folder may be opened again, as after a restart."""

    def __init__(
        self,
        name: str,
        folder: Path,
        log: InMemoryLog,
        metadata_log: FakeMetadataTopic,
        topics: OneTopic,
        clock: Clock,
        wrap_store: Callable[[RemoteStorageManager], RemoteStorageManager] = lambda store: store,
    ) -> None:
        """The store is `folder/remote`, which must exist. The process's own files in `folder` have its name."""
        self.name = name
        self.calls = IoCalls()
        self.metadata = FakeTopicMetadataManager(
            metadata_log,
            name,
            folder / f"{name}-state",
            lambda: clock.now_ms,
            lambda log: self.calls.of(log, "metadata", lambda: RemoteLogMetadataNotReadyError("no answer")),
        )
        local = LocalRemoteStorageManager({"path": str(folder / "remote"), "cluster.id": "cluster"})
        self.store = wrap_store(local)
        settings = RemoteLogManagerSettings(
            spool_dir=folder / f"{name}-spool",
            fetch_bytes=500,
            verify_bytes=600,
            remote_log=RemoteLogConfig(visible_after_ms=VISIBLE_AFTER_MS),
        )
        self.settings = settings
        self._spool = Spool(settings.spool_dir, settings.spool_max_bytes, 1)
        self.services = TaskServices(
            source=self.calls.of(log, "broker", lambda: BrokerError("no answer", retriable=True)),
            share_groups=FakeShareGroups(),
            storage=self.calls.of(self.store, "store", lambda: RetriableRemoteStorageError("no answer")),
            metadata=self.metadata,
            settings=settings,
            metrics=RemoteLogManagerMetrics(CollectorRegistry()),
            spool=self._spool,
            clock_ms=lambda: clock.now_ms,
            wall_clock_ms=lambda: clock.wall_ms,
            cluster_id="cluster",
        )
        self.manager = SteppedManager(self.services, topics)

    @property
    def state(self) -> RemoteLogMetadataState:
        return self.metadata.state

    async def open(self) -> None:
        await self.store.open()
        await self.metadata.open()
        await self._spool.open()

    async def end(self) -> None:
        """Ends the process as a crash does: unfinished segments stay in the spool."""
        self.calls.is_gone = True
        with contextlib.suppress(ProcessEnded):
            self.manager.give_up()
        await self.metadata.close()
        await self.store.close()
        self._spool.close()

    def spooled(self) -> list[Path]:
        return list(self.settings.spool_dir.iterdir())

    @asynccontextmanager
    async def reader(self) -> AsyncIterator[RemoteLogReader]:
        """Yields a reader with empty caches."""
        async with RemoteLogReader(self.metadata._own, self.store) as reader:
            yield reader
