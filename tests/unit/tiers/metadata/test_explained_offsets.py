"""The first offset that neither a segment nor a gap has, and how far the search goes."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

import pytest

from tests.support.fakes.in_memory_rlmm import InMemoryRemoteLogMetadataManager
from tests.support.tiers import segment_metadata
from tiers.metadata.remote_log import RemoteLog
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import LogGap

PARTITION = TopicIdPartition(UUID(int=1), 0, "orders")


@pytest.fixture
async def metadata() -> InMemoryRemoteLogMetadataManager:
    """The segments 0-9, 10-19, 30-39 and 40-49. Nothing has the offsets 20 to 29."""
    metadata = InMemoryRemoteLogMetadataManager(lambda: 0, lambda: 0)
    for start in (0, 10, 30, 40):
        await segment_metadata.copied(metadata, segment_metadata.segment(PARTITION, start, start + 9))
    return metadata


@pytest.mark.parametrize(("log_start", "explained"), [(0, 20), (5, 20), (19, 20), (20, 50), (49, 50), (50, None)])
async def test_it_is_the_first_offset_without_a_segment(
    metadata: InMemoryRemoteLogMetadataManager, log_start: int, explained: int | None
) -> None:
    """The offsets between the log start and the first segment count as explained."""
    assert await RemoteLog(metadata.state, PARTITION).explained_to(log_start) == explained


async def test_a_recorded_gap_explains_its_offsets(metadata: InMemoryRemoteLogMetadataManager) -> None:
    await metadata.put_log_gap(PARTITION, LogGap(20, 30), 0)
    assert await RemoteLog(metadata.state, PARTITION).explained_to(0) == 50


async def test_the_search_ends_where_its_caller_needs_no_more(
    metadata: InMemoryRemoteLogMetadataManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, looked_at = metadata.state.answered_offsets, []

    def counted(partition: TopicIdPartition, offset: int = 0) -> Iterator[tuple[int, int]]:
        for run in answered(partition, offset):
            looked_at.append(run)
            yield run

    monkeypatch.setattr(metadata.state, "answered_offsets", counted)
    assert await RemoteLog(metadata.state, PARTITION).explained_to(0, 10) == 10
    assert len(looked_at) <= 2
    assert await RemoteLog(metadata.state, PARTITION).explained_to(0, 21) == 20
