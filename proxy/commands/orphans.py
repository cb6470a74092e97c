"""`tidegate tier orphans`: objects in the store that the metadata does not know, and segments that the store lacks.

The store is listed first and the metadata read after: COPY_SEGMENT_STARTED is committed before the first object is
written (safety rule 3), so a copy under way is never taken for an orphan. Nothing here is deleted by itself. `--delete
--yes` deletes what was shown, segment by segment, if it is older than the grace period and no partition manifest names
it: what a manifest accepted and the metadata lacks is a sign of lost metadata, which `rebuild` is for.

Uploads that did not end are beside the objects: a writer that died, or a request that was repeated, left them. Those of
a copy that is recorded and not finished go with it; all others are shown, and aborted when they are old enough.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Annotated
from uuid import UUID

import typer
from pydantic import TypeAdapter, ValidationError

from proxy.commands.tools import partitions_of, run_command
from proxy.config import TidegateConfig, load_config
from tiers.config import DurationMs
from tiers.console import FINDINGS, AsJson, ConfigFile, progress_bar, say, show_json, show_table, time_text
from tiers.errors import RemoteLogMetadataError, RemoteResourceNotFoundError
from tiers.manager.segment_verification import persistently
from tiers.metadata.partition_manifest import decode_partition_manifest
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.model.segment_state import RemoteLogSegmentState
from tiers.open_tier import TIMEOUT_MS, OpenTier, RemoteTierError, open_tier, readable_segments
from tiers.storage.object_key import (
    INDEXES_SUFFIX,
    LOG_SUFFIX,
    SegmentObjectKey,
    indexes_key,
    log_key,
    parse_partition_manifest_key,
    parse_segment_key,
    partition_manifest_key,
    segment_of_key,
)
from tiers.storage.remote_storage_manager import StoredObject, UnfinishedUpload

ORPHAN, NAMED, MANIFEST, UNKNOWN, MISSING, UPLOAD = (
    "no record names it",
    "a partition manifest names it: was metadata lost?",
    "the manifest of a partition without metadata",
    "not an object of the tier",
    "a record names it, and it is not in the store",
    "an upload that did not end",
)


@dataclass(frozen=True, slots=True)
class Orphan:
    """`modified_ms` None: the store does not tell; then the object counts as new while there is a grace period."""

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
    """Objects of other clusters in the same place, which nothing is said of."""
    deleted: int = 0
    """Segments."""
    aborted: int = 0
    """Uploads."""


def orphans(
    config: ConfigFile,
    grace: Annotated[str, typer.Option("--grace", help="What is younger is shown and never deleted.")] = "24h",
    delete: Annotated[bool, typer.Option("--delete", help="Shows what would be deleted.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --delete: deletes it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Lists the store, and names what no metadata knows and what is missing; exit code 1 when there is any."""
    settings = load_config(config)
    if yes and not delete:
        raise typer.BadParameter("--yes goes with --delete")
    try:
        grace_ms = TypeAdapter(DurationMs).validate_python(grace)
    except ValidationError:
        raise typer.BadParameter(f"--grace: {grace!r} is no duration like '24h'") from None
    report = run_command(lambda: _report(settings, grace_ms, delete and yes))
    if as_json:
        lines = [
            {key: value for key, value in asdict(each).items() if key not in ("custom_metadata", "upload")}
            for each in report.orphans
        ]
        counts = {"other_clusters": report.other_clusters, "deleted": report.deleted, "aborted": report.aborted}
        show_json({"orphans": lines, **counts})
    else:
        _print(report)
    if delete and not yes:
        segments, uploads = _count(report)
        say(f"Nothing was deleted. With --yes {segments} segments are deleted and {uploads} uploads aborted.")
    if delete and yes:
        say(f"{report.deleted} segments were deleted, {report.aborted} uploads aborted.")
    if any(not each.deletable for each in report.orphans) or (report.orphans and not (delete and yes)):
        raise typer.Exit(FINDINGS)


def _count(report: OrphanReport) -> tuple[int, int]:
    """Segments and uploads that may go."""
    deletable = [each for each in report.orphans if each.deletable]
    segments = {each.segment for each in deletable if each.upload is None}
    return len(segments), sum(each.upload is not None for each in deletable)


def _print(report: OrphanReport) -> None:
    if report.orphans:
        headings = ("object", "bytes", "written", "what it is", "may be deleted")
        rows = [
            (each.key, each.size_bytes, time_text(each.modified_ms), each.what, "yes" if each.deletable else "no")
            for each in report.orphans
        ]
        show_table(headings, rows, ("bytes",))
    else:
        typer.echo("every object has a record, and every record its objects")
    if report.other_clusters:
        typer.echo(f"{report.other_clusters} objects are of other clusters and were left out")


