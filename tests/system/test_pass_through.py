"""Unmodified clients on a real cluster of three brokers work through the proxy, and no broker address leaks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import confluent_kafka
import confluent_kafka.admin
import kafka
import pytest
from kafka.admin import KafkaAdminClient

from tests.support.clients.share_member import ShareMember, start_at_earliest
from tests.support.rigs.recording_relay import RecordingRelay, recording_relay
from tests.support.rigs.waiting import until
from tests.support.servers.kafka import CONSOLE_CONSUMER, CONSOLE_PRODUCER, KafkaCluster
from tests.support.servers.ports import consecutive_free_ports, free_ports
from tests.support.servers.producing import create_topic, produce, transactional_producer
from tests.support.servers.tidegate import TidegateProcess

pytestmark = pytest.mark.integration

BROKERS = 3
RECORDS = 300
TIMEOUT_S = 300.0
CLIENT_HOST, PROXY_HOST = "127.0.0.1", "127.0.0.2"


@dataclass(frozen=True)
class Rig:
    cluster: KafkaCluster
    proxy: TidegateProcess
    relay: RecordingRelay
    bootstrap: str

    def leaks(self) -> list[bytes]:
        """Returns the bytes of the client connections that got the brokers' advertised host name."""
        assert any(self.relay.streams())
        name = self.cluster.advertised_host.encode()
        return [stream for stream in self.relay.streams() if name in stream]


@pytest.fixture(scope="module")
def rig(kafka_of_three: KafkaCluster) -> Iterator[Rig]:
    first = consecutive_free_ports(1 + BROKERS, PROXY_HOST)
    ports = range(first, first + 1 + BROKERS)
    with (
        tidegate(kafka_of_three, PROXY_HOST, first) as proxy,
        recording_relay(CLIENT_HOST, PROXY_HOST, ports) as relay,
    ):
        yield Rig(kafka_of_three, proxy, relay, f"{CLIENT_HOST}:{first}")


def tidegate(cluster: KafkaCluster, host: str, bootstrap_port: int) -> TidegateProcess:
    """Returns a proxy without a remote tier. It advertises broker N at the bootstrap port + N."""
    (admin_port,) = free_ports(1)
    config = f"""
[upstream]
bootstrap.servers = "{cluster.bootstrap_servers}"
metadata.max.age.ms = "500ms"
[listener]
host = "{host}"
advertised.host = "{CLIENT_HOST}"
bootstrap.port = {bootstrap_port}
base.port = {bootstrap_port}
[admin]
port = {admin_port}
"""
    return TidegateProcess(config, address=(host, bootstrap_port), admin=("127.0.0.1", admin_port))


def values(prefix: str) -> list[bytes]:
    return [f"{prefix}-{n}".encode() + os.urandom(200) for n in range(RECORDS)]


def test_kafka_python_produces_and_consumes_in_a_group(rig: Rig, topic_name: str) -> None:
    create_topic(rig.bootstrap, topic_name, partitions=6, replicas=3)
    sent = values("python")
    producer = kafka.KafkaProducer(bootstrap_servers=rig.bootstrap, acks="all")
    for acknowledged in [producer.send(topic_name, value) for value in sent]:
        acknowledged.get(TIMEOUT_S)
    producer.close()

    consumer = kafka.KafkaConsumer(
        topic_name,
        bootstrap_servers=rig.bootstrap,
        group_id=topic_name,
        auto_offset_reset="earliest",
        consumer_timeout_ms=int(1000 * TIMEOUT_S),
    )
    received = [next(consumer).value for _ in range(RECORDS)]
    consumer.close()
    assert sorted(received) == sorted(sent)
    assert rig.leaks() == []


def test_librdkafka_transacts_and_reads_committed(rig: Rig, topic_name: str) -> None:
    create_topic(rig.bootstrap, topic_name, partitions=3, replicas=3)
    sent = values("committed")
    producer = transactional_producer(rig.bootstrap, topic_name)
    for outcome, batch in (("abort", values("aborted")), ("commit", sent)):
        producer.begin_transaction()
        for value in batch:
            producer.produce(topic_name, value)
        producer.flush(TIMEOUT_S)
        if outcome == "abort":
            producer.abort_transaction(TIMEOUT_S)
        else:
            producer.commit_transaction(TIMEOUT_S)

    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": rig.bootstrap,
            "group.id": topic_name,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
        }
    )
    consumer.subscribe([topic_name])
    received = take(consumer, RECORDS)
    consumer.close()
    assert sorted(received) == sorted(sent)
    assert rig.leaks() == []


def take(consumer: confluent_kafka.Consumer, count: int) -> list[bytes]:
    taken: list[bytes] = []
    deadline = time.monotonic() + TIMEOUT_S
    while len(taken) < count and time.monotonic() < deadline:
        for message in consumer.consume(count - len(taken), 1.0):
            assert message.error() is None
            value = message.value()
            assert isinstance(value, bytes)
            taken.append(value)
    return taken


def test_the_java_client_produces_and_consumes(rig: Rig, topic_name: str) -> None:
    create_topic(rig.bootstrap, topic_name, partitions=3, replicas=3)
    lines = [f"line {n}" for n in range(RECORDS)]
    rig.cluster.run_tool(
        CONSOLE_PRODUCER, "--bootstrap-server", rig.bootstrap, "--topic", topic_name, stdin="\n".join(lines) + "\n"
    )
    consumed = rig.cluster.run_tool(
        CONSOLE_CONSUMER,
        *("--bootstrap-server", rig.bootstrap, "--topic", topic_name, "--from-beginning"),
        *("--max-messages", str(RECORDS), "--timeout-ms", "120000"),
    )
    assert sorted(consumed.stdout.split("\n")[:RECORDS]) == sorted(lines)
    assert rig.leaks() == []


