"""Timestamps lead to the first record at or after them, though they are not monotonic (docs/semantics.md 5.2)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.fakes.record_batches import build_batch, record
from tests.support.fakes.remote_requests import P0, in_ms
from tests.support.fakes.remote_tier import RemoteTier
from tiers.errors import RemoteReadTimeoutError
from tiers.model.log_start import LogGap
from tiers.reader.chunk_fetcher import Caller
from tiers.reader.remote_log_offset_reader import RemoteLogOffsetReader, TimestampOffset
from tiers.reader.remote_log_reader import RemoteLogReader

BEYOND = 1 << 40


@pytest.fixture
async def tier(tmp_path: Path) -> RemoteTier:
    return RemoteTier(tmp_path, chunk_bytes=200)


@pytest.fixture
async def offsets(tier: RemoteTier) -> AsyncIterator[RemoteLogOffsetReader]:
    async with RemoteLogReader(tier.rlmm.log, tier.storage) as reader:
        yield reader


async def find(
    offsets: RemoteLogOffsetReader, timestamp_ms: int, from_offset: int = 0, to_offset: int = BEYOND
) -> TimestampOffset | None:
    return await offsets.offset_for_timestamp(P0, timestamp_ms, from_offset, to_offset, Caller(in_ms(), 1))


async def test_log_append_time_is_every_records_timestamp(tier: RemoteTier, offsets: RemoteLogOffsetReader) -> None:
    await tier.add(P0, [build_batch(0, [record(0, 1), record(1, 2)], log_append_time_ms=700)], 0)
    assert await find(offsets, 700, from_offset=1) == TimestampOffset(700, 1, 0)


async def test_look_ups_go_on_behind_a_gap(tier: RemoteTier, offsets: RemoteLogOffsetReader) -> None:
    await tier.add(P0, [build_batch(0, [record(0, 100), record(1, 300)])], 0)
    await tier.rlmm.put_log_gap(P0, LogGap(2, 50), 3)
    await tier.add(P0, [build_batch(50, [record(50, 200), record(51, 400)], leader_epoch=3, codec=4)], 50)
    assert await find(offsets, 150) == TimestampOffset(300, 1, 0)
    assert await find(offsets, 150, from_offset=2) == TimestampOffset(200, 50, 3)
    assert await find(offsets, 350) == TimestampOffset(400, 51, 3)
    assert await find(offsets, 350, to_offset=50) is None
    assert await offsets.max_timestamp(P0, 10, 100, Caller(in_ms(), 1)) == TimestampOffset(400, 51, 3)


async def test_a_store_that_is_down_is_no_answer(tier: RemoteTier, offsets: RemoteLogOffsetReader) -> None:
    await tier.add(P0, [build_batch(0, [record(0, 5)])], 0)
    tier.storage.is_down = True
    with pytest.raises(RemoteReadTimeoutError):
        await offsets.offset_for_timestamp(P0, 1, 0, 100, Caller(in_ms(30), 1))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    timestamps=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=8),
    wanted=st.integers(0, 10),
    from_offset=st.integers(0, 40),
    to_offset=st.integers(1, 41),
    is_one_batch=st.booleans(),
)
async def test_the_answer_is_that_of_a_scan(
    tmp_path_factory: pytest.TempPathFactory,
    timestamps: list[list[int]],
    wanted: int,
    from_offset: int,
    to_offset: int,
    is_one_batch: bool,
) -> None:
    """`to_offset` limits a search for the greatest timestamp by segments."""
    tier = RemoteTier(tmp_path_factory.mktemp("tier"), chunk_bytes=150)
    flat: list[tuple[int, int]] = []
    end = 0
    for of_segment in timestamps:
        base = len(flat)
        flat += [(base + n, timestamp) for n, timestamp in enumerate(of_segment)]
        records = [record(o, t) for o, t in flat[base:]]
        end = len(flat) if base < to_offset else end
        batches = [records] if is_one_batch else [[each] for each in records]
        await tier.add(P0, [build_batch(each[0].offset, each) for each in batches], base)
    in_range = [(t, o) for o, t in flat if from_offset <= o < to_offset]
    first = next(((t, o, 0) for t, o in in_range if t >= wanted), None)
    greatest = max(((t, -o) for o, t in flat if from_offset <= o < end), default=None)
    async with RemoteLogReader(tier.rlmm.log, tier.storage) as reader:
        assert await find(reader, wanted, from_offset, to_offset) == first
        found = await reader.max_timestamp(P0, from_offset, to_offset, Caller(in_ms(), 1))
    assert found == (None if greatest is None else (greatest[0], -greatest[1], 0))
