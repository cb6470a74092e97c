"""Calls that hang hold up no call of another kind: copies, deletions and the others have threads of their own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import build_segment, metadata_of
from tests.support.servers.racing_s3 import RacingS3
from tests.support.tiers.waiting import until
from tiers.errors import RemoteResourceNotFoundError
from tiers.model.ids import RemoteLogSegmentId
from tiers.storage import file_system
from tiers.storage.activity import note_progress
from tiers.storage.local import LocalRemoteStorageManager
from tiers.storage.remote_storage_manager import RemoteStorageManager
from tiers.storage.s3.storage import S3RemoteStorageManager


def of_files(folder: Path) -> RemoteStorageManager:
    return LocalRemoteStorageManager({"path": str(folder), "cluster.id": "cluster-1", "threads": "4"})


@contextlib.asynccontextmanager
async def opened(manager: RemoteStorageManager) -> AsyncIterator[RemoteStorageManager]:
    await manager.open()
    try:
        yield manager
    finally:
        await manager.close()


async def test_hung_copies_leave_connections_of_s3_to_the_others(tmp_path: Path) -> None:
    built = build_segment(tmp_path / "log", [batch_of(0, 3)])
    metadata = metadata_of(built)
    data = built.log_segment_data(metadata)
    async with RacingS3() as server:
        settings = server.settings() | {"cluster.id": "c", "max.concurrency": "4"}
        async with opened(S3RemoteStorageManager(settings)) as storage:
            await storage.copy_log_segment_data(metadata, data)
            server.writes_go_on.clear()
            async with asyncio.TaskGroup() as group:
                attempts = [
                    replace(metadata, segment_id=RemoteLogSegmentId(metadata.topic_id_partition, uuid.uuid4()))
                    for _ in range(8)
                ]
                copies = [group.create_task(storage.copy_log_segment_data(each, data)) for each in attempts]
                await until(lambda: server.hanging == 2)  # half of the connections
                assert await storage.delete_log_segment_data(metadata)
                with pytest.raises(RemoteResourceNotFoundError):
                    await storage.get_object("small")
                assert server.hanging == 2
                assert not any(copy.done() for copy in copies)
                server.writes_go_on.set()
            assert await storage.fetch_indexes(attempts[-1]) == data.indexes


class Gate:
    """Holds every call of a function until the test opens the gate."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self._loop = asyncio.get_running_loop()
        self.waiting = asyncio.Semaphore(0)

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def gated(*arguments: Any, **options: Any) -> Any:
            self._loop.call_soon_threadsafe(self.waiting.release)
            self._opened.wait()
            return function(*arguments, **options)

        return gated

    def open(self) -> None:
        self._opened.set()


async def test_hung_copies_hold_up_no_deletion_and_no_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    built = build_segment(tmp_path / "log", [batch_of(0, 3)])
    metadata = metadata_of(built)
    data = built.log_segment_data(metadata)
    gate = Gate()
    monkeypatch.setattr(file_system, "_pieces_of", gate.before(file_system._pieces_of))
    async with opened(of_files(folder)) as storage:
        async with asyncio.TaskGroup() as group:
            attempts = [
                replace(metadata, segment_id=RemoteLogSegmentId(metadata.topic_id_partition, uuid.uuid4()))
                for _ in range(8)
            ]
            copies = [group.create_task(storage.copy_log_segment_data(each, data)) for each in attempts]
            for _ in range(4):  # as many as there are threads
                await gate.waiting.acquire()
            await storage.put_object("manifest", b"{}")
            assert await storage.get_object("manifest") == b"{}"
            assert await storage.delete_log_segment_data(metadata)
            assert not any(copy.done() for copy in copies)
            gate.open()
        assert await storage.fetch_indexes(attempts[0]) == data.indexes


async def test_a_copy_waits_for_its_thread_while_another_copy_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, go_on = tmp_path / "store", threading.Event()
    folder.mkdir()
    built = build_segment(tmp_path / "log", [batch_of(0, 3)])
    metadata = metadata_of(built)
    data = built.log_segment_data(metadata)
    pieces_of = file_system._pieces_of

    def slowly(*arguments: Any) -> Iterator[bytes]:
        while not go_on.wait(0.01):
            note_progress()
        return pieces_of(*arguments)

    monkeypatch.setattr(file_system, "_pieces_of", slowly)
    settings = {"path": str(folder), "cluster.id": "cluster-1", "threads": "1", "timeout.ms": "2000"}
    async with opened(LocalRemoteStorageManager(settings)) as storage, asyncio.TaskGroup() as group:
        other = replace(metadata, segment_id=RemoteLogSegmentId(metadata.topic_id_partition, uuid.uuid4()))
        copies = [group.create_task(storage.copy_log_segment_data(each, data)) for each in (metadata, other)]
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await until(lambda: loop.time() - began_s > 3.0)  # longer than the deadline
        assert not any(copy.done() for copy in copies)
        go_on.set()
