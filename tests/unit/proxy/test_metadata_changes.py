"""The changes that a worker asks of the remote-log process."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from uuid import UUID

import pytest

from proxy.process import metadata_changes
from proxy.process.metadata_changes import MetadataChangeServer, RemoteMetadataChanges
from tests.support.fakes.in_memory_rlmm import InMemoryRemoteLogMetadataManager
from tiers.errors import OwnershipLostError, RemoteLogError, RemoteLogMetadataNotReadyError
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import LogStart, LogStartReason
from tiers.reader.shared.channel import listen

TOPIC = UUID(int=7)
PARTITION = TopicIdPartition(TOPIC, 0, "orders")
START = LogStart(42, 3, LogStartReason.USER)


class NotAllowedError(Exception):
    pass


class LibraryError(Exception):
    """As an exception of a library: it cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("a defect")
        self.lock = threading.Lock()


class UnreadableError(Exception):
    """It can be pickled, but not unpickled."""

    def __init__(self, *, text: str) -> None:
        super().__init__(text)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def allow(before: Mapping[str, str]) -> None:
    return


def refuse(before: Mapping[str, str]) -> None:
    raise NotAllowedError(f"before: {dict(before)}")


class Processes:
    """The listener survives the lives of the remote-log process."""

    def __init__(self) -> None:
        self.manager = InMemoryRemoteLogMetadataManager()
        self.listener = listen()
        self.changes = RemoteMetadataChanges(self.listener.getsockname())
        self._life = AsyncExitStack()

    async def start(self) -> None:
        await self._life.enter_async_context(MetadataChangeServer(self.listener, self.manager))

    async def stop(self) -> None:
        await self._life.aclose()


@pytest.fixture
async def processes() -> AsyncIterator[Processes]:
    made = Processes()
    with made.listener:
        yield made
        made.changes.close()
        await made.stop()


async def test_the_remote_log_process_makes_the_changes(processes: Processes) -> None:
    await processes.start()
    changes, state = processes.changes, processes.manager.state
    await changes.put_log_start(PARTITION, START)
    await changes.put_topic_deletion(TOPIC, "orders", is_confirmed=False)
    await changes.change_topic_tier_config(TOPIC, "orders", {"local.retention.ms": "5"}, allow)
    assert state.log_start_offset(PARTITION) == 42
    assert set(state.topic_deletions()) == {TOPIC}
    assert state.topic_tier_config(TOPIC) == {"local.retention.ms": "5"}


async def test_an_error_keeps_its_type(processes: Processes) -> None:
    await processes.start()
    with pytest.raises(NotAllowedError, match=r"before: \{\}"):
        await processes.changes.change_topic_tier_config(TOPIC, "orders", {"local.retention.ms": "5"}, refuse)
    processes.manager.fail_writes = OwnershipLostError("a newer owner")
    with pytest.raises(OwnershipLostError, match="a newer owner"):
        await processes.changes.put_log_start(PARTITION, START)


async def test_the_next_process_answers_after_the_end_of_one(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def hangs(*arguments: object) -> None:
        begun.set()
        await asyncio.Event().wait()

    await processes.start()
    with monkeypatch.context() as patch:
        patch.setattr(processes.manager, "put_log_start", hangs)
        change = asyncio.create_task(processes.changes.put_log_start(PARTITION, START))
        await begun.wait()
        await processes.stop()
        with pytest.raises(RemoteLogMetadataNotReadyError, match="does not answer: the remote-log process ended"):
            await change
    next_change = asyncio.create_task(processes.changes.put_log_start(PARTITION, START))
    await processes.start()
    await next_change
    assert processes.manager.state.log_start_offset(PARTITION) == 42


async def test_a_change_that_nobody_waits_for_is_not_made_later(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would undo the changes that its client has made since, through another proxy."""
    monkeypatch.setattr(metadata_changes, "_TIMEOUT_MS", 50)
    changes, manager = processes.changes, processes.manager
    with pytest.raises(RemoteLogMetadataNotReadyError):
        await changes.change_topic_tier_config(TOPIC, "orders", {"local.retention.ms": "5"}, allow)
    await manager.change_topic_tier_config(TOPIC, "orders", {"local.retention.ms": "9"}, allow)
    await processes.start()
    monkeypatch.undo()
    await changes.put_log_start(PARTITION, START)  # the same connection, behind the change
    assert manager.state.topic_tier_config(TOPIC) == {"local.retention.ms": "9"}


@pytest.mark.parametrize("error", [LibraryError(), UnreadableError(text="a defect")])
async def test_a_defect_fails_one_change_alone(processes: Processes, error: Exception) -> None:
    await processes.start()
    processes.manager.fail_writes = error
    with pytest.raises(RemoteLogError, match=r"the call failed: .*Error"):
        await processes.changes.put_log_start(PARTITION, START)
    processes.manager.fail_writes = None
    await processes.changes.put_log_start(PARTITION, START)


async def test_a_cut_message_leaves_no_descriptor_behind(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    await processes.start()
    await processes.changes.put_log_start(PARTITION, START)
    before = open_files()

    def no_file(name: str) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "memfd_create", no_file)
    for _ in range(5):
        with pytest.raises(RemoteLogMetadataNotReadyError):
            await processes.changes.put_topic_deletion(TOPIC, "o" * 100_000, is_confirmed=False)
        await processes.changes.put_log_start(PARTITION, START)
    assert open_files() <= before
