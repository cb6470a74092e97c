"""`rebuild` finds out from the store alone which records the metadata topic must have.

Every `.indexes` object describes its segment. The partition manifest says which segments were accepted; it may be older
than the lost metadata, but never newer. These rules apply per partition:

* A segment that the manifest accepts is live. A segment that the manifest calls dead is dead. A segment that the
  manifest does not name is newer than the manifest, or its copy had not ended when the manifest was written. It is live
  if it continues the accepted segments without a gap and no other segment has the same offsets.
* Accepted segments that are missing at the front expired after the manifest was written, or were lost. A loss is
  likelier, since the owner rewrites the manifest in the round in which segments expire. Their offsets become a gap. The
  log start does not move: owners delete the brokers' records below the log start, and those may be the last copy. If
  accepted segments are missing between others, the partition is refused.
* A segment that has exactly the records of several other segments was merged from them. While all of them exist and no
  manifest names the merged segment, it is not needed.
* A segment with the same range and content as another one is not needed. An attempt that was given up left it.
* A `.log` object without `.indexes` is an incomplete copy. An `.indexes` object without `.log` is not possible in
  normal operation, so the partition is refused.
* Two segments with different content for one range, unreadable objects, or a `.log` of a wrong size: the partition is
  refused.

This module writes nothing. A refusal is a text for an operator, and only an operator may decide about it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from uuid import UUID

from tiers.config.paused_work import paused_work
from tiers.config.topic_settings import is_deletion_requested
from tiers.config.total_retention import TOTAL_KEYS, longest_total, recorded_total
from tiers.metadata.partition_manifest import ManifestSegment, PartitionManifest
from tiers.metadata.records.record_types import KeyAndValue
from tiers.metadata.remote_log_metadata_manager import MetadataPosition
from tiers.metadata.written_records import key_and_value
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import LogGap, LogStart, OffsetAndEpoch
from tiers.model.segment_metadata import (
    Cut,
    CutUpdate,
    LocalLogStartUpdate,
    LogGapUpdate,
    LogStartOffsetUpdate,
    RemoteLogSegmentMetadata,
    RemoteLogSegmentMetadataUpdate,
    TopicTierConfigUpdate,
    after_cuts,
    leader_epoch_at,
)
from tiers.model.segment_state import RemoteLogSegmentState
from tiers.segment.indexes.segment_index import Chunk

_NO_LEADER_EPOCH = -1


@dataclass(frozen=True, slots=True)
class FoundIndexes:
    """The contents of a readable `.indexes` object.

    `metadata` has the custom metadata of the listing. `content` is a digest of the log's record batches. `stored_bytes`
    is the size of the `.log` object."""

    metadata: RemoteLogSegmentMetadata
    content: bytes
    stored_bytes: int


@dataclass(slots=True)
class FoundSegment:
    """The objects of one uuid in the listing. `indexes` is an explanation when that object cannot be read."""

    base_offset: int
    end_offset: int
    log_bytes: int | None = None
    indexes: FoundIndexes | str | None = None


@dataclass(slots=True)
class FoundPartition:
    """The objects of one partition. `manifest` is an explanation when it is unreadable, and None when it is missing."""

    topic_id_partition: TopicIdPartition
    manifest: PartitionManifest | str | None = None
    segments: dict[UUID, FoundSegment] = field(default_factory=dict)


@dataclass(slots=True)
class PartitionPlan:
    """The segments and settings that the metadata topic must have for one partition.

    `segments` are finished, and have the `cut_at` that `cuts` give them. `unnamed` has those of `segments` that no
    manifest accepts; they must be read back first. If `refused` is not empty, no record may be written. `positions` are
    those that the metadata topic reached when the manifest was written (`PartitionManifest.positions`)."""

    topic_id_partition: TopicIdPartition
    has_manifest: bool = False
    manifest: PartitionManifest | None = None
    """The manifest that the plan was made of."""
    positions: list[tuple[TopicIdPartition, MetadataPosition]] = field(default_factory=list)
    segments: list[RemoteLogSegmentMetadata] = field(default_factory=list)
    unnamed: list[RemoteLogSegmentMetadata] = field(default_factory=list)
    log_start: LogStart | None = None
    local_log_start: OffsetAndEpoch | None = None
    gaps: list[LogGap] = field(default_factory=list)
    cuts: tuple[Cut, ...] = ()
    tier_config: dict[str, str] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    @property
    def log_start_offset(self) -> int:
        """The recorded log start; 0 when no log start is recorded."""
        return 0 if self.log_start is None else self.log_start.offset


def content_of(chunks: Sequence[Chunk]) -> bytes:
    """Returns a digest that is equal for logs of the same record batches, however the store encodes them."""
    lines = (f"{each.first_offset} {each.last_offset} {each.log_bytes} {each.crc32c}" for each in chunks)
    return hashlib.sha256("\n".join(lines).encode()).digest()


def plan_partition(found: FoundPartition) -> PartitionPlan:
    manifest = found.manifest
    plan = PartitionPlan(found.topic_id_partition)
    if isinstance(manifest, str):
        plan.refused.append(f"it is not known which segments are live and which are dead: {manifest}")
        return plan
    if manifest is None:
        plan.notes.append("there is no manifest: the log starts at the first segment, even if it was trimmed further")
    else:
        plan.topic_id_partition = manifest.topic_id_partition
        plan.has_manifest, plan.manifest = True, manifest
        plan.positions = list(manifest.positions())
        plan.log_start = manifest.log_start
        plan.local_log_start = manifest.local_log_start
        plan.gaps = list(manifest.gaps)
        plan.cuts = manifest.cuts
        plan.tier_config = dict(manifest.tier_config)
    accepted = {} if manifest is None else {each.id: each for each in manifest.segments}
    dead = frozenset(() if manifest is None else manifest.dead)
    _judge_log_start(plan, [each for uuid, each in found.segments.items() if uuid not in accepted and uuid not in dead])
    candidates = _whole_segments(found, plan, accepted, dead)
    contents: dict[tuple[int, int], bytes] = {}
    gone_to = _take_accepted(found, plan, manifest, candidates, contents)
    _drop_merged(plan, candidates)
    _take_unnamed(plan, gone_to, sorted(candidates.values(), key=lambda each: _place(each.metadata)), contents)
    names = [each.topic_id_partition.topic for each in plan.segments]
    if manifest is None and names:
        plan.topic_id_partition = replace(plan.topic_id_partition, topic=names[-1])
    _check_epochs(plan)
    return plan


def _whole_segments(
    found: FoundPartition, plan: PartitionPlan, accepted: dict[UUID, ManifestSegment], dead: frozenset[UUID]
) -> dict[UUID, FoundIndexes]:
    """Returns the segments whose two objects exist and fit. Drops the others, or refuses them when they count."""
    whole: dict[UUID, FoundIndexes] = {}
    for uuid, segment in found.segments.items():
        name = f"segment {uuid} ({segment.base_offset} to {segment.end_offset})"
        if uuid in dead:
            plan.dropped.append(f"{name}: its deletion had begun")
        elif uuid not in accepted and segment.end_offset < plan.log_start_offset:
            plan.dropped.append(f"{name}: it lies below the log start")
        elif segment.indexes is None and uuid not in accepted:
            plan.dropped.append(f"{name}: its copy did not end")
        elif segment.indexes is None:
            plan.refused.append(f"{name} was accepted, but its .indexes object is missing")
        elif isinstance(segment.indexes, str):
            plan.refused.append(f"{name}: its .indexes object cannot be read: {segment.indexes}")
        elif segment.log_bytes is None:
            plan.refused.append(f"{name}: its .log object is missing")
        elif segment.log_bytes != segment.indexes.stored_bytes:
            plan.refused.append(
                f"{name}: its .log object has {segment.log_bytes} bytes, not {segment.indexes.stored_bytes}"
            )
        else:
            whole[uuid] = segment.indexes
    return whole


def _denies(segment: RemoteLogSegmentMetadata, start: LogStart | None) -> bool:
    """Whether the segment has another record below the log start than the log start's history, or a later one."""
    if start is None or segment.start_offset >= start.offset:
        return False
    last = min(segment.end_offset, start.offset - 1)
    return not start.may_follow(last, leader_epoch_at(segment.segment_leader_epochs, last))


