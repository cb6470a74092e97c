"""Writes and reads the messages of the record types that are Tidegate's own and not Kafka's."""

from __future__ import annotations

from typing import Protocol

from protocol.primitives import (
    EMPTY_TAGGED_SECTION,
    INT8,
    INT32,
    INT64,
    Buffer,
    read_array_length,
    read_int8,
    read_int32,
    read_int64,
    read_string,
    read_uuid,
    skip_tagged_section,
    write_array_length,
    write_string,
)
from tiers.errors import RemoteLogMetadataError
from tiers.metadata.records.record_parts import read_partition, write_partition
from tiers.model.copy_plan import CopyPlan
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import LogGap, LogStart, LogStartReason, OffsetAndEpoch
from tiers.model.segment_metadata import (
    CutUpdate,
    LocalLogStartUpdate,
    LogGapUpdate,
    LogStartOffsetUpdate,
    TierMarkerUpdate,
    TopicDeletionUpdate,
    TopicMissingUpdate,
    TopicTierConfigUpdate,
    UnfinishedRebuildUpdate,
)


class OfPartition(Protocol):
    """The fields at the start of every own message."""

    @property
    def topic_id_partition(self) -> TopicIdPartition: ...
    @property
    def writer(self) -> str: ...
    @property
    def event_timestamp_ms(self) -> int: ...


def _write_head(update: OfPartition) -> bytes:
    return (
        write_partition(update.topic_id_partition)
        + write_string(update.writer, compact=True)
        + INT64.pack(update.event_timestamp_ms)
    )


def _read_head(buf: Buffer, pos: int) -> tuple[TopicIdPartition, str, int, int]:
    """Returns the partition, the writer, the timestamp, and the position after them."""
    partition, pos = read_partition(buf, pos)
    writer, pos = read_string(buf, pos, compact=True)
    event_timestamp_ms, pos = read_int64(buf, pos)
    return partition, writer or "", event_timestamp_ms, pos


def write_log_start(update: LogStartOffsetUpdate) -> bytes:
    start = update.log_start
    return (
        _write_head(update)
        + INT64.pack(start.offset)
        + INT32.pack(start.leader_epoch)
        + INT8.pack(start.reason)
        + INT32.pack(start.last_epoch)
        + EMPTY_TAGGED_SECTION
    )


def read_log_start(buf: Buffer, pos: int) -> tuple[LogStartOffsetUpdate, int]:
    partition, writer, event_timestamp_ms, pos = _read_head(buf, pos)
    position, pos = _read_position(buf, pos)
    reason, pos = read_int8(buf, pos)
    last_epoch, pos = read_int32(buf, pos)
    log_start = LogStart(position.offset, position.leader_epoch, LogStartReason(reason), last_epoch)
    return LogStartOffsetUpdate(partition, writer, event_timestamp_ms, log_start), skip_tagged_section(buf, pos)


def _read_position(buf: Buffer, pos: int) -> tuple[OffsetAndEpoch, int]:
    offset, pos = read_int64(buf, pos)
    leader_epoch, pos = read_int32(buf, pos)
    if offset < 0:
        raise RemoteLogMetadataError(f"a record has the negative offset {offset}")
    return OffsetAndEpoch(offset, leader_epoch), pos


def write_tier_config(update: TopicTierConfigUpdate) -> bytes:
    return b"".join(
        (
            _write_head(update),
            write_array_length(len(update.config), compact=True),
            *(
                write_string(key, compact=True) + write_string(value, compact=True) + EMPTY_TAGGED_SECTION
                for key, value in update.config.items()
            ),
            EMPTY_TAGGED_SECTION,
        )
    )


def read_tier_config(buf: Buffer, pos: int) -> tuple[TopicTierConfigUpdate, int]:
    partition, writer, event_timestamp_ms, pos = _read_head(buf, pos)
    count, pos = read_array_length(buf, pos, compact=True)
    config: dict[str, str] = {}
    for _ in range(count):
        key, pos = read_string(buf, pos, compact=True)
        value, pos = read_string(buf, pos, compact=True)
        pos = skip_tagged_section(buf, pos)
        config[key or ""] = value or ""
    return TopicTierConfigUpdate(partition, writer, event_timestamp_ms, config), skip_tagged_section(buf, pos)


def write_cut(update: CutUpdate) -> bytes:
    return (
        _write_head(update)
        + INT64.pack(update.offset)
        + INT32.pack(update.leader_epoch)
        + INT8.pack(update.is_proved)
        + EMPTY_TAGGED_SECTION
    )


def read_cut(buf: Buffer, pos: int) -> tuple[CutUpdate, int]:
    partition, writer, event_timestamp_ms, pos = _read_head(buf, pos)
    position, pos = _read_position(buf, pos)
    is_proved, pos = read_int8(buf, pos)
    update = CutUpdate(partition, writer, event_timestamp_ms, position.leader_epoch, position.offset, bool(is_proved))
    return update, skip_tagged_section(buf, pos)


