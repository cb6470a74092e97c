"""`scrub`: compares everything in the remote tier with the metadata and, on request, reads it back and decodes it.

* The job reads the metadata, lists the store and reads segments on the executors, and then reads the metadata again. It
  drops a verdict on a segment that was replaced or deleted meanwhile (compared by uuid, never by offsets). An object is
  an orphan only if neither reading of the metadata knows it.
* Gaps come from the later reading, because a moving log start or a finished copy closes them. Overlaps must be in both
  readings, because a merge publishes the merged segment before it deletes the small ones.
* The job deletes only orphans older than the grace period, only on request, and only through `tiers.upkeep.orphans`.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from pipeline.chosen_partitions import chosen_partitions
from pipeline.config import PipelineConfig
from pipeline.maintenance.scrub_report import (
    Finding,
    FindingKind,
    InnerGap,
    ScrubLevel,
    ScrubReport,
    in_order,
    of_damage,
    of_gap,
    of_orphan,
    of_overlap,
    of_segment,
)
from pipeline.maintenance.segment_scrub import ScrubbedSegment, ScrubSetup, scrub_segments
from pipeline.maintenance.usage import DAY_MS
from pipeline.worker import TierStore
from tiers.access.open_tier import OpenTier, open_tier, readable_segments
from tiers.access.progress import SILENCE, Progress
from tiers.bounded_gather import bounded_gather
from tiers.errors import RemoteResourceNotFoundError
from tiers.metadata.remote_log import RemoteLog
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.quick_values import garbage_collection_paused
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.model.stored_segment import StoredSegment
from tiers.storage.object_key import INDEXES_SUFFIX, parse_facts_key, parse_segment_key
from tiers.storage.retries import with_retries
from tiers.upkeep.orphans import ORPHAN, UPLOAD, OrphanReport, delete_orphans, judge_orphans
from tiers.upkeep.resume_notes import note_segment, noted_segments
from tiers.upkeep.runner import Runner
from tiers.upkeep.store_listing import Misfit, list_store

_DEPTHS = {ScrubLevel.META: 0, ScrubLevel.BATCH: 1, ScrubLevel.DEEP: 2}
_MIN_TASK_BYTES = {ScrubLevel.BATCH: 512 << 20, ScrubLevel.DEEP: 256 << 20}
"""About one second of work per task, or more if the store is slow to reach."""
_MAX_TASK_BYTES = 2 << 30
_TASKS_PER_CORE = 4
_MAX_PROBES = 1000
"""Limit of probes for objects that the listing lacks. If more are missing, a late listing is not the reason."""
_PROBES_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class ScrubOptions:
    """`topics` is a pattern for whole names. `resume` is a file that notes intact segments. A later run at the same or
    a lower level skips these segments."""

    level: ScrubLevel = ScrubLevel.BATCH
    topics: str | None = None
    grace_ms: int = DAY_MS
    delete_orphans: bool = False
    resume: Path | None = None


async def scrub(
    config: PipelineConfig, runner: Runner, options: ScrubOptions, progress: Progress = SILENCE
) -> ScrubReport:
    """Raises `JobError`, `RemoteTierError`."""
    async with open_tier(config, progress) as tier:
        return await scrub_tier(tier, config, runner, options)


async def scrub_tier(tier: OpenTier, config: PipelineConfig, runner: Runner, options: ScrubOptions) -> ScrubReport:
    partitions = chosen_partitions(tier.state, options.topics)
    report = ScrubReport(options.level, partitions=len(partitions))
    overlapping = {_both(one): one.one.topic_id_partition for one in _overlaps(tier, partitions)}
    segments = [] if options.level is ScrubLevel.META else _finished_segments(tier, partitions)
    store = TierStore(config, tier.cluster_id)
    listed = await list_store(tier.state, store, runner, partitions, is_all=options.topics is None)
    uploads = [] if options.topics is not None else [upload async for upload in tier.storage.list_uploads()]
    read: list[ScrubbedSegment] = []
    if options.level is not ScrubLevel.META:
        read = await _read_back(tier, config, runner, options, segments, report)

    await tier.refresh()
    findings = _of_verdicts(tier, read, report)
    judged = {each.segment_id for each in read if each.trouble is None}
    findings += await _of_listing(
        tier, [misfit for misfit in listed.misfits if misfit.segment_id not in judged], report
    )
    findings += [of_gap(each, gap) for each in partitions for gap in RemoteLog(tier.state, each).remote_holes()]
    findings += [of_overlap(*one) for one in _overlaps(tier, set(overlapping.values())) if _both(one) in overlapping]
    report.objects, report.stored_bytes = listed.objects, listed.stored_bytes
    older_than_ms = time.time_ns() // 1_000_000 - options.grace_ms
    orphans = await judge_orphans(tier, listed.unknown, uploads, older_than_ms, options.grace_ms)
    findings += await _of_orphans(tier, orphans, older_than_ms, options, report)
    report.findings = in_order(findings)
    return report


def packed(
    segments: Sequence[RemoteLogSegmentMetadata], min_bytes: int, parallelism: int
) -> Iterator[tuple[RemoteLogSegmentMetadata, ...]]:
    """Yields tasks of at least about `min_bytes`. For a small tier the tasks are smaller, so that all cores are
    busy."""
    total = sum(each.segment_size_bytes for each in segments)
    task_bytes = min(
        max(total // (_TASKS_PER_CORE * parallelism), min_bytes), _MAX_TASK_BYTES, -(-total // parallelism)
    )
    task: list[RemoteLogSegmentMetadata] = []
    size_bytes = 0
    for each in segments:
        if task and size_bytes + each.segment_size_bytes > task_bytes:
            yield tuple(task)
            task, size_bytes = [], 0
        task.append(each)
        size_bytes += each.segment_size_bytes
    if task:
        yield tuple(task)


async def _read_back(
    tier: OpenTier,
    config: PipelineConfig,
    runner: Runner,
    options: ScrubOptions,
    segments: Sequence[RemoteLogSegmentMetadata],
    report: ScrubReport,
) -> list[ScrubbedSegment]:
    """Reads the segments back. With a `resume` file the work is split into parts, and each finished part is noted."""
    depth = _DEPTHS[options.level]
    whole = noted_segments(options.resume, depth)
    left = [each for each in segments if str(each.segment_id.id) not in whole]
    report.already_scrubbed = len(segments) - len(left)
    plan = list(packed(left, _MIN_TASK_BYTES[options.level], runner.parallelism))
    size = max(1, len(plan) if options.resume is None else _TASKS_PER_CORE * runner.parallelism)
    parts = [plan[start : start + size] for start in range(0, len(plan), size)]
    task = partial(scrub_segments, ScrubSetup(config, tier.cluster_id, options.level is ScrubLevel.DEEP))
    scrubbed: list[ScrubbedSegment] = []
    with ExitStack() as stack:
        notes = None if options.resume is None else stack.enter_context(options.resume.open("a"))
        for number, part in enumerate(parts, 1):
            what = "reading back" if len(parts) == 1 else f"reading back, part {number} of {len(parts)}"
            for found in await runner.run(what, part, task):
                scrubbed += found
                for each in found:
                    if notes is not None and not each.verdict.damages and each.trouble is None:
                        note_segment(notes, each.segment_id, depth)
    return scrubbed


def _of_verdicts(tier: OpenTier, scrubbed: Sequence[ScrubbedSegment], report: ScrubReport) -> list[Finding]:
    findings: list[Finding] = []
    for each in scrubbed:
        verdict = each.verdict
        report.segments += 1
        report.log_bytes += verdict.log_bytes
        report.batches += verdict.batches
        report.records += verdict.records
        if verdict.missing_offsets:
            partition, name = each.segment_id.topic_id_partition, str(each.segment_id.id)
            report.inner_gaps.append(InnerGap(partition.topic, partition.partition, name, verdict.missing_offsets))
        if not verdict.damages and each.trouble is None:
            continue
        segment = _finished(tier, each.segment_id)
        if segment is None:
            report.outdated += 1
            continue
        findings += [of_damage(segment, damage) for damage in verdict.damages]
        if each.trouble is not None:
            what = f"it could not be read to its end: {each.trouble}"
            findings.append(of_segment(FindingKind.UNREAD, segment, what))
    return findings


async def _of_listing(tier: OpenTier, misfits: Sequence[Misfit], report: ScrubReport) -> list[Finding]:
    """Returns findings for objects that the listing lacks and that the store also denies when asked directly, because
    a listing may lag behind."""

    async def of(misfit: Misfit) -> Finding | None:
        segment = _finished(tier, misfit.segment_id)
        if segment is None:
            report.outdated += 1
            return None
        if len(misfits) <= _MAX_PROBES and await _is_there(tier, segment, misfit.suffix):
            return None
        if misfit.size_bytes is None:
            return of_segment(FindingKind.MISSING, segment, f"the {misfit.suffix} object is missing")
        what = f"the {misfit.suffix} object has {misfit.size_bytes} of {segment.segment_size_bytes} bytes"
        return of_segment(FindingKind.DAMAGED, segment, what)

    return [finding for finding in await bounded_gather(misfits, of, _PROBES_AT_ONCE) if finding is not None]


async def _is_there(tier: OpenTier, segment: RemoteLogSegmentMetadata, suffix: str) -> bool:
    last = max(0, segment.segment_size_bytes - 1)
    try:
        if suffix == INDEXES_SUFFIX:
            await with_retries(lambda: tier.storage.fetch_indexes(segment))
            return True
        return len(await with_retries(lambda: tier.storage.fetch_log_segment(segment, last, last))) > 0
    except RemoteResourceNotFoundError:
        return False


async def _of_orphans(
    tier: OpenTier, orphans: OrphanReport, older_than_ms: int, options: ScrubOptions, report: ScrubReport
) -> list[Finding]:
    topics = {each.topic_id: each.topic for each in tier.state.partitions()}
    findings: list[Finding] = []
    for orphan in orphans.orphans:
        is_young = options.grace_ms > 0 and (orphan.modified_ms is None or orphan.modified_ms > older_than_ms)
        if orphan.what in (ORPHAN, UPLOAD) and is_young:
            report.young_orphans += 1
            continue
        key = parse_segment_key(orphan.key)
        named = key or parse_facts_key(orphan.key)
        topic = None if named is None else topics.get(named.topic_id, str(named.topic_id))
        findings.append(of_orphan(orphan, topic, None if named is None else named.partition, key))
    deletable = [each for each in orphans.orphans if each.deletable]
    report.other_clusters = orphans.other_clusters
    report.deletable_segments = len({each.segment for each in deletable if each.upload is None})
    report.deletable_uploads = sum(each.upload is not None for each in deletable)
    if options.delete_orphans and deletable:
        await delete_orphans(tier, orphans)
        report.deleted_segments, report.aborted_uploads = orphans.deleted, orphans.aborted
        if (orphans.deleted, orphans.aborted) == (report.deletable_segments, report.deletable_uploads):
            gone = {each.key for each in deletable}
            findings = [each for each in findings if each.object not in gone]
    return findings


def _finished(tier: OpenTier, segment_id: RemoteLogSegmentId) -> RemoteLogSegmentMetadata | None:
    segment = tier.state.remote_log_segment_metadata_by_id(segment_id)
    return segment if segment is not None and _is_finished(segment) else None


def _finished_segments(tier: OpenTier, partitions: Sequence[TopicIdPartition]) -> list[RemoteLogSegmentMetadata]:
    with garbage_collection_paused():
        return [segment for each in partitions for segment in readable_segments(tier, each)]


def _is_finished(segment: RemoteLogSegmentMetadata) -> bool:
    return segment.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED


def _overlaps(tier: OpenTier, partitions: Collection[TopicIdPartition]) -> Iterator[Overlap]:
    for each in partitions:
        log_start = tier.state.log_start_offset(each)
        finished = (segment for segment in tier.state.stored_segments(each) if segment.is_finished)
        yield from overlaps(finished, log_start or 0)


class Overlap(NamedTuple):
    """Two segments that have offsets together, from `first_offset` on."""

    first_offset: int
    one: RemoteLogSegmentMetadata
    other: RemoteLogSegmentMetadata


def overlaps(readable: Iterable[StoredSegment], log_start: int) -> Iterator[Overlap]:
    """Yields the overlaps of one partition's readable segments from `log_start` on.

    `readable` must be in ascending order of start offsets. Each segment is compared with the earlier segment that
    reaches furthest. Offsets that a CUT cut off do not count."""
    furthest: StoredSegment | None = None
    for _, together in groupby(readable, key=lambda each: each.start_offset):
        for segment in sorted(together, key=lambda each: each.valid_end_offset):
            first, end = max(segment.start_offset, log_start), segment.valid_end_offset
            if first > end:
                continue
            if furthest is not None and first <= furthest.valid_end_offset:
                yield Overlap(first, furthest.metadata, segment.metadata)
            if furthest is None or end > furthest.valid_end_offset:
                furthest = segment


def _both(overlap: Overlap) -> tuple[RemoteLogSegmentId, RemoteLogSegmentId]:
    return overlap.one.segment_id, overlap.other.segment_id