def _judge_log_start(plan: PartitionPlan, unnamed: Iterable[FoundSegment]) -> None:
    """Leaves out a log start that a segment denies which came after the manifest, as the metadata would.

    Then no segment below that log start is dropped for it, since an earlier segment of that history may lie there."""
    start = plan.log_start
    read = [each.indexes.metadata for each in unnamed if isinstance(each.indexes, FoundIndexes)]
    denying = next((each for each in read if _denies(each, start)), None)
    if start is not None and denying is not None:
        plan.log_start = None
        plan.notes.append(
            f"the log start {start.offset} of leader epoch {start.leader_epoch} does not count any more: "
            f"segment {denying.segment_id.id} has records of another leader epoch below it"
        )


def _take_accepted(
    found: FoundPartition,
    plan: PartitionPlan,
    manifest: PartitionManifest | None,
    candidates: dict[UUID, FoundIndexes],
    contents: dict[tuple[int, int], bytes],
) -> int | None:
    """Moves the accepted segments from `candidates` to the plan, and their contents by range to `contents`.

    Returns the last offset (inclusive) of the segments that are missing at the front; None when none is missing."""
    if manifest is None:
        return None
    missing: list[ManifestSegment] = []
    for named in manifest.segments:
        if named.id not in found.segments:
            missing.append(named)
            continue
        taken = candidates.pop(named.id, None)
        if taken is None:
            continue  # it was refused before
        metadata = taken.metadata
        described = metadata.start_offset, metadata.end_offset, metadata.segment_size_bytes
        if described != (named.start_offset, named.end_offset, named.size_bytes):
            plan.refused.append(f"segment {named.id}: the manifest and the .indexes object describe it differently")
            continue
        custom = named.custom_metadata if named.custom_metadata is not None else metadata.custom_metadata
        plan.segments.append(after_cuts(replace(metadata, custom_metadata=custom), plan.cuts))
        contents[_place(metadata)] = taken.content
    return _judge_missing(found, plan, manifest, missing)


