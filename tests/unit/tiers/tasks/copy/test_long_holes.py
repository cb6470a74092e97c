"""A hole of more offsets than an int32 counts does not stop the copying."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.records.record_batch import iterate_batches
from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench
from tiers.reader.remote_log_reader import RemoteLogReader, RemoteReadRequest, monotonic_ms
from tiers.segment.indexes.indexes_object import decode_indexes_object
from tiers.segment.indexes_of_log import LogIndexer
from tiers.verify.segment_verification import verify_segment

FAR = 2**31 + 1000
NEAR = [batch_of(10 * number, 10) for number in range(3)]
BEYOND = [batch_of(FAR + 10 * number, 10, leader_epoch=2, timestamp=1_600_000_000_000 + number) for number in range(40)]


async def copy_everything(bench: Workbench, segment_bytes: int) -> None:
    policy = replace(POLICY, segment_bytes=segment_bytes)
    await bench.copy_all(policy)
    while bench.state.remote_end_offset(PARTITION) != bench.log.end_offset - 1:
        bench.now_ms += policy.segment_ms
        await bench.copy_all(policy)


@pytest.mark.parametrize("fetch_bytes", [1, 500, 1 << 20])
@pytest.mark.parametrize("segment_bytes", [1000, 100_000])
async def test_a_long_hole_between_records_is_copied_over(
    bench: Workbench, fetch_bytes: int, segment_bytes: int
) -> None:
    bench.log.append(*NEAR, *BEYOND, batch_of(2 * FAR, 5, leader_epoch=2))
    bench.log.leader_epoch, bench.log.elections = 2, {0: 0, 1: 1000, 2: FAR - 10}
    bench.services = replace(bench.services, settings=replace(bench.services.settings, fetch_bytes=fetch_bytes))
    bench.restart()
    await copy_everything(bench, segment_bytes)
    assert await bench.remote_bytes() == bench.log.records
    assert [end + 1 for _, end in bench.finished[:-1]] == [start for start, _ in bench.finished[1:]]
    if segment_bytes > 1000:
        assert bench.finished == [(0, 29), (30, FAR + 399), (FAR + 400, 2 * FAR + 4)]
    before = None
    for number, segment in enumerate(bench.segments):
        assert await verify_segment(bench.store, segment, None) == []
        stored = decode_indexes_object(await bench.store.fetch_indexes(segment), segment)
        indexer = LogIndexer(bench.folder / f"again-{number}", segment, before, None)
        indexer.append(bytes(await bench.store.fetch_log_segment(segment, 0)))
        assert indexer.finish().with_facts(bytes(stored.indexes.facts)).indexes == stored.indexes
        before = stored
    epochs = {one for segment in bench.segments for one in segment.segment_leader_epochs}
    assert {(0, 0), (1, 1000), (2, FAR - 10)} <= {(one.epoch, one.start_offset) for one in epochs}


async def test_a_long_hole_at_the_start_of_a_log_is_read_over(bench: Workbench) -> None:
    bench.log.append(*BEYOND)
    bench.log.leader_epoch = 2
    await copy_everything(bench, 100_000)
    assert bench.finished == [(0, FAR + 399)]
    async with RemoteLogReader(bench.metadata.log, bench.store) as reader:
        for offset, first in ((0, FAR), (FAR - 1, FAR), (FAR + 399, FAR + 390)):
            read = await reader.read(RemoteReadRequest(PARTITION, offset, 1 << 20, True, 1, monotonic_ms() + 30_000, 1))
            records = b"".join(map(bytes, read.records))
            assert next(iterate_batches(records)).base_offset == first
