"""`scan_store`: lists and reads a store for `rebuild` on executors. Only the results return to the driver.

Keys begin with hex digits that spread partitions evenly, so there is one listing per first digit. Then executors read
every `.indexes` object and every manifest, some hundreds per task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from pipeline.config import PipelineConfig
from pipeline.job_services import run_beside
from pipeline.maintenance.store_listing import TierStore
from pipeline.spark.task_runner import TaskRunner
from pipeline.spark.worker import worker
from tiers.access.open_tier import open_key_ring
from tiers.bounded_gather import bounded_gather
from tiers.metadata.partition_manifest import PartitionManifest
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage.remote_storage_manager import StoredObject
from tiers.storage.retries import with_retries
from tiers.upkeep.bucket_scan import BucketScan, IndexesKey, read_indexes, read_manifest
from tiers.upkeep.rebuild import Rebuild, judge_scan
from tiers.upkeep.rebuild_plan import FoundIndexes
from tiers.verify.segment_verification import verify_segment

T = TypeVar("T")

PREFIXES = tuple("0123456789abcdef")
OBJECTS_PER_TASK = 500
READS_AT_ONCE = 32
SEGMENTS_PER_VERIFY_TASK = 4


@dataclass(frozen=True, slots=True)
class ListTask:
    store: TierStore
    prefix: str


@dataclass(frozen=True, slots=True)
class ReadTask:
    store: TierStore
    indexes: tuple[IndexesKey, ...] = ()
    manifests: tuple[TopicIdPartition, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadResult:
    """The results in the order of the task. An object that cannot be read has a sentence with the reason."""

    indexes: tuple[FoundIndexes | str, ...]
    manifests: tuple[PartitionManifest | str, ...]


@dataclass(frozen=True, slots=True)
class VerifyTask:
    store: TierStore
    segments: tuple[RemoteLogSegmentMetadata, ...]


def list_prefix(task: ListTask) -> list[StoredObject]:
    return worker().run(_list(task))


async def _list(task: ListTask) -> list[StoredObject]:
    storage = await task.store.opened()

    async def listed() -> list[StoredObject]:
        return [stored async for stored in storage.list_objects(task.prefix)]

    return await with_retries(listed)


def read_objects(task: ReadTask) -> ReadResult:
    return worker().run(_read(task))


async def _read(task: ReadTask) -> ReadResult:
    storage = await task.store.opened()
    indexes = await bounded_gather(task.indexes, lambda key: read_indexes(storage, key, with_retries), READS_AT_ONCE)
    manifests = await bounded_gather(
        task.manifests, lambda one: read_manifest(storage, task.store.cluster_id, one, with_retries), READS_AT_ONCE
    )
    return ReadResult(tuple(indexes), tuple(manifests))


def verify_segments(task: VerifyTask) -> list[list[str]]:
    """Returns, for each segment, what is wrong with it."""
    return worker().run(_verify(task))


async def _verify(task: VerifyTask) -> list[list[str]]:
    storage = await task.store.opened()
    ring = open_key_ring(task.store.config)
    return [
        [damage.what for damage in await verify_segment(storage, segment, ring if ring.keys else None)]
        for segment in task.segments
    ]


async def scan_store(config: PipelineConfig, runner: TaskRunner, cluster_id: str) -> BucketScan:
    """Scans the store. Raises `JobError`."""
    store = TierStore(config, cluster_id)
    scan = BucketScan(cluster_id)
    for listed in await run_beside(runner, "listing", [ListTask(store, each) for each in PREFIXES], list_prefix):
        for stored in listed:
            scan.take(stored)
    plan = [
        *(ReadTask(store, indexes=tuple(part)) for part in parts_of(scan.indexes, OBJECTS_PER_TASK)),
        *(ReadTask(store, manifests=tuple(part)) for part in parts_of(scan.manifests, OBJECTS_PER_TASK)),
    ]
    for task, result in zip(plan, await run_beside(runner, "reading", plan, read_objects), strict=True):
        for key, found in zip(task.indexes, result.indexes, strict=True):
            scan.put_indexes(key, found)
        for partition, manifest in zip(task.manifests, result.manifests, strict=True):
            scan.put_manifest(partition, manifest)
    return scan


async def planned_rebuild(config: PipelineConfig, runner: TaskRunner, cluster_id: str) -> Rebuild:
    """Plans the rebuild as a single process does (`plan_rebuild`). Segments that no manifest names are read back."""
    done = judge_scan(await scan_store(config, runner, cluster_id))
    unnamed = [(plan, segment) for plan in done.plans for segment in plan.unnamed]
    parts = list(parts_of(unnamed, SEGMENTS_PER_VERIFY_TASK))
    store = TierStore(config, cluster_id)
    tasks = [VerifyTask(store, tuple(segment for _, segment in part)) for part in parts]
    for part, answers in zip(parts, await run_beside(runner, "reading back", tasks, verify_segments), strict=True):
        for (plan, segment), damages in zip(part, answers, strict=True):
            plan.refused += [f"segment {segment.segment_id.id}: {what}" for what in damages]
    return done


def parts_of(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[first : first + size] for first in range(0, len(items), size)]
