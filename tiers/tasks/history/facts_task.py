"""`FactsTask`: gives the facts of one partition to its copies, and compares the metadata with the stored ones.

The positions in the stored facts prove the metadata: a metadata topic that does not reach one of them has lost
records, and so has a topic that does not know a whole segment behind the last known one. The owner compares once before
it removes anything, and again after a day (docs/design.md, safety rule 5). Until then, and while it doubts, its copies
name no position.

Facts that have changed go with the next copy. If none follows within a round, the owner stores them as an object of
their own. It deletes an earlier such object when it has read a later one that contains it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from uuid import UUID

from tiers.errors import LaterFormatError, MetadataLostError, RemoteLogMetadataError
from tiers.metadata.metadata_log import MetadataPosition
from tiers.metadata.partition_facts import (
    PartitionFacts,
    decode_partition_facts,
    encode_partition_facts,
    facts_of,
    newest_of,
)
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_start import LogGap
from tiers.model.segment_state import RemoteLogSegmentState
from tiers.storage.object_key import parse_facts_key, partition_prefix
from tiers.tasks.history.stored_facts import (
    WAY_BACK,
    StoredFacts,
    lost_reason,
    put_facts,
    read_stored_facts,
    unknown_segments,
)
from tiers.tasks.task_services import TaskServices

_PROVED_FOR_MS = 24 * 3_600_000
_FIRST_PAUSE_MS, _MAX_PAUSE_MS = 60_000, 3_600_000


class FactsTask:
    """Works on one partition for as long as this process owns it."""

    def __init__(self, services: TaskServices, topic_id_partition: TopicIdPartition) -> None:
        self._services = services
        self._partition = topic_id_partition
        self._proved_at_ms: int | None = None
        self._check_at_ms = 0
        self._pause_ms = _FIRST_PAUSE_MS
        self._stored: PartitionFacts | None = None
        """The content of the facts that this owner found or stored last; None: it knows of none."""
        self._objects: dict[str, PartitionFacts] = {}
        self._accepted: tuple[MetadataPosition, ...] = ()
        self._changed: PartitionFacts | None = None
        """The content that the last `run` found, if it is not stored."""
        self._announced: dict[UUID, PartitionFacts] = {}
        """The content of the facts that copies have, whose outcome is not known."""
        self.doubt: MetadataLostError | None = None
        """Why the last `check` doubts that the metadata knows all copies; None: it does not."""

    @property
    def is_proved(self) -> bool:
        """Whether the metadata was compared with the store within a day, and knows all copies."""
        at_ms = self._proved_at_ms
        return at_ms is not None and self._services.clock_ms() - at_ms < _PROVED_FOR_MS

    @property
    def is_check_due(self) -> bool:
        return not self.is_proved and self._services.clock_ms() >= self._check_at_ms

    def present(self) -> PartitionFacts:
        """Returns the facts that the store has not refuted."""
        services = self._services
        return facts_of(services.log, services.cluster_id, self._partition, self._accepted, is_proved=self.is_proved)

    def for_copy(self, segment_id: UUID) -> bytes:
        """Returns the present facts for the `.indexes` object of a copy that is about to be announced."""
        facts = self.present()
        self._announced[segment_id] = facts.content
        return encode_partition_facts(facts)

    async def check(self) -> None:
        """Compares the metadata with the store, and sets `doubt`. Raises the errors of the store and the brokers."""
        services, partition = self._services, self._partition
        await services.place.require(services)
        timeout_ms = services.settings.request_timeout_ms
        try:
            stored = await read_stored_facts(services.storage, services.cluster_id, partition)
        except (LaterFormatError, RemoteLogMetadataError) as error:
            reason = f"it is not known whether the metadata lost records: {error}: {WAY_BACK}"
        else:
            for each in {partition, partition.of_settings}:
                await services.log.ensure_fresh(each, 0, timeout_ms)
            reason = await lost_reason(services.storage, services.log, partition, stored, timeout_ms)
            self._keep(stored)
        services.require_ownership(partition)  # to a former owner, the copies of the present one are unknown
        if reason:
            self.doubt, self._proved_at_ms = MetadataLostError(reason), None
            self._check_at_ms = services.clock_ms() + self._pause_ms
            self._pause_ms = min(2 * self._pause_ms, _MAX_PAUSE_MS)
            return
        self.doubt, self._proved_at_ms, self._pause_ms = None, services.clock_ms(), _FIRST_PAUSE_MS

    async def require_proved(self) -> None:
        """Compares the metadata with the store before a deletion. Raises `MetadataLostError` too."""
        await self.check()
        if self.doubt is not None:
            raise self.doubt

    async def store_dead(self) -> None:
        """Stores facts that call every segment of the partition dead: its whole remote log is about to be deleted.

        Unfinished copies are dead too. Stores nothing if the deletion of every segment has begun. The caller has called
        `require_proved`. Raises the store's errors, and `OwnershipLostError`."""
        segments = list(self._services.state.stored_segments(self._partition))
        if any(each.state < RemoteLogSegmentState.DELETE_SEGMENT_STARTED for each in segments):
            await self.store(frozenset(each.metadata.segment_id.id for each in segments))

    def _keep(self, stored: StoredFacts) -> None:
        self._objects = stored.objects
        self._accepted = tuple({position for each in stored.all() for position in each.accepted})
        newest = newest_of(stored.not_accepted(), self._services.log.position(self._partition).topic_id)
        self._stored = None if newest is None else newest.content

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
        services, partition = self._services, self._partition
        await services.place.require(services)  # otherwise the listing is that of another place
        stored = await read_stored_facts(services.storage, services.cluster_id, partition, is_strict=False)
        async for _ in unknown_segments(services.storage, services.log, partition, stored, hole):
            return True
        return False

    async def run(self) -> None:
        """Stores the facts if they have changed since the last run and no copy has them. Raises the store's errors."""
        self._note_copies()
        facts = self.present()
        is_stored = facts.content in (self._stored, *(each.content for each in self._in_doubt(facts)))
        if is_stored or (self._stored is None and self._changed is None and facts.is_empty):
            self._changed = None
        elif facts.content != self._changed:
            # The next copy may have them. What the store has is not theirs, also after the change is taken back.
            self._changed, self._stored = facts.content, None
        else:
            await self.store()

    def _in_doubt(self, facts: PartitionFacts) -> Iterator[PartitionFacts]:
        """Yields the stored facts without a position, if `facts` have none either."""
        return (each for each in self._objects.values() if facts.position is None and each.position is None)

    def _note_copies(self) -> None:
        metadata = self._services.state
        for uuid, content in list(self._announced.items()):
            known = metadata.remote_log_segment_metadata_by_id(RemoteLogSegmentId(self._partition, uuid))
            if known is not None and known.state is RemoteLogSegmentState.COPY_SEGMENT_STARTED:
                continue
            del self._announced[uuid]
            if known is not None and known.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED:
                self._stored = content

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


async def delete_facts(services: TaskServices, partition: TopicIdPartition) -> None:
    """Deletes the `.facts` objects of a deleted topic's partition, as its last objects. Raises the store's errors."""
    prefix = partition_prefix(services.cluster_id, partition)
    for key in [each.key async for each in services.storage.list_objects(prefix)]:
        if parse_facts_key(key) is not None:
            await services.storage.delete_object(key)
