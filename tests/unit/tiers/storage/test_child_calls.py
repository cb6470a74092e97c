"""A store in a child process: stuck calls, replaced processes, and the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.fakes.copies import other_attempt, segment_to_copy
from tests.support.fakes.stalling_files import make
from tests.support.tiers.waiting import until
from tiers.errors import CredentialsRefusedError, RetriableRemoteStorageError
from tiers.storage import retries
from tiers.storage.child_calls import MAX_RETIRED, ChildCalls
from tiers.storage.file_system import FileSystemRemoteStorageManager


class Storage(FileSystemRemoteStorageManager):
    def __init__(self, folder: Path, timeout_ms: int) -> None:
        self.children = ChildCalls(make, {"path": str(folder), "timeout.ms": str(timeout_ms)}, grace_s=0.5)
        super().__init__(self.children)

    @property
    def processes(self) -> list[int]:
        return self.children.processes


@contextlib.asynccontextmanager
async def opened(folder: Path, timeout_ms: int = 60_000) -> AsyncIterator[Storage]:
    storage = Storage(folder, timeout_ms)
    try:
        await storage.open()
        yield storage
    finally:
        await storage.close()
        with pytest.raises(RuntimeError, match="not open"):
            await storage.get_object("key")
        assert storage.processes == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_right_that_is_missing_for_good_ends_no_copy(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "PAUSE_MS", 0)
    metadata, data = segment_to_copy(tmp_path)
    async with opened(folder) as storage, asyncio.TaskGroup() as group:
        await storage.put_object("k", b"data")
        (folder / "hold").touch()
        (folder / "accepted").write_bytes(b"others")
        for number in range(MAX_RETIRED + 2):
            group.create_task(storage.copy_log_segment_data(other_attempt(metadata), data))
            await until(lambda number=number: len([*folder.rglob("*.log")]) > number)  # type: ignore[misc]
            with pytest.raises(CredentialsRefusedError):
                await storage.get_object("k")
        assert len(storage.processes) <= MAX_RETIRED + 2
        (folder / "ticket").write_bytes(b"others")
        assert await storage.get_object("k") == b"data"
        (folder / "hold").unlink()


async def test_a_missing_right_costs_no_credentials_that_work(folder: Path) -> None:
    """The newer ones are not valid yet, or cannot be had now."""
    async with opened(folder) as storage:
        await storage.put_object("k", b"data")
        (folder / "ticket").write_bytes(b"valid from tomorrow on")
        with pytest.raises(CredentialsRefusedError):
            await storage.get_object("forbidden")
        assert await storage.get_object("k") == b"data"


@pytest.mark.parametrize("fault", ["frozen", "stuck"])
async def test_a_stuck_call_meets_its_deadline_and_a_new_process_takes_over(tmp_path: Path, fault: str) -> None:
    """A frozen one shares its interpreter with every other call there, and none with this process."""
    async with opened(tmp_path, 300) as storage:
        [first] = storage.processes
        with pytest.raises(RetriableRemoteStorageError, match="no progress"):
            await storage.get_object(fault)
        await until_it_works(storage)
        assert first not in storage.processes[-1:]
        await until(lambda: len(storage.processes) == 1)


async def until_it_works(storage: Storage) -> None:
    while True:
        try:
            async for _ in storage.list_objects(""):  # its deadline is longer
                pass
        except RetriableRemoteStorageError:
            continue
        return


async def test_however_often_it_gets_stuck_there_are_few_processes(tmp_path: Path) -> None:
    async with opened(tmp_path, 200) as storage:
        most = 0
        for _ in range(MAX_RETIRED + 3):
            await until_it_works(storage)
            calls = [storage.get_object("frozen") for _ in range(20)]
            assert {type(each) for each in await asyncio.gather(*calls, return_exceptions=True)} == {
                RetriableRemoteStorageError
            }
            most = max(most, len(storage.processes))
        assert most <= 1 + MAX_RETIRED


async def test_a_process_that_ends_fails_its_calls_and_is_replaced(tmp_path: Path) -> None:
    async with opened(tmp_path) as storage:
        stuck = asyncio.gather(storage.get_object("stuck"), return_exceptions=True)
        with pytest.raises(RetriableRemoteStorageError, match="has ended"):
            await storage.get_object("dies")
        assert [type(each) for each in await stuck] == [RetriableRemoteStorageError]
        await storage.put_object("key", b"data")
        await until(lambda: len(storage.processes) == 1)  # a process closes its socket before it is gone
        [pid] = storage.processes
        os.kill(pid, signal.SIGKILL)
        await until_it_works(storage)


async def test_a_cancelled_copy_is_taken_back_by_the_child(folder: Path, tmp_path: Path) -> None:
    metadata, data = segment_to_copy(tmp_path, 5 << 19)
    hold = folder / "hold"
    hold.touch()

    def written() -> bool:
        with contextlib.suppress(FileNotFoundError):  # deleted since it was found
            return any(file.stat().st_size for file in folder.rglob("*.log"))
        return False

    async with opened(folder) as storage:
        async with asyncio.TaskGroup() as group:
            copying = group.create_task(storage.copy_log_segment_data(metadata, data))
            await until(written)
            copying.cancel()
        assert written()
        [pid] = storage.processes
        # The cancellation is sent before this call, on the same pipe.
        assert len([stored async for stored in storage.list_objects("")]) == 2
        hold.unlink()
        await until(lambda: not written())
        assert storage.processes == [pid]


@pytest.mark.parametrize("end", ["cancelled", "killed"])
async def test_an_unfinished_replacement_leaves_the_object(tmp_path: Path, end: str) -> None:
    """The replaced object may have the only key of an encrypted segment."""
    hold = tmp_path / "hold"
    async with opened(tmp_path) as storage:
        await storage.put_object("a/b", b"before")
        hold.touch()
        putting = asyncio.gather(storage.put_object("a/b", b"after"), return_exceptions=True)
        await until(lambda: b"after" in [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()])
        assert await storage.get_object("a/b") == b"before"
        if end == "killed":
            os.kill(storage.processes[-1], signal.SIGKILL)
            assert [type(each) for each in await putting] == [RetriableRemoteStorageError]
        else:
            putting.cancel()
            await until(putting.done)
        hold.unlink()
        if end == "cancelled":
            await until(lambda: not [*(tmp_path / ".tmp").iterdir()])
        await until_it_works(storage)
        assert await storage.get_object("a/b") == b"before"


async def test_a_copy_that_makes_progress_lives_longer_than_its_deadline(folder: Path, tmp_path: Path) -> None:
    metadata, data = segment_to_copy(tmp_path, 11 << 20)
    (folder / "slow").touch()
    async with opened(folder, 2000) as storage:
        await until_it_works(storage)
        [pid] = storage.processes
        await storage.copy_log_segment_data(metadata, data)  # a quarter of a second for each of 12 pieces
        (folder / "slow").unlink()
        assert await storage.fetch_log_segment(metadata, 0) == data.log_segment.read_bytes()
        assert storage.processes == [pid]


async def test_the_child_of_a_parent_that_is_killed_ends(tmp_path: Path) -> None:
    async with opened(tmp_path) as storage:
        [pid], [child] = storage.processes, storage.children._children
        child._transport.abort()  # all that a dead parent leaves behind is a closed socket
        await until(lambda: not child.is_alive())
    assert not is_alive(pid)
