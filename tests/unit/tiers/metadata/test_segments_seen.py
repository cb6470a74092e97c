"""Since when a segment is visible to this process (docs/design.md, safety rule 1)."""

from __future__ import annotations

from uuid import UUID

import pytest

from tests.support.tiers.metadata_state import Topic, segment, to
from tiers.metadata.state.writer import RemoteLogMetadataStateWriter
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.segment_state import RemoteLogSegmentState

PARTITION = TopicIdPartition(UUID(int=1), 0, "orders")
FIRST, SECOND, THIRD, BEFORE = (RemoteLogSegmentId(PARTITION, UUID(int=number)) for number in range(4))


def test_a_segment_is_seen_before_it_can_be_looked_up(
    state: RemoteLogMetadataStateWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied, readable = segment(1, 0, 9), []
    see = state._see

    def then(segment_ids: list[RemoteLogSegmentId]) -> None:
        readable.append(state.remote_end_offset(copied.topic_id_partition))
        see(segment_ids)

    monkeypatch.setattr(state, "_see", then)
    topic = Topic(state)
    topic.put(copied)
    assert state.seen_at_ms(copied.segment_id) is None
    topic.put(to(copied, RemoteLogSegmentState.COPY_SEGMENT_FINISHED))
    assert readable == [None, None]
    assert state.seen_at_ms(copied.segment_id) is not None
