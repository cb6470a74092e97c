"""Through the proxy as on a broker that asks who is there: SASL, TLS, rights, and nothing secret in what is said."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import confluent_kafka
import kafka as kafka_python
import pytest
from confluent_kafka.admin._acl import AclOperation
from kafka.errors import TopicAuthorizationFailedError
from kafka.net.sasl.oauth import AbstractTokenProvider

from tests.integration.strict_consumer import local_log_start, until_trimmed
from tests.servers.certificates import Authority
from tests.servers.jars import ServerUnavailable
from tests.servers.kafka import KafkaCluster
from tests.servers.producing import create_topic, produce, random_values
from tests.servers.secure_kafka import MECHANISMS, PROXY, USERS, add_users, allow, secure_kafka, token, write_token
from tests.servers.tidegate import TidegateProcess, tidegate_over

pytestmark = pytest.mark.integration

TIMEOUT_S = 60.0
RECORDS = 6_000
RECORD = tuple[int, bytes]
READ = (AclOperation.READ, AclOperation.DESCRIBE)
WRITE = (AclOperation.WRITE,)
CHECK_S = 0.1


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def secured(authority: Authority) -> Iterator[KafkaCluster]:
    try:
        cluster = secure_kafka(authority).start()
    except ServerUnavailable as missing:
        pytest.fail(str(missing), pytrace=False)
    with closing(ExitStack()) as stack:
        stack.callback(cluster.stop)
        add_users(cluster)
        yield cluster


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
    cluster: KafkaCluster, home: Path, protocol: str, more: str, tiered: list[str] | None = None
) -> TidegateProcess:
    home.mkdir(parents=True, exist_ok=True)
    return tidegate_over(
        cluster,
        home,
        tiered=tiered or [],
        upstream=cluster.bootstrap_servers_of(protocol),
        settings={
            "remote.log.metadata.topic.name": f"__metadata-{home.name}",
            "remote.log.visible.after.ms": 2000,
            "remote.log.metadata.topic.num.partitions": 1,
        },
        more=section("log", {"level": "debug"}) + more,
    )


@pytest.fixture(scope="module")
def plain(secured: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TidegateProcess]:
    """Plain text on both sides; copies by SCRAM, in sessions that end every few seconds."""
    home = tmp_path_factory.mktemp("plain")
    with proxy_before(secured, home, "SASL_PLAINTEXT", sasl("SCRAM-SHA-512", home), ["tiered-*"]) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def encrypted(
    secured: KafkaCluster, authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TidegateProcess]:
    """TLS on both sides; its own connections authenticate by a token."""
    home = tmp_path_factory.mktemp("encrypted")
    more = sasl("OAUTHBEARER", home)
    more += section("upstream.tls", {"ca": authority.ca})
    more += section("listener.tls", {"certificate": authority.identity("proxy")})
    with proxy_before(secured, home, "SASL_SSL", more) as proxy:
        yield proxy


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
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "message.timeout.ms": 30_000, **settings})
    for value in values:
        producer.produce(topic, value, on_delivery=lambda error, _: failed.append(error) if error else None)
    assert producer.flush(TIMEOUT_S) == 0
    assert failed == []


def read_by_librdkafka(bootstrap: str, topic: str, count: int, settings: Mapping[str, Any]) -> list[RECORD]:
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "unused", "auto.offset.reset": "error", **settings}
    )
    consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
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
    consumer = kafka_python.KafkaConsumer(
        bootstrap_servers=bootstrap, auto_offset_reset="none", consumer_timeout_ms=30_000, **settings
    )
    partition = kafka_python.TopicPartition(topic, 0)
    consumer.assign([partition])
    consumer.seek(partition, offset)
    try:
        return [(message.offset, message.value) for _, message in zip(range(count), consumer, strict=False)]
    finally:
        consumer.close()


def total(proxy: TidegateProcess, pattern: str) -> float:
    """The sum of all series whose name and labels match."""
    lines = [line for line in proxy.metrics().splitlines() if re.match(pattern, line)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


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
    store_reads = r'tidegate_remote_storage_requests_total\{.*operation="fetch'
    before = total(plain, store_reads)
    for offset in (0, start - 1, start, RECORDS - 1):
        with pytest.raises(TopicAuthorizationFailedError):
            read_by_kafka_python(plain.bootstrap_servers, topic, 1, bob, offset)
    assert total(plain, store_reads) == before

    alice = for_kafka_python("alice", "SCRAM-SHA-256")
    assert read_by_kafka_python(plain.bootstrap_servers, topic, RECORDS, alice) == list(enumerate(values))
    assert total(plain, store_reads) > before
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
    while total(plain, handshakes) < asked + 2:
        assert time.monotonic() < deadline
        producer.produce(topic_name, b"again")
        assert producer.flush(TIMEOUT_S) == 0
        sent += 1
        time.sleep(CHECK_S)
    assert total(plain, connections) == opened
    assert failed == []
    ours = for_kafka_python("alice", "PLAIN")
    assert len(read_by_kafka_python(plain.bootstrap_servers, topic_name, sent, ours)) == sent


def eventually(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(CHECK_S)


def test_certificates_on_both_sides_change_without_a_restart(
    secured: KafkaCluster, authority: Authority, tmp_path: Path, topic_name: str
) -> None:
    create_topic(secured.bootstrap_servers, topic_name)
    produce(secured.bootstrap_servers, topic_name, [b"hello"])
    served = tmp_path / "served.pem"
    served.write_bytes(authority.identity("proxy").read_bytes())
    more = section("upstream.tls", {"ca": authority.ca, "certificate": authority.identity(PROXY)})
    more += section("listener.tls", {"certificate": served, "client.ca": authority.ca, "client.auth": "required"})
    known = {"security_protocol": "SSL", "ssl_certfile": str(authority.identity("client"))}
    with proxy_before(secured, tmp_path / "mutual", "SSL", more) as proxy:
        answers = read_by_kafka_python(
            proxy.bootstrap_servers, topic_name, 1, {**known, "ssl_cafile": str(authority.ca)}
        )
        assert answers == [(0, b"hello")]
        with pytest.raises(confluent_kafka.KafkaException):
            confluent_kafka.Consumer(
                {
                    "bootstrap.servers": proxy.bootstrap_servers,
                    "group.id": "unused",
                    "security.protocol": "SSL",
                    "ssl.ca.location": str(authority.ca),
                }
            ).list_topics(timeout=5)
        assert "it shows no certificate" in proxy.output.read_text()
        assert "every client has the rights of this certificate" in proxy.output.read_text()

        successor = Authority(tmp_path / "successor")
        served.write_bytes(successor.identity("proxy").read_bytes())
        eventually(lambda: "changed certificates are in use" in touched(proxy))
        answers = read_by_kafka_python(
            proxy.bootstrap_servers, topic_name, 1, {**known, "ssl_cafile": str(successor.ca)}
        )
        assert answers == [(0, b"hello")]


def touched(proxy: TidegateProcess) -> str:
    """What it has said, after somebody knocked."""
    asyncio.run(knock(*proxy.address))
    return proxy.output.read_text()


async def knock(host: str, port: int) -> None:
    _, writer = await asyncio.open_connection(host, port)
    writer.close()
    await writer.wait_closed()


def test_check_says_in_one_line_what_is_wrong(secured: KafkaCluster, authority: Authority, tmp_path: Path) -> None:
    stranger = Authority(tmp_path / "stranger")
    cases = (
        ("SASL_PLAINTEXT", section("upstream.sasl", {"mechanism": "PLAIN", "username": PROXY, "password": "wr0ng"}),
         "authentication failed"),
        ("SASL_SSL", "", "speaks TLS"),
        ("SASL_SSL", section("upstream.tls", {"ca": stranger.ca}), "its certificate is not accepted"),
        ("SASL_SSL", section("listener.tls", {"certificate": tmp_path / "none"}), "No such file"),
    )  # fmt: skip
    for protocol, more, said in cases:
        proxy = proxy_before(secured, tmp_path / "check", protocol, more)
        command = [sys.executable, "-m", "proxy", "check", "--config", str(proxy.config)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        proxy.stop()
        assert done.returncode == 1
        problems = [line for line in done.stdout.splitlines() if line.startswith("problem: ")]
        assert any(said in line for line in problems), done.stdout
        assert "wr0ng" not in done.stdout + done.stderr
        assert done.stderr == ""


def test_no_secret_was_said(plain: TidegateProcess, encrypted: TidegateProcess) -> None:
    for proxy in (plain, encrypted):
        said = proxy.output.read_text() + proxy.metrics()
        assert "serving" in said
        for secret in (*USERS.values(), "eyJ"):  # how every token begins
            assert secret not in said
