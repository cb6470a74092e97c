"""Finds orphaned objects, which the metadata does not know, and missing objects, which only the metadata knows.

* `find_orphans` lists the store first and reads the metadata afterwards. COPY_SEGMENT_STARTED is committed before the
  first object is written (docs/design.md, safety rule 3), so a copy in progress never looks orphaned.
* The owner deletes the objects of deleted segments once more, and the uploads of unfinished copies. So the report has
  only the other unfinished uploads, which a writer that died or a repeated request left.
* An object is deletable if it is older than a grace period, unless the metadata lost records (docs/design.md, safety
  rule 5): `rebuild` restores such metadata. Probes of the store are reported only when they are old.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tiers.access.open_tier import TIMEOUT_MS, OpenTier, RemoteTierError, readable_segments
from tiers.errors import LaterFormatError, RemoteLogMetadataError
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.storage.object_key import (
    LOG_SUFFIX,
    FactsKey,
    SegmentObjectKey,
    indexes_key,
    is_probe_key,
    log_key,
    marked_cluster,
    parse_facts_key,
    parse_segment_key,
    segment_of_key,
)
from tiers.storage.remote_storage_manager import StoredObject, UnfinishedUpload
from tiers.storage.retries import with_retries
from tiers.tasks.history.stored_facts import read_stored_facts
from tiers.upkeep.runner import HereRunner, OpenedStore
from tiers.upkeep.store_listing import list_store

ORPHAN, LOST, FACTS, UNKNOWN, MISSING, UPLOAD = (
    "no record names it",
    "the metadata of its partition lost records",
    "the facts of a partition without metadata",
    "not an object of the tier",
    "a record names it, but it is not in the store",
    "an unfinished upload",
)


@dataclass(slots=True)
class Orphan:
    """One object or upload of the report.

    `modified_ms` is None when the store does not report it. The object then counts as new, unless the grace period is
    0."""

    key: str
    size_bytes: int
    modified_ms: int | None
    what: str
    segment: str | None = None
    deletable: bool = False
    custom_metadata: bytes | None = None
    upload: UnfinishedUpload | None = None


@dataclass(slots=True)
class OrphanReport:
    orphans: list[Orphan]
    other_clusters: int = 0
    """The number of objects of other clusters in the same store, which the report does not judge."""
    deleted: int = 0
    """The number of deleted segments."""
    aborted: int = 0
    """The number of aborted uploads."""


async def find_orphans(tier: OpenTier, older_than_ms: int, grace_ms: int) -> OrphanReport:
    store = OpenedStore(tier.storage, tier.cluster_id, tier.key_ring)
    listed = await list_store(tier.state, store, HereRunner(tier.progress), _partitions(tier), is_all=True)
    uploads = [upload async for upload in tier.storage.list_uploads()]
    await tier.refresh()
    report = await judge_orphans(tier, listed.unknown, uploads, older_than_ms, grace_ms)
    for misfit in listed.misfits:
        segment = tier.state.remote_log_segment_metadata_by_id(misfit.segment_id)
        is_finished = segment is not None and segment.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED
        if misfit.size_bytes is None and segment is not None and is_finished:
            key = (log_key if misfit.suffix == LOG_SUFFIX else indexes_key)(tier.cluster_id, segment)
            report.orphans.append(Orphan(key, 0, None, MISSING, str(segment.segment_id.id)))
    return report


async def judge_orphans(
    tier: OpenTier,
    listed: Sequence[StoredObject],
    uploads: Iterable[UnfinishedUpload],
    older_than_ms: int,
    grace_ms: int,
) -> OrphanReport:
    """Returns the orphaned objects and uploads. The metadata must have been read after they were listed."""
    known = set(tier.state.partitions())
    kept = {segment.segment_id.id for segment in tier.state.deleted_segments()}
    report, of_segments = OrphanReport([]), list[tuple[Orphan, SegmentObjectKey]]()
    for stored in listed:
        key, facts, cluster_id = parse_segment_key(stored.key), parse_facts_key(stored.key), marked_cluster(stored.key)
        if (named := key or facts) is not None:
            cluster_id = named.cluster_id
        if cluster_id not in (None, tier.cluster_id):
            report.other_clusters += 1
            continue
        is_old = _is_old(stored.modified_ms, older_than_ms, grace_ms)
        line = Orphan(
            stored.key, stored.size_bytes, stored.modified_ms, UNKNOWN, custom_metadata=stored.custom_metadata
        )
        if key is not None:
            if _known(tier, key) is not None or key.segment_uuid in kept:
                continue
            line.what, line.segment, line.deletable = ORPHAN, str(key.segment_uuid), is_old
            of_segments.append((line, key))
        elif facts is not None:
            if _partition_of(facts) in known:
                continue
            line.what = FACTS
        elif cluster_id is not None or (is_probe_key(stored.key) and not is_old):
            continue
        report.orphans.append(line)
    await _keep_the_lost(tier, of_segments)
    for upload in uploads:
        key = parse_segment_key(upload.key)
        if key is not None and key.cluster_id != tier.cluster_id:
            report.other_clusters += 1
        elif key is None or _leaves_uploads(tier, key):
            segment = None if key is None else str(key.segment_uuid)
            is_old = key is not None and _is_old(upload.started_ms, older_than_ms, grace_ms)
            report.orphans.append(Orphan(upload.key, 0, upload.started_ms, UPLOAD, segment, is_old, upload=upload))
    return report


def _is_old(written_ms: int | None, older_than_ms: int, grace_ms: int) -> bool:
    return grace_ms == 0 or (written_ms is not None and written_ms <= older_than_ms)


def _known(tier: OpenTier, key: SegmentObjectKey) -> RemoteLogSegmentMetadata | None:
    return tier.state.remote_log_segment_metadata_by_id(RemoteLogSegmentId(_partition_of(key), key.segment_uuid))


def _partition_of(key: SegmentObjectKey | FactsKey) -> TopicIdPartition:
    return TopicIdPartition(key.topic_id, key.partition)


def _leaves_uploads(tier: OpenTier, key: SegmentObjectKey) -> bool:
    """Returns whether uploads of the segment stay forever: no process writes the segment or will delete it."""
    known = _known(tier, key)
    return known is None or known.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED


async def _keep_the_lost(tier: OpenTier, orphans: Sequence[tuple[Orphan, SegmentObjectKey]]) -> None:
    """Keeps the objects of partitions whose metadata lost records from being deletable: the lost ones may name them.

    The two objects of a segment become deletable together, or neither of them. Raises `BrokerError`, and the errors of
    the store."""
    lost: dict[TopicIdPartition, bool] = {}
    young = {orphan.segment for orphan, _ in orphans if not orphan.deletable}
    for orphan, key in orphans:
        partition = _partition_of(key)
        if partition not in lost:
            lost[partition] = await _is_lost(tier, partition)
        if lost[partition]:
            orphan.what = LOST
        orphan.deletable = not lost[partition] and orphan.segment not in young


async def _is_lost(tier: OpenTier, partition: TopicIdPartition) -> bool:
    """Whether the metadata of the partition lost records. False for a topic that is known to be gone.

    The brokers may hide a topic that this client may not describe."""
    if partition.topic_id not in tier.cluster.topics_by_id and not tier.state.is_known(partition):
        return False
    try:
        stored = await with_retries(lambda: read_stored_facts(tier.storage, tier.cluster_id, partition))
    except (LaterFormatError, RemoteLogMetadataError):
        return True
    return bool(await stored.lost_reason(tier.log, TIMEOUT_MS))


def _partitions(tier: OpenTier) -> list[TopicIdPartition]:
    return sorted(tier.state.partitions(), key=lambda each: (each.topic, each.topic_id, each.partition))


async def delete_orphans(tier: OpenTier, report: OrphanReport) -> None:
    """Deletes the deletable objects, segment by segment, unless a record names them by now.

    Raises `RemoteTierError` when the metadata knows no segment at all.
    """
    wanted = {each.segment: each for each in report.orphans if each.deletable and each.upload is None}
    uploads = [each.upload for each in report.orphans if each.deletable and each.upload is not None]
    if (wanted or uploads) and not any(readable_segments(tier, partition) for partition in _partitions(tier)):
        raise RemoteTierError("the metadata knows no segment at all, so it was lost: nothing is deleted; see `rebuild`")
    with tier.progress.bar("segments", len(wanted)) as advance:
        for orphan in wanted.values():
            key = parse_segment_key(orphan.key)
            assert key is not None
            segment = segment_of_key(key, orphan.custom_metadata)
            await tier.log.ensure_fresh(segment.topic_id_partition, 1000, TIMEOUT_MS)
            if _known(tier, key) is None and await tier.storage.delete_log_segment_data(segment):
                report.deleted += 1
            advance(1)
    with tier.progress.bar("uploads", len(uploads)) as advance:
        for upload in uploads:
            key = parse_segment_key(upload.key)
            assert key is not None
            await tier.log.ensure_fresh(_partition_of(key), 1000, TIMEOUT_MS)
            if _leaves_uploads(tier, key):
                await tier.storage.abort_upload(upload)
                report.aborted += 1
            advance(1)
