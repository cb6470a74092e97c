"""The disk chunk cache on the way of a read."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from protocol.records.record_batch import iterate_batches
from tests.support.fakes.idle import wait_idle
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.remote_tier import TOPIC_ID, RemoteTier
from tests.support.tiers.workbench import PARTITION, workbench
from tiers.config.settings import RemoteLogConfig
from tiers.errors import CorruptSegmentError, RetriableRemoteStorageError
from tiers.model.ids import TopicIdPartition
from tiers.reader.chunk_cache import ChunkKey
from tiers.reader.disk_chunk_cache import DiskChunkCache, DiskChunkCacheSettings
from tiers.reader.metrics import RemoteLogReaderMetrics
from tiers.reader.remote_log_reader import (
    RemoteLogReader,
    RemoteLogReaderSettings,
    RemoteReadRequest,
    decode_index,
    monotonic_ms,
)
from tiers.segment.segment_encryption import KeyRing
from tiers.storage.locations import HOME

P0 = TopicIdPartition(TOPIC_ID, 0, "orders")
SETTINGS = RemoteLogReaderSettings(
    min_get_bytes=3000, max_get_bytes=6000, remote_log=RemoteLogConfig(chunk_cache_bytes=1 << 20)
)
RING = KeyRing({"k1": b"1" * 32}, current="k1")


@pytest.fixture
async def tier(tmp_path: Path) -> RemoteTier:
    return RemoteTier(tmp_path)


def disk(folder: Path, max_bytes: int = 1 << 20) -> DiskChunkCache:
    return DiskChunkCache(DiskChunkCacheSettings(folder / "chunks", max_bytes), monotonic_ms)


@asynccontextmanager
async def reader_of(tier: RemoteTier, disk_chunks: DiskChunkCache) -> AsyncIterator[RemoteLogReader]:
    async with RemoteLogReader(tier.rlmm, tier.storage, SETTINGS, disk_chunks=disk_chunks) as reader:
        await wait_idle(disk_chunks)
        yield reader
        await wait_idle(reader.chunk_pool)
        await wait_idle(disk_chunks)


async def read(
    reader: RemoteLogReader, offset: int, max_bytes: int = 900, partition: TopicIdPartition = P0
) -> tuple[bytes, int]:
    """Records, and the offset that follows."""
    answer = await reader.read(
        RemoteReadRequest(
            partition,
            offset,
            max_bytes,
            min_one_message=True,
            isolation_level=0,
            deadline_ms=monotonic_ms() + 20_000,
            connection_id=1,
        )
    )
    *_, last = (batch for view in answer.records for batch in iterate_batches(view))
    return b"".join(answer.records), last.next_offset


async def read_all(reader: RemoteLogReader, end: int) -> bytes:
    records, offset = b"", 0
    while offset < end:
        more, offset = await read(reader, offset)
        records += more
    return records


async def test_after_a_restart_nothing_is_fetched(tier: RemoteTier, tmp_path: Path) -> None:
    made = b"".join(await tier.fill(P0, segments=3, batches=20))
    async with reader_of(tier, disk(tmp_path)) as reader:
        assert await read_all(reader, 600) == made
    tier.storage.gets.clear()
    again = disk(tmp_path)
    async with reader_of(tier, again) as reader:
        assert await read_all(reader, 600) == made
    assert tier.storage.gets == []
    assert again.misses == 0
    assert again.hits > 20


async def test_chunks_on_the_disk_are_served_while_the_store_is_down(tier: RemoteTier, tmp_path: Path) -> None:
    batches = await tier.fill(P0, segments=1, batches=40)
    kept = disk(tmp_path)
    async with reader_of(tier, kept) as reader:
        await read(reader, 0)
    async with reader_of(tier, disk(tmp_path)) as reader:
        (segment,) = tier.rlmm.list_remote_log_segments(P0)
        await reader.index(segment, deadline_ms=monotonic_ms() + 20_000, connection_id=1)
        tier.storage.is_down = True
        while not reader.breakers.of(HOME).is_open:
            with suppress(RetriableRemoteStorageError), reader.breakers.of(HOME):
                raise RetriableRemoteStorageError("slow down")
        assert b"".join(batches).startswith((await read(reader, 0))[0])
        assert reader.breakers.of(HOME).is_open


async def test_any_disk_cache_of_any_size_gives_the_same_bytes(tier: RemoteTier, tmp_path: Path) -> None:
    """Files are lost and damaged meanwhile, memory is small, and reads begin anywhere."""
    made = await tier.fill(P0, segments=2, batches=30)
    chance = random.Random(7)
    for _ in range(6):
        async with reader_of(tier, disk(tmp_path, max_bytes=chance.choice([8192, 40_000, 1 << 20]))) as reader:
            for _ in range(15):
                first = chance.randrange(60)
                records, _ = await read(reader, 10 * first)
                assert b"".join(made[first:]).startswith(records)
        for path in (tmp_path / "chunks").iterdir():
            match chance.randrange(4):
                case 0:
                    path.unlink()
                case 1:
                    path.write_bytes(path.read_bytes()[: chance.randrange(1000)])
    assert tier.storage.gets


async def test_damaged_bytes_of_the_store_are_not_kept(tier: RemoteTier, tmp_path: Path) -> None:
    batches = await tier.fill(P0, segments=1, batches=3)
    kept = disk(tmp_path)
    async with reader_of(tier, kept) as reader:
        tier.storage.damage = lambda data: bytes(len(data))
        with pytest.raises(CorruptSegmentError):
            await read(reader, 0, 1)
        await wait_idle(kept)
        assert kept.size_bytes == 0
        tier.storage.damage = None
        assert (await read(reader, 0, 1))[0] == batches[0]


async def test_a_damaged_chunk_is_not_kept_beside_its_neighbours(tier: RemoteTier, tmp_path: Path) -> None:
    await tier.fill(P0, segments=1, batches=12)
    (segment,) = tier.rlmm.list_remote_log_segments(P0)
    async with reader_of(tier, disk(tmp_path)) as reader:
        index = await reader.index(segment, deadline_ms=monotonic_ms() + 20_000, connection_id=1)
        bad = index.chunks()[1].stored_position + 100
        tier.storage.damage = lambda data: data[:bad] + bytes([data[bad] ^ 1]) + data[bad + 1 :]
        await read(reader, 0, 1)
        assert tier.storage.gets[0][0] == 0
        assert tier.storage.gets[0][1] > bad
    assert f"{segment.segment_id.id.hex}-0" in {path.name for path in (tmp_path / "chunks").iterdir()}
    assert f"{segment.segment_id.id.hex}-1" not in {path.name for path in (tmp_path / "chunks").iterdir()}


async def test_a_whole_file_that_is_not_the_chunk_is_fetched_again(tier: RemoteTier, tmp_path: Path) -> None:
    batches = await tier.fill(P0, segments=1, batches=3)
    (segment,) = tier.rlmm.list_remote_log_segments(P0)
    kept = disk(tmp_path)
    async with kept:
        await wait_idle(kept)
        kept.put(ChunkKey(segment.segment_id.id, 0), [memoryview(bytes(1000))])
        await wait_idle(kept)
    for _ in range(2):
        async with reader_of(tier, disk(tmp_path)) as reader:
            assert (await read(reader, 0, 1))[0] == batches[0]
    assert len(tier.storage.gets) == 1


async def test_a_part_on_the_disk_is_not_held_back_by_the_store(tier: RemoteTier, tmp_path: Path) -> None:
    batches = await tier.fill(P0, segments=1, batches=12)
    async with reader_of(tier, disk(tmp_path)) as reader:
        await read(reader, 0)
    numbered = sorted((tmp_path / "chunks").iterdir(), key=lambda path: int(path.name.rpartition("-")[2]))
    for path in numbered[1:]:
        path.unlink()
    async with reader_of(tier, disk(tmp_path)) as reader:
        (segment,) = tier.rlmm.list_remote_log_segments(P0)
        index = await reader.index(segment, deadline_ms=monotonic_ms() + 20_000, connection_id=1)
        tier.storage.is_down = True
        assert (await read(reader, 0, 5000))[0] == b"".join(batches)[: index.chunks()[0].log_bytes]


async def test_extents_of_an_encrypted_store_are_encrypted_on_the_disk(tmp_path: Path) -> None:
    async with workbench(tmp_path) as bench:
        bench.services = replace(bench.services, key_ring=RING)
        bench.restart()
        bench.log.append(*[batch_of(10 * n, 10, value_bytes=15) for n in range(4)])
        await bench.copy_all()
        for _ in range(2):
            kept = disk(tmp_path)
            decode = partial(decode_index, ciphers=RING)
            async with RemoteLogReader(
                bench.metadata, bench.store, SETTINGS, decode_indexes=decode, disk_chunks=kept
            ) as reader:
                await wait_idle(kept)
                assert (await read(reader, 0, 5000, PARTITION))[0] == bench.log.bytes_of(0, 29)
                await wait_idle(kept)
        assert (kept.hits > 0, kept.misses) == (True, 0)
        on_disk = b"".join(path.read_bytes() for path in (tmp_path / "chunks").iterdir())
        assert on_disk
        assert bench.log.bytes_of(0, 9)[61:] not in on_disk


async def test_metrics_tell_what_the_disk_and_the_hedges_did(tier: RemoteTier, tmp_path: Path) -> None:
    await tier.fill(P0, segments=1, batches=3)
    for _ in range(2):
        kept = disk(tmp_path)
        async with reader_of(tier, kept) as reader:
            await read(reader, 0)
            registry = CollectorRegistry()
            registry.register(RemoteLogReaderMetrics(reader))
            prefix = "tidegate_remote_reader"
            names = ("disk_chunk_hits_total", "disk_chunk_misses_total", "disk_chunk_evictions_total")
            counts = [registry.get_sample_value(f"{prefix}_{name}") for name in names]
            assert registry.get_sample_value(f"{prefix}_hedged_requests_total") == 0
            assert registry.get_sample_value(f"{prefix}_hedge_wins_total") == 0
    assert counts == [kept.hits, 0, 0]
    assert kept.hits > 0
    assert registry.get_sample_value(f"{prefix}_disk_chunk_bytes") == kept.size_bytes > 0
