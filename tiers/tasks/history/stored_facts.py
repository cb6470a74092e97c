"""The facts of a partition in the store: with its copies, and compared with what the metadata knows.

The positions in the stored facts prove the metadata: a metadata topic that does not reach one of them has lost
records, and so has a topic that does not know a whole segment behind the last known one (docs/design.md, safety rule
5). `StoredFacts` writes nothing and needs no ownership, so that commands use it as the owner does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from uuid import UUID, uuid4

from tiers.config.topic_policy import holding_back
from tiers.errors import (
    CorruptSegmentError,
    LaterFormatError,
    MetadataLostError,
    RemoteLogMetadataError,
    RemoteResourceNotFoundError,
    RetriableRemoteStorageError,
)
from tiers.metadata.metadata_log import MetadataLog, MetadataPosition
from tiers.metadata.partition_facts import (
    PartitionFacts,
    decode_partition_facts,
    encode_partition_facts,
    facts_of,
    joined,
    newest_of,
    newest_of_topics,
    not_accepted,
)
from tiers.metadata.remote_log import RemoteLog
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_start import LogGap, LogStartReason
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentState
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
from tiers.tasks.task_services import TaskServices

LAST_OFFSET = (1 << 63) - 1
FIRST_PAUSE_MS, MAX_PAUSE_MS = 60_000, 3_600_000
WAY_BACK = (
    "`tidegate tier rebuild` restores the metadata from the store; `tidegate tier accept` reads back what only the"
    " store knows, and goes on without the rest (docs/recovery.md, 'A partition stops')"
)
_PROVED_FOR_MS = 24 * 3_600_000
_LISTINGS = 3


@dataclass(frozen=True, slots=True)
class StoredFacts:
    """One listing of a partition, and the newest facts in it.

    `segments` are the listed `.indexes` objects, by their keys alone, in the order of their offsets, and `logs` are the
    listed `.log` objects. `objects` are the `.facts` objects by their keys. `latest` are the facts of the last segment
    with a position: a copy that was made before the owner had compared the metadata with the store names none."""

    storage: RemoteStorageManager
    partition: TopicIdPartition
    segments: Sequence[RemoteLogSegmentMetadata]
    logs: frozenset[UUID]
    objects: dict[str, PartitionFacts]
    latest: PartitionFacts | None

    def all(self) -> list[PartitionFacts]:
        return [*self.objects.values(), *([] if self.latest is None else [self.latest])]

    def joined(self, topic_id: UUID | None) -> PartitionFacts | None:
        """Returns all facts as `joined` does, where `topic_id` is the present metadata topic; None without any."""
        facts = self.all()
        return joined(facts, topic_id) if facts else None

    def accepted(self) -> set[MetadataPosition]:
        return {position for each in self.all() for position in each.accepted}

    def not_accepted(self) -> list[PartitionFacts]:
        """Returns the facts whose positions no operator has accepted as lost."""
        return not_accepted(self.all())

    async def lost_reason(self, log: MetadataLog, timeout_ms: int) -> str:
        """Returns why the metadata has lost records; empty: it has not.

        The caller has read the metadata after these facts. Raises the errors of the brokers and of the store."""
        if lost := await self.lost_positions(log, timeout_ms):
            return (
                f"facts of {self.partition} in the store name offset {lost[0].next_offset} of the metadata topic"
                f" {lost[0].topic_id}: the metadata lost records since, or lacks the settings that held there:"
                f" {WAY_BACK}"
            )
        remote = RemoteLog(log.state, self.partition)
        log_start = remote.log_start()
        lacking = [each for each in self.segments if remote.unread_from(each, log_start) is not None]
        async for segment in replace(self, segments=lacking).unknown_segments(log, LogGap(log_start, LAST_OFFSET)):
            return (
                f"the store has segment {segment.segment_id.id} of {self.partition}, which the metadata does not know:"
                f" metadata was lost: {WAY_BACK}"
            )
        return ""

    async def lost_positions(self, log: MetadataLog, timeout_ms: int) -> list[MetadataPosition]:
        """Returns the positions that the metadata topic does not reach.

        A position in another metadata topic does not count: `rebuild` or `import` made the present one. But an import
        restores no settings. So it counts if no facts name the present topic, and the metadata lacks what the newest
        facts have. Raises `BrokerError`."""
        facts, topic_id = self.not_accepted(), log.position(self.partition).topic_id
        newest = newest_of(facts)
        if newest is not None and newest_of(facts, topic_id) is None and _lacks(log.state, newest_of_topics(facts)):
            return [position for _, position in newest.positions()]
        named = dict.fromkeys(pair for each in facts for pair in each.positions() if pair[1].topic_id == topic_id)
        return [position for of, position in named if not await log.confirms(of, position, timeout_ms)]

    async def unknown_segments(self, log: MetadataLog, hole: LogGap) -> AsyncIterator[RemoteLogSegmentMetadata]:
        """Yields the whole segments with offsets of `hole` that the metadata does not know, by their keys.

        A readable segment may have the offsets, too, until a CUT that the metadata lost voids them. The broker's own
        retention may have removed the records of a copy that the metadata lost. Raises the store's errors."""
        known = self.joined(log.position(self.partition).topic_id)
        gone = {each.segment_id.id for each in log.state.deleted_segments(self.partition)}
        gone.update(known.dead if known else ())
        for segment in self.segments:
            is_in_hole = segment.start_offset < hole.next_offset and hole.first_offset <= segment.end_offset
            # One answer may be damaged on its way. A gap that was recorded because of it stays.
            if (
                is_in_hole
                and segment.segment_id.id not in gone
                and log.state.remote_log_segment_metadata_by_id(segment.segment_id) is None
                and (await self._reads_whole(segment) or await self._reads_whole(segment))
            ):
                yield replace(segment, segment_id=replace(segment.segment_id, topic_id_partition=self.partition))

    async def _reads_whole(self, segment: RemoteLogSegmentMetadata) -> bool:
        """Returns whether the store has the `.indexes` object, which is written last, and the `.log` that it describes.

        A copy counts only after it was read back, so the metadata never knew one that the store has damaged. Reads the
        last chunk alone. In doubt a segment is whole: an owner of a later release may have written a format that this
        one does not read. Raises the store's errors, also if it lists an object and does not find it."""
        is_listed = True
        try:
            last = decode_indexes_object(await self.storage.fetch_indexes(segment), segment).chunks()[-1]
            is_listed = segment.segment_id.id in self.logs
            begin, size_bytes = last.stored_position, last.stored_bytes
            return len(await self.storage.fetch_log_segment(segment, begin, begin + size_bytes - 1)) == size_bytes
        except LaterFormatError:
            return True
        except CorruptSegmentError:
            return False
        except RemoteResourceNotFoundError as error:
            if is_listed:
                raise _listed_but_not_found(error) from error
            return False


