"""The partition manifest: a small object beside a partition's segments, with the facts that their objects lack.

    {"checksum": CRC-32C of the rest, "manifest": {"version": 4, ...}}    JSON, in the store, beside the segments

* It names the segments that were accepted (COPY_SEGMENT_FINISHED), and the CUTs. It also names the dead segments whose
  objects may still exist. A segment that it does not name is newer, or is a copy that had not ended.
* The owner writes it after the metadata record, so it may be older than the metadata topic, but never newer. It says
  how far the owner had read the metadata topic. A metadata topic that does not reach this position has lost records.
* The broker keeps the records of a segment until the manifest accepts the segment. So the manifest is a witness of all
  segments that were ever copied and trimmed (docs/design.md, safety rule 5).
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from protocol.records.record_batch import crc32c
from tiers.errors import RemoteLogMetadataError
from tiers.metadata.remote_log_metadata_manager import MetadataPosition
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_start import LogGap, LogStart, LogStartReason, OffsetAndEpoch
from tiers.model.segment_metadata import Cut, LeaderEpochEntry, RemoteLogSegmentMetadata, after_cuts
from tiers.model.segment_state import RemoteLogSegmentState

VERSION = 7


@dataclass(frozen=True, slots=True)
class ManifestSegment:
    """An accepted segment. `end_offset` is inclusive. `leader_epoch` is that of its copy."""

    id: UUID
    start_offset: int
    end_offset: int
    size_bytes: int
    leader_epochs: tuple[LeaderEpochEntry, ...]
    leader_epoch: int
    custom_metadata: bytes | None = None

    def metadata(self, partition: TopicIdPartition) -> RemoteLogSegmentMetadata:
        """Returns the metadata with which a store finds the segment. Its times have no meaning."""
        return RemoteLogSegmentMetadata(
            segment_id=RemoteLogSegmentId(partition, self.id),
            start_offset=self.start_offset,
            end_offset=self.end_offset,
            broker_id=-1,
            max_timestamp_ms=-1,
            event_timestamp_ms=-1,
            segment_leader_epochs=self.leader_epochs,
            segment_size_bytes=self.size_bytes,
            state=RemoteLogSegmentState.COPY_SEGMENT_FINISHED,
            custom_metadata=self.custom_metadata,
            copy_epoch=self.leader_epoch,
        )


@dataclass(frozen=True, slots=True)
class PartitionManifest:
    """The manifest's values. `dead` has the segments whose deletion began."""

    cluster_id: str
    topic_id_partition: TopicIdPartition
    log_start: LogStart | None
    local_log_start: OffsetAndEpoch | None
    position: MetadataPosition
    """How far the owner had read the metadata partition."""
    gaps: tuple[LogGap, ...] = ()
    cuts: tuple[Cut, ...] = ()
    segments: tuple[ManifestSegment, ...] = ()
    dead: tuple[UUID, ...] = ()
    tier_config: Mapping[str, str] = field(default_factory=dict)
    """The tier settings of the whole topic that were set through a proxy."""
    settings_position: MetadataPosition | None = None
    """How far the owner had read the metadata partition that has the tier settings of the topic. It may be another one
    than that of `position`. None only if `tier_config` is empty."""

    def is_later_than(self, position: MetadataPosition) -> bool:
        """Whether the manifest reflects records of the same metadata topic that a reader at `position` did not read."""
        return self.position.topic_id == position.topic_id and self.position.next_offset > position.next_offset

    def accepted(self) -> dict[UUID, int | None]:
        """Returns the accepted segments, each with its `cut_at`."""
        segments = (each.metadata(self.topic_id_partition) for each in self.segments)
        return {each.segment_id.id: after_cuts(each, self.cuts).cut_at for each in segments}

    def positions(self) -> Iterator[tuple[TopicIdPartition, MetadataPosition]]:
        """Yields the positions that the metadata topic must still reach, each with a partition whose metadata it has.

        Without both, the metadata may lack segments, or have earlier tier settings than the recorded ones."""
        yield self.topic_id_partition, self.position
        if self.settings_position is not None:
            yield self.topic_id_partition.of_settings, self.settings_position


def witness_of(stored: bytes | None) -> str:
    """Names the stored bytes of the manifest, so that an operator can accept exactly those.

    The bytes need not be readable. None means that the store has no manifest."""
    return "none" if stored is None else hashlib.sha256(stored).hexdigest()


