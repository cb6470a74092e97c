"""Holes in a log that was compacted once: an offset in a hole has the leader epoch that the leader gives it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fakes.broker.cluster import FakeCluster, LocalLog
from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench
from tiers.errors import BrokerError
from tiers.metadata.log_history import epoch_before
from tiers.metadata.remote_log import RemoteLog
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata, leader_epoch_at
from tiers.segment.indexes.indexes_object import decode_indexes_object
from tiers.segment.leader_epochs import EpochHole
from tiers.segment.segment_builder import SegmentBuilder
from tiers.tasks.copy.segment_copy import append_records, epochs_in_hole
from tiers.verify.segment_verification import verify_segment

AT_ONCE = replace(POLICY, segment_ms=0)
FAR = 2**31 + 1000


def cluster_with(*epochs: tuple[int, int]) -> FakeCluster:
    """Returns a cluster whose log has these leader epochs with their start offsets."""
    log = LocalLog([batch_of(200, 100)], epochs[0][1], leader_epoch=epochs[-1][0], epochs=epochs)
    return FakeCluster(logs={PARTITION: log})


@pytest.mark.parametrize(
    ("epochs", "hole", "found", "asked"),
    [
        ([(3, 0), (5, 150), (6, 250)], (3, 10, 5, 200), [(5, 150)], [4]),
        ([(3, 0), (4, 60), (7, 61), (9, 150)], (3, 10, 9, 200), [(4, 60), (7, 61), (9, 150)], [8, 6, 3]),
        ([(5, 150), (7, 170)], (3, 10, 7, 200), [(5, 150), (7, 170)], [6, 4, 3]),  # it has forgotten those below
        ([(5, 5)], (3, 10, 5, 200), [(5, 10)], [4]),
        ([(3, 0)], (3, 10, 5, 200), [(5, 200)], [4]),  # it does not know the batch's epoch
        ([(1, 150)], (-1, 10, 1, 200), [(0, 10), (1, 150)], [0]),
    ],
)
async def test_the_leader_names_the_epochs_in_a_hole(
    epochs: list[tuple[int, int]], hole: tuple[int, int, int, int], found: list[tuple[int, int]], asked: list[int]
) -> None:
    cluster = cluster_with(*epochs)
    entries = await epochs_in_hole(cluster, PARTITION, EpochHole(*hole), 1000)
    assert [(one.epoch, one.start_offset) for one in entries] == found
    assert [epoch for _, epoch in cluster.epochs_asked] == asked


@given(
    gaps=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 20)), min_size=1, max_size=8),
    first_epoch=st.integers(0, 2),
    data=st.data(),
)
async def test_every_offset_of_a_hole_has_the_leaders_epoch(
    gaps: list[tuple[int, int]], first_epoch: int, data: st.DataObject
) -> None:
    epochs, epoch, offset = [(first_epoch, 0)], first_epoch, 0
    for more_epochs, records in gaps:
        epoch, offset = epoch + more_epochs, offset + records
        epochs.append((epoch, offset))
    leaders = [LeaderEpochEntry(*each) for each in epochs]
    first_offset = data.draw(st.integers(1, offset + 20))
    next_offset = data.draw(st.integers(0, first_offset - 1))
    before = leader_epoch_at(leaders, next_offset - 1) if next_offset and data.draw(st.booleans()) else -1
    hole = EpochHole(before, next_offset, leader_epoch_at(leaders, first_offset), first_offset)
    entries = await epochs_in_hole(cluster_with(*epochs), PARTITION, hole, 1000)
    known = (*([LeaderEpochEntry(before, 0)] if before >= 0 else []), *entries)
    if hole.leader_epoch > before:
        assert entries[-1].epoch == hole.leader_epoch
    for at in range(next_offset, first_offset + 1):
        assert leader_epoch_at(known, at) == leader_epoch_at(leaders, at)


async def test_all_holes_of_one_read_are_asked_for(bench: Workbench, tmp_path: Path) -> None:
    log = InMemoryLog(leader_epoch=9, elections={3: 0, 5: 50, 7: 120, 9: 150})
    log.append(batch_of(0, 10, leader_epoch=3), batch_of(100, 10, leader_epoch=5), batch_of(200, 10, leader_epoch=9))
    read = await log.read(PARTITION, 0, 1 << 20, 1000)
    builder, spool = SegmentBuilder(tmp_path / "log", 0), bench.services.spool
    log.failure = BrokerError("gone", retriable=True)
    with pytest.raises(BrokerError):
        await append_records(builder, read.records, (), spool, log, PARTITION, 1000)
    assert builder.size_bytes == 0
    log.failure = None
    await append_records(builder, read.records, (), spool, log, PARTITION, 1000)
    built = builder.finish()
    epochs = [(one.epoch, one.start_offset) for one in built.segment_leader_epochs]
    assert epochs == [(3, 0), (5, 50), (7, 120), (9, 150)]
    assert built.log_segment.read_bytes() == log.records


@pytest.fixture
def log(bench: Workbench) -> InMemoryLog:
    """Epoch 5 began at 150. A compaction has removed the records 10 to 199 of both epochs."""
    bench.log.leader_epoch, bench.log.elections = 5, {3: 0, 5: 150}
    bench.log.append(batch_of(0, 10, leader_epoch=3), batch_of(200, 10, leader_epoch=5))
    return bench.log


def epochs_of(segment: RemoteLogSegmentMetadata) -> list[tuple[int, int]]:
    return [(one.epoch, one.start_offset) for one in segment.segment_leader_epochs]


async def test_a_segment_that_begins_in_a_hole_has_the_epochs_of_the_hole(bench: Workbench, log: InMemoryLog) -> None:
    log.elections[4] = 120
    log.last_stable_offset = 10
    await bench.copy(AT_ONCE)
    bench.restart()
    log.last_stable_offset = None
    await bench.copy(AT_ONCE)
    first, second = bench.segments
    assert (epochs_of(first), epochs_of(second)) == ([(3, 0)], [(3, 10), (4, 120), (5, 150)])
    cumulative = decode_indexes_object(await bench.store.fetch_indexes(second), second).indexes.leader_epochs
    assert [(one.epoch, one.start_offset) for one in cumulative] == [(3, 0), (4, 120), (5, 150)]
    for offset in range(1, 210):
        of_leader = await epoch_before(log, PARTITION, offset, 5, 1000)
        assert RemoteLog(bench.state, PARTITION).epoch_at(offset - 1) == of_leader


@pytest.mark.parametrize(("fetch_bytes", "segment_bytes"), [(1, 1000), (1 << 20, 100_000)])
async def test_a_hole_that_no_int32_counts_is_copied_over(
    bench: Workbench, fetch_bytes: int, segment_bytes: int
) -> None:
    policy, beyond = replace(POLICY, segment_bytes=segment_bytes), range(FAR, FAR + 400, 10)
    bench.log.append(*(batch_of(at, 10) for at in (0, 10, 20)), *(batch_of(at, 10, leader_epoch=2) for at in beyond))
    bench.log.append(batch_of(2 * FAR, 5, leader_epoch=2))
    bench.log.leader_epoch, bench.log.elections = 2, {0: 0, 1: 1000, 2: FAR - 10}
    bench.services = replace(bench.services, settings=replace(bench.services.settings, fetch_bytes=fetch_bytes))
    bench.restart()
    while bench.state.remote_end_offset(PARTITION) != bench.log.end_offset - 1:
        await bench.copy_all(policy)
        bench.now_ms += policy.segment_ms
    assert await bench.remote_bytes() == bench.log.records
    assert [end + 1 for _, end in bench.finished[:-1]] == [start for start, _ in bench.finished[1:]]
    if segment_bytes > 1000:
        assert bench.finished == [(0, 29), (30, FAR + 399), (FAR + 400, 2 * FAR + 4)]
    for segment in bench.segments:
        assert (await verify_segment(bench.store, segment, None)).damages == ()
    epochs = {one for segment in bench.segments for one in segment.segment_leader_epochs}
    assert {(0, 0), (1, 1000), (2, FAR - 10)} <= {(one.epoch, one.start_offset) for one in epochs}
