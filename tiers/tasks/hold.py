"""`Hold`: the reason why an owner leaves something as it is now, and the rules of the retention in both tiers.

The tasks decide by these functions, and `tiers/explain` shows their holds to operators. So an explanation is the
decision itself. Times are in milliseconds of the wall clock, unless a function says otherwise.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import TypeVar

from tiers.config.topic_policy import TierWork, TopicPolicy
from tiers.config.topic_settings import LOCAL_RETENTION_BYTES, LOCAL_RETENTION_MS
from tiers.config.total_retention import NOTHING_EXPIRES, UNLIMITED, Retention
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.model.stored_segment import StoredSegment

Segment = TypeVar("Segment", StoredSegment, RemoteLogSegmentMetadata)


class HoldReason(StrEnum):
    """The rules that hold a copy, a trim or an expiry. `tiers/explain/words.py` has a sentence for each."""

    COPY_DISABLED = "copy-disabled"
    COPYING_PAUSED = "copying-paused"
    NOT_DUE = "not-due"
    """The records neither fill a segment nor are old enough."""

    NO_LOCAL_RETENTION = "no-local-retention"
    TRIMMING_PAUSED = "trimming-paused"
    NOT_VISIBLE = "not-visible"
    ABOVE_LSO = "above-lso"
    LOCAL_RETENTION = "local-retention"
    NEWEST_SEGMENT = "newest-segment"

    EXPIRING_PAUSED = "expiring-paused"
    RETENTION_UNKNOWN = "retention-unknown"
    """The owner does not know the total retention: the file and the recorded total differ."""
    RETENTION_IN_DOUBT = "retention-in-doubt"
    """The present retention could not be read from the brokers, or they disagree."""
    UNLIMITED_RETENTION = "unlimited-retention"
    TOTAL_RETENTION = "total-retention"
    FUTURE_TIMESTAMP = "future-timestamp"
    """By the time of its copy the segment would have expired, but a record of it has a timestamp in the future."""
    EXPIRY_BUDGET = "expiry-budget"
    """The bytes that may expire in one run are used up."""


@dataclass(frozen=True, slots=True)
class Hold:
    """`at_ms` is the time at which this hold ends by itself; None: it needs an event, or the time cannot be told.

    `values` are the numbers that decide, by the names of their settings or with their units in the name."""

    reason: HoldReason
    at_ms: int | None = None
    values: Mapping[str, int] = field(default_factory=dict)


def segment_timestamp_ms(segment: RemoteLogSegmentMetadata | StoredSegment) -> int:
    """Returns the time from which time retention counts: the copy time for records without timestamps.

    See docs/design.md, safety rule 6."""
    return segment.max_timestamp_ms if segment.max_timestamp_ms >= 0 else segment.event_timestamp_ms


def _retained(
    reason: HoldReason, keep: Retention, now_ms: int, timestamp_ms: int, later_bytes: int, keys: tuple[str, str]
) -> Hold | None:
    """Returns the hold of a segment that a retention covers, in time and in bytes; None: one of them does not.

    `later_bytes` are those behind the segment. `keys` are the names of the limits."""
    age_ms, values, at_ms = now_ms - timestamp_ms, dict[str, int](), None
    if 0 <= keep.ms < age_ms or 0 <= keep.size_bytes <= later_bytes:
        return None
    if keep.ms >= 0:
        values |= {"age_ms": age_ms, keys[0]: keep.ms}
        at_ms = timestamp_ms + keep.ms + 1
    if keep.size_bytes >= 0:
        values |= {"later_bytes": later_bytes, keys[1]: keep.size_bytes}
    return Hold(reason, at_ms, values)


@dataclass(frozen=True, slots=True)
class TrimView:
    """What decides which segments of a partition may be trimmed.

    `visible_for_ms` tells for how long the owner's reader has seen the segment finished; None: not yet."""

    last_stable_offset: int
    now_ms: int
    visible_after_ms: int
    visible_for_ms: Callable[[RemoteLogSegmentMetadata], int | None]


def trim_hold(policy: TopicPolicy) -> Hold | None:
    """Returns why nothing of the topic is trimmed, whatever its segments are."""
    if TierWork.TRIMMING in policy.paused:
        return Hold(HoldReason.TRIMMING_PAUSED)
    if policy.local_retention_ms is None and policy.local_retention_bytes is None:
        return Hold(HoldReason.NO_LOCAL_RETENTION)
    return None


def trim_holds(
    policy: TopicPolicy, covering: Sequence[RemoteLogSegmentMetadata], view: TrimView
) -> Iterator[tuple[RemoteLogSegmentMetadata, Hold | None]]:
    """Yields each segment with what keeps it on the broker; None: it may be trimmed, with all segments before it.

    `covering` are the segments that cover the local log from its start up to the first gap. A hold of a segment holds
    the later ones too. Their own holds are those that they have when all segments before them are trimmed."""
    local_bytes = sum(segment.retained_bytes for segment in covering)
    for segment in covering[:-1]:
        yield segment, _trim_hold_of(segment, policy, view, local_bytes)
        local_bytes -= segment.retained_bytes
    if covering:
        yield covering[-1], Hold(HoldReason.NEWEST_SEGMENT)


