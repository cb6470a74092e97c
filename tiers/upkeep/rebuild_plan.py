"""`rebuild` finds out from the store alone which records the metadata topic must have.

Every `.indexes` object describes its segment, and has the facts of the partition as of its copy. The `.facts` objects
have later ones. All of them are joined. These rules apply per partition:

* A segment is live if it has both objects, unless its deletion had begun, or it lies below the log start.
* A segment that has exactly the records of several other segments was merged from them. While all of them exist, it is
  not needed. The same holds for a segment whose records other segments have. Those are read back: a damaged segment is
  left out if others have its records, and refused if they do not.
* A `.log` object without `.indexes` is an incomplete copy. An `.indexes` object without `.log` is not possible in
  normal operation, so the partition is refused.
* Segments that overlap must have the same leader epochs there, and segments of one range the same content, unless a CUT
  voids one of them. Otherwise the partition is refused, and so it is for unreadable objects and a `.log` of a wrong
  size.
* A hole between segments gets a record only if the facts have a gap there. Otherwise its owner finds it.

This module writes nothing. A refusal is a text for an operator, and only an operator may decide about it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final
from uuid import UUID

from tiers.config.topic_policy import holding_back
from tiers.config.topic_settings import is_deletion_requested
from tiers.config.total_retention import TOTAL_KEYS
from tiers.metadata.metadata_log import MetadataPosition
from tiers.metadata.partition_facts import PartitionFacts, joined, newest_of_topics, not_accepted
from tiers.metadata.records.serde import KeyAndValue, key_and_value
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
    RemoteLogSegmentState,
    TopicTierConfigUpdate,
    after_cuts,
    leader_epoch_at,
)
from tiers.segment.indexes.segment_index import Chunk

_NO_LEADER_EPOCH = -1
Damages = Mapping[UUID, Sequence[str]]
"""What is wrong with each segment that was read back and is not whole."""
NO_DAMAGE: Final[Damages] = {}


@dataclass(frozen=True, slots=True)
class FoundIndexes:
    """The contents of a readable `.indexes` object.

    `metadata` has the custom metadata of the listing. `content` is a digest of the log's record batches. `stored_bytes`
    is the size of the `.log` object. `facts` is None if the object has none that can be read."""

    metadata: RemoteLogSegmentMetadata
    content: bytes
    stored_bytes: int
    facts: PartitionFacts | str | None = None
    """The facts of the segment. A text says why they cannot be read."""


@dataclass(slots=True)
class FoundSegment:
    """The objects of one uuid in the listing. `indexes` is an explanation when that object cannot be read."""

    base_offset: int
    end_offset: int
    log_bytes: int | None = None
    indexes: FoundIndexes | str | None = None


@dataclass(slots=True)
class FoundPartition:
    """The objects of one partition. `facts` has an explanation for each `.facts` object that cannot be read."""

    topic_id_partition: TopicIdPartition
    facts: list[PartitionFacts | str] = field(default_factory=list)
    segments: dict[UUID, FoundSegment] = field(default_factory=dict)


@dataclass(slots=True)
class PartitionPlan:
    """The segments and settings that the metadata topic must have for one partition.

    `segments` are finished, and have the `cut_at` that `cuts` give them. `unsure` has those of `segments` that must be
    read back first. If `refused` is not empty, no record may be written. `facts` are all that were found, and
    `positions` are those that the newest ones name."""

    topic_id_partition: TopicIdPartition
    facts: list[PartitionFacts] = field(default_factory=list)
    positions: list[tuple[TopicIdPartition, MetadataPosition]] = field(default_factory=list)
    segments: list[RemoteLogSegmentMetadata] = field(default_factory=list)
    unsure: list[RemoteLogSegmentMetadata] = field(default_factory=list)
    log_starts: list[LogStart] = field(default_factory=list)
    local_log_start: OffsetAndEpoch | None = None
    gaps: list[LogGap] = field(default_factory=list)
    cuts: tuple[Cut, ...] = ()
    dropped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    @property
    def log_start_offset(self) -> int:
        """The log start of the latest leader epoch; 0 when no log start is recorded."""
        latest = max(self.log_starts, key=lambda start: (start.leader_epoch, start.offset), default=None)
        return 0 if latest is None else latest.offset

    @property
    def readable(self) -> list[RemoteLogSegmentMetadata]:
        """Those of `segments` that no CUT cuts off as a whole."""
        return [each for each in self.segments if not each.is_cut_off]


def content_of(chunks: Sequence[Chunk]) -> bytes:
    """Returns a digest that is equal for logs of the same record batches, however the store encodes them."""
    lines = (f"{each.first_offset} {each.last_offset} {each.log_bytes} {each.crc32c}" for each in chunks)
    return hashlib.sha256("\n".join(lines).encode()).digest()


def plan_partition(found: FoundPartition, damaged: Damages = NO_DAMAGE) -> PartitionPlan:
    """Makes the plan, without the segments of `damaged` as far as others have their records."""
    plan = PartitionPlan(found.topic_id_partition)
    read = [each.indexes for each in found.segments.values() if isinstance(each.indexes, FoundIndexes)]
    stored = [*found.facts, *(each.facts for each in read if each.facts is not None)]
    plan.facts = [each for each in stored if isinstance(each, PartitionFacts)]
    plan.refused += [f"facts in the store cannot be read: {each}" for each in stored if isinstance(each, str)]
    dead, gaps = frozenset[UUID](), tuple[LogGap, ...]()
    if plan.facts:
        known = joined(plan.facts, None)
        newest = [pair for each in newest_of_topics(plan.facts) for pair in each.positions()]
        plan.positions = [each for each in dict.fromkeys(newest) if each[1] not in known.accepted]
        plan.topic_id_partition, plan.local_log_start = known.topic_id_partition, known.local_log_start
        plan.log_starts, plan.cuts = list(known.log_starts), known.cuts
        dead, gaps = frozenset(known.dead), known.gaps
    elif read:
        plan.topic_id_partition = read[-1].metadata.topic_id_partition
        plan.notes.append("the store has no facts: the log starts at the first segment, even if it was trimmed further")
    alive = (each.metadata for each in read if each.metadata.segment_id.id not in dead)
    _leave_out_denied(plan, [after_cuts(each, plan.cuts) for each in alive])
    whole = _whole_segments(found, plan, dead)
    candidates = {uuid: each for uuid, each in whole.items() if uuid not in damaged}
    _drop_merged(plan, candidates)
    _take(plan, sorted(candidates.values(), key=lambda each: _place(each.metadata)))
    _refuse_damaged(plan, whole, damaged)
    plan.gaps = _gaps_left(plan, gaps)
    _note_holes(plan)
    _check_epochs(plan)
    return plan


def _whole_segments(found: FoundPartition, plan: PartitionPlan, dead: frozenset[UUID]) -> dict[UUID, FoundIndexes]:
    """Returns the segments whose two objects exist and fit. Drops the others, or refuses them when they count."""
    whole: dict[UUID, FoundIndexes] = {}
    for uuid, segment in found.segments.items():
        name = f"segment {uuid} ({segment.base_offset} to {segment.end_offset})"
        if uuid in dead:
            plan.dropped.append(f"{name}: its deletion had begun")
        elif segment.end_offset < plan.log_start_offset:
            plan.dropped.append(f"{name}: it lies below the log start")
        elif segment.indexes is None:
            plan.dropped.append(f"{name}: its copy did not end")
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


def _denies(segment: RemoteLogSegmentMetadata, start: LogStart) -> bool:
    """Whether the segment has another record below the log start than the log start's history, or a later one."""
    if segment.start_offset >= start.offset:
        return False
    last = min(segment.valid_end_offset, start.offset - 1)
    return not start.may_follow(last, leader_epoch_at(segment.segment_leader_epochs, last))


