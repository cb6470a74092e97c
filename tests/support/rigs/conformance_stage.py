"""A small language for Kafka's tiered storage scenarios: a `Stage`, and actions on it.

A batch has one record of 1000 bytes. Topics named `one-` and `two-` have one or two batches per remote segment and roll
only by size, so the place of every record is known. `aged-` topics also roll by age. `plain-` topics are not tiered
until an action changes that. The actions use a proxy that runs as a user starts it, and the brokers behind it.
"""

from __future__ import annotations

import os
import re
import signal
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kafka as kafka_python
from confluent_kafka import Consumer, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions, NewTopic
from kafka import KafkaAdminClient

from protocol.errors import ErrorCode
from tests.support.rigs.strict_consumer import consumer_at, read
from tests.support.rigs.topic_config_client import alter as alter_topics
from tests.support.rigs.waiting import until
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.peer import Peer, topic_id_of
from tests.support.servers.producing import until_decided
from tests.support.servers.tidegate import TidegateProcess, tidegate_over
from tiers.storage.object_key import parse_facts_key, parse_segment_key

TIMEOUT_S = 300.0
LATEST, EARLIEST, MAX_TIMESTAMP, EARLIEST_LOCAL, LATEST_TIERED = range(-1, -6, -1)
_PASSING = (
    ErrorCode.LEADER_NOT_AVAILABLE,
    ErrorCode.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.REPLICA_NOT_AVAILABLE,
    ErrorCode.OFFSET_NOT_AVAILABLE,
)
BEGINNING_MS = 1_600_000_000_000
"""The timestamp of offset 0. The timestamp of each following offset is one second later."""
_RULES = """
[[topics]]
name = "one-*"
segment.bytes = 1300
segment.ms = "1h"
local.retention.bytes = 1
[[topics]]
name = "two-*"
segment.bytes = 2400
segment.ms = "1h"
local.retention.bytes = 1
[[topics]]
name = "aged-*"
segment.bytes = 1300
segment.ms = "200ms"
local.retention.bytes = 1
[[topics]]
name = "plain-*"
remote.storage.enable = false
segment.bytes = 1300
segment.ms = "1h"
"""
_SETTINGS: Mapping[str, str | int] = {
    "remote.log.manager.task.interval.ms": 200,
    "remote.log.manager.task.retry.backoff.ms": 100,
    "remote.log.visible.after.ms": 400,
    "remote.log.topic.deletion.delay.ms": 500,
}


def conformance_proxy(cluster: KafkaCluster, home: Path, name: str) -> TidegateProcess:
    """Not started yet."""
    settings = {**_SETTINGS, "remote.log.metadata.topic.name": f"__metadata-{name}"}
    return tidegate_over(cluster, home, settings=settings, more=_RULES)


