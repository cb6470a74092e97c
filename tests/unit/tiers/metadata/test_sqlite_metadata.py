"""The example `docs/examples/sqlite-metadata`: one proxy at a time, and no record lost over crashes and mistakes."""

from __future__ import annotations

import asyncio
import importlib
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from uuid import uuid4

import pytest

from protocol.primitives import write_uvarint
from tests.support.examples import install_example
from tests.support.repository import ROOT
from tests.support.tiers.segment_metadata import copied, segment
from tests.support.tiers.waiting import until
from tiers.config.managers import create_record_log
from tiers.errors import OwnershipLostError, RemoteLogMetadataError, RemoteLogMetadataNotReadyError
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataManager
from tiers.metadata.single_writer_log import SingleWriterLog
from tiers.metadata.state.writer import RemoteLogMetadataStateWriter
from tiers.model.ids import TopicIdPartition

PARTITION = TopicIdPartition(uuid4(), 0, "orders")
NAME = "metadata.sqlite"
HOLDER = """
import sys, time
from pathlib import Path
from sqlite_metadata import SqliteRecordLog
log = SqliteRecordLog(Path(sys.argv[1]))
log.open("c", may_create=True)
log.append([(b"key", b"value")], 0)
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def site_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install_example("sqlite-metadata", tmp_path / "site-packages")
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    return tmp_path / "site-packages"


def manager_over(
    folder: Path, *, state: str = "state", cluster_id: str = "c", refusal: str | None = None, name: str = NAME
) -> RemoteLogMetadataManager:
    async def refusal_to_create() -> str | None:
        return refusal

    log = create_record_log("sqlite", {"path": str(folder / name)})
    return RemoteLogMetadataManager(SingleWriterLog(log, folder / state, cluster_id, refusal_to_create))


@asynccontextmanager
async def opened(manager: RemoteLogMetadataManager) -> AsyncIterator[RemoteLogMetadataManager]:
    try:
        await manager.log.open()
        yield manager
    finally:
        await manager.log.close()


async def refused(manager: RemoteLogMetadataManager, said: str) -> None:
    with pytest.raises(RemoteLogMetadataError, match=said) as error:
        async with opened(manager):
            pass
    assert not error.value.retriable


def ends(manager: RemoteLogMetadataManager) -> list[int]:
    return [each.end_offset for each in manager.state.list_remote_log_segments(PARTITION)]


@pytest.mark.parametrize("state", ["state", "another"])
async def test_segments_survive_a_restart_and_the_loss_of_the_state(tmp_path: Path, state: str) -> None:
    async with opened(manager_over(tmp_path)) as manager:
        for start in (0, 100):
            await copied(manager, segment(PARTITION, start, start + 99))
        before = manager.log.position(PARTITION)
    async with opened(manager_over(tmp_path, state=state)) as manager:
        assert ends(manager) == [99, 199]
        assert manager.log.position(PARTITION) == before
        assert await manager.log.confirms(PARTITION, before, 1000)
        await copied(manager, segment(PARTITION, 200, 299))
        assert manager.log.position(PARTITION).leader_epoch > before.leader_epoch
        assert await manager.log.confirms(PARTITION, before, 1000)


async def test_a_file_that_is_not_the_expected_one_is_refused(tmp_path: Path) -> None:
    """A lost file is not replaced by an empty one."""
    await refused(manager_over(tmp_path, refusal="the store holds segments"), "the store holds segments")
    await refused(manager_over(tmp_path, name=f"nowhere/{NAME}"), "nowhere")
    path = tmp_path / NAME
    assert not path.exists()
    async with opened(manager_over(tmp_path)) as manager:
        await copied(manager, segment(PARTITION, 0, 99))
    await refused(manager_over(tmp_path, state="another", cluster_id="d"), "of the Kafka cluster c, and not of d")
    path.unlink()
    await refused(manager_over(tmp_path), "is missing, but")
    with closing(importlib.import_module("sqlite_metadata").SqliteRecordLog(path)) as log:
        log.open("c", may_create=True)
    await refused(manager_over(tmp_path), "is another log, but")


@pytest.mark.parametrize(("passed_ms", "is_kept"), [(302_400_000, True), (302_400_001, False), (-3_600_000, False)])
async def test_a_state_that_may_lack_tombstones_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passed_ms: int, is_kept: bool
) -> None:
    """Tombstones are kept for seven days, and half of it counts. A clock that was set back measures no age."""
    now_ms = 1_700_000_000_000

    def manager() -> RemoteLogMetadataManager:
        log = create_record_log("sqlite", {"path": str(tmp_path / NAME)})
        return RemoteLogMetadataManager(SingleWriterLog(log, tmp_path / "s", "c", None, wall_clock_ms=lambda: now_ms))

    async with opened(manager()) as first:
        await copied(first, segment(PARTITION, 0, 99))
        await until(lambda: 0 in first.state.read_at_ms())
    now_ms += passed_ms
    cleared: list[object] = []
    start_over = RemoteLogMetadataStateWriter.start_over_partitions

    def noted(writer: RemoteLogMetadataStateWriter, numbers: list[int], reason: str, at_ms: int) -> None:
        cleared.append(numbers)
        start_over(writer, numbers, reason, at_ms)

    monkeypatch.setattr(RemoteLogMetadataStateWriter, "start_over_partitions", noted)
    async with opened(manager()) as second:
        assert (ends(second), cleared) == ([99], [] if is_kept else [[0]])


@pytest.fixture
def holder(tmp_path: Path, site_packages: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the file."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "metadata.sqlite")]
    environment = {"PYTHONPATH": f"{site_packages}:{ROOT}"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


async def test_the_lock_of_a_killed_process_is_free_and_its_records_stay(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    await refused(manager_over(tmp_path), rf"process {holder.pid}\)")
    holder.send_signal(signal.SIGKILL)
    await asyncio.to_thread(holder.wait)
    log = importlib.import_module("sqlite_metadata").SqliteRecordLog(tmp_path / "metadata.sqlite")
    assert log.open("c", may_create=False) is not None
    with closing(log):
        assert [record.key for record in log.read(0, 10)] == [b"key"]


async def test_a_removed_lock_file_does_not_let_two_proxies_write(tmp_path: Path) -> None:
    first = manager_over(tmp_path)
    async with opened(first):
        await copied(first, segment(PARTITION, 0, 99))
        (tmp_path / "metadata.sqlite.lock").unlink()
        async with opened(manager_over(tmp_path, state="another")) as second:
            with pytest.raises(OwnershipLostError):
                await first.add_remote_log_segment_metadata(segment(PARTITION, 100, 199))
            with pytest.raises(RemoteLogMetadataNotReadyError):
                await first.log.ensure_fresh(PARTITION, 0, 60_000)
            assert not first.log.owns(PARTITION)
            await until(lambda: first.log.status().alarm is not None)
            await copied(second, segment(PARTITION, 100, 199))
            assert second.log.owns(PARTITION)
            assert ends(second) == [99, 199]


async def test_a_file_that_was_restored_from_an_old_copy_is_refused(tmp_path: Path) -> None:
    path, copy = tmp_path / "metadata.sqlite", tmp_path / "copy"
    async with opened(manager_over(tmp_path)) as manager:
        await copied(manager, segment(PARTITION, 0, 99))
    shutil.copy(path, copy)
    async with opened(manager_over(tmp_path)) as manager:
        await copied(manager, segment(PARTITION, 100, 199))
        position = manager.log.position(PARTITION)
    shutil.copy(copy, path)
    await refused(manager_over(tmp_path), "restored from an old copy")
    async with opened(manager_over(tmp_path, state="another")) as manager:
        assert not await manager.log.confirms(PARTITION, position, 1000)


async def test_a_write_with_an_unknown_end_is_read_before_the_next(tmp_path: Path) -> None:
    manager = manager_over(tmp_path)
    async with opened(manager):
        log = manager.log._log  # type: ignore[attr-defined]  # the log behind the interface
        append, first, second = log.append, segment(PARTITION, 0, 99), segment(PARTITION, 100, 199)

        def unanswered(*records: object) -> None:
            append(*records)
            raise RemoteLogMetadataError("disk I/O error")

        log.append = unanswered
        with pytest.raises(RemoteLogMetadataError, match="disk I/O error"):
            await manager.add_remote_log_segment_metadata(first)
        log.append = append
        await manager.add_remote_log_segment_metadata(second)
        assert ends(manager) == [99, 199]
        assert manager.log.owns(PARTITION)


async def test_nothing_is_fresh_or_owned_while_the_file_cannot_be_read(tmp_path: Path) -> None:
    manager = manager_over(tmp_path)
    async with opened(manager):
        log = manager.log._log  # type: ignore[attr-defined]  # the log behind the interface
        read = log.read

        def fails(offset: int, max_records: int) -> list[object]:
            raise RemoteLogMetadataError("disk I/O error")

        log.read = fails
        await until(lambda: manager.log.status().alarm == "disk I/O error")
        with pytest.raises(RemoteLogMetadataNotReadyError, match="disk I/O error"):
            await manager.log.ensure_fresh(PARTITION, 0, 60_000)
        assert not manager.log.owns(PARTITION)
        log.read = read
        await until(lambda: manager.log.owns(PARTITION))
        assert manager.log.status().alarm is None
        await manager.log.ensure_fresh(PARTITION, 0, 60_000)


async def test_a_cancelled_write_ends_before_the_next_begins(tmp_path: Path) -> None:
    manager = manager_over(tmp_path)
    async with opened(manager):
        log = manager.log._log  # type: ignore[attr-defined]  # the log behind the interface
        append, begun, goes_on = log.append, threading.Event(), threading.Event()

        def slow(*records: object) -> None:
            begun.set()
            goes_on.wait()
            append(*records)

        log.append = slow
        first = asyncio.create_task(manager.add_remote_log_segment_metadata(segment(PARTITION, 0, 99)))
        await asyncio.to_thread(begun.wait)
        first.cancel()
        log.append = append
        second = asyncio.create_task(manager.add_remote_log_segment_metadata(segment(PARTITION, 100, 199)))
        goes_on.set()
        await second
        assert ends(manager) == [99, 199]
        assert first.cancelled()


async def test_records_of_a_later_release_stop_the_manager(tmp_path: Path) -> None:
    async with opened(manager_over(tmp_path)) as manager:
        await copied(manager, segment(PARTITION, 0, 99))
    value = write_uvarint(1) + write_uvarint(1900) + write_uvarint(0)
    with closing(sqlite3.connect(tmp_path / "metadata.sqlite", isolation_level=None)) as connection:
        connection.execute("INSERT INTO records (timestamp_ms, key, value) VALUES (0, ?, ?)", (b"key", value))
    await refused(manager_over(tmp_path), "later release")


def test_a_later_record_with_the_same_key_replaces_the_earlier_one(tmp_path: Path) -> None:
    with closing(importlib.import_module("sqlite_metadata").SqliteRecordLog(tmp_path / "log")) as log:
        log.open("c", may_create=True)
        log.append([(b"a", b"1"), (b"b", b"1"), (b"a", b"2")], 5)
        assert [(record.offset, record.key, record.value) for record in log.read(0, 10)] == [
            (2, b"b", b"1"),
            (3, b"a", b"2"),
        ]
        log.append([(b"a", None)], 7)
        log.drop_tombstones(7)
        assert len(log.read(0, 10)) == 2
        log.drop_tombstones(8)
        assert [record.key for record in log.read(0, 10)] == [b"b"]
        assert log.next_offset() == 5
        assert (log.epoch_before(1), log.epoch_before(2) > 0) == (-1, True)
