"""What the store says about a partition, compared with what the metadata knows (docs/design.md, safety rule 5).

`StoredFacts` is one listing of the partition, and the newest facts in it. `lost_reason` compares them with the
metadata. It writes nothing and needs no ownership, so that commands use it as the owner does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from uuid import UUID, uuid4

from tiers.config.paused_work import paused_work
from tiers.config.total_retention import longest_total, recorded_total
from tiers.errors import CorruptSegmentError, LaterFormatError, RemoteLogMetadataError, RemoteResourceNotFoundError
from tiers.metadata.metadata_log import MetadataLog, MetadataPosition
from tiers.metadata.partition_facts import (
    PartitionFacts,
    decode_partition_facts,
    encode_partition_facts,
    joined,
    newest_of,
    newest_of_topics,
)
from tiers.metadata.remote_log import RemoteLog
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import LogGap, LogStartReason
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.segment.indexes.indexes_object import decode_indexes_object
from tiers.storage.object_key import (
    INDEXES_SUFFIX,
    facts_key,
    parse_facts_key,
    parse_segment_key,
    partition_prefix,
    segment_of_key,
)
from tiers.storage.remote_storage_manager import RemoteStorageManager

LAST_OFFSET = (1 << 63) - 1
_LISTINGS = 3
_INDEXES_PER_LOOK = 16
"""A copy that was made while the owner was in doubt names no position. So an earlier one may have to be read."""
WAY_BACK = (
    "`tidegate tier rebuild` restores the metadata from the store; `tidegate tier accept` reads back what only the"
    " store knows, and goes on without the rest (docs/operations.md, 'A partition stops')"
)


@dataclass(frozen=True, slots=True)
class StoredFacts:
    """`objects` are the `.facts` objects by their keys. `latest` are the facts of the last segment with a position.

    `segments` are the listed `.indexes` objects, by their keys alone, in the order of their offsets."""

    segments: Sequence[RemoteLogSegmentMetadata]
    objects: dict[str, PartitionFacts]
    latest: PartitionFacts | None

    def all(self) -> list[PartitionFacts]:
        return [*self.objects.values(), *([] if self.latest is None else [self.latest])]

    def joined(self, topic_id: UUID | None) -> PartitionFacts | None:
        """Returns all facts as `joined` does, where `topic_id` is the present metadata topic; None without any."""
        facts = self.all()
        return joined(facts, topic_id) if facts else None

    def not_accepted(self) -> list[PartitionFacts]:
        """Returns the facts whose positions no operator has accepted as lost."""
        accepted = {position for each in self.all() for position in each.accepted}
        return [each for each in self.all() if accepted.isdisjoint(position for _, position in each.positions())]


async def put_facts(storage: RemoteStorageManager, facts: PartitionFacts) -> str:
    """Stores the facts as an object of their own. Returns its key. Raises the store's errors."""
    position = facts.position
    epoch, offset = (0, 0) if position is None else (position.leader_epoch, position.next_offset)
    key = facts_key(facts.cluster_id, facts.topic_id_partition, epoch, offset, uuid4())
    await storage.put_object(key, encode_partition_facts(facts))
    return key


async def read_stored_facts(
    storage: RemoteStorageManager, cluster_id: str, partition: TopicIdPartition, *, is_strict: bool = True
) -> StoredFacts:
    """Lists the partition, and reads the newest facts.

    Costs one LIST per 1000 objects, and a GET of each `.facts` object and of one `.indexes` object, or a few. If
    `is_strict`, facts that cannot be read are an error, unless later ones can be read. Raises the store's errors,
    `LaterFormatError` and `RemoteLogMetadataError`."""
    for _ in range(_LISTINGS):
        with suppress(RemoteResourceNotFoundError):  # an owner replaced a listed object by a later one
            return await _read_listed(storage, cluster_id, partition, is_strict=is_strict)
    return await _read_listed(storage, cluster_id, partition, is_strict=is_strict)


async def _read_listed(
    storage: RemoteStorageManager, cluster_id: str, partition: TopicIdPartition, *, is_strict: bool
) -> StoredFacts:
    segments: list[RemoteLogSegmentMetadata] = []
    objects: dict[str, PartitionFacts] = {}
    unread: dict[str, RemoteLogMetadataError] = {}
    async for found in storage.list_objects(partition_prefix(cluster_id, partition)):
        key = parse_segment_key(found.key)
        if key is not None and key.suffix == INDEXES_SUFFIX:
            segments.append(segment_of_key(key, found.custom_metadata))
        elif parse_facts_key(found.key) is not None:
            try:
                objects[found.key] = decode_partition_facts(await storage.get_object(found.key))
            except RemoteLogMetadataError as error:
                unread[found.key] = error
    if is_strict and unread and max(unread) > max(objects, default=""):
        raise RemoteLogMetadataError(f"{max(unread)}: {unread[max(unread)]}")
    segments.sort(key=lambda each: (each.start_offset, each.end_offset))
    for segment in segments[: -_INDEXES_PER_LOOK - 1 : -1]:
        try:
            indexes = decode_indexes_object(await storage.fetch_indexes(segment), segment).indexes
            facts = decode_partition_facts(indexes.facts) if indexes.facts else None
        except (LaterFormatError, RemoteLogMetadataError):
            if is_strict:
                raise
            continue
        except (RemoteResourceNotFoundError, CorruptSegmentError):
            continue
        if facts is not None and facts.position is not None:
            return StoredFacts(segments, objects, facts)
    return StoredFacts(segments, objects, None)