def _judge_missing(
    found: FoundPartition, plan: PartitionPlan, manifest: PartitionManifest, missing: Sequence[ManifestSegment]
) -> int | None:
    if not missing:
        return None
    if not found.segments:
        plan.notes.append(
            f"all {len(missing)} segments that the manifest names are gone: they expired after it was written, "
            f"or were lost; the log starts where the brokers' log starts"
        )
        return None
    first = min(segment.base_offset for segment in found.segments.values())
    gone = [each for each in missing if each.end_offset < first]
    plan.refused += [
        f"segment {each.id} ({each.start_offset} to {each.end_offset}) was accepted, but both its objects are missing"
        for each in missing
        if each not in gone
    ]
    if not gone:
        return None
    gone_from = max(plan.log_start_offset, min(each.start_offset for each in gone))
    gone_to = max(each.end_offset for each in gone) + 1  # the brokers, or a spool, may have the records behind
    if gone_from < gone_to:
        plan.gaps = [gap for gap in plan.gaps if gap.next_offset > gone_to] + [LogGap(gone_from, gone_to)]
        outcome = f"the offsets {gone_from} to {gone_to - 1} are a gap"
    else:
        outcome = "they lie below the log start"
    plan.notes.append(
        f"{len(gone)} segments below {first} are gone: they expired after the manifest was written, or were lost; "
        f"{outcome}"
    )
    ends = (after_cuts(each.metadata(manifest.topic_id_partition), manifest.cuts) for each in gone)
    return max(each.valid_end_offset for each in ends)


