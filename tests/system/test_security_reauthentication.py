"""Sessions end during reads of remote data (KIP-368), and the rights of one principal do not pass to another.

The broker ends sessions of its plain listener after a few seconds. After that, it closes a connection that sends
anything except an authentication.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import confluent_kafka
import pytest
from kafka.protocol.metadata import MetadataRequest, MetadataResponse
from kafka.protocol.sasl import (
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)

from protocol.api_keys import ApiKey
from protocol.apis.fetch.response import FetchResponse, parse_fetch_response
from protocol.errors import ErrorCode
from protocol.header import response_body_position
from protocol.primitives import INT32
from tests.support.fakes.broker.fetch_frames import Ask, fetch_frame
from tests.support.rigs.security_rig import (
    READ,
    RECORDS,
    STORE_READS,
    TIMEOUT_S,
    HalfTrimmed,
    for_librdkafka,
    half_trimmed,
    reads_for_clients,
    total,
)
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.secure_kafka import REAUTHENTICATION_MS, USERS, allow
from tests.support.servers.tidegate import TidegateProcess

pytestmark = pytest.mark.integration

FETCH_VERSION = 12
SOONEST_S = 1.1
"""The shortest time between two authentications. Brokers refuse another one within a second."""
SASL_HANDSHAKES = r'tidegate_requests_total\{.*api="SaslHandshake"'
CONNECTIONS = r"tidegate_connections_total "


@pytest.fixture(scope="module")
def topic(secured: KafkaCluster, plain: TidegateProcess) -> HalfTrimmed:
    trimmed = half_trimmed(secured, "tiered-reauthenticated")
    allow(secured, "alice", trimmed.topic, READ)
    return trimmed


class Wire:
    """A connection on which the test sends single frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, *payloads: bytes) -> None:
        self._writer.write(b"".join(INT32.pack(len(payload)) + payload for payload in payloads))

    async def receive(self) -> bytes:
        async with asyncio.timeout(TIMEOUT_S):
            (size,) = INT32.unpack(await self._reader.readexactly(4))
            return await self._reader.readexactly(size)

    async def is_closed(self) -> bool:
        async with asyncio.timeout(TIMEOUT_S):
            try:
                return await self._reader.read(1) == b""
            except ConnectionResetError:
                return True

    async def authenticate(self, user: str) -> int:
        """Authenticates as `user`. Returns the broker's error code."""
        self.send(handshake(1), token(user))
        assert SaslHandshakeResponse.decode((await self.receive())[4:], version=1).error_code == 0
        return await self.authenticated()

    async def authenticated(self) -> int:
        return int(SaslAuthenticateResponse.decode((await self.receive())[4:], version=1).error_code)

    async def fetched(self) -> FetchResponse:
        payload = await self.receive()
        return parse_fetch_response(
            payload, response_body_position(ApiKey.FETCH, FETCH_VERSION, payload), FETCH_VERSION
        )


def handshake(version: int) -> bytes:
    request = SaslHandshakeRequest(mechanism="PLAIN")
    request.API_VERSION = version
    request.with_header(correlation_id=1, client_id="test")
    return bytes(request.encode(header=True))


def raw_token(user: str) -> bytes:
    return f"\0{user}\0{USERS[user]}".encode()


def token(user: str) -> bytes:
    request = SaslAuthenticateRequest(auth_bytes=raw_token(user))
    request.API_VERSION = 1
    request.with_header(correlation_id=2, client_id="test")
    return bytes(request.encode(header=True))


def fetch(topic: str, offset: int, max_wait_ms: int = 5_000) -> bytes:
    return fetch_frame(FETCH_VERSION, [Ask(topic, 0, offset)], max_wait_ms=max_wait_ms)


def records_of(response: FetchResponse) -> bytes:
    (partition,) = response.partitions
    return bytes(response.records(partition))


@asynccontextmanager
async def wire_to(proxy: TidegateProcess) -> AsyncIterator[Wire]:
    reader, writer = await asyncio.open_connection(*proxy.address)
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()


def error_of(response: FetchResponse) -> int:
    (partition,) = response.partitions
    return partition.error_code


class NotNowError(Exception):
    """An error that every client retries."""


def served(response: FetchResponse) -> FetchResponse:
    error = error_of(response)
    if error == ErrorCode.REPLICA_NOT_AVAILABLE or not (error or records_of(response)):
        raise NotNowError
    assert error == 0
    return response


async def within_a_session(attempt: Callable[[], Awaitable[None]]) -> None:
    """Repeats the whole attempt if its session ends too early, since a session is short on a busy machine.

    Fails if the connection is closed before its session can have ended."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            began_s = time.monotonic()
            try:
                return await attempt()
            except NotNowError:
                continue
            except (asyncio.IncompleteReadError, ConnectionError):
                if time.monotonic() - began_s < REAUTHENTICATION_MS / 1000:
                    raise


@asynccontextmanager
async def alice_has_read(proxy: TidegateProcess, topic: HalfTrimmed) -> AsyncIterator[Wire]:
    """Yields a connection on which alice has read remote records, and which may authenticate again."""
    async with wire_to(proxy) as wire:
        assert await wire.authenticate("alice") == 0
        for _ in range(2):  # the first fetch is not predicted, the second is
            wire.send(fetch(topic.topic, 0))
            served(await wire.fetched())
        await asyncio.sleep(SOONEST_S)
        yield wire


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


async def test_another_principal_is_served_nothing_of_what_the_first_was_allowed(
    plain: TidegateProcess, topic: HalfTrimmed
) -> None:
    """A broker accepts no other principal on a connection, so the requests in progress get no answers."""

    async def attempt() -> None:
        async with alice_has_read(plain, topic) as wire:
            reads = total(plain, STORE_READS)
            wire.send(handshake(1), token("bob"), fetch(topic.topic, 2_000))
            assert SaslHandshakeResponse.decode((await wire.receive())[4:], version=1).error_code == 0
            assert await wire.is_closed()
            assert total(plain, STORE_READS) == reads
        async with wire_to(plain) as wire:
            assert await wire.authenticate("bob") == 0
            wire.send(fetch(topic.topic, 2_000))
            assert error_of(await wire.fetched()) == ErrorCode.TOPIC_AUTHORIZATION_FAILED
            assert total(plain, STORE_READS) == reads

    await asyncio.to_thread(reads_for_clients, plain)
    await within_a_session(attempt)


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


def test_a_consumer_authenticates_again_and_again_while_it_reads_remote_data(
    plain: TidegateProcess, topic: HalfTrimmed
) -> None:
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
