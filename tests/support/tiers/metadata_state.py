"""An open state of the metadata topic, and short forms of the records that a test puts into it."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

from tiers.metadata.records.serde import MetadataRecord, RecordKey, key_of
from tiers.metadata.state.layout import StateIdentity
from tiers.metadata.state.replay import MetadataEvent, PartitionRead
from tiers.metadata.state.writer import RemoteLogMetadataStateWriter
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_start import UNKNOWN_EPOCH, LogGap, LogStart, LogStartReason
from tiers.model.segment_metadata import (
    CutUpdate,
    LeaderEpochEntry,
    LogGapUpdate,
    LogStartOffsetUpdate,
    RemoteLogSegmentMetadata,
    RemoteLogSegmentMetadataUpdate,
)
from tiers.model.segment_metadata import RemoteLogSegmentState as State

TOPIC_ID = UUID(int=7)
PARTITION = TopicIdPartition(TOPIC_ID, 3, "orders")
NEIGHBOUR = TopicIdPartition(TOPIC_ID, 4, "orders")
IDENTITY = StateIdentity("cluster", UUID(int=99), 50)
NOW_MS = 1_700_000_000_000
Record = MetadataRecord


def open_state(
    folder: Path, identity: StateIdentity = IDENTITY, *, is_kept: bool = True
) -> RemoteLogMetadataStateWriter:
    return RemoteLogMetadataStateWriter.open(folder, identity, is_kept=is_kept, map_size_bytes=1 << 24)


class Topic:
    """Numbers events as a metadata partition would, and replays them."""

    def __init__(self, state: RemoteLogMetadataStateWriter) -> None:
        self.state = state
        self.next_offset = 0

    def put(self, *records: Record) -> list[RemoteLogSegmentId]:
        return self.events(*((key_of(record), record) for record in records))

    def bury(self, *keys: RecordKey) -> list[RemoteLogSegmentId]:
        return self.events(*((key, None) for key in keys))

    def events(self, *pairs: tuple[RecordKey, Record | None]) -> list[RemoteLogSegmentId]:
        events = [
            MetadataEvent(self.next_offset + index, NOW_MS + index, key, record)
            for index, (key, record) in enumerate(pairs)
        ]
        self.next_offset += len(events)
        return self.state.apply([PartitionRead(0, events, self.next_offset)])


def segment(
    number: int, start: int, end: int, epoch: int = 0, partition: TopicIdPartition = PARTITION
) -> RemoteLogSegmentMetadata:
    return RemoteLogSegmentMetadata(
        RemoteLogSegmentId(partition, UUID(int=number)),
        start,
        end,
        1,
        NOW_MS,
        NOW_MS,
        (LeaderEpochEntry(epoch, start),),
        1000,
        State.COPY_SEGMENT_STARTED,
    )


def to(metadata: RemoteLogSegmentMetadata, state: State) -> RemoteLogSegmentMetadataUpdate:
    return RemoteLogSegmentMetadataUpdate(metadata.segment_id, 1, NOW_MS, state)


def cut(leader_epoch: int, offset: int) -> CutUpdate:
    return CutUpdate(PARTITION, "a", NOW_MS, leader_epoch, offset)


def log_start(writer: str, start: LogStart) -> LogStartOffsetUpdate:
    return LogStartOffsetUpdate(PARTITION, writer, NOW_MS, start)


def user(offset: int, leader_epoch: int = 0, last_epoch: int = UNKNOWN_EPOCH) -> LogStart:
    return LogStart(offset, leader_epoch, LogStartReason.USER, last_epoch)


def gap(first_offset: int, next_offset: int) -> LogGapUpdate:
    return LogGapUpdate(PARTITION, "a", NOW_MS, LogGap(first_offset, next_offset), 3)


def fill(folder: Path) -> None:
    state = open_state(folder)
    first = segment(1, 0, 99)
    Topic(state).put(first, to(first, State.COPY_SEGMENT_FINISHED))
    state.mark_read_to_end({0: NOW_MS - 1000})
    state.close()
