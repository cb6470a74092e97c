"""A range of a segment is read as whole chunks, ahead and in few GETs. Every chunk is checked against its checksum."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from pipeline.source.remote_read import RawBatches, read_remote_range
from protocol.records.record_batch import iterate_batches
from tests.support.fakes.record_batches import batch_of, build_batch, control_batch, record
from tests.support.fakes.remote_tier import TOPIC_ID, RemoteTier
from tests.support.fakes.segments import PARTITION, build_segment, metadata_of
from tiers.bounded_gather import in_order
from tiers.errors import CorruptSegmentError, EncryptionKeyError
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import AbortedTransaction
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.segment.indexes.segment_index import AbortedTransactionRange
from tiers.segment.segment_encryption import KeyRing, seal_segment
from tiers.storage.local import LocalRemoteStorageManager

ORDERS = TopicIdPartition(TOPIC_ID, 0, "orders")


@pytest.fixture
def tier(tmp_path: Path) -> RemoteTier:
    return RemoteTier(tmp_path)


async def segment_of(tier: RemoteTier, batches: int = 40) -> tuple[RemoteLogSegmentMetadata, list[bytes]]:
    """Batches of ten records; a chunk holds two or three of them."""
    made = await tier.fill(ORDERS, segments=1, batches=batches)
    return next(iter(tier.state.list_remote_log_segments(ORDERS))), made


async def read(
    tier: RemoteTier, segment: RemoteLogSegmentMetadata, first: int, end: int, min_timestamp_ms: int | None = None
) -> list[RawBatches]:
    parts = read_remote_range(
        tier.storage, segment, None, first, end, min_timestamp_ms=min_timestamp_ms, get_bytes=4000, gets_at_once=2
    )
    return [part async for part in parts]


async def test_a_whole_segment_is_its_log_byte_for_byte(tier: RemoteTier) -> None:
    segment, made = await segment_of(tier)
    parts = await read(tier, segment, 0, 399)
    assert b"".join(part.data for part in parts) == b"".join(made)
    assert parts[-1].next_offset == 400
    assert 1 < len(tier.storage.gets) < 10  # chunks of 1000 bytes, four to a GET
    assert tier.storage.max_running <= 2


async def test_a_part_is_whole_chunks_around_it_and_nothing_more(tier: RemoteTier) -> None:
    segment, _ = await segment_of(tier)
    [part] = await read(tier, segment, 205, 214)
    offsets = [batch.base_offset for batch in iterate_batches(part.data)]
    assert offsets[0] <= 200 < 214 <= offsets[-1] + 9
    assert part.next_offset == offsets[-1] + 10
    assert len(part.data) < 3000
    assert len(tier.storage.gets) == 1


async def test_chunks_before_a_time_are_not_fetched(tier: RemoteTier) -> None:
    segment, _ = await segment_of(tier)
    parts = await read(tier, segment, 0, 399, min_timestamp_ms=1_000_000 + 350)
    offsets = [batch.base_offset for part in parts for batch in iterate_batches(part.data)]
    assert 300 < offsets[0] <= 350
    assert offsets[-1] == 390
    assert await read(tier, segment, 0, 399, min_timestamp_ms=2_000_000) == []


async def test_aborted_transactions_come_with_their_batches(tier: RemoteTier) -> None:
    batches = [
        batch_of(0, 2),
        build_batch(2, [record(2)], producer_id=7, transactional=True),
        control_batch(3, commit=False, producer_id=7),
    ]
    segment = await tier.add(ORDERS, batches, 0, [AbortedTransaction(7, 2)])
    [part] = await read(tier, segment, 0, 3)
    assert part.aborted == (AbortedTransactionRange(7, 2, 3),)


@pytest.mark.parametrize("get_bytes", [1000, 1 << 20])
async def test_damage_comes_out_after_what_lies_before_it(tier: RemoteTier, get_bytes: int) -> None:
    segment, _ = await segment_of(tier)
    damaged_from = 12_000

    def damage(data: bytes) -> bytes:
        position = damaged_from - tier.storage.gets[-1][0]
        return data if not 0 <= position < len(data) else data[:position] + b"!" + data[position + 1 :]

    tier.storage.damage = damage
    offsets: list[int] = []

    async def read_on() -> None:
        async for part in read_remote_range(tier.storage, segment, None, 0, 399, get_bytes=get_bytes, gets_at_once=1):
            offsets.extend(batch.base_offset for batch in iterate_batches(part.data))

    with pytest.raises(CorruptSegmentError, match="is not what was stored"):
        await read_on()
    assert offsets == list(range(0, 10 * len(offsets), 10))
    assert offsets


async def test_an_encrypted_segment_needs_its_key(tmp_path: Path) -> None:
    (tmp_path / "remote").mkdir()
    storage = LocalRemoteStorageManager({"path": str(tmp_path / "remote"), "cluster.id": "c"})
    await storage.open()
    ring = KeyRing({"k1": b"1" * 32}, "k1")
    made = [batch_of(0, 10), batch_of(10, 10)]
    built = build_segment(tmp_path / "log", made, base_offset=0)
    segment = metadata_of(built)
    sealed = seal_segment(built, segment.segment_id.id, ring, tmp_path / "sealed")
    await storage.copy_log_segment_data(segment, sealed.log_segment_data(segment))
    parts = [part async for part in read_remote_range(storage, segment, ring, 0, 19)]
    assert b"".join(part.data for part in parts) == b"".join(made)
    assert segment.topic_id_partition == PARTITION
    with pytest.raises(EncryptionKeyError):
        _ = [part async for part in read_remote_range(storage, segment, KeyRing(), 0, 19)]


async def test_calls_run_side_by_side_and_end_in_their_order() -> None:
    may_end = [asyncio.Event() for _ in range(4)]
    has_ended = [asyncio.Event() for _ in range(4)]
    begun: list[int] = []

    def call(number: int) -> Callable[[], Awaitable[int]]:
        async def work() -> int:
            begun.append(number)
            try:
                await may_end[number].wait()
                if number == 2:
                    raise LookupError("gone")
                return number
            finally:
                has_ended[number].set()

        return work

    results = in_order(((1, call(number)) for number in range(4)), 2)
    may_end[1].set()
    async with asyncio.TaskGroup() as group:
        first = group.create_task(anext(results))
        await has_ended[1].wait()
        assert not first.done()
        may_end[0].set()
    assert first.result() == 0
    assert await anext(results) == 1
    may_end[2].set()
    with pytest.raises(LookupError, match="gone"):
        await anext(results)
    assert begun == [0, 1, 2, 3]
    assert has_ended[3].is_set()  # no reader waits for it any more
