"""Reads of the remote tier return the broker's own bytes, also with faults of the store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.fakes.idle import wait_idle
from tests.support.fakes.log_starts import user_log_start
from tests.support.fakes.record_batches import build_batch, record
from tests.support.fakes.remote_requests import P0, asked, in_ms, joined, next_offset, read_all
from tests.support.fakes.remote_tier import RemoteTier
from tests.support.tiers.waiting import until
from tiers.broker.client import monotonic_ms
from tiers.config.settings import RemoteLogConfig
from tiers.errors import (
    CorruptSegmentError,
    OffsetBelowLogStartError,
    OffsetGapError,
    RemoteReadTimeoutError,
    RemoteResourceNotFoundError,
    RetriableRemoteStorageError,
)
from tiers.model.log_source import AbortedTransaction
from tiers.model.log_start import LogGap
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.reader.chunk_fetcher import Caller, RemoteLogReaderSettings
from tiers.reader.remote_log_reader import RemoteLogReader
from tiers.storage.locations import HOME

SETTINGS = RemoteLogReaderSettings(max_get_bytes=6000, remote_log=RemoteLogConfig(chunk_cache_bytes=1 << 20))


@pytest.fixture
async def tier(tmp_path: Path) -> RemoteTier:
    return RemoteTier(tmp_path)


@pytest.fixture
async def reader(tier: RemoteTier) -> AsyncIterator[RemoteLogReader]:
    async with RemoteLogReader(tier.rlmm.log, tier.storage, SETTINGS) as made:
        yield made


async def test_an_answer_pins_a_few_times_its_size_at_most(tier: RemoteTier, reader: RemoteLogReader) -> None:
    await tier.fill(P0, segments=1, batches=20)
    for max_bytes in (10, 1000, 3000):
        result = await reader.read(asked(50, max_bytes))
        pinned = {id(view.obj): memoryview(view.obj).nbytes for view in result.records}
        assert 0 < sum(pinned.values()) <= 8 * result.size_bytes


async def test_one_get_covers_adjacent_chunks_and_serves_the_next_reads(
    tier: RemoteTier, reader: RemoteLogReader
) -> None:
    await tier.fill(P0, segments=1, batches=7)
    for offset in (0, 10, 20):
        await reader.read(asked(offset, 10))
    ((start, end),) = tier.storage.gets
    assert start == 0
    assert 1000 < end < SETTINGS.max_get_bytes
    assert tier.storage.index_gets == 1


async def test_readers_of_one_chunk_share_one_download(tier: RemoteTier, reader: RemoteLogReader) -> None:
    """It outlives its requests."""
    batches = await tier.fill(P0, segments=1, batches=3)
    tier.storage.gate = asyncio.Event()
    with pytest.raises(RemoteReadTimeoutError) as caught:
        await reader.read(asked(0, timeout_ms=40))
    assert caught.value.cause is None
    async with asyncio.TaskGroup() as group:
        reads = [group.create_task(reader.read(asked(0, 10, connection_id=n))) for n in range(5)]
        await tier.storage.asked.wait()
        tier.storage.gate.set()
    assert [joined(one.result()) for one in reads] == [batches[0]] * 5
    assert len(tier.storage.gets) == 1


async def test_a_store_that_fails_is_asked_again(tier: RemoteTier, reader: RemoteLogReader) -> None:
    batches = await tier.fill(P0, segments=1, batches=1)
    tier.storage.fail(2)
    tier.storage.index_failures.append(RetriableRemoteStorageError("slow down"))
    assert joined(await reader.read(asked(0))) == batches[0]
    assert (len(tier.storage.gets), tier.storage.index_gets) == (3, 2)


@pytest.mark.parametrize("suffix", [".log", ".indexes"])
async def test_a_late_object_is_read_when_the_store_shows_it(tmp_path: Path, suffix: str) -> None:
    """A store that shows a FINISHED segment late: no read answers that it is gone (docs/design.md, safety rule 7)."""
    tier = RemoteTier(tmp_path)
    batches = await tier.fill(P0, segments=1, batches=1)
    (shown,) = (tmp_path / "store").rglob(f"*{suffix}")
    hidden = shown.rename(tmp_path / "hidden")
    passed_ms = 0

    def asked_for() -> int:
        return max(len(tier.storage.gets), tier.storage.index_gets)

    def clock_ms() -> int:
        return monotonic_ms() + passed_ms

    async def time_passes() -> None:
        nonlocal passed_ms
        await until(lambda: asked_for() >= 2)
        passed_ms = 600_000

    async with RemoteLogReader(tier.rlmm.log, tier.storage, SETTINGS, clock_ms=clock_ms) as reader:
        with pytest.raises(RemoteReadTimeoutError) as raised:
            await asyncio.gather(reader.read(asked(0, timeout_ms=600_000)), time_passes())
        assert isinstance(raised.value.cause, RemoteResourceNotFoundError)
        before = asked_for()
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(reader.read(asked(0, deadline_ms=clock_ms() + 60_000)))
            await until(lambda: asked_for() > before + 1)
            hidden.rename(shown)
        assert joined(reading.result()) == batches[0]


async def test_a_segment_deleted_under_the_read_is_looked_up_again(tier: RemoteTier, reader: RemoteLogReader) -> None:
    await tier.fill(P0, segments=1, batches=1)
    (segment,) = tier.state.list_remote_log_segments(P0)
    tier.storage.gate = asyncio.Event()
    tier.storage.failures.append(RemoteResourceNotFoundError("gone"))

    async def delete() -> None:
        await tier.storage.asked.wait()
        await tier.rlmm.put_log_start(P0, user_log_start(10))
        await tier.move(segment, RemoteLogSegmentState.DELETE_SEGMENT_STARTED)
        assert tier.storage.gate is not None
        tier.storage.gate.set()

    with pytest.raises(OffsetBelowLogStartError):
        await asyncio.gather(reader.read(asked(0)), delete())


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: bytes(len(data)), lambda data: data[:-1] + bytes([data[-1] ^ 1])]
)
async def test_damaged_bytes_are_read_once_more_and_never_served(
    tier: RemoteTier, reader: RemoteLogReader, damage: Callable[[bytes], bytes]
) -> None:
    batches = await tier.fill(P0, segments=1, batches=1)
    tier.storage.damage = damage
    with pytest.raises(CorruptSegmentError):
        await reader.read(asked(0))
    assert len(tier.storage.gets) == 2
    damages = iter([True])
    tier.storage.damage = lambda data: damage(data) if next(damages, False) else data
    assert joined(await reader.read(asked(0))) == batches[0]
    assert len(tier.storage.gets) == 4


async def test_a_damaged_chunk_leaves_its_neighbours_readable(tier: RemoteTier, reader: RemoteLogReader) -> None:
    batches = await tier.fill(P0, segments=1, batches=12)
    (segment,) = tier.state.list_remote_log_segments(P0)
    chunks = (await reader.fetcher.index(segment, Caller(in_ms(), 1))).chunks()
    bad = chunks[1].stored_position

    def damage(data: bytes) -> bytes:
        at = bad - tier.storage.gets[-1][0]
        return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :] if 0 <= at < len(data) else data

    tier.storage.damage = damage
    assert joined(await reader.read(asked(0, 1))) == batches[0]
    with pytest.raises(CorruptSegmentError):
        await reader.read(asked(chunks[1].first_offset, 1))
    assert joined(await reader.read(asked(chunks[-1].last_offset, 1))) == batches[-1]


async def test_sequential_reads_are_read_ahead_across_the_border(tier: RemoteTier, reader: RemoteLogReader) -> None:
    batches = await tier.fill(P0, segments=2, batches=30)
    offset = 0
    while offset < 200:
        offset = next_offset(await reader.read(asked(offset, 900)))
    await wait_idle(reader.fetcher.index_pool)
    await wait_idle(reader.fetcher.chunk_pool)
    tier.storage.is_down = True
    assert (await reader.read(asked(offset, 900))).records
    tier.storage.is_down = False
    assert await read_all(reader, 600, 3000) == b"".join(batches)
    assert tier.storage.index_gets == 2


async def test_a_full_queue_does_not_fail_a_read_that_has_its_first_chunk(tier: RemoteTier) -> None:
    batches = await tier.fill(P0, segments=1, batches=20)
    remote_log = RemoteLogConfig(reader_threads=1, reader_max_pending_tasks=1)
    settings = RemoteLogReaderSettings(first_get_bytes=1, max_get_bytes=1, remote_log=remote_log)
    async with RemoteLogReader(tier.rlmm.log, tier.storage, settings) as reader:
        found = await reader.read(asked(0))
        assert joined(found) == b"".join(batches)[: found.size_bytes]
        assert found.size_bytes


def data(offset: int, producer_id: int) -> bytes:
    return build_batch(offset, [record(offset), record(offset + 1)], producer_id=producer_id, transactional=True)


def abort(offset: int, producer_id: int) -> bytes:
    marker = record(offset, key=b"\x00\x00\x00\x00", value=b"\x00\x00\x00\x00\x00\x00")
    return build_batch(offset, [marker], producer_id=producer_id, transactional=True, control=True)


async def test_aborted_transactions_of_all_segments_read_sorted_and_once(tmp_path: Path) -> None:
    """A read ends at a gap: the marker that ends a transaction may be lost in it."""
    tier = RemoteTier(tmp_path, chunk_bytes=10)
    # 7 writes at 0 and 4, 8 at 2; 8 aborts at 6, 7 aborts at 9, in the next segment.
    first, second = AbortedTransaction(7, 0), AbortedTransaction(8, 2)
    await tier.add(P0, [data(0, 7), data(2, 8), data(4, 7), abort(6, 8)], 0, [second, first])
    await tier.add(P0, [data(7, -1), abort(9, 7), data(10, 7)], 7, [first])
    await tier.rlmm.put_log_gap(P0, LogGap(12, 20), 0)
    await tier.add(P0, [data(20, 7)], 20, is_behind_gap=True)
    async with RemoteLogReader(tier.rlmm.log, tier.storage, SETTINGS) as reader:
        for offset in (7, 20):
            await reader.read(asked(offset))
        assert (await reader.read(asked(0))).aborted_transactions is None
        # Behind its marker a transaction poisons what its producer commits later.
        for offset, end, aborted in ((0, 12, (first, second)), (7, 12, (first,)), (10, 12, ()), (20, 22, ())):
            read = await reader.read(asked(offset, isolation_level=1))
            assert (read.next_offset, read.aborted_transactions) == (end, aborted)
        for offset in (12, 19):
            with pytest.raises(OffsetGapError):
                await reader.read(asked(offset))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(offset=st.integers(0, 299), max_bytes=st.integers(0, 8000), min_one=st.booleans())
async def test_any_read_is_the_longest_run_of_whole_batches_that_fits(
    tmp_path_factory: pytest.TempPathFactory, offset: int, max_bytes: int, min_one: bool
) -> None:
    tier = RemoteTier(tmp_path_factory.mktemp("tier"))
    batches = await tier.fill(P0, segments=1, batches=30)
    async with RemoteLogReader(tier.rlmm.log, tier.storage, SETTINGS) as reader:
        result = await reader.read(asked(offset, max_bytes, min_one_message=min_one))
    got = joined(result)
    rest = batches[offset // 10 :]
    assert got in {b"".join(rest[:count]) for count in range(len(rest) + 1)}
    assert result.size_bytes == len(got)
    assert len(got) <= max_bytes or (min_one and got == rest[0])
    assert bool(got) == (min_one or len(rest[0]) <= max_bytes)
    assert result.first_offset == (offset // 10 * 10 if got else offset)


async def test_another_segments_objects_are_an_error_never_an_answer(
    tier: RemoteTier, reader: RemoteLogReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is whole in itself: every checksum matches."""
    await tier.fill(P0, segments=2, batches=5)
    first, second = tier.state.list_remote_log_segments(P0)
    inner = tier.storage.inner

    async def fetch_indexes(metadata: RemoteLogSegmentMetadata) -> bytes:
        return await inner.fetch_indexes(second)

    async def fetch_log_segment(metadata: RemoteLogSegmentMetadata, start: int, end: int | None) -> memoryview:
        return await inner.fetch_log_segment(second, start, end)

    monkeypatch.setattr(tier.storage, "fetch_indexes", fetch_indexes)
    monkeypatch.setattr(tier.storage, "fetch_log_segment", fetch_log_segment)
    with pytest.raises(CorruptSegmentError):
        await reader.read(asked(first.start_offset))


async def test_gets_of_chunks_that_fail_open_the_circuit(tier: RemoteTier, reader: RemoteLogReader) -> None:
    await tier.fill(P0, segments=1, batches=6)
    (segment,) = tier.state.list_remote_log_segments(P0)
    await reader.fetcher.index(segment, Caller(in_ms(), 1))
    tier.storage.is_down = True
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        reading = group.create_task(reader.read(asked(0, timeout_ms=600_000)))
        while not reader.fetcher.breakers.of(HOME).is_open:
            await tier.storage.refusals.acquire()
        reading.cancel()
