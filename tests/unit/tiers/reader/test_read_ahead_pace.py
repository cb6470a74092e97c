"""Read-ahead follows the latency and the rate of the store, in virtual time: a client waits only in the beginning.

All sizes are a thousandth of the real ones: a chunk has about 1,000 bytes.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from uuid import UUID

import pytest

from tests.support.fakes.in_memory_rlmm import InMemoryRemoteLogMetadataManager
from tests.support.fakes.remote_requests import P0, asked, next_offset
from tests.support.fakes.remote_tier import RemoteTier
from tests.support.simulation.loop import VirtualLoop
from tiers.config.settings import RemoteLogConfig
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.reader.remote_log_reader import RemoteLogReader, RemoteLogReaderSettings
from tiers.storage.remote_storage_manager import RemoteStorageManager

CHUNK = 1_000
SETTINGS = RemoteLogReaderSettings(
    first_get_bytes=CHUNK,
    min_get_bytes=4 * CHUNK,
    max_get_bytes=8 * CHUNK,
    read_ahead_max_window_bytes=64 * CHUNK,
    remote_log=RemoteLogConfig(
        chunk_cache_bytes=256 * CHUNK, read_ahead_bytes=128 * CHUNK, reader_max_bytes_in_flight=128 * CHUNK
    ),
)


@dataclass
class Reading:
    seconds: float = 0.0
    first_s: float = 0.0
    window_bytes: int = 0
    gets: int = 0
    got_bytes: int = 0
    stored_bytes: int = 0


class DistantStore:
    """Answers after `latency_s`, and sends `rate` bytes per second on each connection. It has its objects in memory."""

    def __init__(self, latency_s: float, rate: float) -> None:
        self.logs: dict[UUID, memoryview] = {}
        self.indexes: dict[UUID, bytes] = {}
        self.gets = 0
        self.got_bytes = 0
        self._latency_s = latency_s
        self._rate = rate

    async def fetch_log_segment(
        self, metadata: RemoteLogSegmentMetadata, start_position: int, end_position: int | None = None
    ) -> memoryview:
        assert end_position is not None
        self.gets += 1
        self.got_bytes += end_position + 1 - start_position
        await asyncio.sleep(self._latency_s + (end_position + 1 - start_position) / self._rate)
        return self.logs[metadata.segment_id.id][start_position : end_position + 1]

    async def fetch_indexes(self, metadata: RemoteLogSegmentMetadata) -> bytes:
        await asyncio.sleep(self._latency_s)
        return self.indexes[metadata.segment_id.id]


async def filled(folder: Path, store: DistantStore) -> InMemoryRemoteLogMetadataManager:
    tier = RemoteTier(folder, chunk_bytes=CHUNK)
    await tier.fill(P0, segments=4, batches=200, records=1, value_bytes=CHUNK - 100)
    for segment in tier.state.list_remote_log_segments(P0):
        uuid = segment.segment_id.id
        store.logs[uuid] = await tier.storage.fetch_log_segment(segment, 0)
        store.indexes[uuid] = await tier.storage.fetch_indexes(segment)
    await tier.storage.close()
    return tier.rlmm


def backfill(folder: Path, *, latency_s: float, rate: float, client_s: float, readers: int = 1) -> Reading:
    """Reads 800 chunks; the client takes `client_s` for each."""
    store = DistantStore(latency_s, rate)
    rlmm = asyncio.run(filled(folder, store))
    loop = VirtualLoop()

    async def run() -> Reading:
        reading = Reading()
        began_s = loop.time()

        async def client(reader: RemoteLogReader, connection_id: int) -> None:
            offset = 0
            while offset < 800:
                deadline_ms = int(loop.time() * 1000) + 60_000
                request = asked(offset, CHUNK, deadline_ms=deadline_ms, connection_id=connection_id)
                offset = next_offset(await reader.read(request))
                reading.first_s = reading.first_s or loop.time() - began_s
                reading.window_bytes = max(reading.window_bytes, reader.read_ahead.reserved_bytes)
                await asyncio.sleep(client_s)

        async with (
            RemoteLogReader(
                rlmm.log, cast(RemoteStorageManager, store), SETTINGS, clock_ms=lambda: int(loop.time() * 1000)
            ) as reader,
            asyncio.TaskGroup() as group,
        ):
            for number in range(readers):
                group.create_task(client(reader, number))
        reading.seconds = loop.time() - began_s
        reading.gets, reading.got_bytes = store.gets, store.got_bytes
        reading.stored_bytes = sum(map(len, store.logs.values()))
        return reading

    try:
        return loop.run_until_complete(run())
    finally:
        loop.close()


def test_a_fast_client_of_a_far_store_waits_only_in_the_beginning(tmp_path: Path) -> None:
    reading = backfill(tmp_path, latency_s=0.06, rate=80_000, client_s=0.004)
    assert reading.first_s < 0.145  # the index, and then one chunk
    assert reading.seconds < 1.2 * (800 * 0.004)
    assert reading.window_bytes == 64 * CHUNK


def test_a_slow_client_keeps_the_first_window(tmp_path: Path) -> None:
    reading = backfill(tmp_path, latency_s=0.06, rate=80_000, client_s=0.1)
    assert reading.seconds < 1.01 * (800 * 0.1)
    assert reading.window_bytes <= 8 * CHUNK


@pytest.mark.parametrize("readers", [1, 4])
def test_large_gets_bring_most_of_a_backfill_and_no_byte_twice(tmp_path: Path, readers: int) -> None:
    reading = backfill(tmp_path, latency_s=0.06, rate=80_000, client_s=0.004, readers=readers)
    assert reading.gets < 800 / 5
    assert reading.got_bytes == reading.stored_bytes