def _leave_out_denied(plan: PartitionPlan, segments: Sequence[RemoteLogSegmentMetadata]) -> None:
    """Leaves out the log starts that a segment of another history denies, as the metadata would.

    Then no segment below such a log start is dropped for it, since an earlier segment of that history may lie there."""
    for start in list(plan.log_starts):
        denying = next((each for each in segments if _denies(each, start)), None)
        if denying is not None:
            plan.log_starts.remove(start)
            plan.notes.append(
                f"the log start {start.offset} of leader epoch {start.leader_epoch} does not count any more: "
                f"segment {denying.segment_id.id} has records of another leader epoch below it"
            )


def _drop_merged(plan: PartitionPlan, candidates: dict[UUID, FoundIndexes]) -> None:
    """Drops merged segments while the segments that they were merged from exist: their deletion had not begun.

    Those must be read back: an attempt that is not whole may be one of them, beside a copy that was made for it."""
    known = [after_cuts(each.metadata, plan.cuts) for each in candidates.values()]
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
            plan.dropped.append(f"{_named(whole)}: it was merged from {len(parts)} segments, which all exist")
            plan.unsure += [each for each in parts if each not in plan.unsure]
            del candidates[uuid]


def _take(plan: PartitionPlan, candidates: Sequence[FoundIndexes]) -> None:
    """Takes the segments by offset. The caller must read back the last one, and those that overlap.

    An owner copies one segment after the other, so the copy of every other one had ended. A segment that a CUT cuts
    stays, whatever others have: it has the only copy of its void records."""
    contents: dict[tuple[int, int], bytes] = {}
    for candidate in candidates:
        segment = after_cuts(candidate.metadata, plan.cuts)
        if segment.is_cut_off:
            plan.segments.append(segment)
            continue
        name = _named(segment)
        beside = [each for each in plan.readable if each.valid_end_offset >= segment.start_offset]
        content = contents.setdefault(_place(segment), candidate.content)
        is_other = content != candidate.content and any(_place(each) == _place(segment) for each in beside)
        if is_other or not _agrees(segment, beside):
            plan.refused.append(
                f"{name}: it has other records than segment {beside[-1].segment_id.id} at the same offsets: it is not"
                " known which one counts"
            )
        elif segment.cut_at is None and any(each.valid_end_offset >= segment.valid_end_offset for each in beside):
            plan.dropped.append(f"{name}: other segments have its records")
            plan.unsure += [each for each in beside if each not in plan.unsure]
        else:
            plan.unsure += [each for each in (*beside, segment) if beside and each not in plan.unsure]
            plan.segments.append(segment)
    plan.unsure += [each for each in plan.readable[-1:] if each not in plan.unsure]


