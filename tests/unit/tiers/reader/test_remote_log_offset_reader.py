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
from tiers.reader.remote_log_offset_reader import RemoteLogOffsetReader, TimestampOffset
from tiers.reader.remote_log_reader import RemoteLogReader


@pytest.fixture
async def tier(tmp_path: Path) -> RemoteTier:
    return RemoteTier(tmp_path, chunk_bytes=200)


@pytest.fixture
async def offsets(tier: RemoteTier) -> AsyncIterator[RemoteLogOffsetReader]:
    async with RemoteLogReader(tier.rlmm.log, tier.storage) as reader:
        yield RemoteLogOffsetReader(tier.state, reader)


async def find(
    offsets: RemoteLogOffsetReader, timestamp_ms: int, from_offset: int = 0, to_offset: int = 1 << 40
) -> TimestampOffset | None:
    return await offsets.offset_for_timestamp(
        P0, timestamp_ms, from_offset, to_offset, deadline_ms=in_ms(), connection_id=1
    )


async def greatest(offsets: RemoteLogOffsetReader, from_offset: int) -> TimestampOffset | None:
    return await offsets.max_timestamp(P0, from_offset, 100, deadline_ms=in_ms(), connection_id=1)


async def test_a_segment_whose_maximum_lies_before_the_start_is_passed_over(
    tier: RemoteTier, offsets: RemoteLogOffsetReader
) -> None:
    await tier.add(P0, [build_batch(0, [record(0, 900), record(1, 100)], leader_epoch=2)], 0)
    await tier.add(P0, [build_batch(2, [record(2, 500), record(3, 950)], leader_epoch=3, codec=4)], 2)
    assert await find(offsets, 600) == TimestampOffset(900, 0, 2)
    assert await find(offsets, 600, from_offset=1) == TimestampOffset(950, 3, 3)
    assert await find(offsets, 600, from_offset=1, to_offset=3) is None
    assert await find(offsets, 951) is None


async def test_log_append_time_is_every_records_timestamp(tier: RemoteTier, offsets: RemoteLogOffsetReader) -> None:
    await tier.add(P0, [build_batch(0, [record(0, 1), record(1, 2)], log_append_time_ms=700)], 0)
    assert await find(offsets, 700, from_offset=1) == TimestampOffset(700, 1, 0)


async def test_the_greatest_timestamp_is_the_first_record_that_has_it(
    tier: RemoteTier, offsets: RemoteLogOffsetReader
) -> None:
    await tier.add(P0, [build_batch(0, [record(0, 99), record(1, 5), record(2, 9), record(3, 9)])], 0)
    await tier.add(P0, [build_batch(4, [record(4, 9)])], 4)
    assert await greatest(offsets, 0) == TimestampOffset(99, 0, 0)
    assert await greatest(offsets, 1) == TimestampOffset(9, 2, 0)  # not one below the log start


async def test_look_ups_go_on_behind_a_gap(tier: RemoteTier, offsets: RemoteLogOffsetReader) -> None:
    await tier.add(P0, [build_batch(0, [record(0, 100), record(1, 300)])], 0)
    await tier.rlmm.put_log_gap(P0, LogGap(2, 50), 3)
    await tier.add(P0, [build_batch(50, [record(50, 200), record(51, 400)], leader_epoch=3)], 50)
    assert await find(offsets, 150) == TimestampOffset(300, 1, 0)
    assert await find(offsets, 150, from_offset=2) == TimestampOffset(200, 50, 3)
    assert await find(offsets, 350) == TimestampOffset(400, 51, 3)
    assert await find(offsets, 350, to_offset=50) is None
    assert await greatest(offsets, 10) == TimestampOffset(400, 51, 3)


async def test_a_store_that_is_down_is_no_answer(tier: RemoteTier, offsets: RemoteLogOffsetReader) -> None:
    await tier.add(P0, [build_batch(0, [record(0, 5)])], 0)
    tier.storage.is_down = True
    with pytest.raises(RemoteReadTimeoutError):
        await offsets.offset_for_timestamp(P0, 1, 0, 100, deadline_ms=in_ms(30), connection_id=1)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    timestamps=st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=5), min_size=1, max_size=8),
    wanted=st.integers(0, 21),
    from_offset=st.integers(0, 40),
)
async def test_the_answer_is_that_of_a_scan(
    tmp_path_factory: pytest.TempPathFactory, timestamps: list[list[int]], wanted: int, from_offset: int
) -> None:
    tier = RemoteTier(tmp_path_factory.mktemp("tier"), chunk_bytes=150)
    flat: list[tuple[int, int]] = []
    for of_segment in timestamps:
        base = len(flat)
        flat += [(base + n, timestamp) for n, timestamp in enumerate(of_segment)]
        await tier.add(P0, [build_batch(o, [record(o, t)]) for o, t in flat[base:]], base)
    expected = next(((o, t) for o, t in flat if t >= wanted and o >= from_offset), None)
    async with RemoteLogReader(tier.rlmm.log, tier.storage) as reader:
        found = await find(RemoteLogOffsetReader(tier.state, reader), wanted, from_offset)
    assert (None if found is None else (found.offset, found.timestamp_ms)) == expected