def _drop_merged(plan: PartitionPlan, candidates: dict[UUID, FoundIndexes]) -> None:
    """Drops merged segments that no manifest names, while the segments that they were merged from exist.

    The deletion of those segments had not begun, or a manifest would name the merged one."""
    known = [*plan.segments, *(each.metadata for each in candidates.values())]
    starts: dict[int, list[RemoteLogSegmentMetadata]] = {}
    for segment in known:
        starts.setdefault(segment.start_offset, []).append(segment)
    for uuid in [*candidates]:
        whole = candidates[uuid].metadata
        parts: list[RemoteLogSegmentMetadata] = []
        offset = whole.start_offset
        while offset <= whole.end_offset:
            shorter = [
                each
                for each in starts.get(offset, ())
                if each.end_offset <= whole.end_offset and _place(each) != _place(whole) and each.cut_at is None
            ]
            if not shorter:
                break
            parts.append(min(shorter, key=lambda each: each.end_offset))
            offset = parts[-1].end_offset + 1
        if (
            offset == whole.end_offset + 1
            and sum(each.segment_size_bytes for each in parts) == whole.segment_size_bytes
        ):
            name = f"segment {uuid} ({whole.start_offset} to {whole.end_offset})"
            plan.dropped.append(f"{name}: it was merged from {len(parts)} segments, which all exist")
            del candidates[uuid]


def _take_unnamed(
    plan: PartitionPlan,
    gone_to: int | None,
    candidates: Sequence[FoundIndexes],
    contents: dict[tuple[int, int], bytes],
) -> None:
    """Takes the segments that no manifest names, by offset.

    Each must continue the segments before it, or the accepted segments that are gone."""
    by_range = {_place(each): each for each in plan.segments}
    end = max((each.valid_end_offset for each in plan.segments), default=gone_to)
    for candidate in candidates:
        metadata = after_cuts(candidate.metadata, plan.cuts)
        uuid, place = metadata.segment_id.id, _place(metadata)
        name = f"segment {uuid} ({metadata.start_offset} to {metadata.end_offset})"
        if contents.get(place) == candidate.content:
            plan.dropped.append(f"{name}: another segment has the same content")
        elif end is not None and metadata.start_offset <= end < metadata.end_offset and _continues(plan, metadata):
            plan.segments.append(metadata)
            plan.unnamed.append(metadata)
            contents[place], by_range[place] = candidate.content, metadata
            end = metadata.end_offset
        elif end is not None and metadata.start_offset <= end:
            other = by_range.get(place)
            beside = f"segment {other.segment_id.id}" if other is not None else "other segments"
            plan.refused.append(
                f"{name}: no manifest names it, and it has offsets of {beside}: it is not known which one counts"
            )
        elif metadata.start_offset > (expected := _next_offset(end, plan, metadata.start_offset)):
            plan.refused.append(
                f"{name}: no manifest names it, and the offsets from {expected} on are missing before it"
            )
        else:
            plan.segments.append(metadata)
            plan.unnamed.append(metadata)
            contents[place], by_range[place] = candidate.content, metadata
            end = metadata.end_offset


def _continues(plan: PartitionPlan, segment: RemoteLogSegmentMetadata) -> bool:
    """Whether a segment that overlaps others has their leader epochs where it overlaps, and at least one does."""
    epochs, beside = (
        segment.segment_leader_epochs,
        [each for each in plan.segments if each.valid_end_offset >= segment.start_offset and not each.is_cut_off],
    )
    return bool(beside) and all(
        leader_epoch_at(each.segment_leader_epochs, at) == leader_epoch_at(epochs, at)
        for each in beside
        for at in (max(each.start_offset, segment.start_offset), each.valid_end_offset)
    )


def _next_offset(end: int | None, plan: PartitionPlan, unknown: int) -> int:
    """Returns the highest offset at which the segment after `end` may begin.

    It may begin directly after `end`, after a recorded gap, or at the log start."""
    known = [] if end is None else [end + 1]
    known += [gap.next_offset for gap in plan.gaps if gap.first_offset in known]
    known += [] if plan.log_start is None else [plan.log_start.offset]
    return max(known, default=unknown)