def _listed_but_not_found(error: RemoteResourceNotFoundError) -> RetriableRemoteStorageError:
    return RetriableRemoteStorageError(f"the store lists an object and does not find it, so it is not known: {error}")


def _lacks(state: RemoteLogMetadataState, several: Sequence[PartitionFacts]) -> bool:
    """Whether the metadata lacks a CUT, a user's log start, or what holds back deletions: a longer total, a pause."""
    partition = several[0].topic_id_partition
    config = state.topic_tier_config(partition.topic_id)
    cuts = {(cut.leader_epoch, cut.offset) for cut in state.cuts(partition)}
    log_start = RemoteLog(state, partition).log_start()
    return holding_back([*(each.tier_config for each in several), config]) != holding_back([config]) or any(
        not cuts.issuperset((cut.leader_epoch, cut.offset) for cut in each.cuts)
        or any(start.reason is LogStartReason.USER and start.offset > log_start for start in each.log_starts)
        for each in several
    )


async def read_stored_facts(
    storage: RemoteStorageManager, cluster_id: str, partition: TopicIdPartition, *, is_strict: bool = True
) -> StoredFacts:
    """Lists the partition, and reads the newest facts.

    Costs one LIST per 1000 objects, and a GET of each `.facts` object and of one `.indexes` object, or of all down to
    one with a position. If `is_strict`, facts that cannot be read are an error, unless later ones can be read. So is an
    object that every listing has and no read finds, unless the facts call its segment dead: a listing may be stale.
    Raises the store's errors, `LaterFormatError` and `RemoteLogMetadataError`."""
    for _ in range(_LISTINGS):
        stored, missing = await _read_listed(storage, cluster_id, partition, is_strict=is_strict)
        if not missing:
            return stored
        # Perhaps an owner replaced a listed object by a later one.
    dead = {uuid for each in stored.all() for uuid in each.dead}
    for name, error in missing.items():
        is_replaced = name < max(stored.objects, default="") if isinstance(name, str) else name in dead
        if is_strict and not is_replaced:
            raise _listed_but_not_found(error) from error
    return stored


