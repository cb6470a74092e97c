"""The attempts at copies that have not ended, by the metadata alone."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest

from tests.support.fakes.in_memory_rlmm import InMemoryRemoteLogMetadataManager
from tests.support.tiers.segment_metadata import copied, segment
from tiers.metadata.remote_log import RemoteLog, is_measured
from tiers.model.copy_plan import CopyPlan
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import LogGap
from tiers.model.segment_metadata import RemoteLogSegmentMetadata

PARTITION = TopicIdPartition(UUID(int=1), 0, "orders")
MINUTE_MS = 60_000


@pytest.fixture
async def metadata() -> InMemoryRemoteLogMetadataManager:
    """The segments 20-29 and 40-49 are readable."""
    metadata = InMemoryRemoteLogMetadataManager(lambda: 0, lambda: MINUTE_MS)
    for start in (20, 40):
        await copied(metadata, segment(PARTITION, start, start + 9))
    return metadata


async def begun(metadata: InMemoryRemoteLogMetadataManager, start: int, end: int) -> RemoteLogSegmentMetadata:
    attempt = segment(PARTITION, start, end)
    await metadata.add_remote_log_segment_metadata(attempt)
    return replace(attempt, event_timestamp_ms=MINUTE_MS)


async def test_attempts_are_the_segments_without_an_end(metadata: InMemoryRemoteLogMetadataManager) -> None:
    last, first = await begun(metadata, 50, 59), await begun(metadata, 0, 9)
    assert list(RemoteLog(metadata.state, PARTITION).attempts()) == [first, last]
    assert list(RemoteLog(metadata.state, PARTITION).attempts(10)) == [last]


async def test_an_attempt_of_a_plan_is_not_measured(metadata: InMemoryRemoteLogMetadataManager) -> None:
    await metadata.put_copy_plan(CopyPlan(PARTITION, "", 0, UUID(int=7), 1, 0, 0, (60, 70)))
    [planned] = RemoteLog(metadata.state, PARTITION).attempts()
    assert not is_measured(planned)
    assert RemoteLog(metadata.state, PARTITION).last_attempt() is None
    assert is_measured(await begun(metadata, 60, 69))


@pytest.mark.parametrize(
    ("attempt", "log_start", "local_log_start", "is_at_head"),
    [
        ((0, 9), 0, 100, True),
        ((0, 9), 9, 100, True),
        ((0, 9), 10, 100, False),
        ((0, 9), 0, 0, False),
        ((10, 19), 0, 10, False),
        ((10, 19), 0, 11, True),
        ((30, 39), 0, 100, False),
    ],
)
async def test_the_head_ends_at_the_first_segment_or_at_the_local_log(
    metadata: InMemoryRemoteLogMetadataManager,
    attempt: tuple[int, int],
    log_start: int,
    local_log_start: int,
    *,
    is_at_head: bool,
) -> None:
    await begun(metadata, *attempt)
    assert (RemoteLog(metadata.state, PARTITION).attempt_at_head(log_start, local_log_start) is not None) is is_at_head


@pytest.mark.parametrize(
    ("gap_end", "cut_at", "first"), [(0, 10, 0), (5, 10, 5), (10, 10, None), (0, 5, 0), (5, 5, None)]
)
async def test_no_attempt_at_the_head_has_offsets_of_a_gap_or_behind_a_cut(
    metadata: InMemoryRemoteLogMetadataManager, gap_end: int, cut_at: int, first: int | None
) -> None:
    await begun(metadata, 0, 9)
    await metadata.put_cut(PARTITION, 1, cut_at)
    if gap_end:
        await metadata.put_log_gap(PARTITION, LogGap(0, gap_end), 0)
    assert RemoteLog(metadata.state, PARTITION).attempt_at_head(0, 100) == first


async def test_the_last_attempt_ends_above_the_segments(metadata: InMemoryRemoteLogMetadataManager) -> None:
    await begun(metadata, 30, 39)
    assert RemoteLog(metadata.state, PARTITION).last_attempt() is None
    assert RemoteLog(metadata.state, PARTITION).begun_end() == 49
    await begun(metadata, 50, 59)
    last = await begun(metadata, 60, 69)
    assert RemoteLog(metadata.state, PARTITION).last_attempt() == last
    assert RemoteLog(metadata.state, PARTITION).begun_end() == 69
    await metadata.put_cut(PARTITION, 1, 55)
    assert RemoteLog(metadata.state, PARTITION).begun_end() == 54


async def test_a_partition_without_segments_has_no_end() -> None:
    metadata = InMemoryRemoteLogMetadataManager()
    assert RemoteLog(metadata.state, PARTITION).begun_end() is None
    await begun(metadata, 0, 9)
    assert RemoteLog(metadata.state, PARTITION).begun_end() == 9


@pytest.mark.parametrize(
    ("attempt", "offset", "unread"),
    [
        ((0, 9), 0, 0),
        ((0, 9), 5, 5),
        ((0, 9), 10, None),
        ((20, 29), 0, None),
        ((22, 27), 0, None),
        ((20, 39), 0, 30),
        ((20, 39), 35, 35),
        ((15, 45), 0, 15),
        ((15, 45), 20, 30),
        ((40, 59), 0, 50),
    ],
)
async def test_an_offset_of_an_attempt_is_unread_if_no_readable_segment_has_it(
    metadata: InMemoryRemoteLogMetadataManager, attempt: tuple[int, int], offset: int, unread: int | None
) -> None:
    assert RemoteLog(metadata.state, PARTITION).unread_from(segment(PARTITION, *attempt), offset) == unread


async def test_copying_fails_since_the_oldest_attempt_at_the_next_segment(
    metadata: InMemoryRemoteLogMetadataManager,
) -> None:
    await begun(metadata, 30, 39)
    assert RemoteLog(metadata.state, PARTITION).copy_failing_since_ms(9 * MINUTE_MS) is None
    await begun(metadata, 50, 59)
    assert RemoteLog(metadata.state, PARTITION).copy_failing_since_ms(2 * MINUTE_MS - 1) is None
    assert RemoteLog(metadata.state, PARTITION).copy_failing_since_ms(2 * MINUTE_MS) == MINUTE_MS
