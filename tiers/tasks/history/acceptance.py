"""`accept_what_is_left` restores what the store says and the metadata lacks. An operator accepts the rest as lost.

It records CUTs, gaps, log starts, settings that hold back deletions, and the whole segments that only the store knows,
as attempts: the owner reads them back and finishes those that fit. It deletes nothing. At last it stores facts with the
present positions, which name the lost ones. By them the owner's doubt ends. It may be repeated.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from tiers.config.topic_policy import holding_back
from tiers.config.total_retention import TOTAL_KEYS, recorded_total
from tiers.errors import LaterFormatError, RemoteLogMetadataError
from tiers.metadata.metadata_log import MetadataLog
from tiers.metadata.partition_facts import (
    PartitionFacts,
    decode_partition_facts,
    facts_of,
    newest_of,
    newest_of_topics,
)
from tiers.metadata.remote_log import RemoteLog
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataManager
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.model.log_start import LogGap, LogStartReason, OffsetAndEpoch
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.segment.indexes.indexes_object import decode_indexes_object
from tiers.storage.remote_storage_manager import RemoteStorageManager
from tiers.tasks.history.stored_facts import LAST_OFFSET, StoredFacts, put_facts, read_stored_facts

_SEGMENTS_PER_WRITE = 500
"""The records of a write are one batch, and brokers limit its size."""


async def may_be_in_doubt(
    log: MetadataLog, bounds: LocalLogBounds, log_start: int, stored: StoredFacts, timeout_ms: int
) -> bool:
    """Returns whether the owner may have a reason to doubt the past. False: there is nothing to accept.

    It is stricter than the owner: it may find a reason where the owner goes on, for example while a copy finishes.

    `bounds` are the leader's, and `log_start` is the recorded one that the leader confirms. Raises the errors of the
    brokers and of the store."""
    remote = RemoteLog(log.state, stored.partition)
    return bool(
        await remote.holes(log_start, bounds.log_start_offset)
        or remote.lost_trim(log_start)
        or await stored.lost_reason(log, timeout_ms)
    )


async def kept_settings(log: MetadataLog, stored: StoredFacts, timeout_ms: int) -> dict[str, str]:
    """Returns the longest total retention and the pauses that the metadata may have lost, as settings of the topic.

    An acceptance is about the known records. It is no word for a shorter total or for the end of a pause. If the
    metadata lost records since the facts were stored, the settings that it has may be earlier ones, or none. Raises
    `BrokerError`."""
    partition = stored.partition
    facts, present = stored.not_accepted(), log.state.topic_tier_config(partition.topic_id)
    unplaced = [each.tier_config for each in facts if each.position is None]
    if not (unplaced or await stored.lost_positions(log, timeout_ms)):
        return {}
    of_topic = newest_of(facts, log.position(partition).topic_id)
    stored_configs = [each.tier_config for each in ([of_topic] if of_topic else newest_of_topics(facts))]
    kept, known = holding_back([*stored_configs, *unplaced, present]), holding_back([present])
    lost = {key: value for key, value in kept.items() if known.get(key) != value}
    return lost if lost.keys().isdisjoint(TOTAL_KEYS) else lost | recorded_total(kept).config()


async def accept_what_is_left(
    storage: RemoteStorageManager,
    metadata: RemoteLogMetadataManager,
    cluster_id: str,
    partition: TopicIdPartition,
    bounds: LocalLogBounds,
    log_start: int,
    timeout_ms: int,
) -> list[str]:
    """Does so, and returns what it could not restore. The caller has compared the marker of the store.

    `bounds` are the leader's, and `log_start` is the recorded one that the leader confirms. Raises the errors of the
    store, the brokers and the metadata manager."""
    stored = await read_stored_facts(storage, cluster_id, partition, is_strict=False)
    log, state = metadata.log, metadata.state
    await log.ensure_fresh(partition, 0, timeout_ms)
    found: list[RemoteLogSegmentMetadata] = []
    not_restored: list[str] = []
    async for each in stored.unknown_segments(log, LogGap(log_start, LAST_OFFSET)):
        try:
            decoded = decode_indexes_object(await storage.fetch_indexes(each), each)
            found.append(decoded.metadata)
            with suppress(RemoteLogMetadataError):  # the segment can be restored without them
                if decoded.indexes.facts:
                    stored.objects[str(each.segment_id.id)] = decode_partition_facts(decoded.indexes.facts)
        except LaterFormatError as error:
            not_restored.append(f"segment {each.segment_id.id}: {error}")
    lost = await stored.lost_positions(log, timeout_ms)
    settings = await kept_settings(log, stored, timeout_ms)
    if settings:  # first: the owner may expire records as soon as its doubt ends
        await metadata.change_topic_tier_config(partition.topic_id, partition.topic, settings)
    facts = stored.joined(log.position(partition).topic_id) or PartitionFacts(cluster_id, partition)
    remote = RemoteLog(state, partition)
    holes = await remote.holes(log_start, bounds.log_start_offset)
    known_cuts = {(cut.leader_epoch, cut.offset) for cut in state.cuts(partition)}
    known_starts = state.recorded_log_starts(partition)
    await metadata.restore(
        partition,
        cuts=[cut for cut in facts.cuts if (cut.leader_epoch, cut.offset) not in known_cuts],
        gaps=[
            LogGap(max(gap.first_offset, hole.first_offset), min(gap.next_offset, hole.next_offset))
            for hole in holes
            for gap in facts.gaps
            if gap.first_offset < hole.next_offset
            and hole.first_offset < gap.next_offset
            and not any(_overlap(each, gap) for each in found)
        ]
        + [hole for hole in holes if any(remote.void_copies(hole)) and not any(_overlap(each, hole) for each in found)],
        # Retention finds its log start again, by the settings of this cluster.
        log_starts=[
            start for start in facts.log_starts if start.reason is LogStartReason.USER and start not in known_starts
        ],
        local_log_start=_trim_left(remote, holes, log_start, bounds.leader_epoch),
    )
    for first in range(0, len(found), _SEGMENTS_PER_WRITE):
        await metadata.restore(partition, segments=found[first : first + _SEGMENTS_PER_WRITE])
    accepted = stored.accepted().union(lost)
    if not not_restored:
        await put_facts(storage, facts_of(log, cluster_id, partition, sorted(accepted)))
    return not_restored


def _overlap(segment: RemoteLogSegmentMetadata, gap: LogGap) -> bool:
    return segment.start_offset < gap.next_offset and gap.first_offset <= segment.end_offset


def _trim_left(remote: RemoteLog, holes: Iterable[LogGap], log_start: int, leader_epoch: int) -> OffsetAndEpoch | None:
    """Returns the trim that takes the place of the recorded one, which shows lost segments. None: it stays."""
    trim, is_lost = remote.last_trim(), remote.lost_trim(log_start) is not None
    end = 0 if trim is None else trim.offset
    offsets = [hole.first_offset for hole in holes if hole.first_offset < end <= hole.next_offset]
    offsets += [log_start] * is_lost
    return OffsetAndEpoch(offsets[0], leader_epoch) if offsets else None
