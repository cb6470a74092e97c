"""`may_be_in_doubt` checks, without writing, whether the owner may doubt the past (docs/design.md, safety rule 5).

The owner's own checks (`PartitionManifestTask`, `LogGapTask`) write, and need the ownership. The check here is stricter
than the owner: if it finds no reason, the owner has none either. It may find a reason where the owner goes on, for
example while a copy finishes.
"""

from __future__ import annotations

from tiers.config.paused_work import paused_work
from tiers.config.total_retention import TOTAL_KEYS
from tiers.errors import RemoteLogMetadataError
from tiers.metadata.log_bounds import unexplained_runs, unexplained_trim
from tiers.metadata.partition_manifest import PartitionManifest, decode_partition_manifest
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataManager
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.model.segment_state import RemoteLogSegmentState


async def may_be_in_doubt(
    metadata: RemoteLogMetadataManager,
    partition: TopicIdPartition,
    bounds: LocalLogBounds,
    log_start: int | None,
    stored_manifest: bytes | None,
    cluster_id: str,
    timeout_ms: int,
) -> bool:
    """Returns whether the owner may have a reason to doubt the past. False: there is nothing to accept.

    `bounds` are the leader's, and `log_start` is the recorded one. `stored_manifest` is the
    content of the partition manifest; None: the store has none. `cluster_id` is the one in object keys. Raises
    `BrokerError`."""
    if await _has_unexplained_offsets(metadata, partition, bounds, log_start):
        return True
    if stored_manifest is None:
        # The manifest is written before the first copy. If the store lacks the copies too, it may be another place.
        return any(each.is_finished for each in metadata.stored_segments(partition))
    try:
        manifest = decode_partition_manifest(stored_manifest)
    except RemoteLogMetadataError:
        return True
    if (manifest.cluster_id, manifest.topic_id_partition) != (cluster_id, partition):
        return True
    return _knows_too_little(metadata, manifest) or not await reaches_positions(metadata, manifest, timeout_ms)


async def _has_unexplained_offsets(
    metadata: RemoteLogMetadataManager, partition: TopicIdPartition, bounds: LocalLogBounds, log_start: int | None
) -> bool:
    start = log_start or 0
    if await unexplained_runs(metadata, partition, start, bounds.log_start_offset):
        return True
    return unexplained_trim(metadata, partition, start) is not None


def _knows_too_little(metadata: RemoteLogMetadataManager, manifest: PartitionManifest) -> bool:
    """Whether the manifest accepts a segment that the metadata does not know as finished."""
    for segment in manifest.segments:
        segment_id = RemoteLogSegmentId(manifest.topic_id_partition, segment.id)
        known = metadata.remote_log_segment_metadata_by_id(segment_id)
        if known is None or known.state is RemoteLogSegmentState.COPY_SEGMENT_STARTED:
            return True
    return False


async def reaches_positions(metadata: RemoteLogMetadataManager, manifest: PartitionManifest, timeout_ms: int) -> bool:
    """Whether the metadata topic still reaches the positions of the manifest.

    A position in another metadata topic does not count: `rebuild` made the present topic."""
    if lacks_settings(metadata, manifest):
        return False
    for partition, position in manifest.positions():
        is_of_topic = position.topic_id == metadata.position(partition).topic_id
        if is_of_topic and not await metadata.confirms(partition, position, timeout_ms):
            return False
    return True


def lacks_settings(metadata: RemoteLogMetadataManager, manifest: PartitionManifest) -> bool:
    """Returns whether the metadata is in another topic than the manifest names, and lacks what holds back deletions.

    That is the topic's total retention, and the work that an operator paused. `rebuild` restores both in a new metadata
    topic. An import of the segments alone does not."""
    partition = manifest.topic_id_partition
    recorded = manifest.tier_config.keys() & set(TOTAL_KEYS) | {work.key for work in paused_work(manifest.tier_config)}
    is_another = manifest.position.topic_id != metadata.position(partition).topic_id
    return is_another and not recorded <= metadata.topic_tier_config(partition.topic_id).keys()
