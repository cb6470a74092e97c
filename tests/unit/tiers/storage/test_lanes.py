"""Calls that hang hold up no call of another kind: copies, deletions and the others have threads of their own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fakes.copies import Copied, other_attempt, segment_to_copy
from tests.support.servers.racing_s3 import RacingS3
from tests.support.tiers.waiting import until
from tiers.errors import RemoteResourceNotFoundError
from tiers.storage import file_system
from tiers.storage.local import LocalRemoteStorageManager
from tiers.storage.remote_storage_manager import RemoteStorageManager
from tiers.storage.s3.storage import S3RemoteStorageManager


@pytest.fixture
def segment(tmp_path: Path) -> Copied:
    return segment_to_copy(tmp_path)


@contextlib.asynccontextmanager
async def eight_hung_copies(
    storage: RemoteStorageManager, segment: Copied, go_on: Callable[[], None]
) -> AsyncIterator[list[asyncio.Task[bytes | None]]]:
    """Other attempts at a segment, of which the last one is there in the end."""
    metadata, data = segment
    attempts = [other_attempt(metadata) for _ in range(8)]
    async with asyncio.TaskGroup() as group:
        yield [group.create_task(storage.copy_log_segment_data(each, data)) for each in attempts]
        go_on()
    assert await storage.fetch_indexes(attempts[-1]) == data.indexes
    await storage.close()


async def test_hung_copies_leave_connections_of_s3_to_the_others(segment: Copied) -> None:
    async with RacingS3() as server:
        storage = S3RemoteStorageManager(server.settings() | {"cluster.id": "c", "max.concurrency": "4"})
        await storage.open()
        await storage.copy_log_segment_data(*segment)
        server.writes_go_on.clear()
        async with eight_hung_copies(storage, segment, server.writes_go_on.set) as copies:
            await until(lambda: server.hanging == 2)  # half of the connections
            assert await storage.delete_log_segment_data(segment[0])
            with pytest.raises(RemoteResourceNotFoundError):
                await storage.get_object("small")
            assert server.hanging == 2
            assert not any(copy.done() for copy in copies)


async def test_hung_copies_hold_up_no_deletion_and_no_read(
    segment: Copied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store").mkdir()
    storage = LocalRemoteStorageManager({"path": str(tmp_path / "store"), "cluster.id": "c", "threads": "4"})
    await storage.open()
    go_on, pieces_of, begun = threading.Event(), file_system._pieces_of, []

    def held(*arguments: Any) -> Iterator[bytes]:
        begun.append(arguments)
        go_on.wait()
        return pieces_of(*arguments)

    monkeypatch.setattr(file_system, "_pieces_of", held)
    async with eight_hung_copies(storage, segment, go_on.set) as copies:
        await until(lambda: len(begun) == 4)  # as many as there are threads
        await storage.put_object("manifest", b"{}")
        assert await storage.get_object("manifest") == b"{}"
        assert await storage.delete_log_segment_data(segment[0])
        assert not any(copy.done() for copy in copies)