async def _read_listed(
    storage: RemoteStorageManager, cluster_id: str, partition: TopicIdPartition, *, is_strict: bool
) -> tuple[StoredFacts, dict[str | UUID, RemoteResourceNotFoundError]]:
    """Returns also the errors for listed objects that do not exist, by the keys of facts and the ids of segments."""
    missing: dict[str | UUID, RemoteResourceNotFoundError] = {}
    latest: PartitionFacts | None = None
    segments: list[RemoteLogSegmentMetadata] = []
    logs: set[UUID] = set()
    objects: dict[str, PartitionFacts] = {}
    unread: dict[str, RemoteLogMetadataError] = {}
    async for found in storage.list_objects(partition_prefix(cluster_id, partition)):
        key = parse_segment_key(found.key)
        if key is not None and key.suffix == INDEXES_SUFFIX:
            segments.append(segment_of_key(key, found.custom_metadata))
        elif key is not None:
            logs.add(key.segment_uuid)
        elif parse_facts_key(found.key) is not None:
            try:
                objects[found.key] = decode_partition_facts(await storage.get_object(found.key))
            except RemoteLogMetadataError as error:
                unread[found.key] = error
            except RemoteResourceNotFoundError as gone:
                missing[found.key] = gone
    if is_strict and unread and max(unread) > max(objects, default=""):
        raise RemoteLogMetadataError(f"{max(unread)}: {unread[max(unread)]}")
    segments.sort(key=lambda each: (each.start_offset, each.end_offset))
    for segment in reversed(segments):
        try:
            facts = await _facts_of_copy(storage, segment)
        except (LaterFormatError, RemoteLogMetadataError):
            if is_strict:
                raise
            continue
        except RemoteResourceNotFoundError as gone:
            missing[segment.segment_id.id] = gone
            continue
        if facts is not None and facts.position is not None:
            latest = facts
            break
    return StoredFacts(storage, partition, segments, frozenset(logs), objects, latest), missing


async def _facts_of_copy(storage: RemoteStorageManager, segment: RemoteLogSegmentMetadata) -> PartitionFacts | None:
    """Returns the facts in an `.indexes` object. None: it has none, or two answers of the store are damaged."""
    for _ in range(2):
        try:
            facts = decode_indexes_object(await storage.fetch_indexes(segment), segment).indexes.facts
            return decode_partition_facts(facts) if facts else None
        except LaterFormatError:
            raise
        except CorruptSegmentError:
            pass
    return None


async def put_facts(storage: RemoteStorageManager, facts: PartitionFacts) -> str:
    """Stores the facts as an object of their own. Returns its key. Raises the store's errors."""
    position = facts.position
    epoch, offset = (0, 0) if position is None else (position.leader_epoch, position.next_offset)
    key = facts_key(facts.cluster_id, facts.topic_id_partition, epoch, offset, uuid4())
    await storage.put_object(key, encode_partition_facts(facts))
    return key