async def _report(config: TidegateConfig, grace_ms: int, delete: bool) -> OrphanReport:
    async with open_tier(config) as tier:
        report = await find_orphans(tier, time.time_ns() // 1_000_000 - grace_ms, grace_ms)
        if delete:
            await delete_orphans(tier, report)
        return report


async def find_orphans(tier: OpenTier, older_than_ms: int, grace_ms: int) -> OrphanReport:
    listed: list[StoredObject] = []
    with progress_bar("objects", None) as advance:
        async for stored in tier.storage.list_objects(""):
            listed.append(stored)
            advance(1)
    uploads = [upload async for upload in tier.storage.list_uploads()]
    await tier.refresh()
    known = set(tier.metadata.partitions())
    report = OrphanReport([])
    seen: set[tuple[UUID, str]] = set()
    for stored in listed:
        key, manifest = parse_segment_key(stored.key), parse_partition_manifest_key(stored.key)
        named = key or manifest
        if named is None:
            report.orphans.append(_line(stored, UNKNOWN))
        elif named.cluster_id != tier.cluster_id:
            report.other_clusters += 1
        elif key is not None:
            seen.add((key.segment_uuid, key.suffix))
            if not _is_known(tier, key):
                is_old = _is_old(stored.modified_ms, older_than_ms, grace_ms)
                report.orphans.append(_line(stored, ORPHAN, key, is_old))
        elif TopicIdPartition(named.topic_id, named.partition) not in known:
            report.orphans.append(_line(stored, MANIFEST))
    report.orphans = _as_one(await _without_the_accepted(tier, report.orphans))
    for upload in uploads:
        key = parse_segment_key(upload.key)
        if key is not None and key.cluster_id != tier.cluster_id:
            report.other_clusters += 1
        elif key is None or _leaves_uploads(tier, key):
            is_old = key is not None and _is_old(upload.started_ms, older_than_ms, grace_ms)
            report.orphans.append(_upload_line(upload, key, is_old))
    report.orphans += _missing(tier, seen)
    return report


def _is_old(written_ms: int | None, older_than_ms: int, grace_ms: int) -> bool:
    return grace_ms == 0 or (written_ms is not None and written_ms <= older_than_ms)


def _line(stored: StoredObject, what: str, key: SegmentObjectKey | None = None, deletable: bool = False) -> Orphan:
    return Orphan(
        stored.key,
        stored.size_bytes,
        stored.modified_ms,
        what,
        None if key is None else str(key.segment_uuid),
        deletable,
        stored.custom_metadata,
    )


def _upload_line(upload: UnfinishedUpload, key: SegmentObjectKey | None, deletable: bool) -> Orphan:
    segment = None if key is None else str(key.segment_uuid)
    return Orphan(upload.key, 0, upload.started_ms, UPLOAD, segment, deletable, upload=upload)


def _known(tier: OpenTier, key: SegmentObjectKey) -> RemoteLogSegmentMetadata | None:
    partition = TopicIdPartition(key.topic_id, key.partition)
    return tier.metadata.remote_log_segment_metadata_by_id(RemoteLogSegmentId(partition, key.segment_uuid))


def _is_known(tier: OpenTier, key: SegmentObjectKey) -> bool:
    return _known(tier, key) is not None


def _leaves_uploads(tier: OpenTier, key: SegmentObjectKey) -> bool:
    """Nobody writes the segment any more, and nobody deletes it either with what was written of it."""
    known = _known(tier, key)
    return known is None or known.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED


async def _without_the_accepted(tier: OpenTier, orphans: list[Orphan]) -> list[Orphan]:
    """What a manifest accepts is no orphan; where a manifest cannot be read, nothing is deletable."""
    accepted: dict[TopicIdPartition, frozenset[str] | None] = {}
    judged = []
    for orphan in orphans:
        key = parse_segment_key(orphan.key)
        if key is not None:
            partition = TopicIdPartition(key.topic_id, key.partition)
            if partition not in accepted:
                accepted[partition] = await _accepted(tier, partition)
            names = accepted[partition]
            if names is None or str(key.segment_uuid) in names:
                orphan = replace(orphan, what=ORPHAN if names is None else NAMED, deletable=False)
        judged.append(orphan)
    return judged


async def _accepted(tier: OpenTier, partition: TopicIdPartition) -> frozenset[str] | None:
    key = partition_manifest_key(tier.cluster_id, partition)
    try:
        manifest = decode_partition_manifest(await persistently(lambda: tier.storage.get_object(key)))
    except RemoteResourceNotFoundError:
        return frozenset()
    except RemoteLogMetadataError:
        return None
    return frozenset(str(each.id) for each in manifest.segments)


def _as_one(orphans: list[Orphan]) -> list[Orphan]:
    """Both objects of a segment go, or neither."""
    kept = {each.segment for each in orphans if not each.deletable}
    return [replace(each, deletable=each.deletable and each.segment not in kept) for each in orphans]


def _missing(tier: OpenTier, seen: set[tuple[UUID, str]]) -> Iterable[Orphan]:
    for partition in partitions_of(tier, None):
        for segment in readable_segments(tier, partition):
            uuid = segment.segment_id.id
            for suffix, key_of in ((LOG_SUFFIX, log_key), (INDEXES_SUFFIX, indexes_key)):
                if (uuid, suffix) not in seen:
                    yield Orphan(key_of(tier.cluster_id, segment), 0, None, MISSING, str(uuid))


async def delete_orphans(tier: OpenTier, report: OrphanReport) -> None:
    wanted = {each.segment: each for each in report.orphans if each.deletable and each.upload is None}
    uploads = [each.upload for each in report.orphans if each.deletable and each.upload is not None]
    if (wanted or uploads) and not any(readable_segments(tier, partition) for partition in partitions_of(tier, None)):
        raise RemoteTierError("the metadata knows no segment at all: it was lost, and nothing is deleted by it")
    with progress_bar("segments", len(wanted)) as advance:
        for orphan in wanted.values():
            key = parse_segment_key(orphan.key)
            assert key is not None
            segment = segment_of_key(key, orphan.custom_metadata)
            await tier.metadata.ensure_fresh(segment.topic_id_partition, 1000, TIMEOUT_MS)
            if not _is_known(tier, key) and await tier.storage.delete_log_segment_data(segment):
                report.deleted += 1
            advance(1)
    with progress_bar("uploads", len(uploads)) as advance:
        for upload in uploads:
            key = parse_segment_key(upload.key)
            assert key is not None
            await tier.metadata.ensure_fresh(TopicIdPartition(key.topic_id, key.partition), 1000, TIMEOUT_MS)
            if _leaves_uploads(tier, key):
                await tier.storage.abort_upload(upload)
                report.aborted += 1
            advance(1)
