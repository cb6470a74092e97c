"""No read and no search by timestamp returns records above a CUT, wherever the CUT lies in a chunk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.records.record_batch import iterate_batches
from tests.support.fakes.record_batches import batch_of, build_batch, record
from tests.support.fakes.remote_requests import P0, asked, in_ms, joined, read_all
from tests.support.fakes.remote_tier import RemoteTier
from tiers.errors import OffsetGapError
from tiers.model.log_source import AbortedTransaction
from tiers.model.segment_metadata import LeaderEpochEntry
from tiers.reader.chunk_fetcher import Caller
from tiers.reader.remote_log_reader import RemoteLogReader
from tiers.segment.producer_state import ProducerStateEntry
from tiers.segment.segment_builder import Carried

ABORT, COMMIT = bytes(4), bytes(3) + b"\x01"
OLD_MS, CUT_MS, NEW_MS = 1_000, 9_000, 5_000
ABORTED = AbortedTransaction(7, 0)


async def cut(tier: RemoteTier, offset: int) -> None:
    """Cuts the log, which then goes on in leader epoch 3."""
    await tier.rlmm.put_cut(P0, 1, offset)
    tier.carried[P0] = Carried((LeaderEpochEntry(0, 0),))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kept=st.integers(1, 20),
    replaced=st.integers(1, 20),
    added=st.integers(0, 20),
    max_bytes=st.sampled_from([1, 900, 3_000, 100_000]),
)
async def test_reads_and_searches_go_over_the_cut_without_a_seam(
    tmp_path_factory: pytest.TempPathFactory, kept: int, replaced: int, added: int, max_bytes: int
) -> None:
    """Batches of 10 offsets in segments of 7 batches: the last `replaced` are cut off, and `added` come after."""

    async def add(begin: int, count: int, times_ms: tuple[int, int], epoch: int) -> list[bytes]:
        batches = [
            batch_of(10 * n, 10, value_bytes=20, timestamp=times_ms[n >= kept], leader_epoch=epoch)
            for n in range(begin, begin + count)
        ]
        for first in range(0, count, 7):
            await tier.add(P0, batches[first : first + 7], (begin + first) * 10)
        return batches

    tier, border, end = RemoteTier(tmp_path_factory.mktemp("tier")), kept * 10, (kept + added) * 10
    old = await add(0, kept + replaced, (OLD_MS, CUT_MS), 0)
    await cut(tier, border)
    left = old[:kept] + await add(kept, added, (NEW_MS, NEW_MS), 3)
    async with RemoteLogReader(tier.rlmm.log, tier.storage) as reader:
        for _ in range(2):  # once from the store, once from memory
            assert await read_all(reader, end, max_bytes) == b"".join(left)
        with pytest.raises(OffsetGapError):
            reader.segment_for(P0, end)
        caller = Caller(in_ms(), 1)
        epochs = await reader.leader_epochs(P0, caller)
        assert epochs == (LeaderEpochEntry(0, 0), LeaderEpochEntry(3, border))[: 2 if added else 1]
        for timestamp_ms, to_offset, offset in (
            (OLD_MS, end, 0),
            (NEW_MS, end, border if added else None),
            (NEW_MS, border, None),
            (CUT_MS, end, None),
        ):
            found = await reader.offset_for_timestamp(P0, timestamp_ms, 0, to_offset, caller)
            assert (None if found is None else found.offset) == offset
        for to_offset, first_ms in ((end, NEW_MS if added else OLD_MS), (border, OLD_MS)):
            greatest = await reader.max_timestamp(P0, 0, to_offset, caller)
            assert greatest is not None
            assert first_ms <= greatest.timestamp_ms < first_ms + 1_000
            assert greatest.offset < to_offset


def of_producer(offset: int, leader_epoch: int, marker: bytes | None = None) -> bytes:
    """Two records of a transaction of producer 7, or its marker."""
    records = [record(offset), record(offset + 1)] if marker is None else [record(offset, key=marker, value=bytes(6))]
    return build_batch(
        offset, records, producer_id=7, transactional=True, control=marker is not None, leader_epoch=leader_epoch
    )


@pytest.mark.parametrize(
    ("segments", "reported", "behind", "reported_behind"),
    [
        ([2, 1], (ABORTED,), COMMIT, ()),
        ([3], (ABORTED,), COMMIT, ()),
        ([2, 1], (), ABORT, (ABORTED,)),
    ],
    ids=["an abort that was cut off", "an abort within the segment", "a commit that was cut off"],
)
async def test_no_read_crosses_a_cut_that_cut_off_a_marker(
    tmp_path: Path,
    segments: list[int],
    reported: tuple[AbortedTransaction, ...],
    behind: bytes,
    reported_behind: tuple[AbortedTransaction, ...],
) -> None:
    """What a producer commits behind the CUT would be hidden. What it aborts would hide what it committed before."""
    tier = RemoteTier(tmp_path)
    before = [of_producer(0, 0), of_producer(2, 0)]
    written = [*before, of_producer(4, 0, ABORT if reported else COMMIT)]
    await tier.add(P0, written[: segments[0]], 0, reported)
    if len(segments) > 1:
        await tier.add(P0, written[2:], 4)
    # The next segment continues the log at offset 4, where the transaction from offset 0 on is open again.
    await cut(tier, 4)
    ongoing = ProducerStateEntry(ABORTED.producer_id, 0, 0, 1, 1, 0, -1, ABORTED.first_offset)
    tier.carried[P0] = replace(tier.carried[P0], producers=(ongoing,), history_from=0)
    after = [of_producer(4, 3), of_producer(6, 3, behind)]
    await tier.add(P0, after, 4, reported_behind)
    async with RemoteLogReader(tier.rlmm.log, tier.storage) as reader:
        for _ in range(2):  # once from the store, once from memory
            for offset, records, aborted, end in ((4, after, reported_behind, 7), (0, before, reported, 4)):
                read = await reader.read(asked(offset, isolation_level=1))
                assert (joined(read), read.aborted_transactions) == (b"".join(records), aborted)
                assert read.next_offset == end


@pytest.mark.parametrize("chunk_bytes", [10, 1000])
async def test_a_reader_gets_over_offsets_without_records_before_a_cut(tmp_path: Path, chunk_bytes: int) -> None:
    tier = RemoteTier(tmp_path, chunk_bytes)
    await tier.add(P0, [batch_of(0, 10, value_bytes=20), batch_of(20, 10, value_bytes=20)], 0)
    await cut(tier, 15)
    await tier.add(P0, [batch_of(15, 10, value_bytes=20, leader_epoch=3)], 15)
    async with RemoteLogReader(tier.rlmm.log, tier.storage) as reader:
        assert (await reader.read(asked(15))).first_offset == 15  # cached from now on
        read = await reader.read(asked(10))
        assert [next(iterate_batches(view)).base_offset for view in read.records] == [15]
