"""Windows grow while their streams have to wait, and never exceed the budget together.

Through a reader, in virtual time, they follow the latency and the rate of the store: a client waits only in the
beginning. All sizes are a thousandth of the real ones: a chunk has about 1,000 bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fakes.in_memory_rlmm import InMemoryRemoteLogMetadataManager
from tests.support.fakes.remote_requests import P0, asked, next_offset
from tests.support.fakes.remote_tier import RemoteTier
from tests.support.simulation.loop import VirtualLoop
from tiers.config.settings import RemoteLogConfig
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.reader.chunk_fetcher import RemoteLogReaderSettings
from tiers.reader.remote_log_reader import IDLE_MS, ReadAhead, RemoteLogReader
from tiers.storage.remote_storage_manager import SegmentReads

CHUNK = 1_000
SETTINGS = RemoteLogReaderSettings(
    first_get_bytes=CHUNK,
    max_get_bytes=8 * CHUNK,
    read_ahead_max_window_bytes=64 * CHUNK,
    read_ahead_bytes=512 * CHUNK,
    max_bytes_in_flight=128 * CHUNK,
    remote_log=RemoteLogConfig(chunk_cache_bytes=768 * CHUNK),
)


class Streams:
    """Reads of streams that are all sequential unless a test says another offset."""

    def __init__(self, budget_bytes: int = 1000) -> None:
        self.now_ms = 0
        self.ahead = ReadAhead(
            lambda: self.now_ms,
            budget_bytes=budget_bytes,
            first_window_bytes=10,
            max_window_bytes=40,
        )
        self.next_offsets: dict[int, int] = {}

    def read(self, connection_id: int, *, waits: bool = False, offset: int | None = None) -> int:
        offset = self.next_offsets.get(connection_id, 0) if offset is None else offset
        self.next_offsets[connection_id] = offset + 10
        return self.ahead.window_bytes((connection_id, P0), offset, offset + 10, had_to_wait=waits)

    def read_times(self, times: int, connection_id: int) -> int:
        """The last window of several reads that all had to wait."""
        return [self.read(connection_id, waits=True) for _ in range(times)][-1]


def test_an_idle_stream_gives_its_window_up() -> None:
    streams = Streams(budget_bytes=50)
    assert streams.read_times(4, 1) == 40
    streams.now_ms = IDLE_MS + 1
    assert streams.read_times(4, 2) == 40
    assert streams.ahead.reserved_bytes == 40
    assert [streams.read_times(4, 3), streams.read(2)] == [30, 20]
    assert streams.ahead.reserved_bytes == 50
    assert streams.read(1) == 0  # as if it were new


def test_streams_that_read_share_the_budget_evenly() -> None:
    streams = Streams(budget_bytes=80)
    for _ in range(3):
        for connection_id in range(1, 5):
            streams.read_times(4, connection_id)
    assert [streams.read(connection_id, waits=True) for connection_id in range(1, 5)] == [20, 20, 20, 20]
    streams = Streams(budget_bytes=20)
    assert [streams.read_times(3, 1), streams.read_times(2, 2), streams.read_times(2, 3)] == [20, 10, 0]
    assert [streams.read(1), streams.read(2)] == [10, 10]


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3), st.booleans(), st.integers(0, IDLE_MS)), max_size=60))
def test_the_budget_holds_whatever_is_read(reads: list[tuple[int, int, bool, int]]) -> None:
    streams = Streams(budget_bytes=70)
    for connection_id, offset, waits, pause_ms in reads:
        streams.now_ms += pause_ms
        window = streams.read(connection_id, waits=waits, offset=offset)
        assert 0 <= window <= 40
        assert 0 <= streams.ahead.reserved_bytes <= 70
        assert streams.ahead.reserved_bytes == sum(each.window_bytes for each in streams.ahead._streams.values())


class DistantStore:
    """Answers after 60 ms, and sends 80,000 bytes per second on each connection. It has its objects in memory."""

    def __init__(self) -> None:
        self.logs: dict[UUID, memoryview] = {}
        self.indexes: dict[UUID, bytes] = {}
        self.gets: list[int] = []

    async def fetch_log_segment(self, metadata: RemoteLogSegmentMetadata, start: int, end: int) -> memoryview:
        self.gets.append(end + 1 - start)
        await asyncio.sleep(0.06 + (end + 1 - start) / 80_000)
        return self.logs[metadata.segment_id.id][start : end + 1]

    async def fetch_indexes(self, metadata: RemoteLogSegmentMetadata) -> bytes:
        await asyncio.sleep(0.06)
        return self.indexes[metadata.segment_id.id]

    async def filled(
        self, folder: Path, partitions: Sequence[TopicIdPartition], segments: int
    ) -> InMemoryRemoteLogMetadataManager:
        """Fills the partitions with segments of 200 chunks each."""
        tier = RemoteTier(folder, chunk_bytes=CHUNK)
        for partition in partitions:
            await tier.fill(partition, segments=segments, batches=200, records=1, value_bytes=CHUNK - 100)
            for segment in tier.state.list_remote_log_segments(partition):
                uuid = segment.segment_id.id
                self.logs[uuid] = await tier.storage.fetch_log_segment(segment, 0)
                self.indexes[uuid] = await tier.storage.fetch_indexes(segment)
        await tier.storage.close()
        return tier.rlmm


@pytest.mark.parametrize(
    ("readers", "client_s", "most_s", "window_bytes"),
    [
        (1, 0.004, 1.2 * 800 * 0.004, 64 * CHUNK),
        (4, 0.004, 1.4 * 800 * 0.004, 256 * CHUNK),
        (1, 0.1, 1.01 * 800 * 0.1, 16 * CHUNK),
    ],
    ids=["fast", "four", "slow"],
)
def test_clients_of_a_far_store_wait_only_in_the_beginning(
    tmp_path: Path, readers: int, client_s: float, most_s: float, window_bytes: int
) -> None:
    """A client takes `client_s` for each of 800 chunks. A slow one keeps a small window.

    Large GETs bring most of what a fast one reads, and no byte twice."""
    store = DistantStore()
    rlmm = asyncio.run(store.filled(tmp_path, [P0], segments=4))
    loop = VirtualLoop()
    firsts_s, windows = list[float](), list[int]()

    async def client(reader: RemoteLogReader, connection_id: int) -> None:
        offset, began_s = 0, loop.time()
        while offset < 800:
            deadline_ms = int(loop.time() * 1000) + 60_000
            request = asked(offset, CHUNK, deadline_ms=deadline_ms, connection_id=connection_id)
            offset = next_offset(await reader.read(request))
            firsts_s.append(loop.time() - began_s)
            windows.append(reader.read_ahead.reserved_bytes)
            await asyncio.sleep(client_s)

    async def run() -> float:
        began_s = loop.time()
        clock_ms: Callable[[], int] = lambda: int(loop.time() * 1000)  # noqa: E731
        async with RemoteLogReader(rlmm.log, cast(SegmentReads, store), SETTINGS, clock_ms=clock_ms) as reader:
            await asyncio.gather(*(client(reader, number) for number in range(readers)))
        return loop.time() - began_s

    try:
        assert loop.run_until_complete(run()) < most_s
    finally:
        loop.close()
    assert firsts_s[0] < 0.145  # the index, and then one chunk
    assert window_bytes / 2 <= max(windows) <= window_bytes
    assert sum(store.gets) == sum(map(len, store.logs.values()))
    assert client_s > 0.01 or len(store.gets) < 800 / 5


@pytest.mark.parametrize(("streams", "cache_chunks", "most_gets"), [(8, 768, 150), (64, 768, 150), (1, 6, 600)])
def test_gets_are_as_long_as_the_cache_allows(tmp_path: Path, streams: int, cache_chunks: int, most_gets: int) -> None:
    """The streams take at most `most_gets` GETs per 1024 chunks, and read less than a hundredth of the chunks twice."""
    remote_log = SETTINGS.remote_log.model_copy(update={"chunk_cache_bytes": cache_chunks * CHUNK})
    settings = replace(SETTINGS, remote_log=remote_log)
    store, loop = DistantStore(), VirtualLoop()
    partitions = [TopicIdPartition(P0.topic_id, number, P0.topic) for number in range(streams)]
    rlmm = asyncio.run(store.filled(tmp_path, partitions, segments=1))

    async def client(reader: RemoteLogReader, partition: TopicIdPartition) -> None:
        offset = 0
        while offset < 200:
            deadline_ms = int(loop.time() * 1000) + 60_000
            request = asked(offset, 4 * CHUNK, deadline_ms=deadline_ms, connection_id=partition.partition)
            offset = next_offset(await reader.read(replace(request, partition=partition)))
            await asyncio.sleep(0.001)

    async def run() -> None:
        clock_ms: Callable[[], int] = lambda: int(loop.time() * 1000)  # noqa: E731
        async with RemoteLogReader(rlmm.log, cast(SegmentReads, store), settings, clock_ms=clock_ms) as reader:
            await asyncio.gather(*(client(reader, each) for each in partitions))

    try:
        loop.run_until_complete(run())
    finally:
        loop.close()
    assert sum(store.gets) <= 1.01 * sum(map(len, store.logs.values()))
    assert len(store.gets) <= most_gets * streams * 200 / 1024
