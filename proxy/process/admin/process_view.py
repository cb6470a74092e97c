"""`ProcessView`: what a process shows of itself on the page. The code that opens a part tells the view about it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Final
from uuid import UUID

from prometheus_client import CollectorRegistry

from proxy.admin.cluster_view import ClusterView, OwnersAlarms
from proxy.admin.counts import ProcessReport
from proxy.admin.facts import THIS_PROCESS, RaisedAlarm, WaitingRead
from proxy.admin.source import OwnParts, raised
from proxy.admin.tier_look import TierParts
from proxy.admin.tier_view import TierView
from proxy.cluster.broker_configs import BrokerConfigs
from proxy.handlers.fetch.delayed import WaitingReads
from proxy.metrics import ProxyMetrics
from proxy.process.admin.process_alarms import ProcessAlarm, ProcessAlarms, Trouble
from proxy.process.admin.process_report import CountedParts, process_report
from proxy.process.admin.recent_events import RecentEvents
from proxy.process.live_settings import LiveSettings
from proxy.process.member_settings import compare_members
from tiers.broker.client import BrokerClient, monotonic_ms, wall_clock_ms
from tiers.broker.share_groups import ClusterShareGroups
from tiers.config.topic_policy import Refusal
from tiers.errors import Peer
from tiers.explain.answers import PartitionAnswer
from tiers.explain.explain import Explanation
from tiers.explain.facts import LocalFacts, OwnerFacts, PartitionFacts
from tiers.explain.gathering import lowest_share_start
from tiers.fitness import STORE_PROBE, Fitness
from tiers.log.broker_log import BrokerLogSource
from tiers.metadata.remote_log import RemoteLog
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataManager
from tiers.metadata.topic.topic_based import TopicBasedMetadataLog
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.reader.remote_log_reader import RemoteLogReader
from tiers.storage.locations import LocatedRemoteStorageManager
from tiers.tasks.remote_log_manager import RemoteLogManager
from tiers.tasks.tiered_topics import TieredTopics

_LANE: Final = "page"
_SHARE_GROUPS_TIMEOUT_MS: Final = 1_000


@dataclass(frozen=True, slots=True)
class RunningTasks:
    """The RLM tasks of a process, and the topics that they work on."""

    manager: RemoteLogManager
    topics: TieredTopics


class ProcessView:
    def __init__(self, registry: CollectorRegistry, proxy: ProxyMetrics | None = None) -> None:
        self.alarms = ProcessAlarms()
        self.events = RecentEvents()
        registry.register(self.alarms)
        self._counted = CountedParts(proxy=proxy)
        self._registry = registry
        self._waiting: Callable[[], Iterator[WaitingRead]] = lambda: iter(())
        self.parts = OwnParts(report=self._report)

    def _report(self) -> ProcessReport:
        report = process_report(self._registry, self._counted)
        return replace(
            report,
            alarms=tuple(self.alarms.raised()),
            waiting=tuple(self._waiting()),
            events=self.events.events(),
        )

    def opened_reads(self, reads: WaitingReads, topic_name: Callable[[UUID], str | None]) -> None:
        """`topic_name` returns the latest known name of a topic: clients may name it by its id."""

        def waiting() -> Iterator[WaitingRead]:
            now_ms = wall_clock_ms()
            for each, waited_ms in reads.now():
                partition = each.partition
                topic = partition.topic or topic_name(partition.topic_id) or str(partition.topic_id)
                reason = each.reason or "the read goes on"
                since_ms = now_ms - waited_ms
                yield WaitingRead(each.client_id, topic, partition.partition, each.offset, since_ms, reason)

        self._waiting = waiting

    def opened_store(self, storage: LocatedRemoteStorageManager) -> None:
        self.alarms.watch(ProcessAlarm.STORE_FAILING, lambda: _outages(storage))

    def opened_reader(self, reader: RemoteLogReader) -> None:
        self._counted.reader = reader
        self.parts.accounts = reader.accounts

    async def opened_tier(
        self,
        stack: AsyncExitStack,
        live: LiveSettings,
        client: BrokerClient,
        metadata: RemoteLogMetadataManager,
        running: RunningTasks,
        fitness: Fitness,
    ) -> None:
        """The stack ends the view of the tier."""
        config = live.config
        manager, topics = running.manager, running.topics

        def alarms() -> OwnersAlarms:
            return OwnersAlarms(tuple(raised_alarms(running, metadata, fitness)), manager.copies_waiting())

        def metadata_partition(partition: TopicIdPartition) -> int | None:
            if isinstance(metadata.log, TopicBasedMetadataLog):
                return metadata.log.metadata_partition(partition)
            return None

        self._counted.backlog_bytes = lambda: manager.backlog_bytes
        view = TierView(
            TierParts(
                cluster=lambda: client.cached_metadata,
                metadata=metadata.state,
                topics=topics,
                bounds=BrokerLogSource(client, lane=_LANE).bounds,
                configs=BrokerConfigs(client).of_topics,
                rules=live.rules,
                report=manager.report,
                owns=metadata.log.owns,
                metadata_partition=metadata_partition,
                explained=partial(explained, client, metadata, running, config.remote_log.visible_after_ms),
            ),
            clock_ms=monotonic_ms,
            wall_clock_ms=wall_clock_ms,
        )
        topic = config.remote_log.metadata_topic
        is_topic_based = isinstance(metadata.log, TopicBasedMetadataLog)
        if is_topic_based:
            differing: list[str] = []
            self.alarms.watch(ProcessAlarm.SETTINGS_DIFFER, lambda: differing)
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            stack.callback(tasks.create_task(compare_members(client, topic, live, differing)).cancel)
        self.parts.tier = await stack.enter_async_context(view)
        self.parts.cluster = ClusterView(
            client,
            metadata.log.status,
            topic if is_topic_based else None,
            alarms,
            clock_ms=monotonic_ms,
            wall_clock_ms=wall_clock_ms,
        )


def _outages(storage: LocatedRemoteStorageManager) -> list[Trouble]:
    now_ms = wall_clock_ms()
    return [Trouble(each.reason, each.location, now_ms - (each.lasting_ms or 0)) for each in storage.outages.now()]


async def explained(
    client: BrokerClient,
    metadata: RemoteLogMetadataManager,
    running: RunningTasks,
    visible_after_ms: int,
    partition: TopicIdPartition,
    bounds: LocalLogBounds | None,
    trouble: str,
) -> PartitionAnswer:
    """Explains a partition with what this process knows, which is most if it owns the partition."""
    report, now_ms, remarks = running.manager.report(partition), wall_clock_ms(), list[str]()
    policy = running.topics.policies.get(partition.topic_id)
    refused = running.topics.refused.get(partition.topic)
    local = None
    if bounds is not None:
        groups = ClusterShareGroups(client)
        share_start = await lowest_share_start(groups, partition, _SHARE_GROUPS_TIMEOUT_MS, remarks)
        uncopied_bytes = 0 if report is None else report.uncopied_bytes
        local = LocalFacts(bounds, share_start=share_start, uncopied_bytes=uncopied_bytes)
    seen = (
        (each.segment_id, metadata.state.seen_at_ms(each.segment_id))
        for each in metadata.state.list_remote_log_segments(partition)
    )
    mono_ms = monotonic_ms()
    owner = OwnerFacts(
        name="this proxy" if metadata.log.owns(partition) else None,
        visible_for_ms={segment_id: mono_ms - seen_ms for segment_id, seen_ms in seen if seen_ms is not None},
        copy_hold=None if report is None else report.copy_hold,
        troubles={} if report is None else {each.name: each.error for each in report.stages if each.failures},
        stopped="" if report is None else report.stopped,
        doubt="" if report is None else report.doubt,
    )
    return Explanation(
        PartitionFacts(
            RemoteLog(metadata.state, partition),
            now_ms,
            policy if refused is None else Refusal(partition.topic, refused),
            local=local,
            local_trouble=trouble,
            owner=owner,
            visible_after_ms=visible_after_ms,
            remarks=tuple(remarks),
        )
    ).partition()


def raised_alarms(running: RunningTasks, metadata: RemoteLogMetadataManager, fitness: Fitness) -> Iterator[RaisedAlarm]:
    """Yields the alarms about the remote tier that are raised now, those about the whole process first."""
    if (alarm := metadata.log.status().alarm) is not None:
        yield RaisedAlarm("metadata", "the remote log metadata", alarm)
    if fitness.reason is not None:
        waits_for = Peer.STORE if fitness.failing == [STORE_PROBE] else None
        yield RaisedAlarm("unfit", THIS_PROCESS, fitness.reason, waits_for=waits_for)
    for topic, reason in sorted(running.topics.refused.items()):
        if running.topics.is_expected(topic):
            yield RaisedAlarm("refused-topic", topic, reason)
    yield from raised(running.manager.alarms())
