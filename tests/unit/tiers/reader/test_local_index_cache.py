"""Index files save GETs: what is found in them is the segment's own index, whatever happens to disk and processes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from uuid import UUID

import pytest

from tests.support.fakes.local_indexes import Segment, contents, encrypted, expected, segment_object
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.remote_requests import P0, read_all
from tests.support.fakes.remote_tier import RemoteTier
from tests.support.fakes.segments import PARTITION, build_segment, metadata_of
from tiers.broker.client import monotonic_ms
from tiers.model.ids import TopicIdPartition
from tiers.reader.local_index_cache import LocalIndexes
from tiers.reader.remote_log_reader import RemoteLogReader
from tiers.segment.indexes.indexes_object import encode_indexes_object
from tiers.segment.indexes.local_index_files import (
    LOG_INDEX,
    OFFSET_INDEX,
    SUFFIXES,
    TIME_INDEX,
    append_to,
)
from tiers.segment.segment_encryption import KeyRing

SET_BYTES = 4 * 4096


class Bench:
    """The folder of one writer. `reader` reads it for another process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now_ms = 0
        self.full = False
        self.goes_on, self.is_stuck = threading.Event(), threading.Event()
        self.goes_on.set()
        self.made: list[LocalIndexes] = []

    def cache(
        self,
        max_bytes: int = 100 * SET_BYTES,
        roll_bytes: int = 1 << 20,
        roll_ms: int = 1000,
        ring: KeyRing | None = None,
        deadline_ms: int = 60_000,
    ) -> LocalIndexes:
        self.made.append(
            LocalIndexes(
                self.folder,
                max_bytes,
                lambda: self.now_ms,
                ring,
                append=self._append,
                roll_bytes=roll_bytes,
                roll_ms=roll_ms,
                deadline_ms=deadline_ms,
            )
        )
        return self.made[-1]

    def reader(self) -> LocalIndexes:
        own, clock_ms = self.folder.parent / "own", lambda: self.now_ms
        self.made.append(LocalIndexes(own, 1 << 30, clock_ms, shared=self.folder, deadline_ms=60_000))
        return self.made[-1]

    def _append(self, path: Path, content: bytes) -> None:
        self.is_stuck.set()
        assert self.goes_on.wait(60)
        if self.full and path.suffix == OFFSET_INDEX:
            append_to(path, content[: len(content) // 2])
            raise OSError(28, "No space left on device")
        append_to(path, content)

    def sets(self, partition: TopicIdPartition = PARTITION) -> list[int]:
        folder = self.folder / f"{partition.topic}-{partition.partition}"
        return sorted(int(path.stem) for path in folder.glob(f"*{OFFSET_INDEX}"))

    def file(self, name: str) -> Path:
        (path,) = self.folder.glob(f"*/*{name}")
        return path


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path / "index")
    yield made
    for each in made.made:
        each.close()


async def put(cache: LocalIndexes, *segments: Segment) -> None:
    for metadata, raw in segments:
        await cache.put(metadata, raw)


async def holds(cache: LocalIndexes, *segments: Segment) -> list[bool]:
    """Whether each is found. What is found is always the segment's own index."""
    found = [await cache.get(segment[0]) for segment in segments]
    for segment, each in zip(segments, found, strict=True):
        assert each is None or contents(each[0], segment[0]) == expected(segment)
    return [each is not None for each in found]


async def test_after_a_restart_nothing_is_fetched_but_records(tmp_path: Path) -> None:
    tier = RemoteTier(tmp_path)
    made = b"".join(await tier.fill(P0, segments=3, batches=4))
    for gets, counts in ((3, (0, 3)), (3, (3, 0))):
        local = LocalIndexes(tmp_path / "index", 1 << 30, monotonic_ms, deadline_ms=60_000)
        async with RemoteLogReader(tier.rlmm.log, tier.storage, local_indexes=local) as reader:
            assert await read_all(reader, 120) == made
        assert (tier.storage.index_gets, (local.hits, local.misses)) == (gets, counts)


async def test_a_segment_with_a_hole_that_no_set_can_hold_is_a_miss(bench: Bench, tmp_path: Path) -> None:
    far = build_segment(tmp_path / "log", [batch_of(2**31 + 30, 10)], base_offset=30)
    metadata = metadata_of(far)
    segments = segment_object(0), (metadata, encode_indexes_object(metadata, far.indexes)), segment_object(2**31 + 40)
    cache = bench.cache()
    await put(cache, *segments)
    assert [await cache.get(segment) is not None for segment, _ in segments] == [True, False, True]


async def test_sets_are_rolled_by_size_and_by_age(bench: Bench) -> None:
    cache = bench.cache(roll_bytes=4 * 83)
    await put(cache, segment_object(0), segment_object(30), segment_object(60))
    assert bench.sets() == [0, 60]
    bench.now_ms = 1000
    await put(cache, segment_object(90))
    assert bench.sets() == [0, 60, 90]


@pytest.mark.parametrize("is_read_apart", [False, True])
async def test_the_set_that_was_used_longest_ago_goes_first(bench: Bench, is_read_apart: bool) -> None:
    cache = bench.cache(max_bytes=2 * SET_BYTES, roll_ms=0)
    first, second, third = segment_object(0), segment_object(30), segment_object(60)
    await put(cache, first, second)
    assert await holds(bench.reader() if is_read_apart else cache, first) == [True]
    await put(cache, third)
    assert await holds(cache, first, second, third) == [True, False, True]
    assert (cache.size_bytes, bench.sets()) == (2 * SET_BYTES, [0, 60])
    smaller = bench.cache(max_bytes=SET_BYTES)
    await smaller.open()
    assert sum(await holds(smaller, first, third)) == 1
    await put(bench.cache(max_bytes=SET_BYTES - 1), first)
    assert list(bench.folder.iterdir()) == []


async def test_a_full_disk_costs_what_was_kept_in_that_set_alone(bench: Bench) -> None:
    cache = bench.cache()
    await put(cache, segment_object(0))
    bench.full = True
    await put(cache, segment_object(30), segment_object(60))
    assert not any(await holds(cache, *map(segment_object, (0, 30, 60))))
    assert (bench.sets(), cache.size_bytes) == ([], 0)
    bench.full = False
    await put(cache, segment_object(30))
    assert await holds(cache, segment_object(30)) == [True]


async def test_a_key_that_was_wrapped_again_is_learned_from_the_store(bench: Bench) -> None:
    old = KeyRing({"old": b"a" * 32}, "old")
    both = KeyRing({"old": b"a" * 32, "new": b"b" * 32}, "new")
    uuid = segment_object(0)[0].segment_id.id
    cipher, section = old.new_cipher(uuid)
    await put(bench.cache(), encrypted(segment_object(0), section))
    cache = bench.cache(ring=KeyRing({"new": b"b" * 32}, "new"))
    assert await cache.get(segment_object(0)[0]) is None
    await put(cache, encrypted(segment_object(0), both.wrapped_again(uuid, section)))
    found = await cache.get(segment_object(0)[0])
    assert found is not None
    assert found[0]._open_chunk is not None
    assert found[0]._open_chunk(0, cipher.seal(0, b"chunk")) == b"chunk"


async def test_a_stuck_disk_holds_nothing_up(bench: Bench) -> None:
    cache = bench.cache(deadline_ms=100)
    bench.goes_on.clear()
    while not bench.is_stuck.is_set():  # a busy machine does not begin a write after the deadline
        await put(cache, segment_object(0))
    await put(cache, segment_object(30))
    bench.goes_on.set()
    while not (await holds(cache, segment_object(0)))[0]:
        pass
    assert await holds(cache, segment_object(30)) == [False]


async def test_files_below_the_log_start_are_removed(bench: Bench) -> None:
    cache = bench.cache(roll_ms=0)
    segments = [segment_object(start) for start in (0, 30, 60)]
    other = segment_object(0, uuid=50, partition=TopicIdPartition(UUID(int=5), 7, "other"))
    await put(cache, *segments, other)
    for below, sets in ((59, [30, 60]), (60, [60]), (1 << 62, [])):
        await cache.remove_below(PARTITION, below)
        assert bench.sets() == sets
    assert await holds(cache, other) == [True]
    assert cache.size_bytes == SET_BYTES


@pytest.mark.parametrize(
    ("suffix", "damage", "is_restarted"),
    [
        (LOG_INDEX, lambda path: path.write_bytes(path.read_bytes()[::-1]), False),
        (LOG_INDEX, lambda path: path.write_bytes(path.read_bytes()[::-1]), True),
        (LOG_INDEX, Path.unlink, False),
        (OFFSET_INDEX, lambda path: path.write_bytes(b"\x00" * 7), True),
    ],
)
async def test_damaged_files_are_removed_and_made_again(
    bench: Bench, suffix: str, damage: Callable[[Path], object], is_restarted: bool
) -> None:
    """A process of another folder leaves them, and keeps the index in its own."""
    first, second, third = segment_object(0), segment_object(30), segment_object(60)
    cache, reader = bench.cache(roll_bytes=1), bench.reader()
    await put(cache, first, second)
    foreign = bench.folder / "somebody's" / "file"
    foreign.parent.mkdir()
    foreign.touch()
    damage(bench.file(f"30{suffix}"))
    assert await holds(reader, second) == [False]
    assert bench.sets() == [0, 30]
    await put(reader, second)
    assert await holds(reader, second) == [True]
    cache = bench.cache(roll_bytes=1) if is_restarted else cache
    assert await holds(cache, second) == [False]
    await put(cache, third)
    assert (bench.sets(), cache.size_bytes, foreign.exists()) == ([0, 60], 2 * SET_BYTES, True)
    await put(cache, second)
    assert await holds(cache, second) == [True]


async def test_a_torn_tail_is_a_miss_and_is_never_appended_to(bench: Bench) -> None:
    first, second, third = segment_object(0), segment_object(30), segment_object(60)
    await put(bench.cache(), first, second)
    for suffix in SUFFIXES:
        path = bench.file(f"0{suffix}")
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        assert await holds(bench.reader(), first, second) == [True, suffix == TIME_INDEX]
        path.write_bytes(whole)
    path = bench.file(OFFSET_INDEX)
    path.write_bytes(path.read_bytes()[:-4])
    await put(bench.cache(), third)
    assert bench.sets() == [0, 60]
    assert await holds(bench.reader(), first, second, third) == [True, False, True]


async def test_readers_of_a_set_that_begins_anew_are_never_wrong(bench: Bench) -> None:
    """Each attempt at the same offsets replaces the set while the readers are in it."""
    attempts = [segment_object(0, uuid=number) for number in range(1, 200)]
    cache = bench.cache()

    async def read(reader: LocalIndexes) -> None:
        while not writing.done():
            await holds(reader, *attempts)

    async with asyncio.TaskGroup() as group:
        writing = group.create_task(put(cache, *attempts))
        for _ in range(2):
            group.create_task(read(bench.reader()))
    assert await holds(bench.reader(), attempts[-1]) == [True]
