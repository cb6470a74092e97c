"""`Looker` takes a look at the tier: the lines of all partitions and topics, as of one time.

A look at 10,000 partitions takes a second of work. So it is done in slices, between which other tasks run, and what
cannot have changed since the last look is not read again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol
from uuid import UUID

from proxy.admin.facts import PartitionLine, TopicLine, TopicState
from proxy.admin.lines import PartitionKnowledge, SegmentSums, SegmentWalk, partition_line, topic_line
from proxy.cluster.broker_configs import BrokerValue
from tiers.bounded_gather import bounded_gather
from tiers.broker.cluster_metadata import ClusterMetadata
from tiers.config.topic_policy import Rules, TopicPolicy, managed_rule, resume_command
from tiers.errors import RemoteLogError
from tiers.explain.answers import PartitionAnswer
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.tasks.deletion.topic_deletion import deleted_topics
from tiers.tasks.partition_tasks import PartitionReport

LEADER_TIMEOUT_MS: Final = 2_500
_SUMS_KEPT_MS: Final = 300_000
_ASKED_AT_ONCE: Final = 250
_PARTITIONS_PER_SLICE: Final = 20
_SEGMENTS_PER_SLICE: Final = 1_000


class Policies(Protocol):
    """The part of `TieredTopics` that the view uses."""

    @property
    def policies(self) -> Mapping[UUID, TopicPolicy]: ...

    @property
    def refused(self) -> Mapping[str, str]: ...


@dataclass(frozen=True, slots=True)
class TierParts:
    """What the view looks at. Only an owner answers `owns` and `report` for its partitions.

    `metadata_partition` returns None while the metadata topic is not known.

    `bounds` is that of a `LogSource`, and `configs` is `BrokerConfigs.of_topics`."""

    cluster: Callable[[], ClusterMetadata | None]
    metadata: RemoteLogMetadataState
    topics: Policies
    bounds: Callable[[TopicIdPartition, int], Awaitable[LocalLogBounds]]
    configs: Callable[[Collection[str], int], Awaitable[Mapping[str, Mapping[str, BrokerValue]]]]
    rules: Rules
    report: Callable[[TopicIdPartition], PartitionReport | None]
    owns: Callable[[TopicIdPartition], bool]
    metadata_partition: Callable[[TopicIdPartition], int | None]
    explained: Callable[[TopicIdPartition, LocalLogBounds | None, str], Awaitable[PartitionAnswer]]
    """Explains a partition. It gets the leader's bounds, or why the leader did not answer."""


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the tier. The topics are in the order of their names."""

    as_of_ms: int
    began_ms: int
    topics: Mapping[str, TopicLine] = field(default_factory=dict)
    """By name; a deleted topic by name and id."""
    partitions: Mapping[str, Sequence[PartitionLine]] = field(default_factory=dict)
    ids: Mapping[str, UUID] = field(default_factory=dict)


class Looker:
    """`clock_ms` is monotonic."""

    def __init__(self, parts: TierParts, clock_ms: Callable[[], int], wall_clock_ms: Callable[[], int]) -> None:
        self._parts = parts
        self._clock_ms = clock_ms
        self._wall_clock_ms = wall_clock_ms
        self._sums: dict[TopicIdPartition, tuple[int, tuple[int | None, int | None], SegmentSums]] = {}

    async def look(self) -> Look:
        """Raises `RemoteLogError`."""
        began_ms, parts = self._clock_ms(), self._parts
        cluster = parts.cluster()
        partitions = self._partitions()
        answers = await bounded_gather(partitions, lambda each: self._bounds(each, cluster), _ASKED_AT_ONCE)
        topics: dict[str, TopicLine] = {}
        lines: dict[str, list[PartitionLine]] = {}
        ids: dict[str, UUID] = {}
        for number, (partition, answer) in enumerate(zip(partitions, answers, strict=True), 1):
            if not number % _PARTITIONS_PER_SLICE:
                await asyncio.sleep(0)
            key = self._key_of(partition, cluster)
            ids[key] = partition.topic_id
            lines.setdefault(key, []).append(await self._line(partition, cluster, answer))
        self._sums = {each: self._sums[each] for each in partitions}
        for number, (key, listed) in enumerate(lines.items(), 1):
            if not number % _PARTITIONS_PER_SLICE:
                await asyncio.sleep(0)
            listed.sort(key=lambda each: each.partition)
            state, reason = self._state_of(ids[key], cluster)
            topics[key] = topic_line(key, str(ids[key]), state, listed, reason)
        for name, reason in parts.topics.refused.items():
            known = None if cluster is None else cluster.topics.get(name)
            if name not in topics:
                topic_id = "" if known is None else str(known.topic_id)
                topics[name] = topic_line(name, topic_id, "refused", (), reason, len(known.partitions) if known else 0)
        ordered = {name: topics[name] for name in sorted(topics)}
        return Look(self._wall_clock_ms(), began_ms, ordered, lines, ids)

    def _partitions(self) -> list[TopicIdPartition]:
        """Returns the partitions of the tiered topics, and those of which the metadata knows anything."""
        policies = self._parts.topics.policies
        tiered = [each for policy in policies.values() for each in policy.partitions()]
        return tiered + [each for each in self._parts.metadata.partitions() if each.topic_id not in policies]

    async def _bounds(
        self, partition: TopicIdPartition, cluster: ClusterMetadata | None
    ) -> LocalLogBounds | str | None:
        """Returns the leader's bounds, or why it did not answer. None: there is no such topic any more."""
        if cluster is not None and partition.topic_id not in cluster.topics_by_id:
            return None
        try:
            return await self._parts.bounds(partition, LEADER_TIMEOUT_MS)
        except RemoteLogError as error:
            return str(error)

    def _key_of(self, partition: TopicIdPartition, cluster: ClusterMetadata | None) -> str:
        """Returns the topic's name. Topics that are gone may share it, so it is followed by their id."""
        is_there = cluster is None or partition.topic_id in cluster.topics_by_id
        return partition.topic if is_there and partition.topic else f"{partition.topic}@{partition.topic_id}"

    def _state_of(self, topic_id: UUID, cluster: ClusterMetadata | None) -> tuple[TopicState, str]:
        parts = self._parts
        policy = parts.topics.policies.get(topic_id)
        if policy is not None:
            if policy.paused:
                ends = resume_command(policy.topic, policy.paused)
                return "paused", f"an operator paused {' and '.join(sorted(policy.paused))}: `{ends}` ends the pause"
            return ("paused", "remote.log.copy.disable is set") if policy.copy_disable else ("tiered", "")
        if topic_id in deleted_topics(parts.metadata):
            return "deleted", "the topic was deleted: its remote log is removed"
        known = None if cluster is None else cluster.topics_by_id.get(topic_id)
        if cluster is not None and known is None:
            return "missing", "no broker knows the topic"
        if known is not None and (reason := parts.topics.refused.get(known.name)):
            return "refused", reason
        if known is not None and managed_rule(known.name, parts.rules(), {}) is not None:
            return "paused", "the tier settings of the topic could not be read yet"
        return "paused", "no rule of the settings tiers the topic: its remote log stays readable"

    async def _line(
        self, partition: TopicIdPartition, cluster: ClusterMetadata | None, answer: LocalLogBounds | str | None
    ) -> PartitionLine:
        parts, metadata = self._parts, self._parts.metadata
        bounds = answer if isinstance(answer, LocalLogBounds) else None
        trim = metadata.local_log_start(partition)
        known = PartitionKnowledge(
            partition=partition,
            log_start_offset=metadata.log_start_offset(partition),
            remote_start=metadata.earliest_offset(partition),
            remote_end=metadata.remote_end_offset(partition),
            trimmed_to=None if trim is None else trim.offset,
            gaps=len(metadata.gaps(partition)),
            metadata_partition=parts.metadata_partition(partition),
            is_owned=parts.owns(partition),
        )
        local_start = bounds.log_start_offset if bounds is not None else known.trimmed_to or 0
        entry = None if cluster is None else cluster.partition(partition)
        return partition_line(
            known,
            await self._sums_of(known, local_start),
            bounds,
            parts.report(partition),
            None if entry is None or entry.leader_id < 0 else entry.leader_id,
            answer if isinstance(answer, str) else None,
        )

    async def _sums_of(self, known: PartitionKnowledge, local_start: int) -> SegmentSums:
        """Walks the segments, unless the ends of the remote log are as before."""
        now_ms, ends = self._clock_ms(), (known.remote_start, known.remote_end)
        before = self._sums.get(known.partition)
        if before is not None:
            walked_ms, walked_ends, sums = before
            if walked_ends == ends and sums.tail_from <= local_start and now_ms - walked_ms < _SUMS_KEPT_MS:
                return sums
        walk = SegmentWalk(local_start)
        for number, segment in enumerate(self._parts.metadata.stored_segments(known.partition), 1):
            walk.add(segment)
            if not number % _SEGMENTS_PER_SLICE:
                await asyncio.sleep(0)
        sums = walk.result()
        self._sums[known.partition] = now_ms, ends, sums
        return sums
