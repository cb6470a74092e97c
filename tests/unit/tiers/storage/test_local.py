"""The promises of a folder as a store: whole objects or none, and no leftovers."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tests.support.fakes.copies import Copied, opened, segment_to_copy
from tests.support.tiers.waiting import until
from tiers.durable_folders import create_folder
from tiers.errors import RemoteResourceNotFoundError, RemoteStorageError, RetriableRemoteStorageError
from tiers.storage import local
from tiers.storage.file_system import ThreadCalls
from tiers.storage.local import LocalRemoteStorageManager


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


@pytest.fixture
async def storage(root: Path) -> AsyncIterator[LocalRemoteStorageManager]:
    async with opened(LocalRemoteStorageManager({"path": str(root), "cluster.id": "c"})) as manager:
        yield manager


@pytest.fixture
def segment(tmp_path: Path) -> Copied:
    return segment_to_copy(tmp_path)


def replace_by_an_empty_folder(root: Path) -> None:
    """The folder below a mount, for example."""
    unmount(root)
    root.mkdir()


def unmount(root: Path) -> None:
    root.rename(root.with_name("elsewhere"))


async def keys(storage: LocalRemoteStorageManager) -> list[str]:
    return [stored.key async for stored in storage.list_objects("")]


def files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/not/mounted", "mount it, or change `path`; create it only"),
        ("/proc/sys", r"^/proc/sys: no folder can be created in it: change `path`"),
    ],
)
async def test_a_directory_that_cannot_be_used_is_named_and_not_created(path: str, said: str) -> None:
    manager = LocalRemoteStorageManager({"path": path, "cluster.id": "c"})
    with pytest.raises(RemoteStorageError, match=said) as raised:
        await manager.open()
    assert (raised.value.retriable, os.access("/not", os.F_OK)) == (False, False)
    await manager.close()


@pytest.mark.parametrize("fault", [unmount, replace_by_an_empty_folder])
async def test_a_store_that_went_away_is_down_and_has_no_missing_objects(
    storage: LocalRemoteStorageManager, root: Path, segment: Copied, fault: Callable[[Path], None]
) -> None:
    """An unmounted file system must not look like deleted segments. It is an outage, since it may be mounted again."""
    metadata, data = segment
    await storage.copy_log_segment_data(metadata, data)
    fault(root)
    for call in (
        storage.fetch_indexes(metadata),
        storage.delete_log_segment_data(metadata),
        storage.copy_log_segment_data(metadata, data),
        keys(storage),
    ):
        with pytest.raises(RetriableRemoteStorageError, match=r"lacks the folder \.tmp, .* Is it mounted\?") as raised:
            await call
        assert not isinstance(raised.value, RemoteResourceNotFoundError)


async def test_a_failed_copy_leaves_no_object_and_no_temporary_file(
    storage: LocalRemoteStorageManager, root: Path, segment: Copied, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(RetriableRemoteStorageError, match=rf"^{root}/\S+: No space left on device$"):
            await storage.copy_log_segment_data(*segment)
    assert files(root) == []
    await storage.copy_log_segment_data(*segment)
    assert len(files(root)) == 2


class SlowFolder:
    """Holds the first move before it creates the folder of its target."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held, self.answer = threading.Event(), threading.Event()
        monkeypatch.setattr(local, "create_folder", self._create_folder)

    def _create_folder(self, folder: Path, root: Path) -> None:
        if folder.name != ".tmp" and not self.held.is_set():
            self.held.set()
            self.answer.wait()
        create_folder(folder, root)


