"""Builds and parses the keys of all objects in a store.

    <prefix entropy>/<cluster id>/<topic id>/<partition>/<base offset>-<end offset>-<segment uuid>.log | .indexes
    <prefix entropy>/<cluster id>/<topic id>/<partition>/f<leader epoch>-<next offset>-<uuid>.facts
    <cluster id>/tier.json

* The entropy consists of four hex digits of a hash of (cluster id, topic id, partition). It spreads the partitions over
  the key space of a store.
* A key names the topic by its id, because a topic that was deleted and created again is another topic.
* Offsets have 20 digits, so a listing of a partition is in offset order.
* The keys of facts are in the order of the positions that they name, behind the keys of the segments.
* Keys are relative to the prefix in the settings of the store.
* A probe of the store writes `.check-<uuid>`, an export writes `.race-<uuid>`, and both delete them again.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache
from uuid import UUID

from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata, RemoteLogSegmentState

LOG_SUFFIX = ".log"
INDEXES_SUFFIX = ".indexes"

_CLUSTER_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_PARTITION = rf"[0-9a-f]{{4}}/(?P<cluster>{_CLUSTER_ID.pattern})/(?P<topic>{_UUID})/(?P<partition>\d{{1,10}})/"
_SEGMENT_KEY = re.compile(
    rf"{_PARTITION}(?P<base>\d{{20}})-(?P<end>\d{{20}})-(?P<segment>{_UUID})(?P<suffix>\.log|\.indexes)"
)
_FACTS_KEY = re.compile(rf"{_PARTITION}f\d{{10}}-\d{{20}}-{_UUID}\.facts")
_MARKER_KEY = re.compile(rf"({_CLUSTER_ID.pattern})/tier(?:\.([A-Za-z0-9._-]{{1,64}}))?\.json")
_PROBE_KEY = re.compile(rf"\.(?:check|race)-{_UUID}")


@dataclass(frozen=True, slots=True)
class FactsKey:
    """The parts of the key of facts, and the whole key."""

    cluster_id: str
    topic_id: UUID
    partition: int
    key: str


@dataclass(frozen=True, slots=True)
class SegmentObjectKey:
    """The parts of a segment object's key. `suffix` is `.log` or `.indexes`; `end_offset` is inclusive."""

    cluster_id: str
    topic_id: UUID
    partition: int
    base_offset: int
    end_offset: int
    segment_uuid: UUID
    suffix: str


def check_cluster_id(cluster_id: str) -> str:
    """Returns the cluster id. Raises `ValueError` when it cannot be part of a key."""
    if not _CLUSTER_ID.fullmatch(cluster_id):
        raise ValueError(f"cluster id {cluster_id!r}: expected letters, digits, '_', '-' and '.'")
    return cluster_id


@lru_cache(maxsize=8_192)
def partition_prefix(cluster_id: str, partition: TopicIdPartition) -> str:
    """Returns the prefix of a partition's keys. It ends in a slash, so partition 1 is no prefix of partition 10."""
    path = f"{cluster_id}/{partition.topic_id}/{partition.partition}/"
    return f"{hashlib.sha256(path.encode()).hexdigest()[:4]}/{path}"


def facts_key(cluster_id: str, partition: TopicIdPartition, leader_epoch: int, next_offset: int, uuid: UUID) -> str:
    """Returns the key of the facts of a partition that name this position of its metadata."""
    return f"{partition_prefix(cluster_id, partition)}f{max(0, leader_epoch):010d}-{next_offset:020d}-{uuid}.facts"


def marker_key(cluster_id: str, location: str = "") -> str:
    """Returns the key of the marker of a location; home has the empty name."""
    return f"{cluster_id}/tier.{location}.json" if location else f"{cluster_id}/tier.json"


def log_key(cluster_id: str, metadata: RemoteLogSegmentMetadata) -> str:
    return _segment_key(cluster_id, metadata) + LOG_SUFFIX


def indexes_key(cluster_id: str, metadata: RemoteLogSegmentMetadata) -> str:
    return _segment_key(cluster_id, metadata) + INDEXES_SUFFIX


def _segment_key(cluster_id: str, metadata: RemoteLogSegmentMetadata) -> str:
    prefix = partition_prefix(cluster_id, metadata.topic_id_partition)
    return f"{prefix}{metadata.start_offset:020d}-{metadata.end_offset:020d}-{metadata.segment_id.id}"


def parse_segment_key(key: str) -> SegmentObjectKey | None:
    """Returns the parts of a segment object's key; None for other keys, and for a key with the wrong entropy."""
    found = _SEGMENT_KEY.fullmatch(key)
    where = found and _partition_of(found)
    if found is None or where is None:
        return None
    return SegmentObjectKey(*where, int(found["base"]), int(found["end"]), UUID(found["segment"]), found["suffix"])


def parse_facts_key(key: str) -> FactsKey | None:
    """Returns the parts of the key of facts; None for other keys, and for a key with the wrong entropy."""
    found = _FACTS_KEY.fullmatch(key)
    where = found and _partition_of(found)
    return where and FactsKey(*where, key)


def _partition_of(found: re.Match[str]) -> tuple[str, UUID, int] | None:
    """Returns the cluster id, the topic id and the partition of a key; None if its entropy is wrong."""
    cluster_id, topic_id, partition = found["cluster"], UUID(found["topic"]), int(found["partition"])
    prefix = partition_prefix(cluster_id, TopicIdPartition(topic_id, partition))
    return (cluster_id, topic_id, partition) if found.string.startswith(prefix) else None


def marked_cluster(key: str) -> str | None:
    """Returns the cluster id in the key of a marker; None for other keys."""
    found = _MARKER_KEY.fullmatch(key)
    return None if found is None else found[1]


def marked_location(key: str) -> str:
    """Returns the location of a marker by its key; the empty name for home, and for other keys."""
    found = _MARKER_KEY.fullmatch(key)
    return "" if found is None else found[2] or ""


def segment_of_key(key: SegmentObjectKey, custom_metadata: bytes | None) -> RemoteLogSegmentMetadata:
    """Returns metadata by which a store finds or deletes the segment's objects. Its other fields are placeholders."""
    return RemoteLogSegmentMetadata(
        segment_id=RemoteLogSegmentId(TopicIdPartition(key.topic_id, key.partition), key.segment_uuid),
        start_offset=key.base_offset,
        end_offset=key.end_offset,
        broker_id=-1,
        max_timestamp_ms=-1,
        event_timestamp_ms=-1,
        segment_leader_epochs=(LeaderEpochEntry(0, key.base_offset),),
        segment_size_bytes=0,
        state=RemoteLogSegmentState.COPY_SEGMENT_STARTED,
        custom_metadata=custom_metadata,
    )


def is_probe_key(key: str) -> bool:
    """Returns whether the object is of a probe, which may be in progress."""
    return _PROBE_KEY.fullmatch(key) is not None
