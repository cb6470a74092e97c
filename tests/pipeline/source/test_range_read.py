"""A task resumes where it was when the records of its plan moved to the other tier. It loses and repeats no record."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeline.decode.record_columns import RecordColumns
from pipeline.source import range_read, remote_read
from pipeline.source.local_read import OffsetOutOfRangeError
from pipeline.source.options import ReadOptions, parse_options
from pipeline.source.range_read import RangeReader
from pipeline.source.read_plan import LocalRange, LogView, MissingOffsets, ReadRange, cover
from pipeline.source.remote_read import RawBatches
from pipeline.source.tiered_log import DataLossError, LogBounds
from pipeline.worker import Worker
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.remote_tier import TOPIC_ID, RemoteTier
from tests.support.fakes.stored_segments import remote_range
from tiers.errors import CorruptSegmentError
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentState

ORDERS = TopicIdPartition(TOPIC_ID, 0, "orders")
OFFSETS = RecordColumns(("offset",))


class MovingLog:
    """Batches of ten records. The leader has those from `local_start` on; the metadata is the tier's own."""

    def __init__(self, tier: RemoteTier, end: int) -> None:
        self.tier = tier
        self.log_start = self.local_start = 0
        self.end = end
        self.trim_at: dict[int, int] = {}
        """Once the leader gave out this offset, its log starts there."""
        self.plans = 0

    async def read_local(
        self, client: object, partition: object, first_offset: int, end_offset: int, **settings: object
    ) -> AsyncGenerator[RawBatches]:
        for base in range(first_offset // 10 * 10, end_offset + 1, 10):
            if base + 9 < self.local_start:
                raise OffsetOutOfRangeError(ORDERS, base)
            yield RawBatches(memoryview(batch_of(base, 10)), (), base + 10)
            self.local_start = self.trim_at.get(base, self.local_start)

    async def bounds(self, partitions: Sequence[TopicIdPartition]) -> dict[TopicIdPartition, LogBounds]:
        self.plans += 1
        return {one: LogBounds(self.log_start, self.local_start, self.end) for one in partitions}

    def ranges(
        self, partition: TopicIdPartition, bounds: LogBounds, first: int, last: int
    ) -> list[ReadRange | MissingOffsets]:
        view = LogView(
            partition,
            bounds.log_start,
            bounds.local_start,
            lambda at: self.tier.state.answering_segments(partition, at),
        )
        return list(cover(view, first, last))

    @asynccontextmanager
    async def open(self, options: ReadOptions) -> AsyncIterator[MovingLog]:
        yield self


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MovingLog:
    moving = MovingLog(RemoteTier(tmp_path), 200)

    async def storage(self: Worker, *args: object) -> Any:
        return moving.tier.storage

    async def at_once(call: Callable[[], Awaitable[Any]]) -> Any:
        return await call()

    monkeypatch.setattr(remote_read, "with_retries", at_once)
    monkeypatch.setattr(range_read, "read_local_range", moving.read_local)
    monkeypatch.setattr(range_read, "open_log", moving.open)
    monkeypatch.setattr(Worker, "storage", storage)
    return moving


@pytest.fixture
def options(tmp_path: Path) -> dict[str, str]:
    file = tmp_path / "tidegate.toml"
    file.write_text(
        '[upstream]\nbootstrap.servers = "localhost:1"\n[storage]\nimplementation = "local"\npath = "/no"\n'
    )
    return {"config": str(file), "subscribe": "orders"}


def read(options: dict[str, str], ranges: Sequence[ReadRange], lost: Sequence[tuple[int, int]] = ()) -> list[int]:
    """Returns the offsets of the records that are read. `lost` has the ranges that the reader must name as lost."""
    reader = RangeReader(parse_options(options, is_streaming=False), "cluster")
    found = [offset for batch in reader.read(ranges, OFFSETS) for offset in batch.column("offset").to_pylist()]
    assert reader.lost == [MissingOffsets(ORDERS, *one) for one in lost]
    return found


async def segment(log: MovingLog, first: int, end: int) -> RemoteLogSegmentMetadata:
    return await log.tier.add(ORDERS, [batch_of(base, 10) for base in range(first, end, 10)], first)


async def remove(log: MovingLog, old: RemoteLogSegmentMetadata, *, from_metadata: bool = True) -> None:
    await log.tier.storage.inner.delete_log_segment_data(old)
    if from_metadata:
        await log.tier.move(old, RemoteLogSegmentState.DELETE_SEGMENT_STARTED)


def blank_segments(folder: Path) -> None:
    for file in folder.rglob("*.log"):
        file.chmod(0o600)
        file.write_bytes(bytes(file.stat().st_size))


async def test_records_trimmed_during_the_read_come_from_the_store(log: MovingLog, options: dict[str, str]) -> None:
    await segment(log, 0, 100)
    await segment(log, 100, 150)
    log.trim_at = {30: 140}
    assert read(options, [LocalRange(ORDERS, 5, 195)]) == list(range(5, 196))
    assert log.plans == 1


async def test_a_segment_that_was_replaced_is_read_from_the_one_in_its_place(
    log: MovingLog, options: dict[str, str]
) -> None:
    small = [await segment(log, first, first + 20) for first in range(0, 100, 20)]
    planned = [remote_range(one, one.start_offset, one.end_offset) for one in small]
    await segment(log, 0, 100)
    for one in small[2:]:
        await remove(log, one)
    assert read(options, planned) == list(range(100))


async def test_records_of_no_tier_are_a_loss(log: MovingLog, options: dict[str, str]) -> None:
    old = await segment(log, 0, 100)
    planned: list[ReadRange] = [remote_range(old, 0, 99), LocalRange(ORDERS, 100, 119)]
    await remove(log, old)
    log.log_start = log.local_start = 100
    with pytest.raises(DataLossError, match="orders-0: 0 to 99 is gone"):
        read(options, planned)
    assert read({**options, "failOnDataLoss": "false"}, planned, [(0, 99)]) == list(range(100, 120))


async def test_damaged_records_are_named_with_their_partition(
    log: MovingLog, options: dict[str, str], tmp_path: Path
) -> None:
    old = await segment(log, 0, 50)
    blank_segments(tmp_path)
    with pytest.raises(CorruptSegmentError, match=r"^orders-0: the chunk with offsets 0 to 39, at 0, is not what was"):
        read(options, [remote_range(old, 0, 49)])


async def test_an_object_that_only_the_metadata_still_has_is_a_loss(log: MovingLog, options: dict[str, str]) -> None:
    old = await segment(log, 0, 50)
    await segment(log, 50, 100)
    await remove(log, old, from_metadata=False)
    planned = log.ranges(ORDERS, LogBounds(0, 100, 200), 40, 119)
    ranges: list[ReadRange] = [one for one in planned if not isinstance(one, MissingOffsets)]
    assert len(ranges) == 3
    with pytest.raises(DataLossError, match="40 to 49 cannot be read"):
        read(options, ranges)
    assert read({**options, "failOnDataLoss": "false"}, ranges, [(40, 49)]) == list(range(50, 120))


async def test_large_ranges_are_not_held_in_memory_ahead(
    log: MovingLog, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges = [remote_range(await segment(log, at, at + 10), at, at + 9) for at in range(0, 50, 10)]
    large = [one._replace(record_bytes=float(1 << 30)) for one in ranges]
    reader = RangeReader(parse_options(options, is_streaming=False), "cluster")
    async with aclosing(reader.raw_batches(large)) as batches:
        await anext(batches)
        assert log.tier.storage.index_gets == 1


async def test_what_was_opened_ahead_is_closed_with_the_reader(log: MovingLog, options: dict[str, str]) -> None:
    """The first range is read while the others wait for the store."""
    ranges = [remote_range(await segment(log, at, at + 10), at, at + 9) for at in range(0, 50, 10)]
    reader = RangeReader(parse_options(options, is_streaming=False), "cluster")
    store = log.tier.storage
    store.gate = asyncio.Event()
    reading = asyncio.create_task(anext(reader.raw_batches(ranges)))
    await store.asked.wait()
    assert store.running > 1
    reading.cancel()
    await asyncio.wait({reading})
    assert store.running == 0


async def test_a_log_that_ends_before_what_was_planned_is_a_loss(log: MovingLog, options: dict[str, str]) -> None:
    log.trim_at = {20: 500}
    log.end = 30
    with pytest.raises(DataLossError, match="ends at 30: 30 to 99 is gone"):
        read(options, [LocalRange(ORDERS, 0, 99)])
    log.local_start = 0
    lossy = {**options, "failOnDataLoss": "false"}
    assert read(lossy, [LocalRange(ORDERS, 0, 99)], [(30, 99)]) == list(range(30))