def encode_partition_manifest(manifest: PartitionManifest) -> bytes:
    partition, start = manifest.topic_id_partition, manifest.log_start
    document = {
        "version": VERSION,
        "clusterId": manifest.cluster_id,
        "topic": partition.topic,
        "topicId": str(partition.topic_id),
        "partition": partition.partition,
        "logStart": None
        if start is None
        else [start.offset, start.leader_epoch, start.reason.name.lower(), start.last_epoch],
        "localLogStart": None if manifest.local_log_start is None else list(manifest.local_log_start),
        "metadata": _encode_position(manifest.position),
        "gaps": [list(gap) for gap in manifest.gaps],
        "cuts": [list(cut) for cut in manifest.cuts],
        "tierConfig": dict(sorted(manifest.tier_config.items())),
        "tierConfigMetadata": None
        if manifest.settings_position is None
        else _encode_position(manifest.settings_position),
        "dead": sorted(map(str, manifest.dead)),
        "segments": [_encode_segment(each) for each in manifest.segments],
    }
    return json.dumps({"checksum": _checksum(document), "manifest": document}, separators=(",", ":")).encode()


def decode_partition_manifest(data: bytes) -> PartitionManifest:
    """Decodes a manifest. Raises `RemoteLogMetadataError` unless it is complete and of this version."""
    try:
        whole = json.loads(data)
        document = whole["manifest"]
        if whole["checksum"] != _checksum(document):
            raise RemoteLogMetadataError("a partition manifest has a wrong checksum")
        if document["version"] != VERSION:
            raise RemoteLogMetadataError(f"a partition manifest has the unknown version {document['version']!r}")
        return PartitionManifest(
            cluster_id=str(document["clusterId"]),
            topic_id_partition=TopicIdPartition(
                UUID(document["topicId"]), int(document["partition"]), str(document["topic"])
            ),
            log_start=_decode_log_start(document["logStart"]),
            local_log_start=_decode_offset_and_epoch(document["localLogStart"]),
            position=_decode_position(document["metadata"]),
            gaps=tuple(LogGap(int(first), int(following)) for first, following in document["gaps"]),
            cuts=tuple(
                Cut(int(epoch), int(offset), int(at_ms), bool(is_proved))
                for epoch, offset, at_ms, is_proved in document["cuts"]
            ),
            segments=tuple(_decode_segment(each) for each in document["segments"]),
            dead=tuple(UUID(each) for each in document["dead"]),
            tier_config={str(key): str(value) for key, value in document["tierConfig"].items()},
            settings_position=(
                None if document["tierConfigMetadata"] is None else _decode_position(document["tierConfigMetadata"])
            ),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RemoteLogMetadataError(f"a partition manifest cannot be read: {error!r}") from error


def _encode_position(position: MetadataPosition) -> dict[str, Any]:
    return {
        "topicId": str(position.topic_id),
        "leaderEpoch": position.leader_epoch,
        "nextOffset": position.next_offset,
    }


def _decode_position(value: Mapping[str, Any]) -> MetadataPosition:
    return MetadataPosition(UUID(value["topicId"]), int(value["leaderEpoch"]), int(value["nextOffset"]))


def _encode_segment(segment: ManifestSegment) -> dict[str, Any]:
    custom = segment.custom_metadata
    return {
        "id": str(segment.id),
        "startOffset": segment.start_offset,
        "endOffset": segment.end_offset,
        "leaderEpoch": segment.leader_epoch,
        "sizeInBytes": segment.size_bytes,
        "leaderEpochs": [[entry.epoch, entry.start_offset] for entry in segment.leader_epochs],
        "customMetadata": None if custom is None else base64.b64encode(custom).decode(),
    }


def _decode_segment(each: Mapping[str, Any]) -> ManifestSegment:
    custom = each["customMetadata"]
    return ManifestSegment(
        id=UUID(each["id"]),
        start_offset=int(each["startOffset"]),
        end_offset=int(each["endOffset"]),
        size_bytes=int(each["sizeInBytes"]),
        leader_epochs=tuple(LeaderEpochEntry(int(epoch), int(start)) for epoch, start in each["leaderEpochs"]),
        leader_epoch=int(each["leaderEpoch"]),
        custom_metadata=None if custom is None else base64.b64decode(custom, validate=True),
    )


def _decode_log_start(value: Any) -> LogStart | None:
    if value is None:
        return None
    offset, leader_epoch, reason, last_epoch = value
    return LogStart(int(offset), int(leader_epoch), LogStartReason[reason.upper()], int(last_epoch))


def _decode_offset_and_epoch(value: Any) -> OffsetAndEpoch | None:
    if value is None:
        return None
    offset, leader_epoch = value
    return OffsetAndEpoch(int(offset), int(leader_epoch))


def _checksum(document: object) -> str:
    canonical = json.dumps(document, separators=(",", ":"), sort_keys=True).encode()
    return f"{crc32c(canonical, 0, len(canonical)):08x}"
