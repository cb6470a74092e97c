"""The leader names the epochs that begin in a hole of its log."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fakes.broker.cluster import FakeCluster, LocalLog
from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import PARTITION
from tests.support.tiers.workbench import Workbench
from tiers.errors import BrokerError
from tiers.model.segment_metadata import LeaderEpochEntry, leader_epoch_at
from tiers.segment.leader_epochs import EpochHole
from tiers.segment.segment_builder import SegmentBuilder
from tiers.tasks.copy.segment_copy import append_records, epochs_in_hole

TIMEOUT_MS = 1000


def cluster_with(*epochs: tuple[int, int]) -> FakeCluster:
    """Returns a cluster whose log has these leader epochs with their start offsets."""
    log = LocalLog([batch_of(200, 100)], epochs[0][1], leader_epoch=epochs[-1][0], epochs=epochs)
    return FakeCluster(logs={PARTITION: log})


@pytest.mark.parametrize(
    ("epochs", "hole", "found", "asked"),
    [
        ([(3, 0), (5, 150)], (3, 10, 5, 200), [(5, 150)], [4]),
        ([(3, 0), (5, 150), (6, 250)], (3, 10, 5, 200), [(5, 150)], [4]),
        ([(3, 0), (5, 10)], (3, 10, 5, 200), [(5, 10)], [4]),
        ([(3, 0), (5, 200)], (3, 10, 5, 200), [(5, 200)], [4]),
        ([(3, 0), (4, 60), (7, 61), (9, 150)], (3, 10, 9, 200), [(4, 60), (7, 61), (9, 150)], [8, 6, 3]),
        ([(5, 150)], (3, 10, 5, 200), [(5, 150)], [4, 3]),
        ([(5, 150), (7, 170)], (3, 10, 7, 200), [(5, 150), (7, 170)], [6, 4, 3]),
        ([(5, 5)], (3, 10, 5, 200), [(5, 10)], [4]),
        ([(3, 0)], (3, 10, 5, 200), [(5, 200)], [4]),
        ([(0, 0), (5, 150)], (-1, 10, 5, 200), [(0, 10), (5, 150)], [4]),
        ([(0, 0), (2, 30), (5, 150)], (-1, 10, 5, 200), [(0, 10), (2, 30), (5, 150)], [4, 1]),
        ([(1, 0), (5, 150)], (-1, 10, 5, 200), [(1, 10), (5, 150)], [4, 0]),
        ([(1, 150)], (-1, 10, 1, 200), [(0, 10), (1, 150)], [0]),
        ([(0, 0), (5, 150)], (0, 10, 5, 200), [(5, 150)], [4]),
    ],
    ids=[
        "in the hole",
        "an epoch that has ended",
        "at the hole's start",
        "at the hole's end",
        "several epochs in one hole",
        "a leader that has forgotten the epochs below",
        "a leader that has forgotten the epochs below two",
        "before the hole",
        "a leader that does not know the batch's epoch",
        "no known epoch, epoch 0",
        "no known epoch, several epochs",
        "no known epoch, epoch 0 unused",
        "no known epoch, and none below",
        "after epoch 0",
    ],
)
async def test_the_leader_names_the_epochs_in_a_hole(
    epochs: list[tuple[int, int]], hole: tuple[int, int, int, int], found: list[tuple[int, int]], asked: list[int]
) -> None:
    cluster = cluster_with(*epochs)
    entries = await epochs_in_hole(cluster, PARTITION, EpochHole(*hole), TIMEOUT_MS)
    assert [(one.epoch, one.start_offset) for one in entries] == found
    assert [epoch for _, epoch in cluster.epochs_asked] == asked


@given(
    gaps=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 20)), min_size=1, max_size=8),
    first_epoch=st.integers(0, 2),
    data=st.data(),
)
async def test_every_offset_of_a_hole_has_the_epoch_that_the_leader_gives_it(
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
    entries = await epochs_in_hole(cluster_with(*epochs), PARTITION, hole, TIMEOUT_MS)
    known = (*([LeaderEpochEntry(before, 0)] if before >= 0 else []), *entries)
    if hole.leader_epoch > before:
        assert entries[-1].epoch == hole.leader_epoch
    for at in range(next_offset, first_offset + 1):
        assert leader_epoch_at(known, at) == leader_epoch_at(leaders, at)


async def test_all_holes_of_one_read_are_asked_for(bench: Workbench, tmp_path: Path) -> None:
    log = InMemoryLog(leader_epoch=9, elections={3: 0, 5: 50, 7: 120, 9: 150})
    log.append(batch_of(0, 10, leader_epoch=3), batch_of(100, 10, leader_epoch=5), batch_of(200, 10, leader_epoch=9))
    read = await log.read(PARTITION, 0, 1 << 20, TIMEOUT_MS)
    builder = SegmentBuilder(tmp_path / "log", 0)
    spool = bench.services.spool
    log.failure = BrokerError("gone", retriable=True)
    with pytest.raises(BrokerError):
        await append_records(builder, read.records, (), spool, log, PARTITION, TIMEOUT_MS)
    assert builder.size_bytes == 0
    log.failure = None
    await append_records(builder, read.records, (), spool, log, PARTITION, TIMEOUT_MS)
    built = builder.finish()
    epochs = [(one.epoch, one.start_offset) for one in built.segment_leader_epochs]
    assert epochs == [(3, 0), (5, 50), (7, 120), (9, 150)]
    assert built.log_segment.read_bytes() == log.records
