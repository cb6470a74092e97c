"""`SimCluster`: three brokers with replicated partitions, in one process and in virtual time.

* A leader appends, its followers copy a moment later, and the high watermark follows the in-sync replicas. A follower
  learns a high watermark one copy late, so that a new leader's may lie below the committed end.
* A broker that is *cut off* reaches neither the controller nor other brokers, but clients reach it. It believes in the
  leaders that it knew, and goes on answering.
* An unclean election makes any replica the leader, with the log that it has.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from protocol.errors import ErrorCode
from tests.support.simulation.loop import VirtualLoop
from tests.support.simulation.replica_log import Batch, ReplicaLog, placed

HOST = "broker-"
PORT = 9092
CLUSTER_ID = "simulated"
_ISR_TIMEOUT_S = 2.0


@dataclass(eq=False)
class SimTopic:
    name: str
    topic_id: UUID
    configs: dict[str, str]
    partitions: list[SimPartition] = field(default_factory=list)

    @property
    def min_isr(self) -> int:
        return int(self.configs.get("min.insync.replicas", "1"))

    @property
    def has_append_time(self) -> bool:
        return self.configs.get("message.timestamp.type") == "LogAppendTime"


@dataclass(eq=False)
class SimPartition:
    topic: SimTopic
    index: int
    replicas: dict[int, ReplicaLog]
    leader: int
    leader_epoch: int
    isr: set[int]
    epoch_start: int = 0
    """The log end at the last election. Until the high watermark reaches it, the leader tells no latest offset."""
    watchers: list[Callable[[], None]] = field(default_factory=list)
    """Called when the partition may have an answer for somebody who waits."""
    is_copying: bool = False
    unreadable_at: int = -1
    """An offset in a batch that the disks of all brokers have damaged; -1: none."""

    @property
    def log(self) -> ReplicaLog:
        """The log of the true leader. While there is none, that of the last one."""
        return self.replicas[self.leader if self.leader >= 0 else self.last_leader]

    last_leader: int = 0

    def __str__(self) -> str:
        return f"{self.topic.name}-{self.index}"


class View(NamedTuple):
    """What a broker believes of a partition."""

    leader: int
    leader_epoch: int
    isr: tuple[int, ...]


@dataclass(eq=False)
class SimBroker:
    node_id: int
    is_up: bool = True
    slow_ms: int = 0
    views: dict[SimPartition, View] | None = None
    """The views of a broker that is cut off. None: it knows what the controller knows."""
    topics: dict[str, SimTopic] | None = None
    configs: dict[str, dict[str, str]] | None = None
    incarnation: int = 0

    @property
    def is_cut_off(self) -> bool:
        return self.views is not None


def _base_offset(batch: Batch) -> int:
    return batch.base_offset


def _place(batches: list[Batch], offset: int) -> int:
    """Returns where the first batch is that begins at `offset` or later. It is mostly the end, or the last batch."""
    if not batches or batches[-1].base_offset < offset:
        return len(batches)
    if len(batches) > 1 and batches[-2].base_offset < offset:
        return len(batches) - 1
    return bisect_left(batches, offset, key=_base_offset)


def _is_copied(log: ReplicaLog, leader: ReplicaLog) -> bool:
    """Whether a follower has all that the leader has. Most copies find nothing new but the high watermark."""
    if log.end != leader.end or log.start != leader.start or not log.batches or not leader.batches:
        return False
    return log.batches[-1] is leader.batches[-1]


def _common_end(log: ReplicaLog, leader: ReplicaLog) -> int:
    """Returns the end of the last batch that both logs have; what the leader trimmed counts as common.

    If they have none, it is where the leader's first epoch of the log ends, which may lie below the log."""
    for batch in reversed(log.batches):
        if batch.next_offset <= leader.start:
            return batch.next_offset
        place = _place(leader.batches, batch.base_offset)
        if place < len(leader.batches):
            other = leader.batches[place]
            if other is batch or other[:3] == batch[:3]:
                return batch.next_offset
    if not log.batches:
        return min(log.end, leader.end)
    _, epoch_end = leader.end_offset_for(log.epochs[0][0])
    begin = log.batches[0].base_offset
    return min(begin, epoch_end) if epoch_end >= 0 else begin


