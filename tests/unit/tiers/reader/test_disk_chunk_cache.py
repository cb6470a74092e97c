"""The disk chunk cache keeps its limit, survives restarts, and fails no read."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
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


class Files(ChunkFiles):
    """Whatever `broken` names fails as a full or dying disk does. A write waits until it `goes_on`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        self.broken: set[str] = set()
        self.calls: list[str] = []
        self.goes_on, self.is_stuck = threading.Event(), threading.Event()
        self.goes_on.set()
        self.most_bytes = 0

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
        self.is_stuck.set()
        self.goes_on.wait()
        super().write(key, stored, check)
        self.most_bytes = max(self.most_bytes, self.size_bytes)

    @property
    def size_bytes(self) -> int:
        return sum(file_bytes(path.stat().st_size - 28) for path in self.folder.iterdir())


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "chunks"
        self.files = Files(self.folder)
        self.now_ms = 0

    @asynccontextmanager
    async def cache(self, max_files: int = 3, max_pending_bytes: int = 1 << 20) -> AsyncIterator[DiskChunkCache]:
        settings = DiskChunkCacheSettings(self.folder, max_files * FILE_BYTES, max_pending_bytes, rest_ms=1000)
        async with DiskChunkCache(settings, lambda: self.now_ms, self.files) as cache:
            await wait_idle(cache)
            yield cache


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


async def test_the_longest_unused_makes_room(bench: Bench) -> None:
    async with bench.cache(max_files=3) as cache:
        await put(cache, 0, 1, 2)
        assert await held(cache, [0]) == [0]
        await put(cache, 3)
        assert await held(cache, [0, 1, 2, 3]) == [0, 2, 3]
        assert cache.evictions == 1
        cache.put(key(4), [memoryview(bytes(3 * FILE_BYTES))])  # larger than all of it
        await wait_idle(cache)
        assert await held(cache, [0, 2, 3]) == [0, 2, 3]
        assert cache.size_bytes == bench.files.size_bytes == 3 * FILE_BYTES


async def test_nothing_is_ever_above_the_bytes(bench: Bench) -> None:
    async with bench.cache(max_files=5) as cache:
        for first in range(0, 60, 12):
            cache.put(key(first), [chunk(number) for number in range(first, first + 12)])
            await wait_idle(cache)
            assert cache.size_bytes == bench.files.size_bytes
    assert bench.files.most_bytes == 5 * FILE_BYTES


async def test_it_outlives_the_process_and_a_smaller_size_holds_at_once(bench: Bench) -> None:
    async with bench.cache(max_files=3) as cache:
        await put(cache, 0, 1, 2)
    for max_files, found in ((3, [0, 1, 2]), (1, [2])):
        async with bench.cache(max_files=max_files) as cache:
            assert cache.size_bytes == bench.files.size_bytes == max_files * FILE_BYTES
            assert await held(cache, [0, 1, 2]) == found


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(path.read_bytes()[:-1]), Path.unlink])
async def test_a_file_that_is_not_whole_or_gone_is_a_miss(bench: Bench, damage: Callable[[Path], object]) -> None:
    async with bench.cache() as cache:
        await put(cache, 0, 1)
        path = bench.folder / f"{SEGMENT.hex}-0"
        damage(path)
        assert await held(cache, [0, 1]) == [1]
        await wait_idle(cache)
        assert (path.exists(), cache.size_bytes) == (False, FILE_BYTES)
        await put(cache, 0)
        assert await held(cache, [0]) == [0]


async def test_a_full_disk_is_tried_again_later(bench: Bench) -> None:
    async with bench.cache() as cache:
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
        assert cache.size_bytes == bench.files.size_bytes == 2 * FILE_BYTES


async def test_a_disk_that_cannot_be_read_is_a_miss_and_left_alone(bench: Bench) -> None:
    async with bench.cache() as cache:
        await put(cache, 0)
        bench.files.broken = {"read"}
        assert await held(cache, [0, 0, 0]) == []
        assert (bench.files.calls.count("read"), cache.misses) == (1, 3)
        bench.files.broken = set()
        bench.now_ms = 1000
        assert await held(cache, [0]) == [0]


async def test_a_folder_that_cannot_be_made_is_tried_again_later(bench: Bench) -> None:
    bench.folder.write_bytes(b"a file")
    async with bench.cache() as cache:
        await put(cache, 0)
        assert await held(cache, [0]) == []
        assert bench.files.calls == ["load"]
        bench.folder.unlink()
        bench.now_ms = 1000
        await put(cache, 0, 0)
        assert await held(cache, [0]) == [0]


async def test_chunks_that_the_disk_cannot_take_in_time_are_left_out(bench: Bench) -> None:
    bench.files.goes_on.clear()
    async with bench.cache(max_files=10, max_pending_bytes=2 * CHUNK_BYTES) as cache:
        for number in range(4):
            cache.put(key(number), [chunk(number)])
        assert await held(cache, [0]) == []
        bench.files.goes_on.set()
        await wait_idle(cache)
        assert await held(cache, range(4)) == [0, 1]
        await put(cache, 2)
        assert await held(cache, [2]) == [2]


async def test_a_stuck_disk_does_not_hold_up_the_end(bench: Bench) -> None:
    bench.files.goes_on.clear()
    async with bench.cache() as cache:
        cache.put(key(0), [chunk(0)])
        await asyncio.to_thread(bench.files.is_stuck.wait)
    bench.files.goes_on.set()
    async with Bench(bench.folder.parent).cache() as cache:
        assert await held(cache, [0]) == []
