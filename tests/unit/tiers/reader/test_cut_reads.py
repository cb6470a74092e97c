"""No read and no search by timestamp returns records above a CUT, wherever the CUT lies in a chunk."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.records.record_batch import iterate_batches
from tests.support.fakes.record_batches import batch_of, build_batch, record
from tests.support.fakes.remote_requests import P0, asked, in_ms, joined, read_all
from tests.support.fakes.remote_tier import RemoteTier
from tiers.errors import OffsetGapError
from tiers.model.log_source import AbortedTransaction
from tiers.model.segment_metadata import LeaderEpochEntry
from tiers.reader.remote_log_offset_reader import RemoteLogOffsetReader
from tiers.reader.remote_log_reader import RemoteLogReader
from tiers.segment.transactions import OpenTransactions

ABORT, COMMIT = bytes(4), bytes(3) + b"\x01"
OLD_MS, CUT_MS, NEW_MS = 1_000, 9_000, 5_000
ABORTED = AbortedTransaction(7, 0)


async def cut_tier(root: Path, kept: int, replaced: int, added: int) -> tuple[RemoteTier, list[bytes]]:
    """So many batches of 10 offsets in segments of 7, the last `replaced` cut off, `added` ones after; what is left."""
    tier = RemoteTier(root)
    old = [
        batch_of(offset, 10, value_bytes=20, timestamp=OLD_MS if offset < kept * 10 else CUT_MS)
        for offset in range(0, (kept + replaced) * 10, 10)
    ]
    for first in range(0, len(old), 7):
        await tier.add(P0, old[first : first + 7], first * 10)
    await tier.rlmm.put_cut(P0, 1, kept * 10)
    tier._leader_epochs[P0] = (LeaderEpochEntry(0, 0),)
    new = [
        batch_of(offset, 10, value_bytes=20, timestamp=NEW_MS, leader_epoch=3)
        for offset in range(kept * 10, (kept + added) * 10, 10)
    ]
    for first in range(0, len(new), 7):
        await tier.add(P0, new[first : first + 7], (kept + first) * 10)
    return tier, old[:kept] + new


@settings(max_examples=25, deadline=None)
@given(
    kept=st.integers(1, 20),
    replaced=st.integers(1, 20),
    added=st.integers(0, 20),
    max_bytes=st.sampled_from([1, 900, 3_000, 100_000]),
)
def test_reads_go_over_the_cut_without_a_seam(kept: int, replaced: int, added: int, max_bytes: int) -> None:
    async def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            tier, left = await cut_tier(Path(folder), kept, replaced, added)
            async with RemoteLogReader(tier.rlmm.log, tier.storage) as reader:
                for _ in range(2):  # once from the store, once from memory
                    assert await read_all(reader, len(left) * 10, max_bytes) == b"".join(left)
                with pytest.raises(OffsetGapError):
                    reader.segment_for(P0, len(left) * 10)
                epochs = await reader.leader_epochs(P0, deadline_ms=in_ms(), connection_id=1)
                assert epochs == (LeaderEpochEntry(0, 0), LeaderEpochEntry(3, kept * 10))[: 2 if added else 1]

    asyncio.run(run())


@pytest.mark.parametrize(("kept", "replaced"), [(3, 2), (4, 9), (7, 7), (9, 1)])
async def test_timestamps_find_nothing_that_was_cut_off(tmp_path: Path, kept: int, replaced: int) -> None:
    tier, left = await cut_tier(tmp_path, kept, replaced, 5)
    cut, end = kept * 10, len(left) * 10
    async with RemoteLogReader(tier.rlmm.log, tier.storage) as reader:
        offsets = RemoteLogOffsetReader(tier.state, reader)
        for timestamp_ms, to_offset, offset in (
            (OLD_MS, end, 0),
            (NEW_MS, end, cut),
            (NEW_MS, cut, None),
            (CUT_MS, end, None),
        ):
            found = await offsets.offset_for_timestamp(
                P0, timestamp_ms, 0, to_offset, deadline_ms=in_ms(), connection_id=1
            )
            assert (None if found is None else found.offset) == offset
        greatest = await offsets.max_timestamp(P0, 0, end, deadline_ms=in_ms(), connection_id=1)
        head = await offsets.max_timestamp(P0, 0, cut, deadline_ms=in_ms(), connection_id=1)
        assert greatest is not None
        assert head is not None
        assert head.offset < cut <= greatest.offset
        assert head.timestamp_ms < NEW_MS <= greatest.timestamp_ms < CUT_MS


def data(offset: int, leader_epoch: int) -> bytes:
    """Two records of a transaction of producer 7."""
    return build_batch(
        offset, [record(offset), record(offset + 1)], producer_id=7, transactional=True, leader_epoch=leader_epoch
    )


def marker(offset: int, value: bytes, leader_epoch: int) -> bytes:
    return build_batch(
        offset,
        [record(offset, key=value, value=bytes(6))],
        producer_id=7,
        transactional=True,
        control=True,
        leader_epoch=leader_epoch,
    )


@pytest.mark.parametrize(
    ("segments", "reported", "behind", "reported_behind"),
    [
        ([[data(0, 0), data(2, 0)], [marker(4, ABORT, 0)]], (ABORTED,), COMMIT, ()),
        ([[data(0, 0), data(2, 0), marker(4, ABORT, 0)]], (ABORTED,), COMMIT, ()),
        ([[data(0, 0), data(2, 0)], [marker(4, COMMIT, 0)]], (), ABORT, (ABORTED,)),
    ],
    ids=["an abort that was cut off", "an abort within the segment", "a commit that was cut off"],
)
async def test_no_read_crosses_a_cut_that_cut_off_a_marker(
    tmp_path: Path,
    segments: list[list[bytes]],
    reported: tuple[AbortedTransaction, ...],
    behind: bytes,
    reported_behind: tuple[AbortedTransaction, ...],
) -> None:
    """What a producer commits behind the CUT would be hidden. What it aborts would hide what it committed before."""
    tier = RemoteTier(tmp_path)
    await tier.add(P0, segments[0], 0, reported)
    for segment in segments[1:]:
        await tier.add(P0, segment, 4)
    await tier.rlmm.put_cut(P0, 1, 4)
    # The next segment continues the log at offset 4, where the transaction from offset 0 on is open again.
    tier._leader_epochs[P0] = (LeaderEpochEntry(0, 0),)
    tier._open_transactions[P0] = OpenTransactions(ongoing=(ABORTED,), history_from=0)
    after = [data(4, 3), marker(6, behind, 3)]
    await tier.add(P0, after, 4, reported_behind)
    async with RemoteLogReader(tier.rlmm.log, tier.storage) as reader:
        for _ in range(2):  # once from the store, once from memory
            read = await reader.read(asked(4, isolation_level=1))
            assert (joined(read), read.aborted_transactions) == (b"".join(after), reported_behind)
            before = await reader.read(asked(0, isolation_level=1))
            assert (joined(before), before.next_offset) == (data(0, 0) + data(2, 0), 4)
            assert before.aborted_transactions == reported


@pytest.mark.parametrize("chunk_bytes", [10, 1000])
async def test_a_reader_gets_over_offsets_without_records_before_a_cut(tmp_path: Path, chunk_bytes: int) -> None:
    tier = RemoteTier(tmp_path, chunk_bytes)
    await tier.add(P0, [batch_of(0, 10, value_bytes=20), batch_of(20, 10, value_bytes=20)], 0)
    await tier.rlmm.put_cut(P0, 1, 15)
    tier._leader_epochs[P0] = (LeaderEpochEntry(0, 0),)
    await tier.add(P0, [batch_of(15, 10, value_bytes=20, leader_epoch=3)], 15)
    async with RemoteLogReader(tier.rlmm.log, tier.storage) as reader:
        assert (await reader.read(asked(15))).first_offset == 15  # cached from now on
        read = await reader.read(asked(10))
        assert [next(iterate_batches(view)).base_offset for view in read.records] == [15]
