"""The rules of both retentions against naive models: records are removed from the beginning of the log only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiers.segment_metadata import segment
from tests.support.tiers.workbench import PARTITION, POLICY
from tiers.config.topic_policy import TierWork
from tiers.config.total_retention import Retention, TotalRetention
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.tasks.hold import HoldReason, TrimView, expiry_hold, expiry_holds, trim_hold, trim_holds

NOW_MS = 1_000
times = st.integers(NOW_MS - 5, NOW_MS + 2)
limits = st.integers(-1, 6)


@st.composite
def logs(draw: st.DrawFn) -> list[RemoteLogSegmentMetadata]:
    """Segments of ten offsets, one behind the other, of a byte or more each."""
    shapes = draw(st.lists(st.tuples(st.integers(1, 3), st.one_of(st.just(-1), times), times), max_size=5))
    return [
        replace(
            segment(PARTITION, 10 * number, 10 * number + 9),
            segment_size_bytes=size_bytes,
            max_timestamp_ms=timestamp_ms,
            event_timestamp_ms=copied_ms,
        )
        for number, (size_bytes, timestamp_ms, copied_ms) in enumerate(shapes)
    ]


def removed(holds: Sequence[object]) -> int:
    """Returns how many segments go: those before the first hold."""
    return next((number for number, hold in enumerate(holds) if hold is not None), len(holds))


@given(log=logs(), keep_ms=limits, keep_bytes=limits, local_bytes=st.integers(0, 2), has_size=st.booleans())
def test_the_total_retention_removes_what_is_too_old_or_too_much(
    log: list[RemoteLogSegmentMetadata], keep_ms: int, keep_bytes: int, local_bytes: int, has_size: bool
) -> None:
    expected, rest = 0, local_bytes + sum(each.segment_size_bytes for each in log)
    for each in log:
        rest -= each.segment_size_bytes
        age_ms = NOW_MS - (each.event_timestamp_ms if each.max_timestamp_ms < 0 else each.max_timestamp_ms)
        if not (keep_ms >= 0 and age_ms > keep_ms) and not (keep_bytes >= 0 and rest >= keep_bytes):
            break
        expected += 1
    alive_bytes = sum(each.segment_size_bytes for each in log) if has_size else None
    keep = Retention(keep_ms, keep_bytes)
    holds = [hold for _, hold in expiry_holds(log, keep, NOW_MS, local_bytes, alive_bytes=alive_bytes)]
    assert removed(holds) == expected
    if expected < len(log):
        hold, held = holds[expected], log[expected]
        assert hold is not None
        is_late = 0 <= keep_ms < NOW_MS - held.event_timestamp_ms and held.max_timestamp_ms > NOW_MS
        by_time = HoldReason.FUTURE_TIMESTAMP if is_late else HoldReason.TOTAL_RETENTION
        assert hold.reason is (HoldReason.UNLIMITED_RETENTION if keep == Retention(-1, -1) else by_time)


@given(log=logs(), budget_bytes=st.integers(0, 8))
def test_one_run_expires_no_more_bytes_than_its_budget(log: list[RemoteLogSegmentMetadata], budget_bytes: int) -> None:
    holds = [hold for _, hold in expiry_holds(log, Retention(-1, 0), NOW_MS, budget_bytes=budget_bytes)]
    count = removed(holds)
    assert count >= min(1, len(log))
    assert count <= 1 or sum(each.segment_size_bytes for each in log[:count]) <= budget_bytes
    assert count == len(log) or sum(each.segment_size_bytes for each in log[: count + 1]) > budget_bytes


@given(log=logs(), keep_ms=limits, keep_bytes=limits, lso=st.integers(0, 60), seen=st.lists(limits, min_size=5))
def test_a_trim_removes_what_is_visible_and_beyond_the_local_retention(
    log: list[RemoteLogSegmentMetadata], keep_ms: int, keep_bytes: int, lso: int, seen: list[int]
) -> None:
    """The newest segment stays, and no record counts as newer than its copy."""
    seen_ms = {each.segment_id: None if at < 0 else at for each, at in zip(log, seen, strict=False)}
    expected, rest = 0, sum(each.segment_size_bytes for each in log)
    for each, visible_ms in zip(log[:-1], seen, strict=False):
        rest -= each.segment_size_bytes
        newest_ms = each.event_timestamp_ms
        if each.max_timestamp_ms >= 0:
            newest_ms = min(each.max_timestamp_ms, newest_ms)
        goes = (keep_ms >= 0 and NOW_MS - newest_ms > keep_ms) or (keep_bytes >= 0 and rest >= keep_bytes)
        if visible_ms < 3 or each.end_offset >= lso or not goes:
            break
        expected += 1
    policy = replace(
        POLICY,
        local_retention_ms=None if keep_ms < 0 else keep_ms,
        local_retention_bytes=None if keep_bytes < 0 else keep_bytes,
    )
    view = TrimView(lso, NOW_MS, 3, lambda each: seen_ms[each.segment_id])
    assert removed([hold for _, hold in trim_holds(policy, log, view)]) == min(expected, max(0, len(log) - 1))


def test_overlapping_segments_count_once() -> None:
    """Of those that overlap, the ones that have the most bytes together count."""
    sizes = {(0, 29): 500, (20, 64): 400, (30, 64): 300, (65, 99): 100}
    log = [
        replace(segment(PARTITION, start, end), segment_size_bytes=size_bytes)
        for (start, end), size_bytes in sizes.items()
    ]
    held = [hold.values["later_bytes"] for _, hold in expiry_holds(log, Retention(-1, 10_000), NOW_MS) if hold]
    assert held == [400, 100, 100, 0]


@pytest.mark.parametrize(
    ("changes", "trims", "expires"),
    [
        ({}, HoldReason.NO_LOCAL_RETENTION, None),
        ({"local_retention_ms": 0}, None, None),
        ({"local_retention_bytes": 0, "is_doubtful": True}, None, HoldReason.RETENTION_IN_DOUBT),
        ({"total_conflict": "other"}, HoldReason.NO_LOCAL_RETENTION, HoldReason.RETENTION_UNKNOWN),
        ({"total_to_record": TotalRetention(5)}, HoldReason.NO_LOCAL_RETENTION, HoldReason.RETENTION_UNKNOWN),
        ({"paused": frozenset(TierWork)}, HoldReason.TRIMMING_PAUSED, HoldReason.EXPIRING_PAUSED),
    ],
)
def test_a_policy_holds_its_whole_topic(
    changes: dict[str, object], trims: HoldReason | None, expires: HoldReason | None
) -> None:
    policy = replace(POLICY, **changes)  # type: ignore[arg-type]  # the fields are named by the cases
    found = trim_hold(policy), expiry_hold(policy)
    assert tuple(None if hold is None else hold.reason for hold in found) == (trims, expires)
