"""One partition of the drill's `TierModel`, and the metadata records that the model takes."""

from __future__ import annotations

from uuid import UUID

from tests.drill.tier_model import TierModel
from tiers.metadata.records.serde import MetadataRecord, key_of
from tiers.metadata.state.replay import MetadataEvent
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata, RemoteLogSegmentMetadataUpdate
from tiers.model.segment_metadata import RemoteLogSegmentState as State

PLACE = ("orders", 0)
PARTITION = TopicIdPartition(UUID(int=1), 0, "orders")


def take(model: TierModel, *records: MetadataRecord, timestamp_ms: int = 0) -> None:
    model.take([MetadataEvent(offset, timestamp_ms, key_of(record), record) for offset, record in enumerate(records)])


def segment(number: int, start: int, end: int) -> RemoteLogSegmentMetadata:
    return RemoteLogSegmentMetadata(
        RemoteLogSegmentId(PARTITION, UUID(int=number)), start, end, -1, 0, 0, (LeaderEpochEntry(0, start),), 60,
        State.COPY_SEGMENT_STARTED,
    )  # fmt: skip


def to(one: RemoteLogSegmentMetadata, state: State) -> RemoteLogSegmentMetadataUpdate:
    return RemoteLogSegmentMetadataUpdate(one.segment_id, -1, 0, state)
