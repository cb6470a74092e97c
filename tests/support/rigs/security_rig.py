"""Proxies in front of a Kafka with authentication, and clients that authenticate."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import confluent_kafka
import kafka as kafka_python
from confluent_kafka.admin._acl import AclOperation
from kafka.net.sasl.oauth import AbstractTokenProvider

from tests.support.rigs.strict_consumer import until_trimmed
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import filled_topic
from tests.support.servers.secure_kafka import PROXY, USERS, token, write_token
from tests.support.servers.tidegate import TidegateProcess, tidegate_over
from tiers.broker.client import BrokerClient
from tiers.broker.sasl import Mechanism, SaslCredentials

TIMEOUT_S = 300.0
RECORDS = 6_000
RECORD = tuple[int, bytes]
READ = (AclOperation.READ, AclOperation.DESCRIBE)
WRITE = (AclOperation.WRITE,)
CHECK_S = 0.1
CHUNK_READS = r'tidegate_remote_reader_cache_(hits|misses)_total\{.*cache="chunk"'
"""The chunks that clients read. The owner reads the store too: copies, and segments before a trim."""


def section(name: str, values: Mapping[str, object]) -> str:
    return "\n".join([f"[{name}]", *(f"{key} = {json.dumps(str(value))}" for key, value in values.items()), ""])


def sasl(mechanism: str, home: Path) -> str:
    own: dict[str, object] = {"mechanism": mechanism}
    if mechanism == "OAUTHBEARER":
        own["token.file"] = write_token(home / "token", PROXY)
    else:
        own |= {"username": PROXY, "password": USERS[PROXY]}
    return section("upstream.sasl", own)


def proxy_before(
    cluster: KafkaCluster,
    home: Path,
    listener: str,
    more: str,
    tiered: Sequence[str] = (),
    settings: Mapping[str, str | int] | None = None,
) -> TidegateProcess:
    """Returns a proxy that is not started. `listener` is a security protocol or an address of the cluster."""
    home.mkdir(parents=True, exist_ok=True)
    return tidegate_over(
        cluster,
        home,
        tiered=tiered,
        upstream=listener if ":" in listener else cluster.bootstrap_servers_of(listener),
        settings={
            "remote.log.metadata.topic.name": f"__metadata-{home.name}",
            "remote.log.visible.after.ms": 2000,
            "remote.log.metadata.topic.num.partitions": 1,
            **(settings or {}),
        },
        more=section("log", {"level": "debug"}) + more,
    )


class Token(AbstractTokenProvider):  # type: ignore[misc]  # kafka-python ships no types
    def __init__(self, user: str) -> None:
        self._token = token(user)

    def token(self) -> str:
        return self._token


def for_kafka_python(user: str, mechanism: str, ca: Path | None = None) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "security_protocol": "SASL_PLAINTEXT" if ca is None else "SASL_SSL",
        "sasl_mechanism": mechanism,
    }
    if ca is not None:
        settings["ssl_cafile"] = str(ca)
    if mechanism == "OAUTHBEARER":
        return settings | {"sasl_oauth_token_provider": Token(user)}
    return settings | {"sasl_plain_username": user, "sasl_plain_password": USERS[user]}


def for_librdkafka(user: str, mechanism: str, ca: Path | None = None) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "security.protocol": "SASL_PLAINTEXT" if ca is None else "SASL_SSL",
        "sasl.mechanism": mechanism,
    }
    if ca is not None:
        settings["ssl.ca.location"] = str(ca)
    if mechanism == "OAUTHBEARER":
        return settings | {"enable.sasl.oauthbearer.unsecure.jwt": True, "sasl.oauthbearer.config": f"principal={user}"}
    return settings | {"sasl.username": user, "sasl.password": USERS[user]}


def send(bootstrap: str, topic: str, values: list[bytes], settings: Mapping[str, Any]) -> None:
    failed: list[object] = []
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, **settings})
    for value in values:
        producer.produce(topic, value, on_delivery=lambda error, _: failed.append(error) if error else None)
    assert producer.flush(TIMEOUT_S) == 0
    assert failed == []


def read_by_librdkafka(
    bootstrap: str, topic: str, count: int, settings: Mapping[str, Any], offset: int = 0
) -> list[RECORD]:
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "unused", "auto.offset.reset": "error", **settings}
    )
    consumer.assign([confluent_kafka.TopicPartition(topic, 0, offset)])
    found: list[RECORD] = []
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while len(found) < count and time.monotonic() < deadline:
            for message in consumer.consume(count - len(found), 1.0):
                assert message.error() is None, str(message.error())
                found.append((message.offset() or 0, bytes(message.value() or b"")))
    finally:
        consumer.close()
    return found


def read_by_kafka_python(
    bootstrap: str, topic: str, count: int, settings: Mapping[str, Any], offset: int = 0
) -> list[RECORD]:
    given = {"auto_offset_reset": "none", "consumer_timeout_ms": int(1000 * TIMEOUT_S), **settings}
    consumer = kafka_python.KafkaConsumer(bootstrap_servers=bootstrap, **given)
    partition = kafka_python.TopicPartition(topic, 0)
    consumer.assign([partition])
    consumer.seek(partition, offset)
    try:
        return [(message.offset, message.value) for _, message in zip(range(count), consumer, strict=False)]
    finally:
        consumer.close()


def total(proxy: TidegateProcess, pattern: str) -> float:
    """Returns the sum of all series whose name and labels match."""
    lines = [line for line in proxy.metrics().splitlines() if re.match(pattern, line)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def chunk_reads(proxy: TidegateProcess) -> float:
    return total(proxy, CHUNK_READS)


class HalfTrimmed(NamedTuple):
    """A topic of random values that the proxy has copied and trimmed."""

    topic: str
    values: list[bytes]
    local_log_start: int


def half_trimmed(cluster: KafkaCluster, topic: str, count: int = RECORDS) -> HalfTrimmed:
    values = filled_topic(cluster.bootstrap_servers, topic, count)
    return HalfTrimmed(topic, values, until_trimmed(cluster, topic, count // 2))


@asynccontextmanager
async def as_user(proxy: TidegateProcess, user: str, mechanism: Mechanism = "PLAIN") -> AsyncIterator[BrokerClient]:
    """Yields a client that sends requests as this user."""
    client = BrokerClient([proxy.address], client_id="test", credentials=SaslCredentials(mechanism, user, USERS[user]))
    try:
        yield client
    finally:
        await client.close()


SECRETS = (*USERS.values(), "eyJhbGciO", "PRIVATE KEY")
"""Strings that must not be logged: the passwords, the start of every token, and a part of every key file."""


def assert_nothing_secret_was_said(proxy: TidegateProcess) -> None:
    said = proxy.output.read_text() + proxy.metrics()
    assert "serving" in said
    leaked = [line for line in said.splitlines() if any(secret in line for secret in SECRETS)]
    assert leaked == [], leaked
