from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import UUID

import pytest

from tests.support.fakes.local_indexes import Segment, contents, encrypted, expected, segment_object
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import PARTITION, build_segment, metadata_of
from tiers.config.settings import RemoteLogConfig
from tiers.model.ids import TopicIdPartition
from tiers.reader.local_index_cache import LocalIndexCache, SharedIndexFiles
from tiers.segment.indexes.indexes_object import encode_indexes_object
from tiers.segment.indexes.local_index_files import LOG_INDEX, OFFSET_INDEX, SEGMENTS, SUFFIXES, TIME_INDEX, append_to
from tiers.segment.segment_encryption import KeyRing

SET_BYTES = 4 * 4096


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now_ms = 0
        self.full = False

    def cache(
        self,
        max_bytes: int = 100 * SET_BYTES,
        roll_bytes: int = 1 << 20,
        roll_ms: int = 1000,
        ring: KeyRing | None = None,
    ) -> LocalIndexCache:
        sizes = {"index_file_cache_bytes": max_bytes, "index_file_roll_bytes": roll_bytes}
        remote_log = RemoteLogConfig().model_copy(update={**sizes, "index_file_roll_ms": roll_ms})
        return LocalIndexCache(self.folder, remote_log, lambda: self.now_ms, ring, self._append)

    def _append(self, path: Path, content: bytes) -> None:
        if self.full and path.suffix == OFFSET_INDEX:
            append_to(path, content[: len(content) // 2])
            raise OSError(28, "No space left on device")
        append_to(path, content)

    def sets(self, partition: TopicIdPartition = PARTITION) -> list[int]:
        folder = self.folder / f"{partition.topic}-{partition.partition}"
        return sorted(int(path.stem) for path in folder.glob(f"*{OFFSET_INDEX}"))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "index")


def put(cache: LocalIndexCache, *segments: Segment) -> None:
    for metadata, raw in segments:
        cache.put(metadata, raw)


def holds(cache: LocalIndexCache, segment: Segment) -> bool:
    found = cache.get(segment[0])
    assert found is None or contents(found[0], segment[0]) == expected(segment)
    return found is not None


def test_indexes_are_there_after_a_restart_in_the_founding_layout(bench: Bench) -> None:
    segments = [segment_object(start) for start in (0, 30, 60)]
    cache = bench.cache()
    assert not holds(cache, segments[0])
    put(cache, *segments)
    for one in (cache, bench.cache()):
        assert all(holds(one, segment) for segment in segments)
        assert one.size_bytes == SET_BYTES
    assert {str(path.relative_to(bench.folder)) for path in bench.folder.glob("*/*")} == {
        f"{PARTITION.topic}-{PARTITION.partition}/{0:020}{suffix}" for suffix in SUFFIXES
    }


def test_a_segment_with_a_hole_that_no_set_can_hold_is_a_miss(bench: Bench, tmp_path: Path) -> None:
    far = build_segment(tmp_path / "log", [batch_of(2**31 + 30, 10)], base_offset=30)
    metadata = metadata_of(far)
    segments = segment_object(0), (metadata, encode_indexes_object(metadata, far.indexes)), segment_object(2**31 + 40)
    cache = bench.cache()
    put(cache, *segments)
    for one in (cache, bench.cache()):
        assert [one.get(segment) is not None for segment, _ in segments] == [True, False, True]


def test_readers_at_two_places_go_on_in_a_set_each(bench: Bench) -> None:
    cache = bench.cache()
    for step in range(0, 120, 30):
        put(cache, segment_object(step), segment_object(9000 + step))
    assert bench.sets() == [0, 30]
    put(cache, segment_object(4000))
    assert bench.sets() == [0, 30]
    put(cache, segment_object(3000))
    assert bench.sets() == [0, 30, 3000]
    assert all(holds(bench.cache(), segment_object(start)) for start in (0, 90, 3000, 4000, 9000, 9090))


def test_sets_are_rolled_by_size_and_by_age(bench: Bench) -> None:
    cache = bench.cache(roll_bytes=4 * 83)
    put(cache, segment_object(0), segment_object(30), segment_object(60))
    assert bench.sets() == [0, 60]
    bench.now_ms = 1000
    put(cache, segment_object(90))
    assert bench.sets() == [0, 60, 90]


def test_the_set_that_was_used_longest_ago_goes_first(bench: Bench) -> None:
    cache = bench.cache(max_bytes=2 * SET_BYTES, roll_ms=0)
    first, second, third = segment_object(0), segment_object(30), segment_object(60)
    put(cache, first, second)
    assert holds(cache, first)
    put(cache, third)
    assert [holds(cache, one) for one in (first, second, third)] == [True, False, True]
    assert cache.size_bytes == 2 * SET_BYTES
    assert bench.sets() == [0, 60]
    smaller = bench.cache(max_bytes=SET_BYTES)
    assert sum(holds(smaller, one) for one in (first, third)) == 1
    put(bench.cache(max_bytes=SET_BYTES - 1), first)
    assert list(bench.folder.iterdir()) == []


@pytest.mark.parametrize(
    ("suffix", "damaged"),
    [
        (LOG_INDEX, lambda content: content[:20] + bytes([content[20] ^ 1]) + content[21:]),
        (OFFSET_INDEX, lambda content: b"\x00" * 7),
    ],
    ids=["a flipped bit", "an incomplete set"],
)
def test_damaged_files_are_removed_and_made_again(bench: Bench, suffix: str, damaged: Callable[[bytes], bytes]) -> None:
    segment, foreign = segment_object(0), bench.folder / "somebody's" / "file"
    put(bench.cache(), segment)
    foreign.parent.mkdir()
    foreign.touch()
    (path,) = bench.folder.glob(f"*/*{suffix}")
    path.write_bytes(damaged(path.read_bytes()))
    cache = bench.cache()
    assert not holds(cache, segment)
    assert [path for path in bench.folder.rglob("*") if path.is_file()] == [foreign]
    assert cache.size_bytes == 0
    put(cache, segment)
    assert holds(cache, segment)


def test_a_full_disk_costs_what_was_kept_in_that_set_and_nothing_else(bench: Bench) -> None:
    cache = bench.cache()
    put(cache, segment_object(0))
    bench.full = True
    put(cache, segment_object(30), segment_object(60))
    assert not any(holds(cache, segment_object(start)) for start in (0, 30, 60))
    assert (bench.sets(), cache.size_bytes) == ([], 0)
    bench.full = False
    put(cache, segment_object(30))
    assert holds(cache, segment_object(30))


def test_a_folder_that_cannot_be_made_is_a_miss(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = Bench(tmp_path / "file" / "index").cache()
    put(cache, segment_object(0))
    assert not holds(cache, segment_object(0))


def test_a_key_that_was_wrapped_again_is_learned_from_the_store(bench: Bench) -> None:
    old = KeyRing({"old": b"a" * 32}, "old")
    both = KeyRing({"old": b"a" * 32, "new": b"b" * 32}, "new")
    uuid = segment_object(0)[0].segment_id.id
    cipher, section = old.new_cipher(uuid)
    put(bench.cache(), encrypted(segment_object(0), section))
    cache = bench.cache(ring=KeyRing({"new": b"b" * 32}, "new"))
    assert cache.get(segment_object(0)[0]) is None
    put(cache, encrypted(segment_object(0), both.wrapped_again(uuid, section)))
    found = cache.get(segment_object(0)[0])
    assert found is not None
    assert bytes(found[0].open_chunk(0, memoryview(cipher.seal(0, b"chunk")))) == b"chunk"


def test_while_a_call_is_stuck_in_the_disk_others_do_without(bench: Bench) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def stuck(path: Path, content: bytes) -> None:
        reached.set()
        assert go_on.wait(60)
        append_to(path, content)

    cache = LocalIndexCache(bench.folder, RemoteLogConfig(), lambda: 0, append=stuck)
    writer = threading.Thread(target=put, args=(cache, segment_object(0)))
    writer.start()
    assert reached.wait(60)
    put(cache, segment_object(30))
    assert not holds(cache, segment_object(0))
    go_on.set()
    writer.join()
    assert holds(cache, segment_object(0))
    assert not holds(cache, segment_object(30))


def test_a_topic_that_was_created_anew_never_gets_entries_of_the_old_one(bench: Bench) -> None:
    anew = TopicIdPartition(UUID(int=99), PARTITION.partition, PARTITION.topic)
    old, new = segment_object(0), segment_object(0, uuid=500, partition=anew)
    cache = bench.cache()
    put(cache, old)
    assert not holds(cache, new)
    put(cache, new, segment_object(30, uuid=501, partition=anew))
    for one in (cache, bench.cache()):
        assert not holds(one, old)
        assert holds(one, new)


def test_files_below_the_log_start_are_removed(bench: Bench) -> None:
    cache = bench.cache(roll_ms=0)
    segments = [segment_object(start) for start in (0, 30, 60)]
    other = segment_object(0, uuid=50, partition=TopicIdPartition(UUID(int=5), 7, "other"))
    put(cache, *segments, other)
    cache.remove_below(PARTITION, 59)
    assert bench.sets() == [30, 60]
    cache.remove_below(PARTITION, 60)
    assert [holds(cache, one) for one in segments] == [False, False, True]
    assert holds(cache, other)
    cache.remove_below(PARTITION, 1 << 62)
    assert bench.sets() == []
    assert cache.size_bytes == SET_BYTES


def shared_holds(reader: SharedIndexFiles, segment: Segment) -> bool:
    found = reader.get(segment[0])
    assert found is None or contents(found[0], segment[0]) == expected(segment)
    return found is not None


def test_readers_see_each_append_of_the_writer_at_once(bench: Bench) -> None:
    cache, readers = bench.cache(roll_bytes=4 * 83), [SharedIndexFiles(bench.folder) for _ in range(3)]
    segments = [segment_object(start) for start in range(0, 300, 30)]
    for count, segment in enumerate(segments, 1):
        assert not any(shared_holds(reader, segment) for reader in readers)
        put(cache, segment)
        for reader in readers:
            assert all(shared_holds(reader, one) for one in segments[:count])


def test_a_reader_never_writes_to_damaged_files(bench: Bench) -> None:
    segment = segment_object(0)
    put(bench.cache(), segment)
    (path,) = bench.folder.glob(f"*/*{LOG_INDEX}")
    path.write_bytes(path.read_bytes()[::-1])
    reader = SharedIndexFiles(bench.folder)
    assert not shared_holds(reader, segment)
    assert bench.sets() == [0]
    path.unlink()
    assert not shared_holds(reader, segment)
    assert not shared_holds(SharedIndexFiles(bench.folder / "missing"), segment)


@pytest.mark.parametrize("is_missing", [True, False])
def test_the_writer_removes_a_set_that_a_reader_found_damaged(bench: Bench, is_missing: bool) -> None:
    first, second, other = segment_object(0), segment_object(30), segment_object(60)
    cache, reader = bench.cache(roll_bytes=1), SharedIndexFiles(bench.folder)
    put(cache, first, second)
    path = next(bench.folder.glob(f"*/*30{LOG_INDEX}"))
    if is_missing:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[::-1])
    assert not shared_holds(reader, second)
    put(cache, other)
    assert bench.sets() == [0, 60]
    assert cache.size_bytes == 2 * SET_BYTES
    assert not shared_holds(reader, second)
    put(cache, second)
    assert shared_holds(reader, second)


@pytest.mark.parametrize("suffix", [SEGMENTS, LOG_INDEX, OFFSET_INDEX])
def test_a_set_is_checked_before_the_writer_removes_it(bench: Bench, suffix: str) -> None:
    """A reader may have met the writer in the middle of an append."""
    segments = [segment_object(start) for start in (0, 30, 60)]
    cache = bench.cache()
    put(cache, *segments)
    named = bench.folder / "damaged" / f"{PARTITION.topic}-{PARTITION.partition}.{0:020}"
    named.parent.mkdir()
    for content in ("", "for a set that is gone"):
        named.touch()
        named.with_suffix(f".{7:020}").write_text(content)
        cache.open()
        assert (bench.sets(), [*named.parent.iterdir()]) == ([0], [])
    path = next(bench.folder.glob(f"*/*{suffix}"))
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2] + bytes(8) + raw[len(raw) // 2 + 8 :])
    named.touch()
    cache.open()
    assert bench.sets() == []


def test_a_torn_tail_is_a_miss_and_is_never_appended_to(bench: Bench) -> None:
    first, second, third = segment_object(0), segment_object(30), segment_object(60)
    put(bench.cache(), first, second)
    for suffix in SUFFIXES:
        (path,) = bench.folder.glob(f"*/*0{suffix}")
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        assert not shared_holds(SharedIndexFiles(bench.folder), second) or suffix == TIME_INDEX
        assert shared_holds(SharedIndexFiles(bench.folder), first)
        path.write_bytes(whole)
    (offset_index,) = bench.folder.glob(f"*/*{OFFSET_INDEX}")
    offset_index.write_bytes(offset_index.read_bytes()[:-4])
    restarted = bench.cache()
    put(restarted, third)
    assert bench.sets() == [0, 60]
    reader = SharedIndexFiles(bench.folder)
    assert [shared_holds(reader, one) for one in (first, second, third)] == [True, False, True]


def test_a_set_that_a_worker_reads_is_not_the_next_to_go(bench: Bench) -> None:
    cache = bench.cache(max_bytes=2 * SET_BYTES, roll_ms=0)
    first, second, third = segment_object(0), segment_object(30), segment_object(60)
    put(cache, first, second)
    assert shared_holds(SharedIndexFiles(bench.folder), first)
    put(cache, third)
    assert bench.sets() == [0, 60]


def test_readers_of_a_set_that_begins_anew_are_never_wrong(bench: Bench) -> None:
    """Each attempt at the same offsets replaces the set while the readers are in it."""
    attempts = [segment_object(0, uuid=number) for number in range(1, 200)]
    over = threading.Event()

    def read() -> None:
        reader = SharedIndexFiles(bench.folder)
        while not over.is_set():
            for attempt in attempts:
                shared_holds(reader, attempt)

    with ThreadPoolExecutor(2) as threads:
        readers = [threads.submit(read) for _ in range(2)]
        cache = bench.cache()
        try:
            put(cache, *attempts)
        finally:
            over.set()
        for each in readers:
            each.result()
    assert shared_holds(SharedIndexFiles(bench.folder), attempts[-1])
