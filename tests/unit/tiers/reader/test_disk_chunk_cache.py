"""The disk chunk cache keeps its limit, survives restarts, and fails no read."""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

import pytest

from tests.support.fakes.idle import wait_idle
from tiers.reader.chunk_cache import ChunkKey
from tiers.reader.chunk_files import ChunkFiles, file_bytes
from tiers.reader.disk_chunk_cache import DiskChunkCache, DiskChunkCacheSettings

SEGMENT = UUID(int=7)
CHUNK_BYTES = 4000
FILE_BYTES = file_bytes(CHUNK_BYTES)


class BrokenFiles(ChunkFiles):
    """Whatever `broken` names fails as a full or dying disk does."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.broken: set[str] = set()
        self.calls: list[str] = []

    def _ask(self, name: str) -> None:
        self.calls.append(name)
        if name in self.broken:
            raise OSError(errno.ENOSPC if name == "write" else errno.EIO, "broken")

    def load(self) -> list[tuple[ChunkKey, int]]:
        self._ask("load")
        return super().load()

    def read(self, keys: Sequence[ChunkKey]) -> list[memoryview]:
        self._ask("read")
        return super().read(keys)

    def write(self, key: ChunkKey, stored: memoryview, check: Callable[[], None]) -> None:
        self._ask("write")
        super().write(key, stored, check)


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "chunks"
        self.files = BrokenFiles(self.folder)
        self.now_ms = 0

    def cache(self, max_files: int = 3, max_pending_bytes: int = 1 << 20) -> DiskChunkCache:
        settings = DiskChunkCacheSettings(self.folder, max_files * FILE_BYTES, max_pending_bytes, rest_ms=1000)
        return DiskChunkCache(settings, lambda: self.now_ms, self.files)

    @property
    def bytes_on_disk(self) -> int:
        return sum(file_bytes(path.stat().st_size - 28) for path in self.folder.iterdir())


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def key(number: int) -> ChunkKey:
    return ChunkKey(SEGMENT, number)


def chunk(number: int) -> memoryview:
    return memoryview(bytes([number]) * CHUNK_BYTES)


async def put(cache: DiskChunkCache, *numbers: int) -> None:
    for number in numbers:
        cache.put(key(number), [chunk(number)])
        await wait_idle(cache)


async def held(cache: DiskChunkCache, numbers: Sequence[int]) -> list[int]:
    """Those that come back, each asked for alone."""
    found = []
    for number in numbers:
        if views := await cache.get([key(number)]):
            assert views == [chunk(number)]
            found.append(number)
    return found


@contextmanager
def warnings_of(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    told: list[str] = []
    with caplog.at_level(logging.WARNING, "tiers.reader"):
        yield told
    told += [record.message for record in caplog.records]


async def test_a_run_comes_back_up_to_what_is_missing(bench: Bench) -> None:
    async with bench.cache() as cache:
        await wait_idle(cache)
        cache.put(key(0), [chunk(0), chunk(1)])
        await wait_idle(cache)
        assert await cache.get([key(0), key(1), key(2)]) == [chunk(0), chunk(1)]
        assert await cache.get([key(2), key(0)]) == []
        assert (cache.hits, cache.misses) == (2, 2)
        assert bench.files.calls == ["load", "write", "write", "read"]


async def test_the_longest_unused_makes_room(bench: Bench) -> None:
    async with bench.cache(max_files=3) as cache:
        await wait_idle(cache)
        await put(cache, 0, 1, 2)
        assert await held(cache, [0]) == [0]
        await put(cache, 3)
        assert await held(cache, [0, 1, 2, 3]) == [0, 2, 3]
        assert cache.evictions == 1
        assert cache.size_bytes == bench.bytes_on_disk == 3 * FILE_BYTES


async def test_nothing_is_ever_above_the_bytes(bench: Bench) -> None:
    most = 0

    class Watched(BrokenFiles):
        def write(self, key: ChunkKey, stored: memoryview, check: Callable[[], None]) -> None:
            nonlocal most
            super().write(key, stored, check)
            most = max(most, bench.bytes_on_disk)

    bench.files = Watched(bench.folder)
    async with bench.cache(max_files=5) as cache:
        await wait_idle(cache)
        for first in range(0, 60, 12):
            cache.put(key(first), [chunk(number) for number in range(first, first + 12)])
            await wait_idle(cache)
            assert cache.size_bytes == bench.bytes_on_disk
    assert most == 5 * FILE_BYTES


async def test_it_outlives_the_process_and_a_smaller_size_holds_at_once(bench: Bench) -> None:
    async with bench.cache(max_files=3) as cache:
        await wait_idle(cache)
        await put(cache, 0, 1, 2)
    async with bench.cache(max_files=3) as cache:
        await wait_idle(cache)
        assert cache.size_bytes == 3 * FILE_BYTES
        assert await held(cache, [0, 1, 2]) == [0, 1, 2]
    async with bench.cache(max_files=1) as cache:
        await wait_idle(cache)
        assert await held(cache, [0, 1, 2]) == [2]
        assert cache.size_bytes == bench.bytes_on_disk == FILE_BYTES


async def test_a_file_that_is_not_whole_is_a_miss_and_goes(bench: Bench) -> None:
    async with bench.cache() as cache:
        await wait_idle(cache)
        await put(cache, 0, 1)
        path = bench.folder / f"{SEGMENT.hex}-0"
        path.write_bytes(path.read_bytes()[:-1])
        assert await held(cache, [0, 1]) == [1]
        await wait_idle(cache)
        assert not path.exists()
        assert cache.size_bytes == FILE_BYTES
        await put(cache, 0)
        assert await held(cache, [0]) == [0]


async def test_files_that_somebody_removed_are_misses(bench: Bench) -> None:
    async with bench.cache() as cache:
        await wait_idle(cache)
        await put(cache, 0, 1)
        (bench.folder / f"{SEGMENT.hex}-0").unlink()
        assert await held(cache, [0, 1]) == [1]
        assert cache.size_bytes == FILE_BYTES


async def test_a_full_disk_is_a_warning_and_tried_again_later(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    with warnings_of(caplog) as told:
        async with bench.cache() as cache:
            await wait_idle(cache)
            await put(cache, 0)
            bench.files.broken = {"write"}
            cache.put(key(1), [chunk(1), chunk(2)])
            await wait_idle(cache)
            bench.files.broken = set()
            await put(cache, 1)
            assert bench.files.calls.count("write") == 3
            bench.now_ms = 1000
            await put(cache, 1)
            assert await held(cache, [0, 1, 2]) == [0, 1]
            assert cache.size_bytes == bench.bytes_on_disk == 2 * FILE_BYTES
    assert len(told) == 1


async def test_a_disk_that_cannot_be_read_is_a_miss_and_left_alone(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    with warnings_of(caplog) as told:
        async with bench.cache() as cache:
            await wait_idle(cache)
            await put(cache, 0)
            bench.files.broken = {"read"}
            assert await held(cache, [0, 0, 0]) == []
            assert bench.files.calls.count("read") == 1
            assert cache.misses == 3
            bench.files.broken = set()
            bench.now_ms = 1000
            assert await held(cache, [0]) == [0]
    assert len(told) == 1


async def test_a_folder_that_cannot_be_made_is_a_warning_and_tried_again_later(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.folder.write_bytes(b"a file")
    with warnings_of(caplog) as told:
        async with bench.cache() as cache:
            await wait_idle(cache)
            await put(cache, 0)
            assert await held(cache, [0]) == []
            assert bench.files.calls == ["load"]
            bench.folder.unlink()
            bench.now_ms = 1000
            await put(cache, 0, 0)
            assert await held(cache, [0]) == [0]
    assert len(told) == 1


async def test_chunks_that_the_disk_cannot_take_in_time_are_left_out(bench: Bench) -> None:
    go_on = threading.Event()

    class Stuck(BrokenFiles):
        def write(self, key: ChunkKey, stored: memoryview, check: Callable[[], None]) -> None:
            go_on.wait()
            super().write(key, stored, check)

    bench.files = Stuck(bench.folder)
    async with bench.cache(max_files=10, max_pending_bytes=2 * CHUNK_BYTES) as cache:
        await wait_idle(cache)
        for number in range(4):
            cache.put(key(number), [chunk(number)])
        assert await held(cache, [0]) == []
        go_on.set()
        await wait_idle(cache)
        assert await held(cache, range(4)) == [0, 1]
        await put(cache, 2)
        assert await held(cache, [2]) == [2]


async def test_a_stuck_disk_does_not_hold_up_the_end(bench: Bench) -> None:
    go_on, is_stuck = threading.Event(), threading.Event()

    class Stuck(BrokenFiles):
        def write(self, key: ChunkKey, stored: memoryview, check: Callable[[], None]) -> None:
            is_stuck.set()
            go_on.wait()
            super().write(key, stored, check)

    bench.files = Stuck(bench.folder)
    async with bench.cache() as cache:
        await wait_idle(cache)
        cache.put(key(0), [chunk(0)])
        await asyncio.to_thread(is_stuck.wait)
    go_on.set()
    async with Bench(bench.folder.parent).cache() as cache:
        await wait_idle(cache)
        assert await held(cache, [0]) == []


async def test_a_chunk_above_the_size_of_all_is_not_kept(bench: Bench) -> None:
    async with bench.cache(max_files=2) as cache:
        await wait_idle(cache)
        await put(cache, 0)
        cache.put(key(1), [memoryview(bytes(2 * FILE_BYTES))])
        await wait_idle(cache)
        assert await held(cache, [0]) == [0]