def test_admin_clients_see_the_cluster_at_the_proxy(rig: Rig) -> None:
    """The clients see all brokers after a while. A broker that was paused is missing for a moment."""
    advertised = {(CLIENT_HOST, rig.proxy.address[1] + node_id) for node_id in rig.cluster.brokers}
    admin = KafkaAdminClient(bootstrap_servers=rig.bootstrap)
    librdkafka = confluent_kafka.admin.AdminClient({"bootstrap.servers": rig.bootstrap})

    def is_whole(named: set[tuple[str, int]]) -> bool:
        assert named <= advertised
        return named == advertised

    def kafka_python_sees_all() -> bool:
        described = admin.describe_cluster()
        assert described["cluster_id"] == rig.cluster.cluster_id
        return is_whole({(broker["host"], broker["port"]) for broker in described["brokers"]})

    def librdkafka_sees_all() -> bool:
        cluster = librdkafka.describe_cluster().result(TIMEOUT_S)
        return is_whole({(node.host, node.port) for node in cluster.nodes})

    until(kafka_python_sees_all)
    admin.close()
    until(librdkafka_sees_all)
    assert rig.leaks() == []


def test_a_leader_that_moves_is_found_again_and_no_endpoint_leaks(rig: Rig, topic_name: str) -> None:
    create_topic(rig.bootstrap, topic_name, partitions=3, replicas=3)
    producer = confluent_kafka.Producer({"bootstrap.servers": rig.bootstrap, "enable.idempotence": True})
    sent = values("moved")
    failed: list[object] = []

    def send(batch: list[bytes]) -> None:
        for value in batch:
            producer.produce(topic_name, value, on_delivery=lambda error, _: failed.append(error) if error else None)
        assert producer.flush(TIMEOUT_S) == 0

    send(sent[:100])
    rig.cluster.stop_broker(3)
    try:
        send(sent[100:200])
    finally:
        rig.cluster.start_broker(3)
    send(sent[200:])
    assert failed == []
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": rig.bootstrap, "group.id": topic_name, "auto.offset.reset": "earliest"}
    )
    consumer.subscribe([topic_name])
    assert sorted(take(consumer, RECORDS)) == sorted(sent)
    consumer.close()
    assert rig.leaks() == []


def test_a_share_group_reads_on_from_leaders_that_moved(rig: Rig, topic_name: str) -> None:
    create_topic(rig.bootstrap, topic_name, partitions=3, replicas=3)
    start_at_earliest(rig.bootstrap, topic_name)
    sent = values("shared")
    with ShareMember() as member:
        for partition in range(3):
            produce(rig.bootstrap, topic_name, sent[partition::6], partition=partition)
        member.join(rig.bootstrap, topic_name, topic_name)
        received = member.take(RECORDS // 2)
        move_leaders(rig.bootstrap, topic_name)
        # The old leaders are alive, and name the new leaders.
        for partition in range(3):
            produce(rig.bootstrap, topic_name, sent[partition + 3 :: 6], partition=partition)
        received += member.take(RECORDS // 2)
        member.leave()
    assert sorted(one.value for one in received) == sorted(sent)
    assert rig.leaks() == []
    assert rig.proxy.metric("tidegate_request_latency_seconds_count", api="ShareFetch", tier="local") > 0


def move_leaders(bootstrap: str, topic: str) -> None:
    """Moves every leader to the partition's next replica, while all brokers run."""
    admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    (described,) = admin.describe_topics([topic])
    wanted: dict[kafka.TopicPartition, list[int]] = {}
    for partition in described["partitions"]:
        replicas, leader = partition["replica_nodes"], partition["leader_id"]
        at = replicas.index(leader) + 1
        wanted[kafka.TopicPartition(topic, partition["partition_index"])] = replicas[at:] + replicas[:at]
    moved = admin.alter_partition_reassignments(wanted)
    assert set(moved.values()) == {None}
    while admin.list_partition_reassignments():
        time.sleep(0.1)
    admin.elect_leaders(0, {topic: list(range(len(wanted)))})
    admin.close()


def test_a_waiting_consumer_is_answered_at_a_stop_and_uses_the_next_proxy(
    kafka_of_three: KafkaCluster, topic_name: str
) -> None:
    proxy = tidegate(kafka_of_three, CLIENT_HOST, consecutive_free_ports(1 + BROKERS))
    sent = values("restart")
    with proxy:
        bootstrap = proxy.bootstrap_servers
        create_topic(bootstrap, topic_name, partitions=1, replicas=3)
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": topic_name,
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": 45_000,
            }
        )
        consumer.subscribe([topic_name])
        produce(bootstrap, topic_name, sent[:100])
        assert take(consumer, 100) == sent[:100]
        assert consumer.poll(0.5) is None
        proxy.keep()
        proxy.stop()
        output = proxy.output.read_text()
        assert "proxy.process.app: stopped" in output
        assert "outlived the drain" not in output
    with proxy:
        produce(bootstrap, topic_name, sent[100:])
        assert take(consumer, RECORDS - 100) == sent[100:]
        consumer.close()
