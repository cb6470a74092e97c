"""The caches of chunks count their bytes. What is read from a file is what was written, or nothing."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fakes.idle import wait_idle
from tiers.reader import chunk_cache
from tiers.reader.chunk_cache import ChunkCache, ChunkFiles, ChunkKey, DiskChunkCache, Extent, file_bytes

A, B = UUID(int=0), UUID(int=1)
SEGMENT = UUID(int=7)
CHUNK_BYTES = 4000
FILE_BYTES = file_bytes(CHUNK_BYTES)


@given(st.lists(st.tuples(st.sampled_from([A, B]), st.integers(0, 9), st.integers(1, 4), st.booleans()), max_size=60))
def test_memory_has_the_extents_used_last(uses: list[tuple[UUID, int, int, bool]]) -> None:
    """Against a list of whole extents. An extent of four chunks is larger than the cache."""
    cache, extents, counts = ChunkCache(300), list[Extent](), [0, 0]
    for segment, number, count, is_put in uses:
        keys = [ChunkKey(segment, each) for each in range(number, number + count)]
        found = next((one for one in extents if keys[0] in one.chunk_keys()), None)
        if is_put and not any(key in cache for key in keys):
            chunks = tuple(memoryview(bytes([each])) for each in range(count))
            new = Extent(segment, number, chunks, 100 * count)
            cache.put(new)
            extents += [new] if count < 4 else []
            while sum(one.size_bytes for one in extents) > 300:
                del extents[0]
        elif found is None:
            assert (cache.get(keys[0]), cache.end_number(keys[0])) == (None, None)
            counts[1] += 1
        else:
            assert cache.get(keys[0]) is found.chunks[number - found.first_number]
            assert cache.end_number(keys[0]) == found.first_number + len(found.chunks)
            counts[0] += 1
            extents.append(extents.pop(extents.index(found)))
        assert cache.size_bytes == sum(one.size_bytes for one in extents)
    assert [cache.hits, cache.misses] == counts


def write(folder: Path, key: ChunkKey, data: bytes) -> Path:
    ChunkFiles(folder).write(key, memoryview(data), lambda: None)
    return folder / f"{key.segment.hex}-{key.number}"


def read(folder: Path, *keys: ChunkKey) -> list[bytes]:
    return [bytes(view) for view in ChunkFiles(folder).read(keys)]


def test_others_of_the_machine_cannot_read_the_files(tmp_path: Path) -> None:
    ChunkFiles(tmp_path / "chunks").load()
    path = write(tmp_path / "chunks", key(3), b"records")
    assert (stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode)) == (0o600, 0o700)


def test_a_next_process_finds_the_longest_unused_first(tmp_path: Path) -> None:
    keys = [ChunkKey(UUID(int=n), n) for n in range(3)]
    for age, each in enumerate(keys):
        os.utime(write(tmp_path, each, bytes(5000 * each.number)), (age, age))
    read(tmp_path, keys[0])
    torn, foreign = tmp_path / f"{SEGMENT.hex}-4.part", tmp_path / "lost+found"
    torn.write_bytes(b"left by a crash")
    foreign.mkdir()
    assert ChunkFiles(tmp_path).load() == [(keys[1], 8192), (keys[2], 12288), (keys[0], file_bytes(0))]
    assert (torn.exists(), foreign.exists()) == (False, True)


def test_a_write_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    def give_up() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        ChunkFiles(tmp_path).write(key(3), memoryview(b"records"), give_up)
    assert list(tmp_path.iterdir()) == []


@given(data=st.binary(max_size=200), cut=st.integers(0, 227), flipped=st.integers(0, 8 * 228 - 1))
def test_a_file_that_is_torn_damaged_or_renamed_is_missing(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, cut: int, flipped: int
) -> None:
    folder = tmp_path_factory.mktemp("chunks")
    path = write(folder, key(3), data)
    whole = path.read_bytes()
    assert read(folder, key(3), key(9)) == [data]
    if cut < len(whole):
        path.write_bytes(whole[:cut])
        assert read(folder, key(3)) == []
        path.write_bytes(whole[:cut] + bytes(len(whole) - cut))
        assert read(folder, key(3)) == ([data] if not any(whole[cut:]) else [])
    damaged = bytearray(whole)
    damaged[flipped // 8 % len(whole)] ^= 1 << flipped % 8
    path.write_bytes(damaged)
    assert read(folder, key(3)) == []
    path.with_name(f"{SEGMENT.hex}-4").write_bytes(whole)
    assert read(folder, key(4)) == []


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
    async def cache(self, max_files: int = 3) -> AsyncIterator[DiskChunkCache]:
        async with DiskChunkCache(self.folder, max_files * FILE_BYTES, lambda: self.now_ms, self.files) as cache:
            await wait_idle(cache)
            yield cache
            assert cache.size_bytes == self.files.size_bytes or not self.files.goes_on.is_set()


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
        assert (cache.hits, cache.misses) == (4, 1)
        cache.put(key(4), [memoryview(bytes(3 * FILE_BYTES))])  # larger than all of it
        await wait_idle(cache)
        assert await held(cache, [0, 2, 3]) == [0, 2, 3]


async def test_nothing_is_ever_above_the_bytes_also_after_a_restart(bench: Bench) -> None:
    async with bench.cache(max_files=5) as cache:
        for first in range(0, 60, 12):
            cache.put(key(first), [chunk(number) for number in range(first, first + 12)])
            await wait_idle(cache)
        kept = await held(cache, range(60))
    assert bench.files.most_bytes == 5 * FILE_BYTES
    for max_files in (5, 1):
        async with bench.cache(max_files=max_files) as cache:
            assert await held(cache, range(60)) == kept[-max_files:]


async def test_a_disk_that_fails_is_tried_again_later(bench: Bench) -> None:
    bench.folder.write_bytes(b"a file")  # so the folder cannot be made
    async with bench.cache() as cache:
        await put(cache, 0)
        assert await held(cache, [0]) == []
        assert bench.files.calls == ["load"]
        bench.folder.unlink()
        bench.now_ms += chunk_cache._REST_MS
        await put(cache, 0, 0)
        bench.files.broken = {"write"}
        cache.put(key(1), [chunk(1), chunk(2)])
        await wait_idle(cache)
        bench.files.broken = {"read"}
        bench.now_ms += chunk_cache._REST_MS
        await put(cache, 1)
        assert await held(cache, [0, 0, 0, 1, 2]) == []
        assert (bench.files.calls.count("write"), bench.files.calls.count("read")) == (4, 1)
        bench.files.broken = set()
        bench.now_ms += chunk_cache._REST_MS
        assert await held(cache, [0, 1, 2]) == [0, 1]
        assert cache.size_bytes == bench.files.size_bytes == 2 * FILE_BYTES


async def test_chunks_that_the_disk_cannot_take_in_time_are_left_out(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_cache, "_MAX_PENDING_BYTES", 2 * CHUNK_BYTES)
    bench.files.goes_on.clear()
    async with bench.cache(max_files=10) as cache:
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