async def delete_facts(services: TaskServices, partition: TopicIdPartition) -> None:
    """Deletes the `.facts` objects of a deleted topic's partition, as its last objects. Raises the store's errors."""
    prefix = partition_prefix(services.cluster_id, partition)
    for key in [each.key async for each in services.storage.list_objects(prefix)]:
        if parse_facts_key(key) is not None:
            await services.storage.delete_object(key)


@dataclass(slots=True)
class Look:
    """The next look at something that the store may have alone: a minute after the last one, and less often later."""

    at_ms: int = 0
    pause_ms: int = FIRST_PAUSE_MS
    doubt: MetadataLostError | None = None
    """What the last look found; None: nothing is lost."""

    def again(self, now_ms: int, doubt: MetadataLostError | None = None) -> None:
        self.at_ms, self.doubt = now_ms + self.pause_ms, doubt
        self.pause_ms = min(2 * self.pause_ms, MAX_PAUSE_MS)


class FactsTask:
    """Gives the facts of one partition to its copies, and compares the metadata with the stored ones.

    The owner compares once before it removes anything, and again after a day. Until then its copies name no position.
    While it doubts, they repeat the newest stored facts. Facts that have changed go with the next copy. If none follows
    within a round, the owner stores them as an object of their own. It deletes an earlier one when it has read a later
    one that contains it."""

    def __init__(self, services: TaskServices, topic_id_partition: TopicIdPartition) -> None:
        self._services = services
        self._partition = topic_id_partition
        self._proved_at_ms: int | None = None
        self._look = Look()
        self._stored: PartitionFacts | None = None
        """The content of the facts that this owner found or stored last; None: it knows of none."""
        self._objects: dict[str, PartitionFacts] = {}
        self._accepted: tuple[MetadataPosition, ...] = ()
        self._changed: PartitionFacts | None = None
        """The content that the last `run` found, if it is not stored."""
        self._doubted: PartitionFacts | None = None
        """The newest facts that `check` found while it doubted the metadata."""
        self._announced: dict[UUID, PartitionFacts] = {}
        """The facts that copies have, whose outcome is not known."""
        self.doubt: MetadataLostError | None = None
        """Why the last `check` doubts that the metadata knows all copies; None: it does not."""

    @property
    def is_proved(self) -> bool:
        """Whether the metadata was compared with the store within a day, and knows all copies."""
        at_ms = self._proved_at_ms
        return at_ms is not None and self._services.clock_ms() - at_ms < _PROVED_FOR_MS

    @property
    def is_check_due(self) -> bool:
        return not self.is_proved and self._services.clock_ms() >= self._look.at_ms

    def present(self) -> PartitionFacts:
        """Returns the facts that the store has not refuted."""
        services = self._services
        return facts_of(services.log, services.cluster_id, self._partition, self._accepted, is_proved=self.is_proved)

    def for_copy(self, segment_id: UUID) -> bytes:
        """Returns the facts for the `.indexes` object of a copy that is about to be announced."""
        facts = self._doubted or self.present()
        self._announced[segment_id] = facts
        return encode_partition_facts(facts)

    async def check(self) -> None:
        """Compares the metadata with the store, and sets `doubt`. Raises the errors of the store and the brokers."""
        services, partition, timeout_ms = self._services, self._partition, self._services.settings.request_timeout_ms
        await services.place.require(services)
        try:
            stored = await read_stored_facts(services.storage, services.cluster_id, partition)
        except (LaterFormatError, RemoteLogMetadataError) as error:
            reason = f"it is not known whether the metadata lost records: {error}: {WAY_BACK}"
        else:
            for each in {partition, partition.of_settings}:
                await services.log.ensure_fresh(each, 0, timeout_ms)
            reason = await stored.lost_reason(services.log, timeout_ms)
            self._objects, self._accepted = stored.objects, tuple(stored.accepted())
            facts = stored.not_accepted()
            newest = newest_of(facts, services.log.position(partition).topic_id)
            self._stored = None if newest is None else newest.content
            self._doubted = (newest or stored.latest or newest_of(facts)) if reason else None
        services.require_ownership(partition)  # to a former owner, the copies of the present one are unknown
        if reason:
            self.doubt, self._proved_at_ms = MetadataLostError(reason), None
            self._look.again(services.clock_ms())
        else:
            self.doubt, self._proved_at_ms, self._look = None, services.clock_ms(), Look()

    async def require_proved(self) -> None:
        """Compares the metadata with the store before a deletion. Raises `MetadataLostError` too."""
        await self.check()
        if self.doubt is not None:
            raise self.doubt

    async def check_gap(self, gap: LogGap) -> None:
        """Lists the store before the owner records `gap`.

        Raises `MetadataLostError` unless no record of the gap was ever copied, and the store's errors."""
        if not self.is_proved:
            await self.require_proved()
        if await self.has_unknown(gap):
            raise MetadataLostError(
                f"records of {self._partition} are in neither tier by the metadata, but the store has them in a segment"
                f" that the metadata does not know: metadata was lost: {WAY_BACK}"
            )

    async def has_unknown(self, hole: LogGap) -> bool:
        """Returns whether only the store knows a whole segment with records of `hole`. Raises the store's errors."""
        services = self._services
        await services.place.require(services)  # otherwise the listing is that of another place
        stored = await read_stored_facts(services.storage, services.cluster_id, self._partition, is_strict=False)
        async for _ in stored.unknown_segments(services.log, hole):
            return True
        return False

    async def run(self) -> None:
        """Stores the facts if they have changed since the last run and no copy has them. Raises the store's errors."""
        metadata = self._services.state
        for uuid, carried in list(self._announced.items()):
            known = metadata.remote_log_segment_metadata_by_id(RemoteLogSegmentId(self._partition, uuid))
            if known is None or known.state is not RemoteLogSegmentState.COPY_SEGMENT_STARTED:
                del self._announced[uuid]
            is_finished = known is not None and known.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED
            if known is not None and is_finished and carried.position is not None:
                place = known.start_offset, known.end_offset
                later = metadata.stored_segments(self._partition, known.start_offset)
                others = (each for each in later if each.metadata.segment_id != known.segment_id)
                if not any((each.start_offset, each.end_offset) >= place for each in others):
                    self._stored = carried.content  # a look reads it
        facts = self.present()
        # Stored facts without a position count if these have none either.
        stored = [each.content for each in self._objects.values() if facts.position is None and each.position is None]
        if facts.content in (self._stored, *stored):
            self._changed = None
        elif self._stored is None and self._changed is None and facts.is_empty:
            return
        elif facts.content != self._changed:
            # The next copy may have them. What the store has is not theirs, also after the change is taken back.
            self._changed, self._stored = facts.content, None
        else:
            await self.store()

    async def store_dead(self) -> None:
        """Stores facts that call every segment of the partition dead: its whole remote log is about to be deleted.

        Unfinished copies are dead too. Stores nothing if the deletion of every segment has begun. The caller has called
        `require_proved`. Raises the store's errors, and `OwnershipLostError`."""
        segments = list(self._services.state.stored_segments(self._partition))
        if any(each.state < RemoteLogSegmentState.DELETE_SEGMENT_STARTED for each in segments):
            await self.store(frozenset(each.metadata.segment_id.id for each in segments))

    async def store(self, dead: frozenset[UUID] = frozenset()) -> None:
        """Stores the facts as an object of their own, and deletes the earlier objects that it contains.

        `dead` are segments whose deletion is about to begin. Raises the store's errors, and `OwnershipLostError`."""
        services, partition = self._services, self._partition
        await services.place.require(services)
        facts = self.present()
        facts = replace(facts, dead=tuple(sorted({*facts.dead, *dead})))
        services.require_ownership(partition)
        key = await put_facts(services.storage, facts)
        services.checkpoint("facts-stored")
        read = decode_partition_facts(await services.storage.get_object(key))
        self._stored, self._changed = facts.content, None
        self._announced.clear()  # a copy that ends now has earlier facts
        services.require_ownership(partition)
        for earlier, known in list(self._objects.items()):
            if read.contains(known):
                await services.storage.delete_object(earlier)
                del self._objects[earlier]
        self._objects[key] = read
