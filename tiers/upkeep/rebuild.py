"""`rebuild` restores the metadata topic from the store. All programs share this module.

The caller passes a function that makes a plan from the objects in the store; this module checks the plan and writes it.
It refuses a partition that it cannot decide. Then it writes nothing, unless the operator skips such partitions. It also
refuses topics that the cluster does not have, because their owner would treat them as missing topics.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeVar
from uuid import UUID

from tiers.access.open_tier import TIMEOUT_MS, RemoteTierError, metadata_to_now, storage_cluster_id, tiered_cluster
from tiers.access.progress import SILENCE, Progress
from tiers.bounded_gather import bounded_gather
from tiers.broker.client import wall_clock_ms
from tiers.config.tier_config import TierConfig
from tiers.errors import CorruptSegmentError, RemoteLogMetadataError, RemoteResourceNotFoundError
from tiers.metadata.metadata_log import MetadataLog
from tiers.metadata.partition_facts import PartitionFacts, decode_partition_facts
from tiers.metadata.records.serde import KeyAndValue, key_and_value
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.segment.indexes.indexes_object import decode_indexes_object
from tiers.storage.object_key import (
    LOG_SUFFIX,
    FactsKey,
    marked_cluster,
    parse_facts_key,
    parse_segment_key,
    segment_of_key,
)
from tiers.storage.remote_storage_manager import RemoteStorageManager, StoredObject
from tiers.storage.retries import with_retries
from tiers.tasks.deletion.topic_deletion import ClusterTopicExistence
from tiers.upkeep.importing import WRITER, refuse_beside_owners, used_offsets, write_all
from tiers.upkeep.rebuild_plan import (
    NO_DAMAGE,
    Damages,
    FoundIndexes,
    FoundPartition,
    FoundSegment,
    PartitionPlan,
    content_of,
    plan_partition,
    records_of,
    tier_configs_of,
)
from tiers.upkeep.runner import JobStore, Runner
from tiers.upkeep.store_listing import HEX_DIGITS, list_prefix
from tiers.verify.segment_verification import verify_segment

T = TypeVar("T")

OBJECTS_PER_TASK: Final = 500
READS_AT_ONCE: Final = 32
SEGMENTS_PER_TASK: Final = 4

Found = FoundIndexes | PartitionFacts | str
"""What an object holds. A text says why it cannot be read."""
PlanOfStore = Callable[[str], Awaitable["Rebuild"]]
"""Makes a plan from the objects with the given cluster id."""


@dataclass(frozen=True, slots=True)
class RebuildOptions:
    """The options. `into` names the metadata topic, and `cluster_id` selects the objects.

    If one is None, the configuration or the cluster decides."""

    into: str | None = None
    cluster_id: str | None = None
    is_applied: bool = False
    skip_undecided: bool = False
    with_unknown_topics: bool = False


@dataclass(slots=True)
class Rebuild:
    """The plan and its outcome. `taken` is the number of used offsets in the metadata topic; a write needs 0."""

    topic: str
    plans: list[PartitionPlan]
    other_clusters: list[str]
    taken: int
    written: bool = False
    lacking: dict[TopicIdPartition, int] = field(default_factory=dict)
    """How many records the metadata topic lacks, by partition. Set only if the topic has records."""

    @property
    def is_needless(self) -> bool:
        """Whether the metadata topic already has everything that the plan would write."""
        return self.taken > 0 and not self.undecided and not any(self.lacking.values())

    @property
    def undecided(self) -> list[PartitionPlan]:
        return [each for each in self.plans if each.refused]


async def rebuild(
    config: TierConfig, options: RebuildOptions, plan_of_store: PlanOfStore, progress: Progress = SILENCE
) -> Rebuild:
    """Makes the plan, checks it, and writes it if the options say so.

    Raises `RemoteTierError` and the errors of `plan_of_store`.
    """
    topics = topics_replaced(config.remote_log.metadata_topic, options)
    if options.into is not None:
        remote_log = config.remote_log.model_copy(update={"metadata_topic": options.into})
        config = config.model_copy(update={"remote_log": remote_log})
    async with tiered_cluster(config, is_new=True) as (client, cluster):
        cluster_id = options.cluster_id or storage_cluster_id(config, cluster.cluster_id)
        if options.is_applied:
            # Owners would change what the plan is made of. Those of the topic that `into` replaces count as well.
            await refuse_beside_owners(client, topics)
        done = await plan_of_store(cluster_id)
        topic_ids = {each.topic_id_partition.topic_id for each in done.plans}
        judge_unknown_topics(
            done.plans, await ClusterTopicExistence(client).gone(topic_ids, TIMEOUT_MS), options.with_unknown_topics
        )
        done.topic = config.remote_log.metadata_topic
        if done.topic in cluster.topics:
            async with metadata_to_now(config, client, progress=progress) as log:
                await compare(done, log)
                done.taken = used_offsets(log)
        if not done.plans:
            raise RemoteTierError(f"the store holds no objects of cluster {cluster_id}")
        if done.is_needless:
            return done
        if options.is_applied and done.taken:
            raise RemoteTierError(f"topic {done.topic} is not empty: delete it, or name another topic by --into")
        if options.is_applied and (options.skip_undecided or not done.undecided):
            wanted = [each for each in done.plans if not each.refused]
            await refuse_beside_owners(client, topics)
            await write_all(
                config,
                client,
                lambda log: list(_records(wanted)),
                lambda log: _check_written(log.state, wanted),
                into_empty=True,
                progress=progress,
            )
            done.written = True
        return done


def topics_replaced(configured: str, options: RebuildOptions) -> list[str]:
    """Returns the metadata topics whose owners must not run: the configured one, and the one to write."""
    return list(dict.fromkeys((configured, options.into or configured)))


class BucketScan:
    """Collects the objects that a store holds of one cluster's tier, by partition.

    The caller passes each listed object to `take`. Then it passes to `put` what `read_object` returns for each of
    `to_read`: every `.indexes` and every `.facts` object, but no `.log` object."""

    def __init__(self, cluster_id: str) -> None:
        self.cluster_id = cluster_id
        self.partitions: dict[tuple[UUID, int], FoundPartition] = {}
        self.other_clusters: set[str] = set()
        self.to_read: list[StoredObject] = []

    def take(self, stored: StoredObject) -> None:
        """Takes one object of the listing. The caller passes every object."""
        segment = parse_segment_key(stored.key)
        named = segment or parse_facts_key(stored.key)
        cluster_id = marked_cluster(stored.key) if named is None else named.cluster_id
        if cluster_id not in (None, self.cluster_id):
            self.other_clusters.add(str(cluster_id))
        elif named is not None:
            place = named.topic_id, named.partition
            found = self.partitions.setdefault(place, FoundPartition(TopicIdPartition(*place)))
            if segment is not None:
                one = FoundSegment(segment.base_offset, segment.end_offset)
                one = found.segments.setdefault(segment.segment_uuid, one)
                if segment.suffix == LOG_SUFFIX:
                    one.log_bytes = stored.size_bytes
                    return
            self.to_read.append(stored)

    def put(self, stored: StoredObject, found: Found) -> None:
        """Keeps what `read_object` returned."""
        segment = parse_segment_key(stored.key)
        named = segment or parse_facts_key(stored.key)
        assert named is not None
        partition = self.partitions[named.topic_id, named.partition]
        if segment is None:
            assert not isinstance(found, FoundIndexes)
            partition.facts.append(found)
        else:
            assert not isinstance(found, PartitionFacts)
            partition.segments[segment.segment_uuid].indexes = found


async def read_object(storage: RemoteStorageManager, stored: StoredObject) -> Found:
    """Reads an `.indexes` or a `.facts` object. Raises `RemoteStorageError` when the store does not answer."""
    key, facts_key = parse_segment_key(stored.key), parse_facts_key(stored.key)
    try:
        if facts_key is not None:
            facts = decode_partition_facts(await with_retries(lambda: storage.get_object(stored.key)))
            of = facts.topic_id_partition
            is_own = facts_key == FactsKey(facts.cluster_id, of.topic_id, of.partition, stored.key)
            return facts if is_own else "the facts belong to another partition or cluster"
        assert key is not None
        named = segment_of_key(key, stored.custom_metadata)
        decoded = decode_indexes_object(await with_retries(lambda: storage.fetch_indexes(named)), named)
    except (CorruptSegmentError, RemoteResourceNotFoundError, RemoteLogMetadataError) as error:
        return str(error)
    known: PartitionFacts | str | None = None
    try:
        known = decode_partition_facts(decoded.indexes.facts) if decoded.indexes.facts else None
    except RemoteLogMetadataError as error:
        known = str(error)
    chunks = decoded.chunks()
    return FoundIndexes(
        replace(decoded.metadata, custom_metadata=stored.custom_metadata),
        content_of(chunks),
        sum(each.stored_bytes for each in chunks),
        known,
    )


async def read_objects(store: JobStore, at_once: int, objects: Sequence[StoredObject]) -> list[Found]:
    storage = await store.opened()
    return await bounded_gather(objects, lambda each: read_object(storage, each), at_once)


async def verify_segments(store: JobStore, segments: Sequence[RemoteLogSegmentMetadata]) -> list[list[str]]:
    """Returns, for each segment, what is wrong with it."""
    storage, ring = await store.opened(), store.key_ring()

    async def verify(segment: RemoteLogSegmentMetadata) -> list[str]:
        verdict = await verify_segment(storage, segment, ring if ring.keys else None)
        return [damage.what for damage in verdict.damages]

    return await bounded_gather(segments, verify, len(segments))


async def scan_store(store: JobStore, runner: Runner, reads_at_once: int = READS_AT_ONCE) -> BucketScan:
    """Lists the store and reads its objects. `reads_at_once` is the number of reads of each task. Raises `JobError`."""
    scan = BucketScan(store.cluster_id)
    prefixes = HEX_DIGITS if runner.parallelism > 1 else ("",)
    for listed in await runner.run("listing", prefixes, partial(list_prefix, store)):
        for stored in listed:
            scan.take(stored)
    objects = parts_of(scan.to_read, OBJECTS_PER_TASK)
    read = partial(read_objects, store, reads_at_once)
    for part, results in zip(objects, await runner.run("reading", objects, read), strict=True):
        for stored, found in zip(part, results, strict=True):
            scan.put(stored, found)
    return scan


async def plan_rebuild(store: JobStore, runner: Runner, reads_at_once: int = READS_AT_ONCE) -> Rebuild:
    """Makes a plan from the objects of the store.

    Reads the segments back whose copies may never have been verified. Raises `JobError`."""
    scan = await scan_store(store, runner, reads_at_once)
    found: dict[UUID, list[str]] = {}
    """What is wrong with each segment that was read back."""
    while True:
        done = judge_scan(scan, {uuid: damages for uuid, damages in found.items() if damages})
        unsure = [each for plan in done.plans for each in plan.unsure if each.segment_id.id not in found]
        if not unsure:
            return done
        parts = parts_of(unsure, SEGMENTS_PER_TASK)
        answers = await runner.run("reading back", parts, partial(verify_segments, store))
        for part, answer in zip(parts, answers, strict=True):
            found.update(zip((each.segment_id.id for each in part), answer, strict=True))


def parts_of(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[first : first + size] for first in range(0, len(items), size)]


def judge_scan(scan: BucketScan, damaged: Damages = NO_DAMAGE) -> Rebuild:
    """Makes a plan from a finished scan. The caller must still read the unsure segments back."""
    plans = [plan_partition(found, damaged) for found in scan.partitions.values()]
    plans.sort(key=lambda each: (each.topic_id_partition.topic, each.topic_id_partition.partition))
    return Rebuild("", plans, sorted(scan.other_clusters), 0)


def judge_unknown_topics(plans: Iterable[PartitionPlan], unknown: Set[UUID], are_meant: bool) -> None:
    """Refuses the plans of unknown topics, or adds a note to them if the operator accepts such topics (`are_meant`).

    `unknown` are the topic ids in the store that no broker of the cluster knows.
    """
    for plan in plans:
        if plan.segments and plan.topic_id_partition.topic_id in unknown:
            said = plan.notes if are_meant else plan.refused
            said.append(
                f"the cluster has no topic with the id {plan.topic_id_partition.topic_id}: with its metadata it is a "
                "missing topic, and its owner deletes its objects when an operator confirms its deletion"
            )


async def compare(done: Rebuild, log: MetadataLog) -> None:
    """Counts, for each partition, what the plan has and the metadata lacks. Raises `BrokerError`."""
    for plan in done.plans:
        has_settings = any(True for _ in tier_configs_of([plan], WRITER, 0))
        lacking = _lacking(plan, log.state)
        lacking += has_settings and not log.state.topic_tier_config(plan.topic_id_partition.topic_id)
        for partition, position in plan.positions:
            is_of_topic = position.topic_id == log.position(partition).topic_id
            if is_of_topic and not await log.confirms(partition, position, TIMEOUT_MS):
                lacking += 1
                break
        done.lacking[plan.topic_id_partition] = lacking


def _lacking(plan: PartitionPlan, metadata: RemoteLogMetadataState) -> int:
    """Returns how many records about the partition alone the metadata lacks."""
    partition = plan.topic_id_partition
    lacking = 0
    for wanted in plan.segments:
        known = metadata.remote_log_segment_metadata_by_id(wanted.segment_id)
        if known is None or known.state is RemoteLogSegmentState.COPY_SEGMENT_STARTED:
            lacking += 1
        elif known.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED:  # else its deletion has begun
            lacking += (known.custom_metadata, known.cut_at) != (wanted.custom_metadata, wanted.cut_at)
    log_start = max((start.offset for start in metadata.log_starts(partition)), default=-1)
    local_log_start = metadata.local_log_start(partition)
    lacking += plan.log_start_offset > log_start >= 0 or (log_start < 0 and bool(plan.log_starts))
    lacking += plan.local_log_start is not None and (
        local_log_start is None or local_log_start.offset < plan.local_log_start.offset
    )
    gaps = metadata.gaps(partition)
    lacking += sum(gap not in gaps and gap.next_offset > log_start for gap in plan.gaps)
    known_cuts = {(cut.leader_epoch, cut.offset) for cut in metadata.cuts(partition)}
    lacking += sum((cut.leader_epoch, cut.offset) not in known_cuts for cut in plan.cuts)
    return lacking


def _records(plans: Sequence[PartitionPlan]) -> Iterator[tuple[TopicIdPartition, Sequence[KeyAndValue]]]:
    now_ms = wall_clock_ms()
    for update in tier_configs_of(plans, WRITER, now_ms):  # first: an owner may expire what it sees without them
        yield update.topic_id_partition, [key_and_value(update)]
    for plan in plans:
        yield plan.topic_id_partition, records_of(plan, WRITER, now_ms)


def _check_written(metadata: RemoteLogMetadataState, plans: Iterable[PartitionPlan]) -> None:
    for plan in plans:
        if _lacking(plan, metadata):
            raise RemoteTierError(f"the metadata of {plan.topic_id_partition} does not read back as it was written")
