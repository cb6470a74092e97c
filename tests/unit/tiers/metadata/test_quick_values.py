from __future__ import annotations

import gc
import pickle
from dataclasses import FrozenInstanceError, replace
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.quick_values import garbage_collection_paused, quick, quick_uuid
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata
from tiers.model.segment_state import RemoteLogSegmentState

SEGMENT_ID = RemoteLogSegmentId(TopicIdPartition(UUID(int=1), 2, "orders"), UUID(int=3))
FIELDS = (SEGMENT_ID, 0, 9, 1, 10, 11, (LeaderEpochEntry(0, 0),), 100, RemoteLogSegmentState.COPY_SEGMENT_STARTED)


@pytest.mark.parametrize("fields", [FIELDS, (*FIELDS, b"where", True, 5)])
def test_a_value_made_quickly_is_like_any_other(fields: tuple[object, ...]) -> None:
    slow = RemoteLogSegmentMetadata(*fields)  # type: ignore[arg-type]  # one tuple for both
    made = quick(RemoteLogSegmentMetadata)(*fields)  # type: ignore[arg-type]
    assert type(made) is RemoteLogSegmentMetadata
    assert (made, hash(made), repr(made)) == (slow, hash(slow), repr(slow))
    assert replace(made, broker_id=7) == replace(slow, broker_id=7)
    with pytest.raises(FrozenInstanceError):
        made.broker_id = 7  # type: ignore[misc]  # it is frozen


@given(st.binary(min_size=16, max_size=16))
def test_a_uuid_made_quickly_is_like_any_other(raw: bytes) -> None:
    made, slow = quick_uuid(raw), UUID(bytes=raw)
    assert (made, hash(made), repr(made), made.bytes) == (slow, hash(slow), repr(slow), raw)
    assert made.is_safe is slow.is_safe
    assert pickle.loads(pickle.dumps(made)) == slow


def test_garbage_is_looked_for_again_when_many_were_made() -> None:
    @garbage_collection_paused()
    def make() -> None:
        assert not gc.isenabled()
        raise ValueError("torn")

    with pytest.raises(ValueError, match="torn"):
        make()
    assert gc.isenabled()
