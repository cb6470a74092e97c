"""A copy plan announces all attempts at once, and names every object until its deletion."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest

from tests.support.tiers.metadata_state import NOW_MS, PARTITION, Topic, open_state, to
from tiers.metadata.records.serde import key_of, segment_keys
from tiers.metadata.state.writer import RemoteLogMetadataStateWriter
from tiers.model.copy_plan import CopyPlan
from tiers.model.segment_state import RemoteLogSegmentState as State

PLAN = CopyPlan(PARTITION, "a", NOW_MS, UUID(int=77), 2, 4, 4, (100, 150, 170))
FIRST, SECOND, OTHER, _ = PLAN.announced()


@pytest.fixture
def state(tmp_path: Path) -> Iterator[RemoteLogMetadataStateWriter]:
    with closing(open_state(tmp_path)) as state:
        yield state


def listed(state: RemoteLogMetadataStateWriter) -> list[tuple[int, int, State]]:
    return [(one.start_offset, one.end_offset, one.state) for one in state.list_remote_log_segments(PARTITION)]


def test_every_attempt_at_a_tile_has_its_own_name_in_the_plan() -> None:
    ids = PLAN.segment_ids()
    assert len({*ids}) == 4
    assert ids == replace(PLAN, writer="b", attempts=2).segment_ids()
    assert not {*ids} & {*replace(PLAN, plan_id=UUID(int=78)).segment_ids()}
    assert [one.segment_id for one in PLAN.announced()] == ids


def test_segments_that_a_plan_announces_count_as_begun_until_it_ends(state: RemoteLogMetadataStateWriter) -> None:
    topic = Topic(state)
    topic.put(PLAN)
    assert listed(state) == [(100, 149, State.COPY_SEGMENT_STARTED)] * 2 + [(150, 169, State.COPY_SEGMENT_STARTED)] * 2
    assert state.copy_plans(PARTITION) == [PLAN]
    assert state.remote_end_offset(PARTITION) is None
    topic.bury(key_of(PLAN))
    assert listed(state) == []
    assert state.partitions() == []


def test_the_committed_segments_of_a_plan_outlive_it(state: RemoteLogMetadataStateWriter) -> None:
    topic = Topic(state)
    measured = replace(SECOND, segment_size_bytes=5_000)
    topic.put(PLAN, measured, to(SECOND, State.COPY_SEGMENT_FINISHED), PLAN)
    topic.bury(key_of(PLAN))
    assert listed(state) == [(100, 149, State.COPY_SEGMENT_FINISHED)]
    assert state.remote_end_offset(PARTITION) == 149


def test_a_deletion_behind_the_end_of_the_plan_is_not_lost(
    state: RemoteLogMetadataStateWriter,
) -> None:
    topic = Topic(state)
    topic.put(PLAN, replace(FIRST, segment_size_bytes=5_000))
    topic.bury(key_of(PLAN))
    topic.put(to(FIRST, State.DELETE_SEGMENT_STARTED))
    assert listed(state) == [(100, 149, State.DELETE_SEGMENT_STARTED)]


def test_a_deleted_attempt_is_gone_and_the_plan_goes_with_its_partition(state: RemoteLogMetadataStateWriter) -> None:
    topic = Topic(state)
    topic.put(PLAN, to(OTHER, State.DELETE_SEGMENT_STARTED), to(OTHER, State.DELETE_SEGMENT_FINISHED))
    topic.bury(*segment_keys(OTHER.segment_id))
    assert len(listed(state)) == 3
    topic.put(PLAN)
    assert len(listed(state)) == 3
