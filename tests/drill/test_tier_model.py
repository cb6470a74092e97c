"""The violations that the drill finds in the records of the metadata topic."""

from __future__ import annotations

import pytest

from tests.drill.acknowledged_records import AcknowledgedRecords
from tests.drill.tier_model import TierModel
from tests.drill.violations import EXPIRY, GAP, STATES, Violations
from tests.support.fakes.log_starts import user_log_start
from tests.support.tiers.tier_model_records import PARTITION, PLACE, segment, take, to
from tiers.model.log_start import LogGap
from tiers.model.segment_metadata import LogGapUpdate, LogStartOffsetUpdate
from tiers.model.segment_metadata import RemoteLogSegmentState as State


@pytest.fixture
def violations() -> Violations:
    return Violations()


@pytest.fixture
def model(violations: Violations) -> TierModel:
    return TierModel(
        AcknowledgedRecords([PLACE], violations),
        violations,
        retained_bytes=lambda place: 100,
        on_finished=lambda place, one: None,
    )


def test_the_visible_part_ends_at_a_gap_and_at_a_later_finish(model: TierModel) -> None:
    one, two, after_a_gap = segment(1, 0, 9), segment(2, 10, 19), segment(3, 25, 29)
    take(model, one, to(one, State.COPY_SEGMENT_FINISHED), timestamp_ms=1_000)
    take(model, two, to(two, State.COPY_SEGMENT_FINISHED), timestamp_ms=2_000)
    take(model, after_a_gap, to(after_a_gap, State.COPY_SEGMENT_FINISHED), timestamp_ms=2_000)
    take(model, segment(4, 20, 24), timestamp_ms=2_000)
    partition = model.partitions[PLACE]
    assert [partition.covered_to(0, at_ms) for at_ms in (999, 1_000, 1_999, 2_000)] == [0, 10, 10, 20]
    assert partition.covered_to(25, 2_000) == 30


@pytest.mark.parametrize(
    "states",
    [
        (State.DELETE_SEGMENT_STARTED, State.COPY_SEGMENT_FINISHED),
        (State.COPY_SEGMENT_FINISHED, State.DELETE_SEGMENT_FINISHED),
    ],
)
def test_a_state_out_of_order_is_noticed(model: TierModel, violations: Violations, states: tuple[State, State]) -> None:
    one = segment(1, 0, 9)
    take(model, LogStartOffsetUpdate(PARTITION, "w", 0, user_log_start(0)), one, *(to(one, state) for state in states))
    assert violations.count == {STATES: 1}


def test_segments_above_the_log_start_may_not_be_deleted(model: TierModel, violations: Violations) -> None:
    one = segment(1, 0, 9)
    take(model, one, to(one, State.COPY_SEGMENT_FINISHED), to(one, State.DELETE_SEGMENT_STARTED))
    assert violations.count == {EXPIRY: 1}


def test_retention_may_take_what_is_too_much_and_no_more(model: TierModel, violations: Violations) -> None:
    segments = [segment(number, number * 10, number * 10 + 9) for number in range(4)]
    for one in segments:
        take(model, one, to(one, State.COPY_SEGMENT_FINISHED))
    take(model, LogStartOffsetUpdate(PARTITION, "w", 0, user_log_start(20)))
    assert violations.total == 0
    take(model, LogStartOffsetUpdate(PARTITION, "w", 0, user_log_start(30)))
    assert violations.count == {EXPIRY: 1}


def test_segments_that_clients_deleted_may_go(model: TierModel, violations: Violations) -> None:
    model._acknowledged[PLACE].ask_to_delete(30)
    take(model, LogStartOffsetUpdate(PARTITION, "w", 0, user_log_start(30)))
    assert violations.total == 0


def test_a_gap_may_have_deleted_records_and_no_others(model: TierModel, violations: Violations) -> None:
    model._acknowledged[PLACE].ask_to_delete(30)
    take(model, LogGapUpdate(PARTITION, "w", 0, LogGap(10, 30), 0))
    assert violations.total == 0
    take(model, LogGapUpdate(PARTITION, "w", 0, LogGap(10, 31), 0))
    assert violations.count == {GAP: 1}
