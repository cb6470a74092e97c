"""`TierModel`: the remote tier as the committed metadata describes it. It checks every metadata record.

It models segments and log starts, but no records: those are in `AcknowledgedRecords`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from uuid import UUID

from tests.drill.acknowledged_records import AcknowledgedRecords, Place
from tests.drill.violations import EXPIRY, GAP, STATES, Violations
from tiers.metadata.state.replay import MetadataEvent
from tiers.model.segment_metadata import (
    LocalLogStartUpdate,
    LogGapUpdate,
    LogStartOffsetUpdate,
    RemoteLogSegmentMetadata,
    RemoteLogSegmentMetadataUpdate,
    is_valid_transition,
)
from tiers.model.segment_metadata import RemoteLogSegmentState as State


@dataclass(slots=True)
class Segment:
    """The state of one segment."""

    metadata: RemoteLogSegmentMetadata
    state: State
    finished_at_ms: int | None = None
    """When the segment was finished, by the broker's clock."""

    @property
    def is_readable(self) -> bool:
        return self.state is State.COPY_SEGMENT_FINISHED


@dataclass(slots=True)
class PartitionModel:
    segments: dict[UUID, Segment] = field(default_factory=dict)
    log_start: int = 0
    announced_start: int = 0
    """The highest local log start that an owner committed before a trim."""

    def readable(self) -> Iterator[Segment]:
        return (segment for segment in self.segments.values() if segment.is_readable)

    def covered_to(self, start: int, finished_by_ms: int) -> int:
        """Returns the end (exclusive) of the contiguous offsets from `start` on in segments finished by that time."""
        spans = sorted(
            (segment.metadata.start_offset, segment.metadata.end_offset)
            for segment in self.segments.values()
            if segment.finished_at_ms is not None and segment.finished_at_ms <= finished_by_ms
        )
        for first, last in spans:
            if first > start:
                return start
            start = max(start, last + 1)
        return start


class TierModel:
    def __init__(
        self,
        acknowledged: AcknowledgedRecords,
        violations: Violations,
        *,
        retained_bytes: Callable[[Place], int | None],
        on_finished: Callable[[Place, Segment], None],
    ) -> None:
        """`retained_bytes` returns the bytes that retention must leave. None: retention may remove nothing."""
        self._acknowledged = acknowledged
        self._violations = violations
        self._retained_bytes = retained_bytes
        self._on_finished = on_finished
        self.partitions = {place: PartitionModel() for place in acknowledged.partitions}
        self.counts: Counter[State] = Counter()

    def take(self, events: Iterable[MetadataEvent]) -> None:
        for event in events:
            match event.record:
                case RemoteLogSegmentMetadata() as added:
                    self._add(added)
                case RemoteLogSegmentMetadataUpdate() as update:
                    self._update(update, event.timestamp_ms)
                case LogStartOffsetUpdate() as raised:
                    self._raise_log_start(raised)
                case LocalLogStartUpdate() as announced:
                    place = announced.topic_id_partition.topic, announced.topic_id_partition.partition
                    model = self.partitions[place]
                    if announced.local_log_start.offset < model.announced_start:
                        self._violations.add(STATES, f"{place}: a trim was announced below an earlier one")
                    model.announced_start = max(model.announced_start, announced.local_log_start.offset)
                case LogGapUpdate() as recorded:
                    self._check_gap(recorded)
                case _:
                    continue

    def _add(self, added: RemoteLogSegmentMetadata) -> None:
        place = added.topic_id_partition.topic, added.topic_id_partition.partition
        segments = self.partitions[place].segments
        if added.segment_id.id not in segments:
            segments[added.segment_id.id] = Segment(added, State.COPY_SEGMENT_STARTED)
            self.counts[State.COPY_SEGMENT_STARTED] += 1

    def _update(self, update: RemoteLogSegmentMetadataUpdate, timestamp_ms: int) -> None:
        partition = update.segment_id.topic_id_partition
        place = partition.topic, partition.partition
        segment = self.partitions[place].segments.get(update.segment_id.id)
        if segment is None or not is_valid_transition(segment.state, update.state):
            before = "nothing" if segment is None else segment.state.name
            self._violations.add(STATES, f"{place} {update.segment_id.id}: {update.state.name} after {before}")
            return
        if segment.state is update.state:
            return
        segment.state = update.state
        self.counts[update.state] += 1
        if update.state is State.COPY_SEGMENT_FINISHED:
            segment.finished_at_ms = timestamp_ms
            self._on_finished(place, segment)
        elif update.state is State.DELETE_SEGMENT_STARTED and self._is_in_the_log(place, segment):
            self._violations.add(EXPIRY, f"{place}: a segment that is still in the log is deleted")

    def _is_in_the_log(self, place: Place, segment: Segment) -> bool:
        return segment.finished_at_ms is not None and segment.metadata.end_offset >= self.partitions[place].log_start

    def _check_gap(self, recorded: LogGapUpdate) -> None:
        place = recorded.topic_id_partition.topic, recorded.topic_id_partition.partition
        gap, asked_start = recorded.gap, self._acknowledged[place].asked_start
        if gap.next_offset > asked_start:
            self._violations.add(GAP, f"{place}: {gap}, while clients deleted the records below {asked_start}")

    def _raise_log_start(self, raised: LogStartOffsetUpdate) -> None:
        place = raised.topic_id_partition.topic, raised.topic_id_partition.partition
        model, offset = self.partitions[place], raised.log_start.offset
        if offset > max(model.log_start, self._acknowledged[place].asked_start):
            retained = self._retained_bytes(place)
            left = sum(
                segment.metadata.segment_size_bytes
                for segment in model.readable()
                if segment.metadata.start_offset >= offset
            )
            if retained is None or left < retained:
                self._violations.add(
                    EXPIRY, f"{place}: the log start was raised to {offset}, which leaves {left} of {retained} bytes"
                )
        model.log_start = max(model.log_start, offset)
