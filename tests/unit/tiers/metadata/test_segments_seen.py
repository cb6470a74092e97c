"""Since when a segment is visible to this process (docs/design.md, safety rule 1)."""

from __future__ import annotations

from uuid import UUID

import pytest

from tiers.metadata import record_backed_manager
from tiers.metadata.record_backed_manager import SegmentsSeen
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition

PARTITION = TopicIdPartition(UUID(int=1), 0, "orders")
FIRST, SECOND, THIRD, BEFORE = (RemoteLogSegmentId(PARTITION, UUID(int=number)) for number in range(4))


def test_a_segment_that_was_forgotten_is_never_seen_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_backed_manager, "_SEEN_KEPT", 2)
    now_ms = 1_000
    seen = SegmentsSeen(lambda: now_ms)
    seen.opened_at_ms = now_ms
    for segment in (FIRST, SECOND, THIRD):
        now_ms += 100
        seen.finished([segment])
    assert [seen.at_ms(segment) for segment in (FIRST, SECOND, THIRD)] == [1_100, 1_200, 1_300]
    assert seen.at_ms(BEFORE) == 1_100
