"""`ClusterView`: the cluster and the owners, as the process sees them that keeps the metadata."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final, NamedTuple

from proxy.admin.facts import BrokerFacts, ClusterFacts, OwnerFacts, PausedTopic, RaisedAlarm
from proxy.admin.tier_look import Look
from proxy.admin.topic_list import summed
from tiers.broker.client import BrokerClient
from tiers.broker.cluster_metadata import Broker, ClusterMetadata
from tiers.errors import BrokerError, Peer, RemoteLogError
from tiers.metadata.metadata_log import MetadataStatus
from tiers.metadata.topic.group.group_members import group_members

_TIMEOUT_MS: Final = 2_000
_BROKERS_MAX_AGE_MS: Final = 5_000
_OWNERS_KEPT_MS: Final = 15_000
_MAX_BROKERS: Final = 1_000
_ROWS_PER_SLICE: Final = 5_000
MAX_PAUSED: Final = 10


class OwnersAlarms(NamedTuple):
    """The alarms of this process. `waiting` counts the partitions whose copy waits, by the peer that is silent."""

    raised: tuple[RaisedAlarm, ...] = ()
    waiting: Mapping[Peer, int] = MappingProxyType({})


class ClusterView:
    """`metadata_topic` is None if the metadata is not in a topic. `alarms` returns those of this process."""

    def __init__(
        self,
        client: BrokerClient,
        status: Callable[[], MetadataStatus],
        metadata_topic: str | None,
        alarms: Callable[[], OwnersAlarms],
        *,
        clock_ms: Callable[[], int],
        wall_clock_ms: Callable[[], int],
    ) -> None:
        self._client = client
        self._status = status
        self._metadata_topic = metadata_topic
        self._alarms = alarms
        self._clock_ms = clock_ms
        self._wall_clock_ms = wall_clock_ms
        self._seen: dict[int, tuple[Broker, int]] = {}
        """Every broker that was named, with the time (wall clock) at which it was named last."""
        self._members: tuple[int, list[OwnerFacts]] = -_OWNERS_KEPT_MS, []
        self._asking = asyncio.Lock()

    async def facts(self, look: Look | None) -> ClusterFacts:
        """`look` is the last look at the tier; None before the first one."""
        trouble = None
        try:
            metadata: ClusterMetadata | None = await self._client.brokers(_BROKERS_MAX_AGE_MS, _TIMEOUT_MS)
        except BrokerError as error:
            metadata, trouble = self._client.cached_metadata, str(error)
        status, alarms = self._status(), self._alarms()
        topics = () if look is None else tuple(look.topics.values())
        partitions = sum(each.partitions for each in topics)
        paused = [PausedTopic(each.topic, each.reason) for each in topics if each.state == "paused"]
        return ClusterFacts(
            cluster_id="" if metadata is None else metadata.cluster_id,
            brokers=tuple(await self._brokers(metadata, is_now=trouble is None)),
            trouble=trouble,
            owners=tuple(await self._who_owns(look, status.owned_partitions)),
            topics=len(topics),
            partitions=partitions,
            bytes=summed(topics),
            metadata_alarm=status.alarm,
            metadata_age_ms=status.freshness_age_ms,
            alarms=alarms.raised,
            waiting_for_store=alarms.waiting.get(Peer.STORE, 0),
            # Without brokers, no process owns a partition.
            waiting_for_brokers=partitions if trouble is not None else alarms.waiting.get(Peer.BROKERS, 0),
            paused_topics=len(paused),
            paused=tuple(paused[:MAX_PAUSED]),
        )

    async def _brokers(self, metadata: ClusterMetadata | None, *, is_now: bool) -> list[BrokerFacts]:
        if metadata is None:
            return []
        now_ms = self._wall_clock_ms()
        if is_now or not self._seen:  # the page may be opened first when no broker answers
            self._seen |= {node_id: (broker, now_ms) for node_id, broker in metadata.brokers.items()}
            while len(self._seen) > _MAX_BROKERS:
                del self._seen[min(self._seen, key=lambda node_id: self._seen[node_id][1])]
        leads: Counter[int] = Counter()
        rows = 0
        for topic in metadata.topics.values():
            leads.update(each.leader_id for each in topic.partitions.values())
            rows += len(topic.partitions)
            if rows >= _ROWS_PER_SLICE:
                rows = 0
                await asyncio.sleep(0)
        return [
            BrokerFacts(
                node_id=node_id,
                host=broker.host,
                port=broker.port,
                rack=broker.rack,
                leads=leads[node_id],
                is_controller=node_id == metadata.controller_id,
                gone_since_ms=None if node_id in metadata.brokers else seen_ms,
            )
            for node_id, (broker, seen_ms) in sorted(self._seen.items())
        ]

    async def _who_owns(self, look: Look | None, own: frozenset[int]) -> list[OwnerFacts]:
        async with self._asking:
            asked_ms, members = self._members
            if self._metadata_topic is not None and self._clock_ms() - asked_ms >= _OWNERS_KEPT_MS:
                try:
                    members = await self._ask(self._metadata_topic)
                except RemoteLogError:
                    members = []
                self._members = self._clock_ms(), members
        if not members:
            members = [OwnerFacts("", "", tuple(sorted(own)), 0, is_this=True)]
        partitions: Counter[int | None] = Counter()
        if look is not None:
            partitions.update(each.metadata_partition for lines in look.partitions.values() for each in lines)
        return [
            replace(
                each,
                partitions=sum(partitions[number] for number in each.metadata_partitions),
                is_this=each.is_this or (bool(own) and set(each.metadata_partitions) == own),
            )
            for each in members
        ]

    async def _ask(self, metadata_topic: str) -> list[OwnerFacts]:
        """Raises `BrokerError`."""
        members = await group_members(self._client, metadata_topic, _TIMEOUT_MS)
        found = [
            OwnerFacts(each.member_id, each.host, tuple(sorted(each.metadata_partitions)), 0, False) for each in members
        ]
        return sorted(found, key=lambda each: each.member)