def _trim_hold_of(
    segment: RemoteLogSegmentMetadata, policy: TopicPolicy, view: TrimView, local_bytes: int
) -> Hold | None:
    """`local_bytes` is the size of the copied part of the local log from this segment on."""
    visible_for_ms = view.visible_for_ms(segment)
    if visible_for_ms is None or visible_for_ms < view.visible_after_ms:
        left_ms = view.visible_after_ms - (visible_for_ms or 0)
        values = {"remote.log.visible.after.ms": view.visible_after_ms}
        return Hold(HoldReason.NOT_VISIBLE, view.now_ms + left_ms, values)
    if segment.valid_end_offset >= view.last_stable_offset:
        return Hold(HoldReason.ABOVE_LSO, values={"last_stable_offset": view.last_stable_offset})
    keep_ms, keep_bytes = policy.local_retention_ms, policy.local_retention_bytes
    return _retained(
        HoldReason.LOCAL_RETENTION,
        Retention(UNLIMITED if keep_ms is None else keep_ms, UNLIMITED if keep_bytes is None else keep_bytes),
        view.now_ms,
        # A record with a timestamp in the future holds nothing on the broker.
        min(segment_timestamp_ms(segment), segment.event_timestamp_ms),
        local_bytes - segment.retained_bytes,
        (LOCAL_RETENTION_MS, LOCAL_RETENTION_BYTES),
    )


def expiry_hold(policy: TopicPolicy) -> Hold | None:
    """Returns why nothing of the topic expires, whatever its segments are."""
    if TierWork.EXPIRING in policy.paused:
        return Hold(HoldReason.EXPIRING_PAUSED)
    if policy.total_conflict or policy.total_to_record is not None:
        return Hold(HoldReason.RETENTION_UNKNOWN)
    return Hold(HoldReason.RETENTION_IN_DOUBT) if policy.is_doubtful else None


def expiry_holds(
    alive: Iterable[Segment],
    retention: Retention,
    now_ms: int,
    local_only_bytes: int = 0,
    budget_bytes: int | None = None,
    alive_bytes: int | None = None,
) -> Iterator[tuple[Segment, Hold | None]]:
    """Yields each segment with what keeps it from expiring; None: it expires, with all segments before it.

    `alive` are the segments that answer for the offsets from the log start on. `budget_bytes` limits the bytes that
    expire, but one segment may always expire. None: no limit. `alive_bytes` are the retained bytes of `alive`, which
    then do not overlap. None: each segment is looked at. A hold of a segment holds the later ones too. Their own holds
    are those that they have when all segments before them have expired."""
    behind = _bytes_behind(list(alive)) if alive_bytes is None else _rest(alive, alive_bytes)
    keys, reason = ("retention_ms", "retention_bytes"), HoldReason.TOTAL_RETENTION
    for number, (segment, behind_bytes) in enumerate(behind):
        timestamp_ms, later_bytes = segment_timestamp_ms(segment), local_only_bytes + behind_bytes
        hold = _retained(reason, retention, now_ms, timestamp_ms, later_bytes, keys)
        if hold is None and budget_bytes is not None:
            if segment.retained_bytes > budget_bytes and number > 0:
                hold = Hold(HoldReason.EXPIRY_BUDGET)
            budget_bytes -= segment.retained_bytes
        elif hold is not None and retention == NOTHING_EXPIRES:
            hold = Hold(HoldReason.UNLIMITED_RETENTION)
        elif hold is not None and is_held_by_future_timestamp(segment, retention.ms, now_ms):
            values = {"max_timestamp_ms": segment.max_timestamp_ms, **hold.values}
            hold = replace(hold, reason=HoldReason.FUTURE_TIMESTAMP, values=values)
        yield segment, hold


def _rest(alive: Iterable[Segment], alive_bytes: int) -> Iterator[tuple[Segment, int]]:
    """Yields each segment with the bytes that `alive` has behind it."""
    for segment in alive:
        alive_bytes -= segment.retained_bytes
        yield segment, alive_bytes


def _bytes_behind(alive: Sequence[Segment]) -> Iterator[tuple[Segment, int]]:
    """Yields each segment with the bytes that the log has behind it at least.

    Segments may overlap, and no record counts twice. So of segments that overlap, those count that have the most bytes
    together without an overlap. In a chain of segments that overlap by few records, about half of them count: the
    retention by bytes then comes late, and never early."""
    if all(later.start_offset > earlier.valid_end_offset for earlier, later in pairwise(alive)):
        yield from _rest(alive, sum(segment.retained_bytes for segment in alive))
        return
    by_start = sorted(alive, key=lambda segment: segment.start_offset)
    starts = [segment.start_offset for segment in by_start]
    from_bytes = [0] * (len(by_start) + 1)
    for number in reversed(range(len(by_start))):
        following = bisect_right(starts, by_start[number].valid_end_offset)
        size_bytes = by_start[number].retained_bytes + from_bytes[following]
        from_bytes[number] = max(from_bytes[number + 1], size_bytes)
    for segment in alive:
        yield segment, from_bytes[bisect_right(starts, segment.valid_end_offset)]


def is_held_by_future_timestamp(segment: StoredSegment | RemoteLogSegmentMetadata, keep_ms: int, now_ms: int) -> bool:
    """Whether a segment that was copied longer ago than time retention keeps it has a timestamp in the future."""
    return 0 <= keep_ms < now_ms - segment.event_timestamp_ms and segment.max_timestamp_ms > now_ms