@dataclass
class Stage:
    """The topic of one scenario. `home` is the folder of the proxy.

    The owner estimates the size of the records. If it estimates too much, it copies the newest ones early."""

    cluster: KafkaCluster
    proxy: TidegateProcess
    home: Path
    topic: str
    values: defaultdict[int, list[tuple[int, bytes]]] = field(default_factory=lambda: defaultdict(list))
    """The offsets and values that a read_committed client gets, in order, by partition."""
    next_offset: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    expected_segments: dict[int, int] = field(default_factory=dict)
    """The number of segments that the scenario expected last, by partition."""
    topic_ids: dict[str, Any] = field(default_factory=dict)
    admins: dict[str, AdminClient] = field(default_factory=dict)
    is_deleted: bool = False

    @property
    def bootstrap(self) -> str:
        return self.proxy.bootstrap_servers

    def admin(self, bootstrap: str | None = None) -> AdminClient:
        """Returns an admin client. The stage keeps it, since its calls end with the client."""
        bootstrap = bootstrap or self.bootstrap
        if bootstrap not in self.admins:
            self.admins[bootstrap] = AdminClient({"bootstrap.servers": bootstrap})
        return self.admins[bootstrap]

    def segments(self, partition: int) -> list[tuple[int, int]]:
        """Returns the base and end offsets (inclusive) of the segments that have both objects."""
        if self.topic not in self.topic_ids:
            self.topic_ids[self.topic] = topic_id_of(self.cluster.bootstrap_servers.split(",")[0], self.topic)
        tier = self.home / "tier"
        found: dict[Any, set[str]] = defaultdict(set)
        for path in [*tier.rglob("*.log"), *tier.rglob("*.indexes")]:
            key = parse_segment_key(str(path.relative_to(tier)))
            if key is not None and (key.topic_id, key.partition) == (self.topic_ids[self.topic], partition):
                found[key.base_offset, key.end_offset, key.segment_uuid].add(key.suffix)
        return sorted((base, end) for (base, end, _), suffixes in found.items() if len(suffixes) == 2)

    def early(self, partition: int) -> list[tuple[int, int]]:
        """Returns the segments that were copied early."""
        expected = self.expected_segments.get(partition)
        return [] if expected is None else self.segments(partition)[expected:]

    def local_start(self, partition: int) -> int:
        consumer = Consumer({"bootstrap.servers": self.cluster.bootstrap_servers, "group.id": "unused"})
        try:
            return int(consumer.get_watermark_offsets(TopicPartition(self.topic, partition), TIMEOUT_S)[0])
        finally:
            consumer.close()

    def store_calls(self, operation: str) -> int:
        """Returns the calls of the remote reader. The owner has calls of its own: it looks for copies before a trim."""
        of_reader = '(?=[^}]*process="remote-reader")'
        return self._counted(rf'remote_storage_requests_total{{{of_reader}[^}}]*operation="{operation}"[^}}]*}}')

    def hedges(self) -> int:
        """Returns how many downloads were slow, and were sent a second time."""
        return self._counted(r"remote_reader_hedged_requests_total(?:{[^}]*})?")

    def _counted(self, series: str) -> int:
        """Returns the sum of all processes. The metrics lack a process that does not answer in time."""
        metrics = ""

        def has_all() -> bool:
            nonlocal metrics
            metrics = self.proxy.metrics()
            return all(f'process="{name}"' in metrics for name in ("remote-log", "remote-reader"))

        until(has_all)
        found = re.findall(rf"^tidegate_{series} (\S+)$", metrics, re.MULTILINE)
        return sum(int(float(count)) for count in found)

    def leader(self, partition: int) -> int:
        listed = self.admin(self.cluster.bootstrap_servers).list_topics(self.topic, timeout=TIMEOUT_S)
        return int(listed.topics[self.topic].partitions[partition].leader)

    def list_offset(self, timestamp: int, partition: int = 0) -> tuple[int, int]:
        """Returns the offset and leader epoch that the leader answers through the proxy.

        Retries the errors that every client retries."""
        host, port = self.proxy.address
        found: list[tuple[int, int]] = []

        def answered() -> bool:
            with Peer((host, port + self.leader(partition))) as peer:
                ((_, error_code, _, offset, epoch),) = peer.list_offsets(9, self.topic, [(partition, timestamp)])
            assert error_code in (ErrorCode.NONE, *_PASSING)
            found.append((offset, epoch))
            return error_code == ErrorCode.NONE

        until(answered)
        return found[-1]


Action = Callable[[Stage], None]


def create(kind: str, partitions: int = 1, replicas: list[int] | None = None) -> Action:
    """Creates the topic. All partitions are on `replicas`, and the first of them leads. Default: on all brokers."""

    def act(stage: Stage) -> None:
        stage.topic = f"{kind}-{stage.topic}"
        nodes = replicas or sorted(stage.cluster.brokers)
        config = {"min.insync.replicas": "1", "retention.ms": "-1"}
        new = NewTopic(stage.topic, partitions, replica_assignment=[nodes] * partitions, config=config)
        stage.admin().create_topics([new])[stage.topic].result(TIMEOUT_S)

    return act


