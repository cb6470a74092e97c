"""Clients authenticate through the proxy as on a broker, and the proxy with its own credentials.

The broker ends sessions of its plain listener after a few seconds (KIP-368). After that, it closes a connection that
sends anything except an authentication. `check` and `serve` report wrong credentials of the proxy in one line.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import confluent_kafka
import pytest
from confluent_kafka.admin._acl import AclOperation
from kafka.protocol.metadata import MetadataRequest, MetadataResponse
from kafka.protocol.sasl import SaslHandshakeResponse

from protocol.errors import ErrorCode
from tests.support.rigs.sasl_wire import (
    alice_has_read,
    error_of,
    fetch,
    handshake,
    raw_token,
    records_of,
    served,
    token,
    wire_to,
    wire_to_address,
    within_a_session,
    wrong_token,
)
from tests.support.rigs.security_clients import (
    SecuredJavaClient,
    Who,
    read_as_aiokafka,
    read_as_franz_go,
    read_as_kafka_python,
    read_as_librdkafka,
)
from tests.support.rigs.security_rig import (
    CHECK_S,
    READ,
    RECORD,
    RECORDS,
    TIMEOUT_S,
    WRITE,
    HalfTrimmed,
    chunk_reads,
    for_kafka_python,
    for_librdkafka,
    half_trimmed,
    proxy_before,
    read_by_kafka_python,
    read_by_librdkafka,
    sasl,
    section,
    send,
    total,
)
from tests.support.rigs.waiting import until
from tests.support.servers.certificates import Authority
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.ports import free_ports
from tests.support.servers.producing import TopicWith, create_topic, delete_topic
from tests.support.servers.secure_kafka import MECHANISMS, PROXY, USERS, allow, allow_all, deny
from tests.support.servers.tidegate import TidegateProcess
from tiers.commands.console import FAILED
from tiers.tasks.deletion.failed_deletions import FAILED_DELETIONS_TOPIC

pytestmark = pytest.mark.integration

Read = Callable[[str, str, int, int, Who], list[RECORD]]
AROUND_THE_SEAM = 200
CLIENTS: dict[str, Read | None] = {
    "kafka-python": read_as_kafka_python,
    "aiokafka": read_as_aiokafka,
    "confluent-kafka": read_as_librdkafka,
    "franz-go": read_as_franz_go,
    "java": None,
}
SECRETS = (*USERS.values(), "wr0ng", "eyJ")
SASL_HANDSHAKES = r'tidegate_requests_total\{.*api="SaslHandshake"'
CONNECTIONS = r"tidegate_connections_total "


@pytest.fixture(scope="module")
def topic(secured: KafkaCluster, plain: TidegateProcess) -> HalfTrimmed:
    trimmed = half_trimmed(secured, "tiered-authenticated")
    allow(secured, "alice", trimmed.topic, READ)
    return trimmed


@pytest.fixture(scope="module")
def sealed_topic(secured: KafkaCluster, encrypted: TidegateProcess) -> HalfTrimmed:
    trimmed = half_trimmed(secured, "sealed-authenticated")
    allow(secured, "alice", trimmed.topic, READ)
    return trimmed


@pytest.fixture(scope="module")
def java(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredJavaClient]:
    client = SecuredJavaClient(tmp_path_factory.mktemp("java"))
    yield client
    client.stop()


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
    asked, opened = total(plain, SASL_HANDSHAKES), total(plain, CONNECTIONS)
    sent = 1
    deadline = time.monotonic() + TIMEOUT_S
    while total(plain, SASL_HANDSHAKES) < asked + 2 or total(plain, CONNECTIONS) > opened:
        assert time.monotonic() < deadline, failed
        producer.produce(topic_name, b"again")
        assert producer.flush(TIMEOUT_S) == 0
        sent += 1
        time.sleep(CHECK_S)
        # On a busy machine the session may end. The test then watches another one. Either sign may come first.
        if failed or total(plain, CONNECTIONS) > opened:
            asked, opened = total(plain, SASL_HANDSHAKES), total(plain, CONNECTIONS)
            failed.clear()
    ours = for_kafka_python("alice", "PLAIN")
    assert len(read_by_kafka_python(plain.bootstrap_servers, topic_name, sent, ours)) == sent


@pytest.mark.full
@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("name", CLIENTS)
def test_every_client_reads_across_the_seam(
    name: str,
    mechanism: str,
    topic: HalfTrimmed,
    sealed_topic: HalfTrimmed,
    java: SecuredJavaClient,
    plain: TidegateProcess,
    encrypted: TidegateProcess,
    authority: Authority,
) -> None:
    read = CLIENTS[name] or java.read
    for proxy, trimmed, ca in ((plain, topic, None), (encrypted, sealed_topic, authority.ca)):
        first = trimmed.local_log_start - AROUND_THE_SEAM
        expected = list(enumerate(trimmed.values))[first : first + 2 * AROUND_THE_SEAM]
        found = read(proxy.bootstrap_servers, trimmed.topic, first, len(expected), Who("alice", mechanism, ca))
        assert found == expected
        assert 0 < first < first + len(expected) < RECORDS


@pytest.mark.full
async def test_fetches_in_flight_around_an_authentication_are_answered_in_order(
    plain: TidegateProcess, topic: HalfTrimmed
) -> None:
    async def attempt() -> None:
        async with alice_has_read(plain, topic) as wire:
            # All requests at the same time: a remote fetch, an authentication, a remote fetch and a local one.
            wire.send(
                fetch(topic.topic, 100), handshake(1), token("alice"), fetch(topic.topic, 100),
                fetch(topic.topic, topic.local_log_start),
            )  # fmt: skip
            first = served(await wire.fetched())
            assert SaslHandshakeResponse.decode((await wire.receive())[4:], version=1).error_code == 0
            assert await wire.authenticated() == 0
            second = served(await wire.fetched())
            shorter, longer = sorted((records_of(first), records_of(second)), key=len)
            assert shorter
            assert longer.startswith(shorter), "the answers must begin with the same bytes"
            served(await wire.fetched())

    await within_a_session(attempt)


@pytest.mark.full
async def test_another_principal_is_served_nothing_of_what_the_first_was_allowed(
    plain: TidegateProcess, topic: HalfTrimmed
) -> None:
    """A broker accepts no other principal on a connection, so the requests behind the token get no answers."""

    async def attempt() -> None:
        async with alice_has_read(plain, topic) as wire:
            reads = chunk_reads(plain)
            wire.send(handshake(1), token("bob"), fetch(topic.topic, 2_000))
            assert SaslHandshakeResponse.decode((await wire.receive())[4:], version=1).error_code == 0
            assert await wire.authenticated() == ErrorCode.SASL_AUTHENTICATION_FAILED
            assert await wire.is_closed()
            assert chunk_reads(plain) == reads
        async with wire_to(plain) as wire:
            assert await wire.authenticate("bob") == 0
            wire.send(fetch(topic.topic, 2_000))
            assert error_of(await wire.fetched()) == ErrorCode.TOPIC_AUTHORIZATION_FAILED
            assert chunk_reads(plain) == reads

    await within_a_session(attempt)


@pytest.mark.full
async def test_a_session_that_ended_gets_no_remote_byte(plain: TidegateProcess, topic: HalfTrimmed) -> None:
    async def attempt() -> None:
        async with wire_to(plain) as wire, asyncio.timeout(TIMEOUT_S):
            assert await wire.authenticate("alice") == 0
            count = 0
            while True:
                wire.send(fetch(topic.topic, 0))
                try:
                    response = await wire.fetched()
                except (asyncio.IncompleteReadError, ConnectionResetError):
                    if count > 0:
                        return
                    raise
                assert error_of(response) in (0, ErrorCode.REPLICA_NOT_AVAILABLE)
                count += error_of(response) == 0

    await within_a_session(attempt)


@pytest.mark.full
async def test_after_raw_tokens_both_tiers_are_there(plain: TidegateProcess, topic: HalfTrimmed) -> None:
    """Kafka 4.3 still accepts SaslHandshake v0. The proxy rewrites addresses and serves the tier there too."""

    async def attempt() -> None:
        async with wire_to(plain) as wire:
            request = MetadataRequest(topics=[], allow_auto_topic_creation=False)
            request.API_VERSION = 5
            request.with_header(correlation_id=3, client_id="test")
            wire.send(handshake(0), raw_token("alice"), bytes(request.encode(header=True)))
            assert SaslHandshakeResponse.decode((await wire.receive())[4:], version=0).error_code == 0
            assert await wire.receive() == b""
            (broker,) = MetadataResponse.decode((await wire.receive())[4:], version=5).brokers
            assert broker.host == "127.0.0.1"
            for offset in (0, topic.local_log_start):
                wire.send(fetch(topic.topic, offset))
                served(await wire.fetched())

    await within_a_session(attempt)


async def test_before_authentication_the_proxy_closes_as_the_broker_does(
    secured: KafkaCluster, plain: TidegateProcess
) -> None:
    request = MetadataRequest(topics=None, allow_auto_topic_creation=False)
    request.API_VERSION = 5
    request.with_header(correlation_id=3, client_id="test")
    metadata = bytes(request.encode(header=True))
    host, _, port = secured.bootstrap_servers_of("SASL_PLAINTEXT").rpartition(":")
    for address in ((host, int(port)), plain.address):
        async with wire_to_address(*address) as wire:
            wire.send(metadata)
            assert await wire.is_closed()
        for version in (0, 1):
            async with wire_to_address(*address) as wire:
                wire.send(handshake(version))
                assert SaslHandshakeResponse.decode((await wire.receive())[4:], version=version).error_code == 0
                wire.send(wrong_token() if version else b"\0alice\0wr0ng")
                if version:
                    assert await wire.authenticated() == ErrorCode.SASL_AUTHENTICATION_FAILED
                wire.send(metadata)
                assert await wire.is_closed()


@pytest.mark.full
def test_a_consumer_reauthenticates_while_it_reads_remote_data(plain: TidegateProcess, topic: HalfTrimmed) -> None:
    """It reads slowly, so that several sessions end, while its connections stay open.

    If a busy machine authenticates too late and the session ends, the test starts again."""
    deadline = time.monotonic() + TIMEOUT_S
    failed: list[object] = []
    settings = for_librdkafka("alice", "SCRAM-SHA-256")
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": plain.bootstrap_servers,
            "group.id": "unused",
            "auto.offset.reset": "error",
            "check.crcs": True,
            "fetch.message.max.bytes": 20_000,
            "queued.max.messages.kbytes": 20,
            "error_cb": failed.append,
            **settings,
        }
    )
    beginning = confluent_kafka.TopicPartition(topic.topic, 0, 0)
    consumer.assign([beginning])
    expected = list(enumerate(topic.values))
    found: list[tuple[int | None, bytes | None]] = []

    def read(count: int) -> None:
        assert time.monotonic() < deadline, failed
        for message in consumer.consume(count, 0.2):
            assert message.error() is None, str(message.error())
            value = message.value()
            assert isinstance(value, bytes)
            found.append((message.offset(), value))

    try:
        asked, opened = total(plain, SASL_HANDSHAKES), total(plain, CONNECTIONS)
        while total(plain, SASL_HANDSHAKES) < asked + 4 or total(plain, CONNECTIONS) > opened:
            read(min(20, RECORDS - len(found)))
            if failed or total(plain, CONNECTIONS) > opened:  # either sign may come first
                asked, opened = total(plain, SASL_HANDSHAKES), total(plain, CONNECTIONS)
                failed.clear()
            if len(found) == RECORDS:
                assert found == expected
                found.clear()
                consumer.seek(beginning)
        while len(found) < RECORDS:
            read(RECORDS - len(found))
    finally:
        consumer.close()
    assert found == expected


def own(mechanism: str, user: str, password: str) -> str:
    return section("upstream.sasl", {"mechanism": mechanism, "username": user, "password": password})


def strangers_token(authority: Authority, home: Path) -> str:
    (home / "token").write_text("no.token.at-all")
    return section("upstream.sasl", {"mechanism": "OAUTHBEARER", "token.file": home / "token"})


def no_token(authority: Authority, home: Path) -> str:
    return section("upstream.sasl", {"mechanism": "OAUTHBEARER", "token.file": home / "none"})


def strangers_ca(authority: Authority, home: Path) -> str:
    return own("PLAIN", PROXY, USERS[PROXY]) + section("upstream.tls", {"ca": Authority(home / "stranger").ca})


def strangers_certificate(authority: Authority, home: Path) -> str:
    mine = Authority(home / "stranger").identity(PROXY)
    return section("upstream.tls", {"ca": authority.ca, "certificate": mine})


More = Callable[[Authority, Path], str]


CASES: dict[str, tuple[str, More, str]] = {
    "password": ("SASL_PLAINTEXT", lambda *_: own("PLAIN", PROXY, "wr0ng"), "[upstream.sasl]: Authentication failed"),
    "scram": ("SASL_PLAINTEXT", lambda *_: own("SCRAM-SHA-256", PROXY, "wr0ng"), "see username and password"),
    "user": ("SASL_PLAINTEXT", lambda *_: own("SCRAM-SHA-512", "nobody", "wr0ng"), "see username and password"),
    "token": ("SASL_PLAINTEXT", strangers_token, "see token.file"),
    "no token": ("SASL_PLAINTEXT", no_token, "none cannot be read: No such file"),
    "no tls": ("SASL_SSL", lambda *_: own("PLAIN", PROXY, USERS[PROXY]), "speaks TLS: set [upstream.tls]"),
    "ca": ("SASL_SSL", strangers_ca, "see [upstream.tls] ca"),
    "certificate": ("SSL", strangers_certificate, "see [upstream.tls] certificate"),
    "no certificate": ("SSL", lambda a, _: section("upstream.tls", {"ca": a.ca}), "see [upstream.tls] certificate"),
    "rights": (
        "SASL_PLAINTEXT",
        lambda *_: own("PLAIN", "carol", USERS["carol"]),
        "the user carol of [upstream.sasl] lacks CREATE, READ, WRITE, DESCRIBE_CONFIGS on topic __metadata-",
    ),
}


def run(command: str, config: Path) -> tuple[int, str, str]:
    """Runs the command. Repeats `check` if a broker did not answer in time, which says nothing about the settings."""
    arguments = [sys.executable, "-m", "proxy", command, "--config", str(config)]
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        is_late = command == "check" and re.search(r" in (time|\d+ ms)", done.stdout)
        if not is_late or time.monotonic() > deadline:
            return done.returncode, done.stdout, done.stderr


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_one_line_says_which_setting_is_wrong(
    case: str, secured: KafkaCluster, authority: Authority, tmp_path: Path
) -> None:
    protocol, more, said = CASES[case]
    proxy = proxy_before(secured, tmp_path / "x", protocol, more(authority, tmp_path))
    try:
        code, out, error = run("check", proxy.config)
        assert code == 1
        assert any(said in line for line in out.splitlines() if line.startswith("problem: ")), out
        assert error == ""
        assert not any(secret in out for secret in SECRETS)

        code, out, error = run("serve", proxy.config)
        assert code == FAILED
        (line,) = [line for line in error.splitlines() if line.startswith("tidegate: ")]
        assert said in line
        assert "Traceback" not in error
        assert not any(secret in error for secret in SECRETS)
    finally:
        proxy.stop()


@pytest.mark.full
def test_a_broker_without_tls_closes_as_one_that_goes_away(
    secured: KafkaCluster, authority: Authority, tmp_path: Path
) -> None:
    """Therefore `serve` retries. The message still names the setting to check."""
    more = section("upstream.tls", {"ca": authority.ca})
    proxy = proxy_before(secured, tmp_path / "x", "SASL_PLAINTEXT", more)
    code, out, _ = run("check", proxy.config)
    proxy.stop()
    assert code == 1
    assert "see [upstream.tls], does it speak TLS?" in out


@pytest.mark.full
def test_rights_that_tiered_topics_need_are_missed(secured: KafkaCluster, tmp_path: Path, topic_name: str) -> None:
    user = "odd=na,me"
    create_topic(secured.bootstrap_servers, topic_name)
    allow_all(secured, user)
    deny(secured, user, topic_name, [AclOperation.READ, AclOperation.DELETE])
    create_topic(secured.bootstrap_servers, FAILED_DELETIONS_TOPIC)
    deny(secured, user, FAILED_DELETIONS_TOPIC, [AclOperation.WRITE])
    more = own("SCRAM-SHA-256", user, USERS[user])
    proxy = proxy_before(secured, tmp_path / topic_name[-8:], "SASL_PLAINTEXT", more, [topic_name])
    code, out, _ = run("check", proxy.config)
    proxy.stop()
    delete_topic(secured.bootstrap_servers, FAILED_DELETIONS_TOPIC)
    assert code == 1
    who = f"the user {user} of [upstream.sasl]"
    problems = [line for line in out.splitlines() if line.startswith("problem: ")]
    lacked = [("WRITE", FAILED_DELETIONS_TOPIC), ("READ", topic_name), ("DELETE", topic_name)]
    assert problems == [f"problem: {who} lacks {right} on topic {topic}" for right, topic in lacked]


@pytest.mark.full
def test_a_broker_that_is_down_is_waited_for(secured: KafkaCluster, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    proxy = proxy_before(secured, tmp_path / "x", f"127.0.0.1:{port}", sasl("PLAIN", tmp_path))
    with proxy.output.open("wb") as output:
        arguments = [sys.executable, "-m", "proxy", "serve", "--config", str(proxy.config)]
        process = subprocess.Popen(arguments, stdout=output, stderr=subprocess.STDOUT)
        try:
            until(lambda: "no broker has answered yet" in proxy.output.read_text())
            code, out, _ = run("check", proxy.config)
            assert code == 1
            assert f"no broker answers at 127.0.0.1:{port}" in out
            assert process.poll() is None
        finally:
            process.terminate()
            assert process.wait(TIMEOUT_S) == 0
            proxy.stop()


@pytest.mark.full
def test_credentials_that_end_later_are_an_alarm_and_asked_again(
    secured: KafkaCluster, tmp_path: Path, topic_name: str, topic_with: TopicWith
) -> None:
    """The proxy's own token becomes invalid: clients continue, and the proxy recovers when the token is valid again."""
    topic_with([b"hello"])
    allow(secured, "alice", topic_name, READ)
    home = tmp_path / f"later-{topic_name[-8:]}"
    with proxy_before(secured, home, "SASL_PLAINTEXT", sasl("OAUTHBEARER", tmp_path)) as proxy:
        good = (tmp_path / "token").read_text()
        (tmp_path / "token").write_text("no.token.at-all")
        # The session of a connection ends after a few seconds, and the next session needs the token.
        until(lambda: "the brokers reject the proxy" in proxy.output.read_text())
        assert not proxy.is_ready()
        alice = for_kafka_python("alice", "PLAIN")
        assert read_by_kafka_python(proxy.bootstrap_servers, topic_name, 1, alice) == [(0, b"hello")]
        (tmp_path / "token").write_text(good)
        proxy.wait_until_ready()
        assert "no.token.at-all" not in proxy.output.read_text()
