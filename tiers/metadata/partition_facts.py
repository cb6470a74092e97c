"""The facts of a partition: what its metadata says beside the segments. Every `.indexes` object has them.

    facts 1 <CRC-32C of the second line>
    {...}    JSON, by the names of `PartitionFacts`

* They are as of the announcement of the copy. If they change and no copy follows, the owner stores them as an object of
  its own, `.facts`. Both kinds of object are immutable.
* They name how far the owner had read the metadata topic. A metadata topic that does not reach this position has lost
  records. Facts name a position only if the owner has compared the metadata with the stored facts before.
* A later position means later metadata of the same topic, so the newest facts of a topic contain its earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final
from uuid import UUID

from pydantic import TypeAdapter

from protocol.records.record_batch import crc32c
from tiers.errors import RemoteLogMetadataError
from tiers.metadata.metadata_log import MetadataLog, MetadataPosition
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import LogGap, LogStart, OffsetAndEpoch
from tiers.model.segment_metadata import Cut, RemoteLogSegmentState

_HEAD = "facts 1"


@dataclass(frozen=True, slots=True)
class PartitionFacts:
    """The facts. `dead` has the segments at or above the log start whose deletion has begun, and `accepted` the lost
    positions of the metadata that an operator has accepted."""

    cluster_id: str
    topic_id_partition: TopicIdPartition
    log_starts: tuple[LogStart, ...] = ()
    local_log_start: OffsetAndEpoch | None = None
    """The recorded trim."""
    gaps: tuple[LogGap, ...] = ()
    cuts: tuple[Cut, ...] = ()
    dead: tuple[UUID, ...] = ()
    accepted: tuple[MetadataPosition, ...] = ()
    tier_config: Mapping[str, str] = field(default_factory=dict)
    """The tier settings of the whole topic that were set through a proxy."""
    position: MetadataPosition | None = None
    """How far the owner had read the metadata partition; None: it had not compared the metadata with the store."""
    settings_position: MetadataPosition | None = None
    """The same of the metadata partition that has the tier settings of the topic."""

    @property
    def content(self) -> PartitionFacts:
        """The facts without positions, which change with every record of other partitions."""
        return replace(self, position=None, settings_position=None)

    @property
    def is_empty(self) -> bool:
        return self.content == PartitionFacts(self.cluster_id, self.topic_id_partition)

    def positions(self) -> Iterator[tuple[TopicIdPartition, MetadataPosition]]:
        """Yields the positions that the metadata topic must still reach, each with a partition whose metadata it has.

        Without both, the metadata may lack segments, or have earlier tier settings than the recorded ones."""
        if self.position is not None:
            yield self.topic_id_partition, self.position
        if self.settings_position is not None:
            yield self.topic_id_partition.of_settings, self.settings_position

    def contains(self, other: PartitionFacts) -> bool:
        """Whether nothing is lost with `other`: these facts were made of later metadata of the same topic."""
        later, earlier = self.position, other.position
        if later is None and earlier is not None:
            return False
        if later is None or earlier is None or later.topic_id != earlier.topic_id:
            whole = joined([self, other], None if later is None else later.topic_id)
            return whole.content == self.content
        return later.next_offset >= earlier.next_offset and set(other.accepted) <= set(self.accepted)


def facts_of(
    log: MetadataLog,
    cluster_id: str,
    partition: TopicIdPartition,
    accepted: Sequence[MetadataPosition] = (),
    *,
    is_proved: bool = True,
) -> PartitionFacts:
    """Returns the facts as the metadata has them. They name no position unless `is_proved`."""
    # First: a state that is read later may have more than the position says, and never less.
    position, settings_position = log.position(partition), log.position(partition.of_settings)
    begun = RemoteLogSegmentState.DELETE_SEGMENT_STARTED
    deleting = (each.metadata for each in log.state.segments_apart(partition) if each.state >= begun)
    deleted = (*deleting, *log.state.deleted_segments(partition))
    log_starts = sorted(
        (each for each in log.state.recorded_log_starts(partition) if each.deletes),
        key=lambda each: (each.leader_epoch, each.offset, each.reason, each.last_epoch),
    )
    log_start = log_starts[-1].offset if log_starts else 0
    return PartitionFacts(
        cluster_id=cluster_id,
        topic_id_partition=partition,
        log_starts=tuple(log_starts),
        local_log_start=log.state.local_log_start(partition),
        gaps=tuple(log.state.gaps(partition)),
        cuts=tuple(log.state.cuts(partition)),
        dead=tuple(sorted(each.segment_id.id for each in deleted if each.end_offset >= log_start)),
        accepted=tuple(sorted(accepted)),
        tier_config=dict(log.state.topic_tier_config(partition.topic_id)),
        position=position if is_proved else None,
        settings_position=settings_position if is_proved else None,
    )


def newest_of(facts: Iterable[PartitionFacts], topic_id: UUID | None = None) -> PartitionFacts | None:
    """Returns the facts with the highest positions in the metadata topic; None without any. `topic_id` None: in any."""
    found = [each for each in facts if each.position is not None and topic_id in (None, each.position.topic_id)]
    # A change of the topic's settings may add no record to the partition's own metadata partition.
    return max(found, key=lambda each: [position[1:] for _, position in each.positions()], default=None)


def not_accepted(facts: Sequence[PartitionFacts]) -> list[PartitionFacts]:
    """Returns the facts that were not made before an operator accepted the loss of their metadata.

    Later facts name the accepted positions. Earlier ones have a position up to an accepted one, which the metadata
    topic may reach again."""
    accepted = {position for each in facts for position in each.accepted}

    def is_lost(each: PartitionFacts) -> bool:
        unnamed = accepted.difference(each.accepted)
        return any(at.topic_id == lost.topic_id and at <= lost for _, at in each.positions() for lost in unnamed)

    return [each for each in facts if not is_lost(each)]


def newest_of_topics(facts: Iterable[PartitionFacts]) -> list[PartitionFacts]:
    """Returns the newest facts of each metadata topic, and all facts without a position: they contain the others."""
    several = list(facts)
    topic_ids = dict.fromkeys(each.position.topic_id for each in several if each.position is not None)
    newest = [found for topic_id in topic_ids if (found := newest_of(several, topic_id)) is not None]
    return [*(each for each in several if each.position is None), *newest]


def joined(facts: Iterable[PartitionFacts], topic_id: UUID | None) -> PartitionFacts:
    """Joins the newest facts of each metadata topic; `facts` are of one partition, and not empty.

    The result has all their CUTs, gaps and dead segments, and the highest log start of each leader epoch. The rest is
    that of the newest facts of the metadata topic `topic_id`, or of any topic."""
    known = list(facts)
    several = newest_of_topics(known)
    newest = newest_of(several, topic_id) or newest_of(several) or several[-1]
    starts: dict[int, LogStart] = {}
    for start in (start for each in several for start in each.log_starts):
        highest = starts.get(start.leader_epoch)
        if highest is None or (start.offset, start.last_epoch) > (highest.offset, highest.last_epoch):
            starts[start.leader_epoch] = start
    known_cuts = sorted((cut for each in several for cut in each.cuts), key=lambda cut: cut.is_proved)
    cuts = {(cut.leader_epoch, cut.offset): cut for cut in known_cuts}
    return replace(
        newest,
        log_starts=tuple(starts[epoch] for epoch in sorted(starts)),
        gaps=tuple(sorted({gap for each in several for gap in each.gaps})),
        cuts=tuple(cuts[name] for name in sorted(cuts)),
        dead=tuple(sorted({uuid for each in several for uuid in each.dead})),
        accepted=tuple(sorted({position for each in known for position in each.accepted})),
    )


_CODEC: Final = TypeAdapter(PartitionFacts)


def encode_partition_facts(facts: PartitionFacts) -> bytes:
    body = _CODEC.dump_json(facts)
    return f"{_HEAD} {crc32c(body, 0, len(body)):08x}\n".encode() + body


def decode_partition_facts(data: bytes | memoryview) -> PartitionFacts:
    """Decodes facts. Raises `RemoteLogMetadataError` unless they are complete and of this version."""
    head, _, body = bytes(data).partition(b"\n")
    if head != f"{_HEAD} {crc32c(body, 0, len(body)):08x}".encode():
        raise RemoteLogMetadataError(f"the facts of a partition are damaged, or of a later release: {head[:40]!r}")
    try:
        return _CODEC.validate_json(body)
    except ValueError as error:
        raise RemoteLogMetadataError(f"the facts of a partition cannot be read: {error}") from error