def _check_epochs(plan: PartitionPlan) -> None:
    """Refuses a log whose leader epochs fall. A merged segment stands for the segments that it was merged from."""
    known = -1
    end = -1
    for segment in sorted(plan.segments, key=lambda each: (each.start_offset, -each.end_offset)):
        epochs = [each.epoch for each in segment.segment_leader_epochs if each.start_offset <= segment.valid_end_offset]
        if segment.is_cut_off or not epochs or segment.valid_end_offset <= end:
            continue
        end = segment.valid_end_offset
        if epochs[0] < known:
            name = f"segment {segment.segment_id.id} ({segment.start_offset} to {segment.end_offset})"
            plan.refused.append(
                f"{name} begins in leader epoch {epochs[0]}, after epoch {known}: the log diverged there"
            )
        known = max(known, epochs[-1])


def _place(segment: RemoteLogSegmentMetadata) -> tuple[int, int]:
    return segment.start_offset, segment.end_offset


def records_of(plan: PartitionPlan, writer: str, now_ms: int) -> list[KeyAndValue]:
    """Returns the records from which replay builds the plan."""
    partition = plan.topic_id_partition
    cuts = (CutUpdate(partition, writer, now_ms, each.leader_epoch, each.offset, each.is_proved) for each in plan.cuts)
    written = [key_and_value(each) for each in cuts]
    for segment in sorted(plan.segments, key=_place):
        written += _finished(segment, partition)
    written += [key_and_value(LogGapUpdate(partition, writer, now_ms, gap, _NO_LEADER_EPOCH)) for gap in plan.gaps]
    if plan.log_start is not None:
        written.append(key_and_value(LogStartOffsetUpdate(partition, writer, now_ms, plan.log_start)))
    if plan.local_log_start is not None:
        written.append(key_and_value(LocalLogStartUpdate(partition, writer, now_ms, plan.local_log_start)))
    return written


def tier_configs_of(plans: Iterable[PartitionPlan], writer: str, now_ms: int) -> Iterator[TopicTierConfigUpdate]:
    """Yields one update per topic with tier settings. The manifest of every partition repeats them.

    A manifest may be older than the topic's last settings. So the longest total retention of all manifests counts, and
    every pause of any manifest. A request to delete the remote log counts only if every manifest has it, since the user
    may have taken it back."""
    by_topic: dict[UUID, list[PartitionPlan]] = {}
    for plan in plans:
        by_topic.setdefault(plan.topic_id_partition.topic_id, []).append(plan)
    for topic_id, alike in by_topic.items():
        said = [each for each in alike if each.tier_config]
        if not said:
            continue
        first = TopicIdPartition(topic_id, 0, said[0].topic_id_partition.topic)
        manifests = [each.tier_config for each in alike if each.has_manifest or each.tier_config]
        keeping = [each for each in manifests if not is_deletion_requested(each)]
        chosen = next((each for each in keeping or manifests if each), {})
        own = {key: value for key, value in chosen.items() if key not in TOTAL_KEYS}
        pauses = {work.key: "true" for each in manifests for work in paused_work(each)}
        total = longest_total([recorded_total(each) for each in manifests])
        if config := own | pauses | total.config():
            yield TopicTierConfigUpdate(first, writer, now_ms, config)


def _finished(segment: RemoteLogSegmentMetadata, partition: TopicIdPartition) -> list[KeyAndValue]:
    segment_id = replace(segment.segment_id, topic_id_partition=partition)
    started = replace(
        segment,
        segment_id=segment_id,
        state=RemoteLogSegmentState.COPY_SEGMENT_STARTED,
        custom_metadata=None,
        cut_at=None,
    )
    finished = RemoteLogSegmentMetadataUpdate(
        segment_id,
        segment.broker_id,
        segment.event_timestamp_ms,
        RemoteLogSegmentState.COPY_SEGMENT_FINISHED,
        segment.custom_metadata,
    )
    return [key_and_value(started), key_and_value(finished)]
