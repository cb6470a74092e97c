"""No read and no search by timestamp returns records above a clamp, wherever the clamp cuts a chunk."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.records.record_batch import iterate_batches
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.remote_tier import TOPIC_ID, RemoteTier
from tiers.errors import OffsetGapError
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogClampUpdate
from tiers.reader.remote_log_offset_reader import RemoteLogOffsetReader
from tiers.reader.remote_log_reader import RemoteLogReader, RemoteReadRequest, monotonic_ms

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
    await tier.rlmm.put_remote_log_clamp(RemoteLogClampUpdate(P0, "", 0, 0, kept * 10 - 1))
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
