"""SASL, TLS and rights work through the proxy as on a broker, and the proxy logs no secrets."""

from __future__ import annotations

import time

import confluent_kafka
import pytest
from confluent_kafka.admin._acl import AclOperation
from kafka.errors import TopicAuthorizationFailedError

from tests.support.rigs.security_rig import (
    CHECK_S,
    READ,
    RECORDS,
    STORE_READS,
    TIMEOUT_S,
    WRITE,
    for_kafka_python,
    for_librdkafka,
    read_by_kafka_python,
    read_by_librdkafka,
    reads_for_clients,
    send,
    total,
)
from tests.support.rigs.strict_consumer import local_log_start, until_trimmed
from tests.support.servers.certificates import Authority
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic, produce, random_values
from tests.support.servers.secure_kafka import MECHANISMS, allow
from tests.support.servers.tidegate import TidegateProcess

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_mechanism_passes_through(
    mechanism: str,
    secured: KafkaCluster,
    plain: TidegateProcess,
    encrypted: TidegateProcess,
    authority: Authority,
    topic_name: str,
) -> None:
    create_topic(secured.bootstrap_servers, topic_name)
    allow(secured, "alice", topic_name, (*READ, *WRITE))
    for number, (proxy, ca) in enumerate(((plain, None), (encrypted, authority.ca)), 1):
        send(proxy.bootstrap_servers, topic_name, [mechanism.encode()], for_librdkafka("alice", mechanism, ca))
        expected = [(offset, mechanism.encode()) for offset in range(number)]
        ours = for_kafka_python("alice", mechanism, ca)
        assert read_by_kafka_python(proxy.bootstrap_servers, topic_name, number, ours) == expected
        settings = for_librdkafka("alice", mechanism, ca)
        assert read_by_librdkafka(proxy.bootstrap_servers, topic_name, number, settings) == expected


def test_what_was_copied_with_own_credentials_is_for_those_who_may_read_it(
    secured: KafkaCluster, plain: TidegateProcess, topic_name: str
) -> None:
    topic = f"tiered-{topic_name}"
    values = random_values(RECORDS)
    create_topic(secured.bootstrap_servers, topic)
    allow(secured, "alice", topic, READ)
    allow(secured, "bob", topic, (AclOperation.DESCRIBE,))
    produce(secured.bootstrap_servers, topic, values)
    start = until_trimmed(secured, topic, RECORDS // 2)

    bob = for_kafka_python("bob", "SCRAM-SHA-256")
    before = reads_for_clients(plain)
    for offset in (0, start - 1, start, RECORDS - 1):
        with pytest.raises(TopicAuthorizationFailedError):
            read_by_kafka_python(plain.bootstrap_servers, topic, 1, bob, offset)
    assert total(plain, STORE_READS) == before

    alice = for_kafka_python("alice", "SCRAM-SHA-256")
    assert read_by_kafka_python(plain.bootstrap_servers, topic, RECORDS, alice) == list(enumerate(values))
    assert total(plain, STORE_READS) > before
    assert local_log_start(secured, topic) >= start


def test_a_client_authenticates_again_on_the_connection_that_it_has(
    secured: KafkaCluster, plain: TidegateProcess, topic_name: str
) -> None:
    create_topic(secured.bootstrap_servers, topic_name)
    allow(secured, "alice", topic_name, (*READ, *WRITE))
    failed: list[object] = []
    settings = {"error_cb": failed.append, **for_librdkafka("alice", "SCRAM-SHA-256")}
    producer = confluent_kafka.Producer({"bootstrap.servers": plain.bootstrap_servers, **settings})
    producer.produce(topic_name, b"first")
    assert producer.flush(TIMEOUT_S) == 0
    handshakes, connections = r'tidegate_requests_total\{.*api="SaslHandshake"', r"tidegate_connections_total "
    asked, opened = total(plain, handshakes), total(plain, connections)
    sent = 1
    deadline = time.monotonic() + TIMEOUT_S
    while total(plain, handshakes) < asked + 2 or total(plain, connections) > opened:
        assert time.monotonic() < deadline, failed
        producer.produce(topic_name, b"again")
        assert producer.flush(TIMEOUT_S) == 0
        sent += 1
        time.sleep(CHECK_S)
        # On a busy machine the session may end. The test then watches another one. Either sign may come first.
        if failed or total(plain, connections) > opened:
            asked, opened = total(plain, handshakes), total(plain, connections)
            failed.clear()
    ours = for_kafka_python("alice", "PLAIN")
    assert len(read_by_kafka_python(plain.bootstrap_servers, topic_name, sent, ours)) == sent
