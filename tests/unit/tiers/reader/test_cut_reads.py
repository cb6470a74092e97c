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
from tests.support.fakes.remote_tier import TOPIC_ID, RemoteTier
from tiers.errors import OffsetGapError
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import AbortedTransaction
from tiers.model.segment_metadata import LeaderEpochEntry
from tiers.reader.remote_log_offset_reader import RemoteLogOffsetReader
from tiers.reader.remote_log_reader import RemoteLogReader, RemoteRead, RemoteReadRequest, monotonic_ms
from tiers.segment.transaction_tracker import OpenTransactions

ABORT, COMMIT = bytes(4), bytes(3) + b"\x01"
P0 = TopicIdPartition(TOPIC_ID, 0, "orders")
OLD_MS, CUT_MS, NEW_MS = 1_000, 9_000, 5_000


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


def request(offset: int) -> RemoteReadRequest:
    return RemoteReadRequest(
        P0,
        offset,
        max_bytes=100_000,
        min_one_message=True,
        isolation_level=1,
        deadline_ms=monotonic_ms() + 20_000,
        connection_id=1,
    )


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
            async with RemoteLogReader(tier.rlmm, tier.storage) as reader:
                served, offset = b"", 0
                for _ in range(2):
                    served, offset = b"", 0
                    while offset < len(left) * 10:
                        read = await reader.read(
                            RemoteReadRequest(
                                P0,
                                offset,
                                max_bytes,
                                min_one_message=True,
                                isolation_level=1,
                                deadline_ms=monotonic_ms() + 20_000,
                                connection_id=1,
                            )
                        )
                        served += b"".join(bytes(view) for view in read.records)
                        offset = max(batch.next_offset for batch in iterate_batches(served))
                        assert read.next_offset >= offset
                assert served == b"".join(left)
                with pytest.raises(OffsetGapError):
                    reader.segment_for(P0, offset)
                epochs = await reader.leader_epochs(P0, deadline_ms=monotonic_ms() + 20_000, connection_id=1)
                assert epochs == (LeaderEpochEntry(0, 0), LeaderEpochEntry(3, kept * 10))[: 2 if added else 1]

    asyncio.run(run())


@pytest.mark.parametrize(("kept", "replaced"), [(3, 2), (4, 9), (7, 7), (9, 1)])
async def test_timestamps_find_nothing_that_was_cut_off(tmp_path: Path, kept: int, replaced: int) -> None:
    tier, left = await cut_tier(tmp_path, kept, replaced, 5)
    async with RemoteLogReader(tier.rlmm, tier.storage) as reader:
        offsets = RemoteLogOffsetReader(tier.rlmm, reader)
        deadline_ms = monotonic_ms() + 20_000
        end = len(left) * 10

        async def at(timestamp_ms: int, to_offset: int) -> int | None:
            found = await offsets.offset_for_timestamp(
                P0, timestamp_ms, 0, to_offset, deadline_ms=deadline_ms, connection_id=1
            )
            return None if found is None else found.offset

        assert await at(OLD_MS, end) == 0
        assert await at(NEW_MS, end) == kept * 10
        assert await at(NEW_MS, kept * 10) is None
        assert await at(CUT_MS, end) is None
        greatest = await offsets.max_timestamp(P0, 0, end, deadline_ms=deadline_ms, connection_id=1)
        assert greatest is not None
        assert (greatest.offset // 10 * 10) >= kept * 10
        assert greatest.timestamp_ms < CUT_MS
        head = await offsets.max_timestamp(P0, 0, kept * 10, deadline_ms=deadline_ms, connection_id=1)
        assert head is not None
        assert head.offset < kept * 10
        assert head.timestamp_ms < NEW_MS


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


def after_an_election(tier: RemoteTier) -> None:
    """The next segment continues the log at offset 4, where the transaction from offset 0 on is open again."""
    tier._leader_epochs[P0] = (LeaderEpochEntry(0, 0),)
    tier._open_transactions[P0] = OpenTransactions(ongoing=(AbortedTransaction(7, 0),), history_from=0)


@pytest.mark.parametrize("ends_at_the_cut", [True, False])
async def test_no_read_crosses_a_cut_that_cut_off_a_marker(tmp_path: Path, ends_at_the_cut: bool) -> None:
    """The CUT cut off the marker of an aborted transaction. What its producer committed after it would be hidden."""
    tier, aborted = RemoteTier(tmp_path), AbortedTransaction(7, 0)
    if ends_at_the_cut:
        await tier.add(P0, [data(0, 0), data(2, 0)], 0, [aborted])
        await tier.add(P0, [marker(4, ABORT, 0)], 4)
    else:
        await tier.add(P0, [data(0, 0), data(2, 0), marker(4, ABORT, 0)], 0, [aborted])
    await tier.rlmm.put_cut(P0, 1, 4)
    after_an_election(tier)
    committed = [data(4, 3), marker(6, COMMIT, 3)]
    await tier.add(P0, committed, 4)
    async with RemoteLogReader(tier.rlmm, tier.storage) as reader:

        async def read(offset: int) -> RemoteRead:
            return await reader.read(request(offset))

        assert b"".join((await read(4)).records) == b"".join(committed)  # cached from now on
        before = await read(0)
        assert (before.next_offset, before.aborted_transactions) == (4, (aborted,))
        behind = await read(4)
        assert (b"".join(behind.records), behind.aborted_transactions) == (b"".join(committed), ())


async def test_no_read_crosses_a_cut_behind_which_a_transaction_aborts(tmp_path: Path) -> None:
    """Before the election the transaction was committed. Its records must not vanish with the size of the read."""
    tier = RemoteTier(tmp_path)
    before = [data(0, 0), data(2, 0)]
    await tier.add(P0, before, 0)
    await tier.add(P0, [marker(4, COMMIT, 0)], 4)
    await tier.rlmm.put_cut(P0, 1, 4)
    after_an_election(tier)
    await tier.add(P0, [data(4, 3), marker(6, ABORT, 3)], 4, [AbortedTransaction(7, 0)])
    async with RemoteLogReader(tier.rlmm, tier.storage) as reader:
        assert (await reader.read(request(4))).next_offset == 7  # cached from now on
        read = await reader.read(request(0))
        assert (b"".join(read.records), read.aborted_transactions) == (b"".join(before), ())


@pytest.mark.parametrize("chunk_bytes", [10, 1000])
async def test_a_reader_gets_over_offsets_without_records_before_a_cut(tmp_path: Path, chunk_bytes: int) -> None:
    tier = RemoteTier(tmp_path, chunk_bytes)
    await tier.add(P0, [batch_of(0, 10, value_bytes=20), batch_of(20, 10, value_bytes=20)], 0)
    await tier.rlmm.put_cut(P0, 1, 15)
    tier._leader_epochs[P0] = (LeaderEpochEntry(0, 0),)
    await tier.add(P0, [batch_of(15, 10, value_bytes=20, leader_epoch=3)], 15)
    async with RemoteLogReader(tier.rlmm, tier.storage) as reader:
        assert (await reader.read(request(15))).first_offset == 15  # cached from now on
        read = await reader.read(request(10))
        assert [next(iterate_batches(view)).base_offset for view in read.records] == [15]
