"""`ProcessView`: what a process shows of itself on the page. The code that opens a part tells the view about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry

from proxy.admin.cluster_view import ClusterView, Owners
from proxy.admin.facts import RaisedAlarm
from proxy.admin.source import OwnParts, raised
from proxy.admin.tier_look import TierParts
from proxy.admin.tier_view import TierView
from proxy.cluster.broker_configs import BrokerConfigs
from proxy.config import TidegateConfig
from proxy.metrics import ProxyMetrics
from proxy.process.process_report import CountedParts, process_report
from tiers.broker.client import BrokerClient, monotonic_ms
from tiers.fitness import Fitness
from tiers.log.broker_log import BrokerLogSource
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataManager
from tiers.metadata.topic.settings import metadata_group_id
from tiers.metadata.topic.topic_based import TopicBasedRemoteLogMetadataManager, wall_clock_ms
from tiers.model.ids import TopicIdPartition
from tiers.reader.remote_log_reader import RemoteLogReader
from tiers.storage.instrumented import InstrumentedRemoteStorageManager
from tiers.tasks.remote_log_manager import RemoteLogManager
from tiers.tasks.tiered_topics import TieredTopics

_LANE = "page"


@dataclass(frozen=True, slots=True)
class RunningTasks:
    """The RLM tasks of a process, and the topics that they work on."""

    manager: RemoteLogManager
    topics: TieredTopics


class ProcessView:
    def __init__(self, registry: CollectorRegistry, proxy: ProxyMetrics | None = None) -> None:
        self._counted = CountedParts(proxy=proxy)
        self.parts = OwnParts(report=partial(process_report, registry, self._counted))

    def opened_store(self, storage: InstrumentedRemoteStorageManager) -> None:
        self._counted.storage = storage

    def opened_reader(self, reader: RemoteLogReader) -> None:
        self._counted.reader = reader
        self.parts.accounts = reader.accounts

    async def opened_tier(
        self,
        stack: AsyncExitStack,
        config: TidegateConfig,
        client: BrokerClient,
        metadata: RemoteLogMetadataManager,
        running: RunningTasks,
        fitness: Fitness,
    ) -> None:
        """The stack ends the view of the tier."""
        manager, topics = running.manager, running.topics

        def backlog_bytes() -> int:
            reports = (manager.report(each) for each in manager.partitions)
            return sum(report.lag_bytes for report in reports if report is not None)

        def alarms() -> list[RaisedAlarm]:
            return list(_alarms(running, metadata, fitness))

        def metadata_partition(partition: TopicIdPartition) -> int | None:
            if isinstance(metadata, TopicBasedRemoteLogMetadataManager):
                return metadata.metadata_partition(partition)
            return None

        self._counted.backlog_bytes, self._counted.alarms = backlog_bytes, alarms
        view = TierView(
            TierParts(
                cluster=client,
                metadata=metadata,
                topics=topics,
                bounds=BrokerLogSource(client, lane=_LANE),
                configs=BrokerConfigs(client),
                rules=config.topics,
                report=manager.report,
                owns=metadata.owns,
                metadata_partition=metadata_partition,
            ),
            clock_ms=monotonic_ms,
            wall_clock_ms=wall_clock_ms,
        )
        topic = config.remote_log.metadata_topic
        is_topic_based = isinstance(metadata, TopicBasedRemoteLogMetadataManager)
        self.parts.tier = await stack.enter_async_context(view)
        self.parts.cluster = ClusterView(
            client,
            metadata.status,
            Owners(metadata_group_id(topic), topic) if is_topic_based else None,
            alarms,
            clock_ms=monotonic_ms,
            wall_clock_ms=wall_clock_ms,
        )


def _alarms(running: RunningTasks, metadata: RemoteLogMetadataManager, fitness: Fitness) -> Iterator[RaisedAlarm]:
    """Yields the alarms that are raised now, those about the whole process first."""
    if (alarm := metadata.status().alarm) is not None:
        yield RaisedAlarm("tidegate_remote_log_metadata_alarm", "the remote log metadata", alarm)
    if fitness.reason is not None:
        yield RaisedAlarm("tidegate_unfit", "this process", fitness.reason)
    found: list[tuple[str, str, str]] = []
    for policy in running.topics.policies.values():
        if policy.total_conflict:
            yield RaisedAlarm("retention-differs", policy.topic, policy.total_conflict)
    for partition in running.manager.partitions:
        report = running.manager.report(partition)
        if report is not None:
            found += [
                (reason, partition.topic, f"{partition}: {report.error}" if report.error else str(partition))
                for reason in report.alarms
            ]
    yield from raised(found)