def produce(batches: int, partition: int = 0, *, transaction: str = "") -> Action:
    """Produces one record per batch. `transaction` is "commit" or "abort". The marker takes an offset too."""

    def act(stage: Stage) -> None:
        settings: dict[str, str | int | float | bool] = {"bootstrap.servers": stage.bootstrap, "linger.ms": 0}
        settings |= {"batch.num.messages": 1, "enable.idempotence": True}  # no duplicates
        producer = Producer({**settings, **({"transactional.id": stage.topic} if transaction else {})})
        if transaction:
            producer.init_transactions(TIMEOUT_S)
            producer.begin_transaction()
        told: list[tuple[object, int | None]] = []

        def on_delivery(error: object, message: Message) -> None:
            told.append((error, message.offset()))

        for _ in range(batches):
            offset, value = stage.next_offset[partition], os.urandom(1000)
            timestamp = BEGINNING_MS + 1000 * offset
            producer.produce(stage.topic, value, partition=partition, timestamp=timestamp, on_delivery=on_delivery)
            assert producer.flush(TIMEOUT_S) == 0
            assert told.pop() == (None, offset)
            stage.next_offset[partition] += 1
            if transaction != "abort":
                stage.values[partition].append((offset, value))
        if transaction:
            ended = producer.commit_transaction if transaction == "commit" else producer.abort_transaction
            ended(TIMEOUT_S)
            until_decided(stage.bootstrap, stage.topic, partition)
            stage.next_offset[partition] += 1

    return act


def expect_segments(*expected: tuple[int, int], partition: int = 0) -> Action:
    """Expects exactly these segments: none before or between them, and at most one behind, which was copied early."""

    def act(stage: Stage) -> None:
        stage.expected_segments[partition] = len(expected)
        found: list[tuple[int, int]] = []

        def as_expected() -> bool:
            found[:] = stage.segments(partition)
            return found[: len(expected)] == list(expected) and len(found) <= len(expected) + bool(expected)

        _until(as_expected, lambda: f"segments {found}, expected {list(expected)}")

    return act


def expect_no_remote_segments(partition: int = 0) -> Action:
    return expect_segments(partition=partition)


def expect_no_objects() -> Action:
    """Expects no objects of any partition, including parts of segments and facts."""

    def act(stage: Stage) -> None:
        tier = stage.home / "tier"

        def objects() -> list[str]:
            names = [str(path.relative_to(tier)) for path in tier.rglob("*.*")]
            keys = {name: parse_segment_key(name) or parse_facts_key(name) for name in names}
            topic_id = stage.topic_ids[stage.topic]
            return [name for name, key in keys.items() if key is not None and key.topic_id == topic_id]

        _until(lambda: not objects(), lambda: f"{objects()} are left")

    return act


def expect_local_start(offset: int, partition: int = 0) -> Action:
    """Expects a local log start of the broker itself, or that of the segment that was copied early."""

    def act(stage: Stage) -> None:
        _until(
            lambda: stage.local_start(partition) in (offset, *(first for first, _ in stage.early(partition))),
            lambda: f"the local log starts at {stage.local_start(partition)}, not {offset}",
        )

    return act


def expect_offset(timestamp: int, offset: int, epoch: int | None = None, partition: int = 0) -> Action:
    """Expects an answer of ListOffsets for a timestamp. The leader epoch is that of the tier's own checkpoint."""

    def act(stage: Stage) -> None:
        answered = (-1, -1)

        def as_expected() -> bool:
            nonlocal answered
            answered = stage.list_offset(timestamp, partition)
            return answered[0] == offset and epoch in (None, answered[1])

        _until(as_expected, lambda: f"{timestamp} is at {answered}, not {(offset, epoch)}")

    return act


def consume(
    offset: int, count: int, *, remote_fetches: int, partition: int = 0, index_fetches: int | None = None
) -> Action:
    """Expects the produced records, byte for byte.

    `remote_fetches` is the number of downloaded ranges of segments, without those that were copied early."""

    def act(stage: Stage) -> None:
        before = {name: stage.store_calls(name) for name in ("fetch_log_segment", "fetch_indexes")}
        hedges_before = stage.hedges()
        settings = {"isolation.level": "read_committed", "fetch.message.max.bytes": 1_000_000}
        with consumer_at(stage.bootstrap, stage.topic, offset, partition, settings) as consumer:  # type: ignore[arg-type]  # librdkafka accepts values of any type
            found = read(consumer, count)
        expected = [each for each in stage.values[partition] if each[0] >= offset][:count]
        assert [each[0] for each in found] == [each[0] for each in expected]
        assert found == expected
        fetched = {name: stage.store_calls(name) - count for name, count in before.items()}
        early_fetches = len(stage.early(partition))
        more = early_fetches + stage.hedges() - hedges_before
        assert remote_fetches <= fetched["fetch_log_segment"] <= remote_fetches + more, (fetched, remote_fetches, more)
        assert index_fetches is None or fetched["fetch_indexes"] <= index_fetches + early_fetches

    return act