def write_local_log_start(update: LocalLogStartUpdate) -> bytes:
    start = update.local_log_start
    return _write_head(update) + INT64.pack(start.offset) + INT32.pack(start.leader_epoch) + EMPTY_TAGGED_SECTION


def read_local_log_start(buf: Buffer, pos: int) -> tuple[LocalLogStartUpdate, int]:
    partition, writer, event_timestamp_ms, pos = _read_head(buf, pos)
    position, pos = _read_position(buf, pos)
    return LocalLogStartUpdate(partition, writer, event_timestamp_ms, position), skip_tagged_section(buf, pos)


def write_log_gap(update: LogGapUpdate) -> bytes:
    return (
        _write_head(update)
        + INT64.pack(update.gap.first_offset)
        + INT64.pack(update.gap.next_offset)
        + INT32.pack(update.leader_epoch)
        + EMPTY_TAGGED_SECTION
    )


def read_log_gap(buf: Buffer, pos: int) -> tuple[LogGapUpdate, int]:
    partition, writer, event_timestamp_ms, pos = _read_head(buf, pos)
    first_offset, pos = read_int64(buf, pos)
    next_offset, pos = read_int64(buf, pos)
    leader_epoch, pos = read_int32(buf, pos)
    if not 0 <= first_offset < next_offset:
        raise RemoteLogMetadataError(f"a gap of {partition} holds no offsets: {first_offset} to {next_offset}")
    update = LogGapUpdate(partition, writer, event_timestamp_ms, LogGap(first_offset, next_offset), leader_epoch)
    return update, skip_tagged_section(buf, pos)


def write_tier_marker(update: TierMarkerUpdate) -> bytes:
    return (
        _write_head(update)
        + write_string(update.location, compact=True)
        + update.marker_id.bytes
        + INT8.pack(update.is_confirmed)
        + EMPTY_TAGGED_SECTION
    )


def read_tier_marker(buf: Buffer, pos: int) -> tuple[TierMarkerUpdate, int]:
    partition, writer, event_timestamp_ms, pos = _read_head(buf, pos)
    location, pos = read_string(buf, pos, compact=True)
    marker_id, pos = read_uuid(buf, pos)
    is_confirmed, pos = read_int8(buf, pos)
    update = TierMarkerUpdate(partition, writer, event_timestamp_ms, location or "", marker_id, bool(is_confirmed))
    return update, skip_tagged_section(buf, pos)


def write_head_alone(update: OfPartition) -> bytes:
    """Writes a record of a type whose only content is its partition."""
    return _write_head(update) + EMPTY_TAGGED_SECTION


def write_topic_deletion(update: TopicDeletionUpdate) -> bytes:
    return _write_head(update) + INT8.pack(update.is_confirmed) + EMPTY_TAGGED_SECTION


def read_topic_deletion(buf: Buffer, pos: int) -> tuple[TopicDeletionUpdate, int]:
    partition, writer, event_timestamp_ms, pos = _read_head(buf, pos)
    is_confirmed, pos = read_int8(buf, pos)
    update = TopicDeletionUpdate(partition, writer, event_timestamp_ms, bool(is_confirmed))
    return update, skip_tagged_section(buf, pos)


def read_topic_missing(buf: Buffer, pos: int) -> tuple[TopicMissingUpdate, int]:
    partition, writer, event_timestamp_ms, pos = _read_head(buf, pos)
    return TopicMissingUpdate(partition, writer, event_timestamp_ms), skip_tagged_section(buf, pos)


def read_unfinished_rebuild(buf: Buffer, pos: int) -> tuple[UnfinishedRebuildUpdate, int]:
    partition, writer, event_timestamp_ms, pos = _read_head(buf, pos)
    return UnfinishedRebuildUpdate(partition, writer, event_timestamp_ms), skip_tagged_section(buf, pos)


def write_copy_plan(plan: CopyPlan) -> bytes:
    return b"".join(
        (
            _write_head(plan),
            plan.plan_id.bytes,
            INT32.pack(plan.attempts),
            INT32.pack(plan.leader_epoch),
            INT32.pack(plan.copy_epoch),
            write_array_length(len(plan.bounds), compact=True),
            *(INT64.pack(offset) for offset in plan.bounds),
            EMPTY_TAGGED_SECTION,
        )
    )


def read_copy_plan(buf: Buffer, pos: int) -> tuple[CopyPlan, int]:
    partition, writer, event_timestamp_ms, pos = _read_head(buf, pos)
    plan_id, pos = read_uuid(buf, pos)
    attempts, pos = read_int32(buf, pos)
    leader_epoch, pos = read_int32(buf, pos)
    copy_epoch, pos = read_int32(buf, pos)
    count, pos = read_array_length(buf, pos, compact=True)
    bounds = []
    for _ in range(count):
        offset, pos = read_int64(buf, pos)
        bounds.append(offset)
    plan = CopyPlan(partition, writer, event_timestamp_ms, plan_id, attempts, leader_epoch, copy_epoch, tuple(bounds))
    return plan, skip_tagged_section(buf, pos)
