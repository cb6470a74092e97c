"""`rebuild` as every program does it: a plan, made of the store by whoever has the means, judged and written here.

What cannot be decided is refused, and then nothing is written unless those partitions are left out. Topics that the
cluster does not have are refused too: when metadata names such a topic, its owner treats it as a missing topic.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from uuid import UUID

import typer

from tiers.console import FINDINGS, progress_bar, say, show_json, show_table
from tiers.each_of import each_of
from tiers.importing import WRITER, records_read, write_all
from tiers.manager.segment_verification import persistently, verify_segment
from tiers.manager.topic_deletion import ClusterTopicExistence
from tiers.metadata.bucket_scan import BucketScan
from tiers.metadata.metadata_producer import KeyAndValue
from tiers.metadata.rebuild import PartitionPlan, plan_partition, records_of, tier_configs_of
from tiers.metadata.topic_based import TopicBasedRemoteLogMetadataManager
from tiers.metadata.written_records import key_and_value
from tiers.model.ids import TopicIdPartition
from tiers.open_tier import TIMEOUT_MS, RemoteTierError, storage_cluster_id, tiered_cluster
from tiers.segment.segment_encryption import KeyRing
from tiers.storage.locations import LocatedRemoteStorageManager
from tiers.tier_config import TierConfig

PlanOfStore = Callable[[str], Awaitable["Rebuild"]]
"""Of the objects of this cluster id."""


@dataclass(frozen=True, slots=True)
class RebuildOptions:
    """`into` is the metadata topic, `cluster_id` says whose objects; None: what the configuration says."""

    into: str | None = None
    cluster_id: str | None = None
    is_applied: bool = False
    skip_undecided: bool = False
    with_unknown_topics: bool = False


@dataclass(slots=True)
class Rebuild:
    """`taken`: offsets of the metadata topic that are taken already; 0 is what is wanted."""

    topic: str
    plans: list[PartitionPlan]
    other_clusters: list[str]
    taken: int
    written: bool = False

    @property
    def undecided(self) -> list[PartitionPlan]:
        return [each for each in self.plans if each.refused]


async def rebuild(config: TierConfig, options: RebuildOptions, plan_of_store: PlanOfStore) -> Rebuild:
    """Raises `RemoteTierError`, and what `plan_of_store` raises."""
    if options.into is not None:
        remote_log = config.remote_log.model_copy(update={"metadata_topic": options.into})
        config = config.model_copy(update={"remote_log": remote_log})
    async with tiered_cluster(config, is_new=True) as (client, cluster):
        cluster_id = options.cluster_id or storage_cluster_id(config, cluster.cluster_id)
        done = await plan_of_store(cluster_id)
        topic_ids = {each.topic_id_partition.topic_id for each in done.plans}
        judge_unknown_topics(
            done.plans, await ClusterTopicExistence(client).gone(topic_ids, TIMEOUT_MS), options.with_unknown_topics
        )
        done.topic = config.remote_log.metadata_topic
        if done.topic in cluster.topics:
            done.taken = await records_read(config, client)
        if not done.plans:
            raise RemoteTierError(f"the store holds nothing of cluster {cluster_id}")
        if options.is_applied and done.taken:
            raise RemoteTierError(f"topic {done.topic} is not empty: delete it, or give another name by --into")
        if options.is_applied and (options.skip_undecided or not done.undecided):
            wanted = [each for each in done.plans if not each.refused]
            await write_all(
                config,
                client,
                lambda metadata: list(_records(wanted)),
                lambda metadata: _check_written(metadata, wanted),
                into_empty=True,
            )
            done.written = True
        return done


async def plan_rebuild(storage: LocatedRemoteStorageManager, cluster_id: str, ring: KeyRing, at_once: int) -> Rebuild:
    """What no manifest names is read back: its copy may never have been verified."""
    scan = BucketScan(cluster_id)
    with progress_bar("objects listed", None) as advance:
        count = await scan.list(storage, advance)
    with progress_bar("objects read", count) as advance:
        await scan.read(storage, persistently, at_once, advance)
    done = judge_scan(scan)
    for plan in done.plans:

        async def check(number: int, plan: PartitionPlan = plan) -> None:
            segment = plan.unnamed[number]
            damages = await verify_segment(storage, segment, ring if ring.keys else None)
            plan.refused += [f"segment {segment.segment_id.id}: {each.what}" for each in damages]

        await each_of(range(len(plan.unnamed)), check, at_once)
    return done


def judge_scan(scan: BucketScan) -> Rebuild:
    """What was read; what no manifest names wants to be read back."""
    plans = [plan_partition(found) for found in scan.partitions.values()]
    plans.sort(key=lambda each: (each.topic_id_partition.topic, each.topic_id_partition.partition))
    return Rebuild("", plans, sorted(scan.other_clusters), 0)


def judge_unknown_topics(plans: Iterable[PartitionPlan], unknown: Set[UUID], are_meant: bool) -> None:
    """`unknown` topic ids are in the store, and no broker of the cluster has them."""
    for plan in plans:
        if plan.segments and plan.topic_id_partition.topic_id in unknown:
            said = plan.notes if are_meant else plan.refused
            said.append(
                f"the cluster has no topic with the id {plan.topic_id_partition.topic_id}: once its metadata is there, "
                "it is a missing topic, and its owner deletes its objects after some days or when an operator says so"
            )


def _records(plans: Sequence[PartitionPlan]) -> Iterator[tuple[TopicIdPartition, Sequence[KeyAndValue]]]:
    now_ms = time.time_ns() // 1_000_000
    for plan in plans:
        yield plan.topic_id_partition, records_of(plan, WRITER, now_ms)
    for update in tier_configs_of(plans, WRITER, now_ms):
        yield update.topic_id_partition, [key_and_value(update)]


def _check_written(metadata: TopicBasedRemoteLogMetadataManager, plans: Sequence[PartitionPlan]) -> None:
    for plan in plans:
        partition = plan.topic_id_partition
        known = {each.segment_id.id: each for each in metadata.list_remote_log_segments(partition)}
        for wanted in plan.segments:
            found = known.pop(wanted.segment_id.id, None)
            if found is None or (found.custom_metadata, found.clamped_to) != (
                wanted.custom_metadata,
                wanted.clamped_to,
            ):
                raise RemoteTierError(f"{partition} does not read back as it was written")
        written_starts = {start.offset for start in metadata.log_starts(partition)}
        is_start_written = plan.log_start is None or plan.log_start.offset in written_starts
        if known or not is_start_written or metadata.gaps(partition) != sorted(plan.gaps):
            raise RemoteTierError(f"{partition} does not read back as it was written")


def show_rebuild(done: Rebuild, options: RebuildOptions, apply: str, as_json: bool) -> None:
    """And ends the command with exit code 1 where something was asked for and not written. `apply` is the option that
    writes."""
    if as_json:
        show_json(
            {
                "topic": done.topic,
                "written": done.written,
                "topic_is_empty": not done.taken,
                "other_clusters": done.other_clusters,
                "partitions": [_as_json(each) for each in done.plans],
            }
        )
    else:
        _print(done)
    if done.undecided:
        say(f"{len(done.undecided)} partitions cannot be decided")
    if not done.written:
        say(_why_not(done, options, apply))
    if done.undecided or not (done.written or not options.is_applied):
        raise typer.Exit(FINDINGS)


def _why_not(done: Rebuild, options: RebuildOptions, apply: str) -> str:
    if done.taken:
        return f"Nothing was written: topic {done.topic} is not empty."
    if options.is_applied:
        return "Nothing was written. With --skip-undecided the others are."
    return f"Nothing was written. With {apply} it is, into {done.topic}."


def _as_json(plan: PartitionPlan) -> dict[str, object]:
    return {
        "topic": plan.topic_id_partition.topic,
        "topic_id": str(plan.topic_id_partition.topic_id),
        "partition": plan.topic_id_partition.partition,
        "segments": len(plan.segments),
        "not_in_manifest": len(plan.unnamed),
        "start_offset": min((each.start_offset for each in plan.segments), default=None),
        "end_offset": max((each.valid_end_offset for each in plan.segments), default=None),
        "log_start_offset": None if plan.log_start is None else plan.log_start.offset,
        "gaps": [gap._asdict() for gap in sorted(plan.gaps)],
        "dropped": plan.dropped,
        "notes": plan.notes,
        "refused": plan.refused,
    }


def _print(done: Rebuild) -> None:
    headings = ("partition", "segments", "from", "to", "log start", "verdict")
    rows = []
    for plan in done.plans:
        line = _as_json(plan)
        verdict = "UNDECIDED" if plan.refused else "written" if done.written else "to be written"
        numbers = (line["segments"], line["start_offset"], line["end_offset"], line["log_start_offset"])
        rows.append((_name(plan.topic_id_partition), *numbers, verdict))
    show_table(headings, rows, headings[1:5])
    for plan in done.plans:
        name = _name(plan.topic_id_partition)
        for kind, sentences in (("refused", plan.refused), ("left out", plan.dropped), ("note", plan.notes)):
            for sentence in sentences:
                typer.echo(f"{name}: {kind}: {sentence}")
    if done.other_clusters:
        typer.echo(f"objects of other clusters were left out: {', '.join(done.other_clusters)}")


def _name(partition: TopicIdPartition) -> str:
    return f"{partition.topic or partition.topic_id}-{partition.partition}"
