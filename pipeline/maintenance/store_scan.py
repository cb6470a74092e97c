"""`scan_store`: lists and reads a store for `rebuild` on executors. Only the results return to the driver.

Keys begin with hex digits that spread partitions evenly, so there is one listing per first digit. Then executors read
every `.indexes` and every `.facts` object, some hundreds per task.
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
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage.remote_storage_manager import StoredObject
from tiers.storage.retries import with_retries
from tiers.upkeep.rebuild import BucketScan, Found, Rebuild, judge_scan, read_object
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
    objects: tuple[StoredObject, ...]


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


def read_objects(task: ReadTask) -> list[Found]:
    """Returns the results in the order of the task. An object that cannot be read has a sentence with the reason."""
    return worker().run(_read(task))


async def _read(task: ReadTask) -> list[Found]:
    storage = await task.store.opened()
    return await bounded_gather(task.objects, lambda each: read_object(storage, each), READS_AT_ONCE)


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
    plan = [ReadTask(store, tuple(part)) for part in parts_of(scan.to_read, OBJECTS_PER_TASK)]
    for task, results in zip(plan, await run_beside(runner, "reading", plan, read_objects), strict=True):
        for stored, found in zip(task.objects, results, strict=True):
            scan.put(stored, found)
    return scan


async def planned_rebuild(config: PipelineConfig, runner: TaskRunner, cluster_id: str) -> Rebuild:
    """Plans the rebuild as a single process does (`plan_rebuild`).

    Reads the segments back whose copies may never have been verified."""
    done = judge_scan(await scan_store(config, runner, cluster_id))
    unsure = [(plan, segment) for plan in done.plans for segment in plan.unsure]
    parts = list(parts_of(unsure, SEGMENTS_PER_VERIFY_TASK))
    store = TierStore(config, cluster_id)
    tasks = [VerifyTask(store, tuple(segment for _, segment in part)) for part in parts]
    for part, answers in zip(parts, await run_beside(runner, "reading back", tasks, verify_segments), strict=True):
        for (plan, segment), damages in zip(part, answers, strict=True):
            plan.refused += [f"segment {segment.segment_id.id}: {what}" for what in damages]
    return done


def parts_of(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[first : first + size] for first in range(0, len(items), size)]
