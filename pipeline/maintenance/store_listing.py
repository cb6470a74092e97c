"""Compares the store's listing with the metadata: `listing_plan` makes the tasks, `list_part` is the task.

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
from typing import NamedTuple
from uuid import UUID

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
from tiers.upkeep.runner import JobStore

_HEX = "0123456789abcdef"
_ONE_LISTING = 10_000
_SIXTEEN_LISTINGS = 500_000
_TASK_SEGMENTS = 5_000
_EXPECTED = struct.Struct(">16s?q")
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
    def of(cls, partition: TopicIdPartition, segments: Iterable[ExpectedSegment]) -> ExpectedPartition:
        return cls(partition, b"".join(_EXPECTED.pack(*each) for each in segments))

    @property
    def segments(self) -> Iterator[ExpectedSegment]:
        return map(ExpectedSegment._make, _EXPECTED.iter_unpack(self.packed))

    @property
    def count(self) -> int:
        return len(self.packed) // _EXPECTED.size


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
    """The result of a task. `unknown` are objects that the metadata did not know when the task was made, including
    those of other programs."""

    objects: int = 0
    stored_bytes: int = 0
    misfits: list[Misfit] = field(default_factory=list)
    unknown: list[StoredObject] = field(default_factory=list)


def expected_partition(partition: TopicIdPartition, segments: Iterable[StoredSegment]) -> ExpectedPartition:
    """Packs `segments`, which are all that the metadata has of the partition, in any state."""
    found = (ExpectedSegment(each.id, each.is_finished, each.segment_size_bytes) for each in segments)
    return ExpectedPartition.of(partition, found)


def listing_plan(expected: Sequence[ExpectedPartition], cluster_id: str, is_all: bool) -> list[ListTask]:
    """Returns the listing tasks. If `is_all`, they list everything that the tier may have in the store, and `expected`
    must have all partitions of the metadata."""
    if not is_all:
        return list(_partition_listings(expected, cluster_id))
    count = sum(each.count for each in expected)
    digits = 0 if count < _ONE_LISTING else 1 if count < _SIXTEEN_LISTINGS else 2
    by_prefix: dict[str, list[ExpectedPartition]] = {prefix: [] for prefix in _prefixes(digits)}
    for each in expected:
        by_prefix[partition_prefix(cluster_id, each.partition)[:digits]].append(each)
    return [ListTask((prefix,), tuple(found)) for prefix, found in by_prefix.items()]


def _prefixes(digits: int) -> list[str]:
    return [""] if digits == 0 else [shorter + digit for shorter in _prefixes(digits - 1) for digit in _HEX]


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
    storage = await store.opened()
    part = _Part(store.cluster_id, task)
    for prefix in task.prefixes:

        async def listed(prefix: str = prefix) -> list[StoredObject]:
            return [stored async for stored in storage.list_objects(prefix)]

        for stored in await with_retries(listed):
            part.add(stored)
    return part.finish()


class _Part:
    def __init__(self, cluster_id: str, task: ListTask) -> None:
        self._cluster_id = cluster_id
        self._result = ListedPart()
        self._partitions = {(one.partition.topic_id, one.partition.partition): one for one in task.expected}
        self._segments = {segment.uuid: (one.partition, segment) for one in task.expected for segment in one.segments}
        self._seen: set[tuple[bytes, str]] = set()

    def add(self, stored: StoredObject) -> None:
        key = parse_segment_key(stored.key)
        named = key or parse_facts_key(stored.key)
        if named is None or named.cluster_id != self._cluster_id:
            self._result.unknown.append(stored)
            return
        self._result.objects += 1
        self._result.stored_bytes += stored.size_bytes
        if key is None:
            if (named.topic_id, named.partition) not in self._partitions:
                self._result.unknown.append(stored)
            return
        _, segment = self._segments.get(key.segment_uuid.bytes, (None, None))
        if segment is None:
            self._result.unknown.append(stored)
            return
        self._seen.add((segment.uuid, key.suffix))
        is_short = key.suffix == LOG_SUFFIX and stored.size_bytes < segment.log_bytes
        if segment.is_finished and is_short:
            self._misfit(segment, key.suffix, stored.size_bytes)

    def finish(self) -> ListedPart:
        for uuid, (_, segment) in self._segments.items():
            for suffix in (LOG_SUFFIX, INDEXES_SUFFIX):
                if segment.is_finished and (uuid, suffix) not in self._seen:
                    self._misfit(segment, suffix, None)
        return self._result

    def _misfit(self, segment: ExpectedSegment, suffix: str, size_bytes: int | None) -> None:
        partition, _ = self._segments[segment.uuid]
        segment_id = RemoteLogSegmentId(partition, UUID(bytes=segment.uuid))
        self._result.misfits.append(Misfit(segment_id, suffix, size_bytes))