async def test_what_passed_its_deadline_replaces_nothing_and_brings_nothing_back(
    storage: LocalRemoteStorageManager, root: Path, segment: Copied, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = storage.calls
    assert isinstance(threads, ThreadCalls)

    async def passes_its_deadline(write: Callable[[], Awaitable[object]]) -> SlowFolder:
        """A busy machine may not reach the folder before the deadline. The call is made again then."""
        folders = SlowFolder(monkeypatch)
        threads.timeout_s = 0.05
        while not folders.held.is_set():
            with pytest.raises(RetriableRemoteStorageError, match=r"no progress in 0\.05 s"):
                await write()
            await until(lambda: folders.held.is_set() or threads.abandoned == 0)
        threads.timeout_s = None
        return folders

    folders = await passes_its_deadline(lambda: storage.put_object("a/manifest", b"earlier"))
    await storage.put_object("a/manifest", b"later")
    folders.answer.set()
    await until(lambda: threads.abandoned == 0)
    assert await storage.get_object("a/manifest") == b"later"

    folders = await passes_its_deadline(lambda: storage.copy_log_segment_data(*segment))
    assert await storage.delete_log_segment_data(segment[0])
    folders.answer.set()
    await until(lambda: threads.abandoned == 0)
    assert [path.name for path in files(root)] == ["manifest"]


async def test_a_copy_whose_temporary_file_another_writer_deleted_is_repeated(
    storage: LocalRemoteStorageManager, root: Path, segment: Copied, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders, store = SlowFolder(monkeypatch), storage.copy_log_segment_data

    async def first_writer() -> None:
        with pytest.raises(RetriableRemoteStorageError, match="is gone: another writer of the object deleted it"):
            await store(*segment)

    async with asyncio.TaskGroup() as group:
        group.create_task(first_writer())
        await until(folders.held.is_set)
        await store(*segment)
        folders.answer.set()
    await store(*segment)
    assert len(files(root)) == 2


async def test_a_folder_is_no_object_and_an_object_no_folder(
    storage: LocalRemoteStorageManager, root: Path, segment: Copied
) -> None:
    await storage.put_object("file", b"")
    with pytest.raises(RemoteStorageError) as raised:
        await storage.put_object("file/inside", b"")
    assert not raised.value.retriable
    await storage.copy_log_segment_data(*segment)
    (log,) = [path for path in files(root) if path.suffix == ".log"]
    log.unlink()
    log.mkdir()
    with pytest.raises(RemoteStorageError, match="Is a directory"):
        await storage.copy_log_segment_data(*segment)


async def test_a_repeated_deletion_is_durable(
    storage: LocalRemoteStorageManager, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await storage.put_object("object", b"")
    answers = iter([RetriableRemoteStorageError("the disk failed"), None])
    synced: list[Path] = []

    def sync(folder: Path) -> None:
        synced.append(folder)
        if answer := next(answers):
            raise answer

    monkeypatch.setattr(local, "sync_folder", sync)
    with pytest.raises(RetriableRemoteStorageError):
        await storage.delete_object("object")
    await storage.delete_object("object")
    assert synced == [root, root]


async def test_delete_removes_what_a_crash_left(
    storage: LocalRemoteStorageManager, root: Path, segment: Copied
) -> None:
    metadata, _ = segment
    (root / ".tmp" / f"{metadata.segment_id.id}.half").write_bytes(b"torn")
    (root / ".tmp" / "other.half").write_bytes(b"of another attempt")
    assert await keys(storage) == []
    assert await storage.delete_log_segment_data(metadata)
    assert [path.name for path in files(root)] == ["other.half"]


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../outside", "a//b", "a/./b", ".tmp/x"])
async def test_keys_stay_inside_the_store(storage: LocalRemoteStorageManager, key: str) -> None:
    with pytest.raises(ValueError, match="not a key"):
        await storage.put_object(key, b"")


async def test_an_opening_removes_what_a_crash_left_of_small_objects_long_ago(root: Path) -> None:
    temporaries = root / ".tmp"
    temporaries.mkdir()
    old, new, of_a_segment = (temporaries / name for name in ("object.old", "object.new", "a-segments-uuid.old"))
    for path in (old, new, of_a_segment):
        path.write_bytes(b"half")
    for path in (old, of_a_segment):
        os.utime(path, (0, 0))
    manager = LocalRemoteStorageManager({"path": str(root), "cluster.id": "c"})
    await manager.open()
    await manager.close()
    assert sorted(temporaries.iterdir()) == sorted([new, of_a_segment])


def test_a_file_system_that_hangs_holds_up_no_end_of_the_process(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "object")  # a read of it hangs
    program = f"""
import asyncio
from tiers.durable_folders import create_folder
from tiers.errors import RetriableRemoteStorageError
from tiers.storage import local
from tiers.storage.local import LocalRemoteStorageManager

async def main():
    storage = LocalRemoteStorageManager({{"path": {str(tmp_path)!r}, "cluster.id": "c", "timeout.ms": "100"}})
    await storage.open()
    try:
        await storage.get_object("object")
    except RetriableRemoteStorageError:
        await storage.close()

asyncio.run(main())
"""
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