def bounce_proxy(number: signal.Signals = signal.SIGTERM) -> Action:
    """Restarts the proxy. It keeps its state, and its caches are empty."""

    def act(stage: Stage) -> None:
        stage.proxy.keep()
        stage.proxy.stop(number)
        stage.proxy.start()

    return act


def bounce_brokers(*node_ids: int, forget: tuple[str, ...] = ()) -> Action:
    """Restarts brokers that are all down at the same time. `forget` are files to delete from their log folders."""

    def act(stage: Stage) -> None:
        for node_id in node_ids:
            stage.cluster.stop_broker(node_id)
        for node_id in node_ids:
            for name in forget:
                for found in stage.cluster.brokers[node_id].logs.rglob(name):
                    found.unlink()
        for node_id in node_ids:
            stage.cluster.start_broker(node_id)

    return act


def delete_records(offset: int, partition: int = 0) -> Action:
    def act(stage: Stage) -> None:
        where = TopicPartition(stage.topic, partition, offset)
        admin = AdminClient({"bootstrap.servers": stage.bootstrap})  # a new client, which knows no former leader
        assert admin.delete_records([where])[where].result(TIMEOUT_S).low_watermark == offset

    return act


def alter(**changes: str) -> Action:
    """Changes topic settings through the proxy. Underscores in the names stand for dots."""

    def act(stage: Stage) -> None:
        named = {key.replace("_", "."): value for key, value in changes.items()}
        assert alter_topics(stage.bootstrap, {stage.topic: named}) == [0]

    return act


def add_partitions(total: int) -> Action:
    def act(stage: Stage) -> None:
        added = stage.admin().create_partitions([NewPartitions(stage.topic, total)])
        added[stage.topic].result(TIMEOUT_S)
        brokers = [stage.cluster.address(node_id) for node_id in stage.cluster.brokers]
        _until(
            lambda: all(_knows(address, stage.topic, total - 1) for address in brokers),
            lambda: "not every broker knows the new partitions",
        )

    return act


def _knows(address: tuple[str, int], topic: str, partition: int) -> bool:
    """Whether the broker knows the partition. A broker that is not the leader answers that it does not lead."""
    with Peer(address) as peer:
        ((_, error_code, _, _, _),) = peer.list_offsets(9, topic, [(partition, LATEST)])
    return error_code in (ErrorCode.NONE, ErrorCode.NOT_LEADER_OR_FOLLOWER)


def move_replicas(*replicas: int, partition: int = 0) -> Action:
    """Changes the partition's replicas. The first of them becomes the leader."""

    def act(stage: Stage) -> None:
        admin = KafkaAdminClient(bootstrap_servers=stage.cluster.bootstrap_servers)
        where = kafka_python.TopicPartition(stage.topic, partition)
        try:
            assert set(admin.alter_partition_reassignments({where: list(replicas)}).values()) == {None}
            _until(lambda: where not in admin.list_partition_reassignments(), lambda: f"{where} still moves")
            if stage.leader(partition) != replicas[0]:
                admin.elect_leaders(0, {stage.topic: [partition]})
        finally:
            admin.close()
        _until(lambda: stage.leader(partition) == replicas[0], lambda: f"{stage.leader(partition)} leads {where}")

    return act


def move_log_dir(node_id: int, folder: Callable[[Stage], Path], partition: int = 0) -> Action:
    def act(stage: Stage) -> None:
        admin = KafkaAdminClient(bootstrap_servers=stage.cluster.bootstrap_servers)
        try:
            admin.alter_replica_log_dirs({(stage.topic, partition, node_id): str(folder(stage))})
        finally:
            admin.close()
        moved = folder(stage) / f"{stage.topic}-{partition}"
        _until(moved.is_dir, lambda: f"{moved} is not there")

    return act


def delete_topic() -> Action:
    def act(stage: Stage) -> None:
        if not stage.is_deleted:
            stage.segments(0)  # reads the topic's id while the topic exists
            stage.admin().delete_topics([stage.topic])[stage.topic].result(TIMEOUT_S)
            stage.is_deleted = True

    return act


def _until(condition: Callable[[], bool], otherwise: Callable[[], str]) -> None:
    try:
        until(condition)
    except AssertionError as error:
        raise AssertionError(otherwise()) from error
