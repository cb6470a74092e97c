"""A connection to a proxy on which a test authenticates and fetches with single frames, also during other requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

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
from tests.support.rigs.security_rig import TIMEOUT_S, HalfTrimmed
from tests.support.servers.secure_kafka import REAUTHENTICATION_MS, USERS
from tests.support.servers.tidegate import TidegateProcess

FETCH_VERSION = 12
SOONEST_S = 1.1
"""The shortest time between two authentications. Brokers refuse another one within a second."""


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
    return _authenticate(raw_token(user))


def wrong_token() -> bytes:
    return _authenticate(b"\0alice\0wr0ng")


def _authenticate(auth_bytes: bytes) -> bytes:
    request = SaslAuthenticateRequest(auth_bytes=auth_bytes)
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
    async with wire_to_address(*proxy.address) as wire:
        yield wire


@asynccontextmanager
async def wire_to_address(host: str, port: int) -> AsyncIterator[Wire]:
    reader, writer = await asyncio.open_connection(host, port)
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