async def lost_reason(
    storage: RemoteStorageManager,
    log: MetadataLog,
    partition: TopicIdPartition,
    stored: StoredFacts,
    timeout_ms: int,
) -> str:
    """Returns why the metadata has lost records; empty: it has not.

    The caller has read the metadata after `stored`. Raises the errors of the brokers and of the store."""
    if lost := await lost_positions(log, partition, stored, timeout_ms):
        return (
            f"facts of {partition} in the store name offset {lost[0].next_offset} of the metadata topic"
            f" {lost[0].topic_id}: the metadata lost records since, or lacks the settings that held there: {WAY_BACK}"
        )
    remote = RemoteLog(log.state, partition)
    log_start = remote.log_start()
    lacking = [each for each in stored.segments if remote.unread_from(each, log_start) is not None]
    hole = LogGap(log_start, LAST_OFFSET)
    async for segment in unknown_segments(storage, log, partition, replace(stored, segments=lacking), hole):
        return (
            f"the store has segment {segment.segment_id.id} of {partition}, which the metadata does not know: metadata"
            f" was lost: {WAY_BACK}"
        )
    return ""


async def lost_positions(
    log: MetadataLog, partition: TopicIdPartition, stored: StoredFacts, timeout_ms: int
) -> list[MetadataPosition]:
    """Returns the positions in the stored facts that the metadata topic does not reach.

    A position in another metadata topic does not count: `rebuild` or `import` made the present one. But an import
    restores no settings. So it counts if no facts name the present topic, and the metadata lacks what the newest facts
    have. Raises `BrokerError`."""
    facts, topic_id = stored.not_accepted(), log.position(partition).topic_id
    newest = newest_of(facts)
    if newest is not None and newest_of(facts, topic_id) is None and _lacks(log.state, newest_of_topics(facts)):
        return [position for _, position in newest.positions()]
    named = dict.fromkeys(pair for each in facts for pair in each.positions() if pair[1].topic_id == topic_id)
    return [position for of, position in named if not await log.confirms(of, position, timeout_ms)]


def _lacks(state: RemoteLogMetadataState, several: Sequence[PartitionFacts]) -> bool:
    """Whether the metadata lacks a CUT, a user's log start, or what holds back deletions: a longer total, a pause."""
    partition = several[0].topic_id_partition
    config = state.topic_tier_config(partition.topic_id)
    known = recorded_total(config)
    cuts = {(cut.leader_epoch, cut.offset) for cut in state.cuts(partition)}
    log_start = RemoteLog(state, partition).log_start()
    return any(
        longest_total([recorded_total(each.tier_config), known]) != known
        or not paused_work(each.tier_config) <= paused_work(config)
        or not cuts.issuperset((cut.leader_epoch, cut.offset) for cut in each.cuts)
        or any(start.reason is LogStartReason.USER and start.offset > log_start for start in each.log_starts)
        for each in several
    )


async def unknown_segments(
    storage: RemoteStorageManager,
    log: MetadataLog,
    partition: TopicIdPartition,
    stored: StoredFacts,
    hole: LogGap,
) -> AsyncIterator[RemoteLogSegmentMetadata]:
    """Yields the whole segments with records of `hole` that the metadata does not know, by the keys of the listing.

    The broker's own retention may have removed the records of a copy that the metadata lost. Raises the store's
    errors."""
    known = stored.joined(log.position(partition).topic_id)
    gone = {each.segment_id.id for each in log.state.deleted_segments(partition)} | set(known.dead if known else ())
    for segment in _unknown(log.state, stored, hole):
        # One answer may be damaged on its way, and the gap that is recorded because of it stays.
        if segment.segment_id.id not in gone and (
            await _reads_whole(storage, segment) or await _reads_whole(storage, segment)
        ):
            yield replace(segment, segment_id=replace(segment.segment_id, topic_id_partition=partition))


def _unknown(state: RemoteLogMetadataState, stored: StoredFacts, hole: LogGap) -> Iterator[RemoteLogSegmentMetadata]:
    for segment in stored.segments:
        is_in_hole = segment.start_offset < hole.next_offset and hole.first_offset <= segment.end_offset
        if is_in_hole and state.remote_log_segment_metadata_by_id(segment.segment_id) is None:
            yield segment


async def _reads_whole(storage: RemoteStorageManager, segment: RemoteLogSegmentMetadata) -> bool:
    """Returns whether the store has the `.indexes` object, which is written last, and the `.log` that it describes.

    A copy counts only after it was read back, so the metadata never knew one that the store has damaged. Reads the last
    chunk alone. In doubt a segment is whole: an owner of a later release may have written a format that this one does
    not read. Raises the store's errors."""
    try:
        last = decode_indexes_object(await storage.fetch_indexes(segment), segment).chunks()[-1]
        end = last.stored_position + last.stored_bytes
        return len(await storage.fetch_log_segment(segment, last.stored_position, end - 1)) == last.stored_bytes
    except LaterFormatError:
        return True
    except (RemoteResourceNotFoundError, CorruptSegmentError):
        return False