class SimCluster:
    def __init__(self, loop: VirtualLoop, rng: random.Random, wall_ms: Callable[[], int]) -> None:
        self.loop = loop
        self.rng = rng
        self.wall_ms = wall_ms
        self.brokers = {number: SimBroker(number) for number in (1, 2, 3)}
        self.topics: dict[str, SimTopic] = {}
        self.hides_sizes = False
        """Whether the proxy may not describe the cluster, so that no broker answers the sizes of its logs."""
        self.refuses_deletions = False
        """Whether no topic may be deleted (delete.topic.enable=false)."""
        self.on_topic_deleted: Callable[[SimTopic], None] = lambda topic: None
        """Called after a deletion, before anybody has the answer."""
        self.version = 0
        """Counts the changes of what Metadata says."""
        self.on_lost: Callable[[SimPartition, int], None] = lambda partition, old_end: None
        """Called after an unclean election, with the end of the log before it."""
        self.on_removed: Callable[[SimPartition, int], None] = lambda partition, end: None
        """Called before a clean election of a leader that lacks the records below `end`."""
        self.on_append: Callable[[SimPartition, Batch], None] = lambda partition, batch: None
        self.on_committed: Callable[[SimPartition, int], None] = lambda partition, before: None
        """Called when the high watermark has risen from `before`."""
        self.on_moved: Callable[[], None] = lambda: None
        """Called when a broker came, went, or lost the controller."""

    # Topics

    def create_topic(self, name: str, partitions: int, configs: dict[str, str]) -> SimTopic:
        topic = SimTopic(name, UUID(int=self.rng.getrandbits(128) | 1), dict(configs))
        nodes = sorted(self.brokers)
        for index in range(partitions):
            leader = nodes[(index + len(self.topics)) % len(nodes)]
            partition = SimPartition(
                topic, index, {node: ReplicaLog() for node in nodes}, leader, 0, set(nodes), last_leader=leader
            )
            partition.log.assign_epoch(0, 0)
            topic.partitions.append(partition)
        self.topics[name] = topic
        self.version += 1
        for partition in topic.partitions:
            if not self._is_reachable(partition.leader):
                self.elect(partition)
        return topic

    def lose_topic(self, topic: SimTopic) -> None:
        """The controllers forget a topic, as after a restore of their log from an older copy. No record is lost."""
        self.topics.pop(topic.name, None)
        self.version += 1
        for partition in topic.partitions:
            self._changed(partition)

    def bring_back(self, topic: SimTopic) -> None:
        self.topics[topic.name] = topic
        self.version += 1
        for partition in topic.partitions:
            if not self._is_reachable(partition.leader):
                self.elect(partition)
            self.copy_soon(partition)

    def partitions(self) -> Iterator[SimPartition]:
        for topic in list(self.topics.values()):
            yield from topic.partitions

    def topics_seen_by(self, broker: SimBroker) -> dict[str, SimTopic]:
        return self.topics if broker.topics is None else broker.topics

    def configs_seen_by(self, broker: SimBroker, topic: SimTopic) -> dict[str, str]:
        return topic.configs if broker.configs is None else broker.configs.get(topic.name, {})

    def topic_by_id(self, broker: SimBroker, topic_id: UUID) -> SimTopic | None:
        wanted = topic_id.int
        for topic in self.topics_seen_by(broker).values():
            if topic.topic_id.int == wanted:
                return topic
        return None

    def view(self, broker: SimBroker, partition: SimPartition) -> View:
        if broker.views is not None and partition in broker.views:
            return broker.views[partition]
        return View(partition.leader, partition.leader_epoch, tuple(sorted(partition.isr)))

    # Leadership

    def check_leader(self, broker: SimBroker, partition: SimPartition, epoch: int | None) -> int:
        """Returns the error code with which the broker answers a request for the partition's log."""
        seen = partition if broker.views is None else self.view(broker, partition)
        if epoch is not None and epoch >= 0:
            if epoch < seen.leader_epoch:
                return ErrorCode.FENCED_LEADER_EPOCH
            if epoch > seen.leader_epoch:
                return ErrorCode.UNKNOWN_LEADER_EPOCH
        return ErrorCode.NONE if seen.leader == broker.node_id else ErrorCode.NOT_LEADER_OR_FOLLOWER

    def elect(self, partition: SimPartition, unclean: int | None = None) -> None:
        """Elects a leader of the in-sync replicas; `unclean` names another one."""
        self.version += 1
        if unclean is None:
            able = [node for node in sorted(partition.isr) if self._is_reachable(node)]
            if not able:
                partition.leader = -1
                self._changed(partition)
                return
            leader = self.rng.choice(able)
            partition.isr = {node for node in partition.isr if self._is_reachable(node)}
            # A follower that cut its log below its log start has a log start above the leader's.
            if partition.replicas[leader].start > partition.log.start:
                self.on_removed(partition, partition.replicas[leader].start)
        else:
            leader, partition.isr = unclean, {unclean}
        old_end = partition.log.high_watermark
        partition.leader = partition.last_leader = leader
        partition.leader_epoch += 1
        log = partition.replicas[leader]
        log.assign_epoch(partition.leader_epoch, log.end)
        partition.epoch_start = log.end
        if unclean is not None:
            log.high_watermark = log.end if partition.isr == {leader} else log.high_watermark
            self.on_lost(partition, old_end)
        self._changed(partition)
        self.copy_soon(partition)

    def _is_reachable(self, node: int) -> bool:
        return self.brokers[node].is_up and not self.brokers[node].is_cut_off

    def _changed(self, partition: SimPartition) -> None:
        for watcher in list(partition.watchers):
            watcher()

    # Replication

    def append(self, broker: SimBroker, partition: SimPartition, data: bytes) -> Batch:
        """Appends a producer's batch to the log of a broker that believes to be the leader."""
        log, view = partition.replicas[broker.node_id], self.view(broker, partition)
        append_time = self.wall_ms() if partition.topic.has_append_time else None
        return self.append_batch(broker, partition, placed(data, log.end, view.leader_epoch, append_time))

    def append_batch(self, broker: SimBroker, partition: SimPartition, batch: Batch) -> Batch:
        partition.replicas[broker.node_id].append(batch)
        if partition.leader == broker.node_id:
            self.on_append(partition, batch)
        self.copy_soon(partition)
        return batch

    def copy_soon(self, partition: SimPartition) -> None:
        if not partition.is_copying:
            partition.is_copying = True
            self.loop.later(self.rng.uniform(0.001, 0.01), self._copy, partition)

    def _copy(self, partition: SimPartition) -> None:
        partition.is_copying = False
        if partition.leader < 0:
            return
        leader = partition.log
        if self._is_reachable(partition.leader):
            for node, log in partition.replicas.items():
                if node != partition.leader and self._is_reachable(node):
                    follows = self.follow(log, leader)
                    if follows != (node in partition.isr):
                        partition.isr ^= {node}
                        self.version += 1
        before = leader.high_watermark
        lagging = any(
            log.high_watermark != before
            for node, log in partition.replicas.items()
            if node in partition.isr and self._is_reachable(node)
        )
        end = min(partition.replicas[node].end for node in partition.isr)
        leader.high_watermark = max(before, min(end, leader.end))
        if leader.high_watermark > before:
            self.on_committed(partition, before)
            self._changed(partition)
        if lagging or leader.high_watermark > before:
            self.copy_soon(partition)

    @staticmethod
    def follow(log: ReplicaLog, leader: ReplicaLog) -> bool:
        """Copies the leader's log as a follower does: first it cuts off what the leader does not have.

        Returns False if the follower cannot append, and stays out of sync: its next offset is within a batch of the
        leader. A follower without records begins with that batch (`UnexpectedAppendOffsetException` in Kafka).
        """
        if _is_copied(log, leader):
            log.high_watermark = max(log.start, min(leader.high_watermark, log.end))
            return True
        if log.end < leader.start or log.start > leader.end:
            log.reset_to(leader.start)
        common = _common_end(log, leader)
        if common < log.start:
            log.reset_to(common)  # the log start follows a truncation below it (`UnifiedLog.truncateTo`)
        elif common < log.end:
            log.truncate_to(common)
        first = leader.batch_start(log.end)
        if first is not None and first < log.end:
            if log.start < log.end:
                return False
            log.reset_to(first)
        for batch in leader.batches[_place(leader.batches, log.end) :]:
            log.append(batch)
        log.end = max(log.end, min(leader.end, leader.start))
        log.trim_to(min(leader.start, log.end))
        log.high_watermark = max(log.start, min(leader.high_watermark, log.end))
        return True

    def _shrink(self, node: int) -> None:
        for partition in self.partitions():
            if node in partition.isr and partition.leader not in (node, -1) and not self._is_reachable(node):
                partition.isr.discard(node)
                self.version += 1
                self.copy_soon(partition)

    def trim(self, broker: SimBroker, partition: SimPartition, offset: int) -> None:
        partition.replicas[broker.node_id].trim_to(offset)
        self.copy_soon(partition)

    # Faults

    def stop(self, node: int) -> None:
        broker = self.brokers[node]
        if not broker.is_up:
            return
        broker.is_up = False
        broker.incarnation += 1
        self._move_away(node)

    def start(self, node: int) -> None:
        broker = self.brokers[node]
        broker.is_up = True
        self._come_back()

    def cut_off(self, node: int) -> None:
        broker = self.brokers[node]
        if broker.is_cut_off or not broker.is_up:
            return
        broker.views = {one: self.view(broker, one) for one in self.partitions()}
        broker.topics = dict(self.topics)
        broker.configs = {topic.name: dict(topic.configs) for topic in self.topics.values()}
        self._move_away(node)

    def rejoin(self, node: int) -> None:
        broker = self.brokers[node]
        broker.views = broker.topics = broker.configs = None
        self._come_back()

    def _move_away(self, node: int) -> None:
        def fence() -> None:
            if self._is_reachable(node):
                return
            for partition in self.partitions():
                if partition.leader == node:
                    self.elect(partition)
            self._shrink(node)
            self.on_moved()

        self.version += 1
        self.on_moved()
        self.loop.later(self.rng.uniform(0.1, _ISR_TIMEOUT_S), fence)

    def _come_back(self) -> None:
        self.version += 1
        for partition in self.partitions():
            if partition.leader < 0:
                self.elect(partition)
            self.copy_soon(partition)
        self.on_moved()

    def live_brokers(self) -> list[SimBroker]:
        return [one for one in self.brokers.values() if one.is_up and not one.is_cut_off]
