"""Which leaders confirm a recorded log start, by the leader epochs that they name (docs/semantics.md 6.1)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fakes.broker.cluster import FakeCluster, LocalLog
from tests.support.fakes.in_memory_rlmm import InMemoryRemoteLogMetadataManager
from tests.support.fakes.log_starts import user_log_start
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import PARTITION
from tiers.metadata.log_history import confirms_log_start, disproved_log_starts, epoch_before, kept_log_start
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import EpochEndOffset
from tiers.model.log_start import UNKNOWN_EPOCH

TIMEOUT_MS = 1000
DELETED = user_log_start(100, leader_epoch=5, last_epoch=5)
"""The records below 100 were deleted. Epoch 4 wrote 0 to 89, and epoch 5 wrote 90 to 99."""


def cluster_with(*epochs: tuple[int, int], end_offset: int, log_start_offset: int = 0) -> FakeCluster:
    """Returns a cluster whose log has these leader epochs with their start offsets."""
    batch = batch_of(log_start_offset, end_offset - log_start_offset)
    log = LocalLog([batch], log_start_offset, leader_epoch=epochs[-1][0], epochs=epochs)
    return FakeCluster(logs={PARTITION: log})


@pytest.mark.parametrize(
    ("epochs", "log_start_offset", "is_confirmed"),
    [
        (((4, 0), (5, 90)), 0, True),
        (((4, 0), (5, 90), (6, 110)), 0, True),
        (((6, 100),), 100, True),
        (((4, 0), (6, 130)), 0, False),
        (((4, 0), (5, 90), (6, 95)), 0, False),
        (((0, 0),), 0, False),
    ],
    ids=[
        "the same leader",
        "its successor",
        "a log that begins there",
        "a leader that was cut off",
        "a cut log",
        "an emptied log",
    ],
)
async def test_a_leader_confirms_the_epoch_of_the_last_deleted_record(
    epochs: tuple[tuple[int, int], ...], log_start_offset: int, is_confirmed: bool
) -> None:
    cluster = cluster_with(*epochs, end_offset=140, log_start_offset=log_start_offset)
    assert await confirms_log_start(cluster, PARTITION, DELETED, TIMEOUT_MS) is is_confirmed


async def test_without_that_epoch_the_end_of_the_leaders_epoch_counts() -> None:
    cluster = cluster_with((4, 0), (6, 130), end_offset=140)
    assert await confirms_log_start(cluster, PARTITION, user_log_start(100, leader_epoch=5), TIMEOUT_MS)
    assert not await confirms_log_start(cluster, PARTITION, user_log_start(131, leader_epoch=5), TIMEOUT_MS)


@given(
    gaps=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 20)), min_size=1, max_size=8),
    log_start_offset=st.integers(0, 30),
    data=st.data(),
)
async def test_the_epoch_before_an_offset_is_found(
    gaps: list[tuple[int, int]], log_start_offset: int, data: st.DataObject
) -> None:
    epochs, epoch, offset = [(0, log_start_offset)], 0, log_start_offset
    for more_epochs, records in gaps:
        epoch, offset = epoch + more_epochs, offset + records
        epochs.append((epoch, offset))
    end_offset = offset + data.draw(st.integers(1, 20))
    cluster = cluster_with(*epochs, end_offset=end_offset, log_start_offset=log_start_offset)
    asked = data.draw(st.integers(log_start_offset + 1, end_offset))
    expected = max(known for known, start in epochs if start < asked)
    assert await epoch_before(cluster, PARTITION, asked, epoch, TIMEOUT_MS) == expected


async def test_a_leader_without_epochs_leaves_the_epoch_unknown() -> None:
    cluster = cluster_with((0, 0), end_offset=10)
    assert await epoch_before(cluster, PARTITION, 5, 3, TIMEOUT_MS) == UNKNOWN_EPOCH


async def test_one_deletion_that_was_recorded_twice_is_disproved_once() -> None:
    """Two processes recorded it at the same time. One of them asked after the records had gone."""
    unnamed = user_log_start(100, leader_epoch=5)
    metadata = InMemoryRemoteLogMetadataManager(all_log_starts={PARTITION: [unnamed, DELETED]})
    cluster = cluster_with((4, 0), (6, 130), end_offset=140)
    assert await disproved_log_starts(cluster, metadata.state, PARTITION, TIMEOUT_MS) == [unnamed, DELETED]
    assert await kept_log_start(cluster, metadata.state, PARTITION, TIMEOUT_MS) == 0
    assert await disproved_log_starts(cluster, metadata.state, PARTITION, TIMEOUT_MS, [unnamed]) == [unnamed, DELETED]
    assert await kept_log_start(cluster, metadata.state, PARTITION, TIMEOUT_MS, [unnamed, DELETED]) == 100


async def test_a_leader_that_was_cut_off_may_disprove_a_log_start_below_its_own() -> None:
    metadata = InMemoryRemoteLogMetadataManager(all_log_starts={PARTITION: [DELETED]})
    cluster = cluster_with((4, 110), (6, 130), end_offset=140, log_start_offset=110)
    assert await disproved_log_starts(cluster, metadata.state, PARTITION, TIMEOUT_MS) == [DELETED]


async def test_a_log_start_that_is_recorded_during_the_question_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metadata = InMemoryRemoteLogMetadataManager(all_log_starts={PARTITION: [DELETED]})
    cluster = cluster_with((4, 0), (5, 90), end_offset=140)
    ask = cluster.end_offset_for_epoch

    async def ask_and_record(partition: TopicIdPartition, leader_epoch: int, timeout_ms: int) -> EpochEndOffset:
        metadata.all_log_starts[PARTITION].append(user_log_start(130, leader_epoch=3))
        return await ask(partition, leader_epoch, timeout_ms)

    monkeypatch.setattr(cluster, "end_offset_for_epoch", ask_and_record)
    for _ in range(2):
        assert await kept_log_start(cluster, metadata.state, PARTITION, TIMEOUT_MS) == 100
