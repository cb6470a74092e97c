"""The disk chunk cache on the way of a read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from tests.support.fakes.idle import wait_idle
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.remote_requests import P0, asked, in_ms, joined, read_all
from tests.support.fakes.remote_tier import RemoteTier
from tests.support.tiers.workbench import PARTITION, workbench
from tiers.broker.client import monotonic_ms
from tiers.config.settings import RemoteLogConfig
from tiers.errors import CorruptSegmentError, RetriableRemoteStorageError
from tiers.reader.chunk_cache import ChunkKey, DiskChunkCache
from tiers.reader.chunk_fetcher import Caller, RemoteLogReaderSettings
from tiers.reader.metrics import RemoteLogReaderMetrics
from tiers.reader.remote_log_reader import RemoteLogReader
from tiers.segment.indexes.segment_index import Chunk
from tiers.segment.segment_encryption import KeyRing
from tiers.storage.locations import HOME

SETTINGS = RemoteLogReaderSettings(max_get_bytes=6000, remote_log=RemoteLogConfig(chunk_cache_bytes=1 << 20))
RING = KeyRing({"k1": b"1" * 32}, current="k1")


@pytest.fixture
async def tier(tmp_path: Path) -> RemoteTier:
    return RemoteTier(tmp_path)


def disk(folder: Path) -> DiskChunkCache:
    return DiskChunkCache(folder / "chunks", 1 << 20, monotonic_ms)


def on_disk(folder: Path) -> list[Path]:
    return sorted((folder / "chunks").iterdir(), key=lambda path: int(path.name.rpartition("-")[2]))


@asynccontextmanager
async def reader_of(tier: RemoteTier, disk_chunks: DiskChunkCache) -> AsyncIterator[RemoteLogReader]:
    async with RemoteLogReader(tier.rlmm.log, tier.storage, SETTINGS, disk_chunks=disk_chunks) as reader:
        await wait_idle(disk_chunks)
        yield reader
        await wait_idle(reader.fetcher.chunk_pool)
        await wait_idle(disk_chunks)


async def chunks_of(tier: RemoteTier, reader: RemoteLogReader) -> tuple[Chunk, ...]:
    (segment,) = tier.state.list_remote_log_segments(P0)
    return tuple((await reader.fetcher.index(segment, Caller(in_ms(), 1))).chunks())


async def test_after_a_restart_nothing_is_fetched(tier: RemoteTier, tmp_path: Path) -> None:
    made = b"".join(await tier.fill(P0, segments=3, batches=20))
    async with reader_of(tier, disk(tmp_path)) as reader:
        assert await read_all(reader, 600) == made
    tier.storage.gets.clear()
    again = disk(tmp_path)
    async with reader_of(tier, again) as reader:
        assert await read_all(reader, 600) == made
        registry = CollectorRegistry()
        registry.register(RemoteLogReaderMetrics(reader))
    assert (tier.storage.gets, again.hits > 20, again.misses) == ([], True, 0)
    for name, value in (("hits_total", again.hits), ("bytes", again.size_bytes)):
        assert registry.get_sample_value(f"tidegate_remote_reader_cache_{name}", {"cache": "chunk_files"}) == value


async def test_chunks_on_the_disk_are_served_while_the_store_is_down(tier: RemoteTier, tmp_path: Path) -> None:
    batches = await tier.fill(P0, segments=1, batches=12)
    async with reader_of(tier, disk(tmp_path)) as reader:
        await reader.read(asked(0, 900))
    for path in on_disk(tmp_path)[1:]:
        path.unlink()
    async with reader_of(tier, disk(tmp_path)) as reader:
        chunks = await chunks_of(tier, reader)
        tier.storage.is_down = True
        while not (breaker := reader.fetcher.breakers.of(HOME)).is_open:
            with suppress(RetriableRemoteStorageError), breaker:
                raise RetriableRemoteStorageError("slow down")
        # A part on the disk does not wait for the store.
        assert joined(await reader.read(asked(0, 5000))) == b"".join(batches)[: chunks[0].log_bytes]


async def test_damaged_bytes_of_the_store_are_not_kept(tier: RemoteTier, tmp_path: Path) -> None:
    batches = await tier.fill(P0, segments=1, batches=12)
    kept = disk(tmp_path)
    async with reader_of(tier, kept) as reader:
        tier.storage.damage = lambda data: bytes(len(data))
        with pytest.raises(CorruptSegmentError):
            await reader.read(asked(0, 1))
        await wait_idle(kept)
        assert kept.size_bytes == 0
        bad = (await chunks_of(tier, reader))[1].stored_position + 100
        tier.storage.damage = lambda data: data[:bad] + bytes([data[bad] ^ 1]) + data[bad + 1 :]
        assert joined(await reader.read(asked(0, 1))) == batches[0]
        assert tier.storage.gets[-1][0] == 0
        assert tier.storage.gets[-1][1] > bad
    numbers = [path.name.rpartition("-")[2] for path in on_disk(tmp_path)]
    assert numbers[:1] == ["0"]
    assert "1" not in numbers


async def test_a_whole_file_that_is_not_the_chunk_is_fetched_again(tier: RemoteTier, tmp_path: Path) -> None:
    batches = await tier.fill(P0, segments=1, batches=3)
    (segment,) = tier.state.list_remote_log_segments(P0)
    async with disk(tmp_path) as kept:
        await wait_idle(kept)
        kept.put(ChunkKey(segment.segment_id.id, 0), [memoryview(bytes(1000))])
        await wait_idle(kept)
    for _ in range(2):
        async with reader_of(tier, disk(tmp_path)) as reader:
            assert joined(await reader.read(asked(0, 1))) == batches[0]
    assert len(tier.storage.gets) == 1


async def test_extents_of_an_encrypted_store_are_encrypted_on_the_disk(tmp_path: Path) -> None:
    async with workbench(tmp_path) as bench:
        bench.services = replace(bench.services, key_ring=RING)
        bench.restart()
        bench.log.append(*[batch_of(10 * n, 10, value_bytes=15) for n in range(4)])
        await bench.copy_all()
        for _ in range(2):
            kept = disk(tmp_path)
            async with RemoteLogReader(
                bench.metadata.log, bench.store, SETTINGS, ciphers=RING, disk_chunks=kept
            ) as reader:
                await wait_idle(kept)
                assert joined(await reader.read(asked(0, 5000, partition=PARTITION))) == bench.log.bytes_of(0, 29)
                await wait_idle(kept)
        assert (kept.hits > 0, kept.misses) == (True, 0)
        stored = b"".join(path.read_bytes() for path in on_disk(tmp_path))
        assert stored
        assert bench.log.bytes_of(0, 9)[61:] not in stored