def _refuse_damaged(plan: PartitionPlan, whole: Mapping[UUID, FoundIndexes], damaged: Damages) -> None:
    """Drops the damaged segments whose records others have, and refuses the other ones.

    The others must be read back, and must not have other records."""
    for uuid in damaged:
        if uuid not in whole:
            continue
        segment = after_cuts(whole[uuid].metadata, plan.cuts)
        run = LogGap(segment.start_offset, segment.valid_end_offset + 1)
        readable = (each for each in plan.readable if each.start_offset < run.next_offset)
        beside = [each for each in readable if each.valid_end_offset >= run.first_offset]
        is_other = any(
            _place(each) == _place(segment) and whole[each.segment_id.id].content != whole[uuid].content
            for each in beside
        )
        if is_other or not _agrees(segment, beside) or any(_without(run, _runs(plan))):
            plan.refused += [f"{_named(segment)}: {what}" for what in damaged[uuid]]
        else:
            plan.dropped.append(f"{_named(segment)}: it is damaged, and other segments have its records")
            plan.unsure += [each for each in beside if each not in plan.unsure]


def _agrees(segment: RemoteLogSegmentMetadata, beside: Iterable[RemoteLogSegmentMetadata]) -> bool:
    """Whether a segment has the leader epochs of the segments that it overlaps, where it overlaps them."""
    epochs = segment.segment_leader_epochs
    return all(
        leader_epoch_at(each.segment_leader_epochs, at) == leader_epoch_at(epochs, at)
        for each in beside
        for at in (max(each.start_offset, segment.start_offset), min(each.valid_end_offset, segment.valid_end_offset))
    )


def _runs(plan: PartitionPlan) -> list[LogGap]:
    return sorted(LogGap(each.start_offset, each.valid_end_offset + 1) for each in plan.readable)


def _without(run: LogGap, taken: Iterable[LogGap]) -> Iterator[LogGap]:
    """Yields the offsets of `run` that none of `taken` has. `taken` are in ascending order."""
    offset = run.first_offset
    for each in taken:
        if each.first_offset >= run.next_offset:
            break
        if offset < each.first_offset:
            yield LogGap(offset, each.first_offset)
        offset = max(offset, each.next_offset)
    if offset < run.next_offset:
        yield LogGap(offset, run.next_offset)


def _gaps_left(plan: PartitionPlan, gaps: Iterable[LogGap]) -> list[LogGap]:
    """Returns the runs of the offsets of `gaps` that no segment has. An attempt that was finished later ends a gap."""
    left: list[LogGap] = []
    taken = _runs(plan)
    for first, end in sorted(gaps):
        first = max(first, plan.log_start_offset, left[-1].next_offset if left else 0)
        left += _without(LogGap(first, end), taken)
    return left


