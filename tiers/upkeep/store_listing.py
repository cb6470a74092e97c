"""`list_store` compares the store's listing with the metadata: `listing_plan` makes the tasks, `list_part` is the task.

Keys begin with four hex digits that spread partitions evenly. A small tier is one listing. A large tier is one listing
per leading digits, which skips objects that other programs store under other names. For chosen topics there is one
listing per partition. A task receives what the metadata knows of its part, and returns sums and differences only: the
two objects of each of a million segments never travel. The metadata was read before the listing, so the caller must
judge unknown objects by the metadata that it reads afterwards.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple
from uuid import UUID

from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.stored_segment import StoredSegment
from tiers.storage.object_key import (
    INDEXES_SUFFIX,
    LOG_SUFFIX,
    parse_facts_key,
    parse_segment_key,
    partition_prefix,
)
from tiers.storage.remote_storage_manager import StoredObject
from tiers.storage.retries import with_retries
from tiers.upkeep.runner import JobStore, Runner

HEX_DIGITS: Final = tuple("0123456789abcdef")
"""The first characters of the keys of segments and facts. They spread the partitions evenly."""
_ONE_LISTING = 10_000
_SIXTEEN_LISTINGS = 500_000
_TASK_SEGMENTS = 5_000
EXPECTED = struct.Struct(">16s?q")
"""The layout of an `ExpectedSegment`."""


class ExpectedSegment(NamedTuple):
    uuid: bytes
    is_finished: bool
    log_bytes: int


@dataclass(frozen=True, slots=True)
class ExpectedPartition:
    """The segments of a partition, packed into bytes, because a plan has all segments of the tier."""

    partition: TopicIdPartition
    packed: bytes

    @classmethod
    def of(cls, partition: TopicIdPartition, segments: Iterable[StoredSegment]) -> ExpectedPartition:
        """`segments` are all that the metadata has of the partition, in any state."""
        packed = (EXPECTED.pack(each.id, each.is_finished, each.segment_size_bytes) for each in segments)
        return cls(partition, b"".join(packed))

    @property
    def segments(self) -> Iterator[ExpectedSegment]:
        return map(ExpectedSegment._make, EXPECTED.iter_unpack(self.packed))

    @property
    def count(self) -> int:
        return len(self.packed) // EXPECTED.size


@dataclass(frozen=True, slots=True)
class ListTask:
    prefixes: tuple[str, ...]
    expected: tuple[ExpectedPartition, ...]


class Misfit(NamedTuple):
    """An object of a finished segment that is too short, or not listed (`size_bytes` is None)."""

    segment_id: RemoteLogSegmentId
    suffix: str
    size_bytes: int | None


@dataclass(slots=True)
class ListedPart:
    """The result of a task, or of all. `unknown` are objects that the metadata did not know when the task was made,
    including those of other programs."""

    objects: int = 0
    stored_bytes: int = 0
    misfits: list[Misfit] = field(default_factory=list)
    unknown: list[StoredObject] = field(default_factory=list)


async def list_store(
    metadata: RemoteLogMetadataState,
    store: JobStore,
    runner: Runner,
    partitions: Sequence[TopicIdPartition],
    *,
    is_all: bool,
) -> ListedPart:
    """Lists the objects of `partitions`. If `is_all`, these are all partitions of the metadata, and it lists all
    objects. Raises `JobError`."""
    expected = [ExpectedPartition.of(each, metadata.stored_segments(each)) for each in partitions]
    plan = listing_plan(expected, store.cluster_id, runner.parallelism, is_all=is_all)
    whole = ListedPart()
    for part in await runner.run("listing", plan, partial(list_part, store)):
        whole.objects += part.objects
        whole.stored_bytes += part.stored_bytes
        whole.misfits += part.misfits
        whole.unknown += part.unknown
    return whole


def listing_plan(
    expected: Sequence[ExpectedPartition], cluster_id: str, parallelism: int, *, is_all: bool
) -> list[ListTask]:
    """Returns the listing tasks. If `is_all`, they list everything that the tier may have in the store, and `expected`
    must have all partitions of the metadata."""
    if not is_all:
        return list(_partition_listings(expected, cluster_id))
    count = sum(each.count for each in expected)
    digits = 0 if count < _ONE_LISTING or parallelism == 1 else 1 if count < _SIXTEEN_LISTINGS else 2
    by_prefix: dict[str, list[ExpectedPartition]] = {prefix: [] for prefix in _prefixes(digits)}
    for each in expected:
        by_prefix[partition_prefix(cluster_id, each.partition)[:digits]].append(each)
    return [ListTask((prefix,), tuple(found)) for prefix, found in by_prefix.items()]


def _prefixes(digits: int) -> list[str]:
    return [""] if digits == 0 else [shorter + digit for shorter in _prefixes(digits - 1) for digit in HEX_DIGITS]


def _partition_listings(expected: Sequence[ExpectedPartition], cluster_id: str) -> Iterator[ListTask]:
    some: list[ExpectedPartition] = []
    count = 0
    for each in expected:
        some.append(each)
        count += each.count + 1
        if count >= _TASK_SEGMENTS or each is expected[-1]:
            yield ListTask(tuple(partition_prefix(cluster_id, one.partition) for one in some), tuple(some))
            some, count = [], 0


async def list_part(store: JobStore, task: ListTask) -> ListedPart:
    """Lists one part. Raises `RemoteStorageError` if the store cannot be listed."""
    partitions = {(one.partition.topic_id, one.partition.partition) for one in task.expected}
    segments = {segment.uuid: (one.partition, segment) for one in task.expected for segment in one.segments}
    seen: set[tuple[bytes, str]] = set()
    part = ListedPart()

    def misfit(uuid: bytes, suffix: str, size_bytes: int | None) -> None:
        part.misfits.append(Misfit(RemoteLogSegmentId(segments[uuid][0], UUID(bytes=uuid)), suffix, size_bytes))

    for prefix in task.prefixes:
        for stored in await list_prefix(store, prefix):
            key = parse_segment_key(stored.key)
            named = key or parse_facts_key(stored.key)
            if named is None or named.cluster_id != store.cluster_id:
                part.unknown.append(stored)
                continue
            part.objects += 1
            part.stored_bytes += stored.size_bytes
            if key is None:
                if (named.topic_id, named.partition) not in partitions:
                    part.unknown.append(stored)
                continue
            uuid = key.segment_uuid.bytes
            if uuid not in segments:
                part.unknown.append(stored)
                continue
            seen.add((uuid, key.suffix))
            _, segment = segments[uuid]
            if segment.is_finished and key.suffix == LOG_SUFFIX and stored.size_bytes < segment.log_bytes:
                misfit(uuid, key.suffix, stored.size_bytes)
    for uuid, (_, segment) in segments.items():
        for suffix in (LOG_SUFFIX, INDEXES_SUFFIX):
            if segment.is_finished and (uuid, suffix) not in seen:
                misfit(uuid, suffix, None)
    return part


async def list_prefix(store: JobStore, prefix: str) -> list[StoredObject]:
    """Lists the objects below a prefix, again from the start after a failure."""
    storage = await store.opened()

    async def listed() -> list[StoredObject]:
        return [stored async for stored in storage.list_objects(prefix)]

    return await with_retries(listed)
