"""Through the proxy as on a broker that asks who is there: SASL, TLS, rights, and nothing secret in what is said."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import confluent_kafka
import pytest
from confluent_kafka.admin._acl import AclOperation
from kafka.errors import TopicAuthorizationFailedError

from tests.integration.security_rig import (
    CHECK_S,
    READ,
    RECORDS,
    STORE_READS,
    TIMEOUT_S,
    WRITE,
    eventually,
    for_kafka_python,
    for_librdkafka,
    proxy_before,
    read_by_kafka_python,
    read_by_librdkafka,
    section,
    send,
    total,
)
from tests.integration.strict_consumer import local_log_start, until_trimmed
from tests.servers.certificates import Authority
from tests.servers.kafka import KafkaCluster
from tests.servers.producing import create_topic, produce, random_values
from tests.servers.secure_kafka import MECHANISMS, PROXY, USERS, allow
from tests.servers.tidegate import TidegateProcess

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
    before = total(plain, STORE_READS)
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