def _note_holes(plan: PartitionPlan) -> None:
    taken = sorted([*_runs(plan), *plan.gaps])
    if taken:
        whole = LogGap(taken[0].first_offset, max(each.next_offset for each in taken))
        for first, end in _without(whole, taken):
            plan.notes.append(f"no segment has the offsets {first} to {end - 1}: their owner finds out what they were")


def _check_epochs(plan: PartitionPlan) -> None:
    """Refuses a log whose leader epochs fall. A merged segment stands for the segments that it was merged from."""
    known = -1
    end = -1
    for segment in sorted(plan.readable, key=lambda each: (each.start_offset, -each.end_offset)):
        epochs = [each.epoch for each in segment.segment_leader_epochs if each.start_offset <= segment.valid_end_offset]
        if not epochs or segment.valid_end_offset <= end:
            continue
        end = segment.valid_end_offset
        if epochs[0] < known:
            plan.refused.append(
                f"{_named(segment)} begins in leader epoch {epochs[0]}, after epoch {known}: the log diverged there"
            )
        known = max(known, epochs[-1])


def _place(segment: RemoteLogSegmentMetadata) -> tuple[int, int]:
    return segment.start_offset, segment.end_offset


def _named(segment: RemoteLogSegmentMetadata) -> str:
    return f"segment {segment.segment_id.id} ({segment.start_offset} to {segment.end_offset})"


def records_of(plan: PartitionPlan, writer: str, now_ms: int) -> list[KeyAndValue]:
    """Returns the records from which replay builds the plan."""
    partition = plan.topic_id_partition
    written = [key_and_value(CutUpdate.of(partition, writer, now_ms, each)) for each in plan.cuts]
    for segment in sorted(plan.segments, key=_place):
        segment_id = replace(segment.segment_id, topic_id_partition=partition)
        is_started, is_finished = (
            RemoteLogSegmentState.COPY_SEGMENT_STARTED,
            RemoteLogSegmentState.COPY_SEGMENT_FINISHED,
        )
        started = replace(segment, segment_id=segment_id, state=is_started, custom_metadata=None, cut_at=None)
        finished = RemoteLogSegmentMetadataUpdate(
            segment_id, segment.broker_id, segment.event_timestamp_ms, is_finished, segment.custom_metadata
        )
        written += [key_and_value(started), key_and_value(finished)]
    written += [key_and_value(LogGapUpdate(partition, writer, now_ms, gap, _NO_LEADER_EPOCH)) for gap in plan.gaps]
    written += [key_and_value(LogStartOffsetUpdate(partition, writer, now_ms, start)) for start in plan.log_starts]
    if plan.local_log_start is not None:
        written.append(key_and_value(LocalLogStartUpdate(partition, writer, now_ms, plan.local_log_start)))
    return written


def tier_configs_of(plans: Iterable[PartitionPlan], writer: str, now_ms: int) -> Iterator[TopicTierConfigUpdate]:
    """Yields one update per topic with tier settings. The facts of every partition repeat them.

    Of each metadata topic, the newest settings count. Which of several metadata topics was the last one is not known.
    So the longest total retention counts, and every pause. A request to delete the remote log counts only if all have
    it, since the user may have taken it back."""
    by_topic: dict[UUID, list[PartitionPlan]] = {}
    for plan in plans:
        by_topic.setdefault(plan.topic_id_partition.topic_id, []).append(plan)
    for topic_id, alike in by_topic.items():
        configs = _newest_settings([facts for plan in alike for facts in not_accepted(plan.facts)])
        if not any(configs):
            continue
        keeping = [each for each in configs if not is_deletion_requested(each)]
        chosen = next((each for each in keeping or configs if each), {})
        own = {key: value for key, value in chosen.items() if key not in TOTAL_KEYS}
        if config := own | holding_back(configs):
            first = TopicIdPartition(topic_id, 0, alike[0].topic_id_partition.topic)
            yield TopicTierConfigUpdate(first, writer, now_ms, config)


def _newest_settings(facts: Sequence[PartitionFacts]) -> list[Mapping[str, str]]:
    newest: dict[UUID, tuple[MetadataPosition, Mapping[str, str]]] = {}
    for each in facts:
        if (position := each.settings_position) is not None:
            known = newest.get(position.topic_id)
            if known is None or known[0] < position:
                newest[position.topic_id] = position, each.tier_config
    # Facts without a position were made in doubt, or before the first look: they may be later than all others.
    unplaced = (each.tier_config for each in facts if each.settings_position is None)
    return [*(config for _, config in newest.values()), *unplaced]
