"""`BrokerClient` sends the proxy's own requests to the cluster's brokers, by node id, each with a deadline.

* It has one connection per broker and *lane*, since a broker answers one request of a connection at a time. A long poll
  (Fetch with a wait, JoinGroup) uses its own lane, and all short requests share the default lane.
* It does not retry requests: only the caller knows whether its request may be sent twice. `BrokerError.retriable` says
  whether a retry may help. The caller handles the error codes inside responses.
* Attempts to connect back off per address, with full jitter, for at most 1 s. There is no background task.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack

from kafka.protocol.api_header import ResponseClassRegistry

from protocol.errors import ErrorCode, ProtocolError
from tiers.backoff import Backoff
from tiers.broker.connection import BrokerConnection, unchecked
from tiers.broker.metadata_reads import (
    DEFAULT_METADATA_MAX_AGE_MS,
    Address,
    Deadline,
    MetadataClient,
    RequestOptions,
)
from tiers.broker.sasl import SaslCredentials
from tiers.broker.tls import TlsContext
from tiers.errors import BrokerError
from tiers.model.ids import TopicIdPartition

DEFAULT_LANE = ""
DEFAULT_REQUEST_TIMEOUT_MS = 30_000
_BACKOFF = Backoff(base_ms=100, cap_ms=1000)
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def monotonic_ms() -> int:
    """Returns the time since some start. On Linux it goes on while the machine is suspended."""
    return time.clock_gettime_ns(_CLOCK) // 1_000_000


def wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


class Moment(NamedTuple):
    """One moment by both clocks."""

    monotonic_ms: int
    wall_ms: int


class Leader(NamedTuple):
    node_id: int
    leader_epoch: int


Connect = Callable[..., Awaitable[BrokerConnection]]
"""Opens a connection to a broker, as `BrokerConnection.connect` does. Raises `BrokerError`."""


@dataclass(slots=True)
class _Link:
    """The slot of a connection, which may be closed and opened again, and its backoff."""

    lock: asyncio.Lock
    connection: BrokerConnection | None = None
    ssl_context: ssl.SSLContext | None = None
    """The context with which `connection` was opened."""
    failures: int = 0
    not_before_ms: int = 0


class BrokerClient(MetadataClient):
    """The client. It asks the `bootstrap` addresses until Metadata has named the brokers.

    It asks them again when it can reach none of those brokers."""

    def __init__(
        self,
        bootstrap: Sequence[Address],
        *,
        client_id: str,
        tls: TlsContext | None = None,
        credentials: SaslCredentials | None = None,
        request_timeout_ms: int = DEFAULT_REQUEST_TIMEOUT_MS,
        clock_ms: Callable[[], int] = monotonic_ms,
        jitter: Callable[[], float] = random.random,
        connect: Connect = BrokerConnection.connect,
    ) -> None:
        if not bootstrap:
            raise ValueError("there is no bootstrap address")
        super().__init__(request_timeout_ms, clock_ms)
        self._bootstrap = tuple(bootstrap)
        self._client_id = client_id
        self.tls = tls
        self._credentials = credentials
        self._jitter = jitter
        self._open_connection = connect
        self._links: dict[tuple[Address, str], _Link] = {}
        self._retired: list[BrokerConnection] = []
        self._is_closed = False

    async def open(self) -> None:
        """Reads the brokers' addresses. Raises `BrokerError` when no bootstrap address answers in time."""
        await self.brokers(0, self._request_timeout_ms)

    async def close(self) -> None:
        """Closes every connection. Requests in progress fail. Safe to call twice."""
        self._is_closed = True
        links, self._links = self._links, {}
        retired, self._retired = self._retired, []
        for connection in [link.connection for link in links.values()] + retired:
            if connection is not None:
                await connection.close()

    def _forget_others(self, known: set[Address]) -> None:
        """Closes the connections to addresses that no broker has any more."""
        known.update(self._bootstrap)
        for key in [key for key in self._links if key[0] not in known]:
            link = self._links[key]
            if not link.lock.locked():
                del self._links[key]
                if link.connection is not None:
                    link.connection.abort("no broker has this address any more")

    async def leader_of(
        self,
        partition: TopicIdPartition,
        timeout_ms: int | None = None,
        max_age_ms: int = DEFAULT_METADATA_MAX_AGE_MS,
    ) -> Leader:
        """Returns the leader of a partition, found by the topic id.

        Raises `BrokerError` with UNKNOWN_TOPIC_ID when there is no such partition, and with LEADER_NOT_AVAILABLE while
        it has no leader. Older metadata may lack a new partition. So it reports UNKNOWN_TOPIC_ID only by metadata that
        was read after this call."""
        not_before_ms = self._clock_ms() - max_age_ms
        topic = self._known_topic(partition.topic_id, not_before_ms) if max_age_ms > 0 else None
        found = None if topic is None else topic.partitions.get(partition.partition)
        if found is None:
            topic = await self._topic(partition.topic_id, self._deadline(timeout_ms))
            found = None if topic is None else topic.partitions.get(partition.partition)
        if found is None:
            raise BrokerError(f"there is no partition {partition} with its topic id", ErrorCode.UNKNOWN_TOPIC_ID)
        if found.leader_id < 0:
            raise BrokerError(f"{partition} has no leader", ErrorCode.LEADER_NOT_AVAILABLE, retriable=True)
        return Leader(found.leader_id, found.leader_epoch)

    async def request(
        self, node_id: int | None, message: Any, timeout_ms: int | None = None, **options: Unpack[RequestOptions]
    ) -> Any:
        """Sends kafka-python's request object and returns its response object.

        If `node_id` is None, it asks any broker. The request must be one that gets a response. Raises `BrokerError`,
        with UNSUPPORTED_VERSION when the bounds leave no version."""
        body, version = await self.request_raw(node_id, message, timeout_ms, **options)
        message.API_VERSION = version
        response_class = ResponseClassRegistry.get_response_class(message.header)
        try:
            return response_class.decode(body, version=version)
        except Exception as error:  # for malformed bytes the decoder raises exceptions of many types
            raise BrokerError(f"a response to {message.name} v{version} cannot be read: {error!r}") from error

    async def request_raw(
        self, node_id: int | None, message: Any, timeout_ms: int | None = None, **options: Unpack[RequestOptions]
    ) -> tuple[memoryview, int]:
        """Does the same as `request`, but returns the undecoded body of the response and the version."""
        deadline = self._deadline(timeout_ms)
        connection = await self._connection(node_id, options.get("lane", DEFAULT_LANE), deadline)
        lowest, highest = connection.api_versions.get(message.API_KEY, (0, -1))
        limit = options.get("max_version")
        version = min(highest, int(message.max_version), highest if limit is None else limit)
        if version < max(lowest, options.get("min_version", 0)):
            raise BrokerError(
                f"{connection.address} supports no version of {message.name} that the proxy can use",
                ErrorCode.UNSUPPORTED_VERSION,
            )
        before_sending = options.get("before_sending", unchecked)
        try:
            return await connection.request(message, version, deadline.remaining_ms(), before_sending), version
        except ProtocolError as error:
            connection.abort("the broker sent bytes that are no Kafka response")
            raise BrokerError(f"{connection.address} sent bytes that are no Kafka response: {error}") from error

    async def _connection(self, node_id: int | None, lane: str, deadline: Deadline) -> BrokerConnection:
        if node_id is not None:
            return await self._connect(await self._address_of(node_id, deadline), lane, deadline)
        candidates = self._candidates(lane)
        for number, address in enumerate(candidates, 1):
            try:
                return await self._connect(address, lane, deadline.share(1 + len(candidates) - number))
            except BrokerError:
                if number == len(candidates):
                    raise
        raise AssertionError("there is always a bootstrap address")

    def _candidates(self, lane: str) -> list[Address]:
        """Returns every known address, those with fewer failures in a row first, else in random order.

        The random order keeps the client from asking the same broker with stale metadata every time.
        """
        known = (
            () if self.cached_metadata is None else [(b.host, b.port) for b in self.cached_metadata.brokers.values()]
        )
        addresses = dict.fromkeys([*known, *self._bootstrap])

        def rank(address: Address) -> tuple[int, float]:
            link = self._links.get((address, lane))
            return (0 if link is None else link.failures), self._jitter()

        return sorted(addresses, key=rank)

    async def _address_of(self, node_id: int, deadline: Deadline) -> Address:
        metadata = self.cached_metadata
        if metadata is None or node_id not in metadata.brokers:
            metadata = await self.brokers(0, deadline.remaining_ms())
        broker = metadata.brokers.get(node_id)
        if broker is None:
            raise BrokerError(f"the cluster names no broker {node_id}", retriable=True)
        return broker.host, broker.port

    async def _connect(self, address: Address, lane: str, deadline: Deadline) -> BrokerConnection:
        if self._is_closed:
            raise BrokerError("the client is closed")
        link = self._links.get((address, lane))
        if link is None:
            link = self._links[address, lane] = _Link(asyncio.Lock())
        try:
            async with asyncio.timeout(deadline.remaining_ms() / 1000), link.lock:
                if (connection := self._usable(link)) is not None:
                    return connection
                if (wait_ms := link.not_before_ms - self._clock_ms()) > 0:
                    await asyncio.sleep(wait_ms / 1000)
                return await self._connect_now(link, address, deadline)
        except TimeoutError as error:
            raise BrokerError(f"no connection to {address[0]}:{address[1]} in time", retriable=True) from error

    def _usable(self, link: _Link) -> BrokerConnection | None:
        """Returns the open connection; None when there is none or the certificates have changed since.

        A connection would keep the old certificate for as long as it lasts, so it is retired.
        """
        connection = link.connection
        if connection is None or connection.is_closed:
            return None
        if self.tls is not None and self.tls.current() is not link.ssl_context:
            connection.retire()
            link.connection = None
            self._retired = [each for each in (*self._retired, connection) if not each.is_closed]
        return link.connection

    async def _connect_now(self, link: _Link, address: Address, deadline: Deadline) -> BrokerConnection:
        ssl_context = None if self.tls is None else self.tls.current()
        try:
            connection = await self._open_connection(
                address[0],
                address[1],
                client_id=self._client_id,
                clock_ms=self._clock_ms,
                timeout_ms=deadline.remaining_ms(),
                ssl_context=ssl_context,
                credentials=self._credentials,
            )
        except BrokerError:
            link.failures += 1
            link.not_before_ms = self._clock_ms() + int(_BACKOFF.pause_ms(link.failures, self._jitter))
            raise
        if self._is_closed:
            await connection.close()
            raise BrokerError("the client is closed")
        link.connection, link.ssl_context, link.failures, link.not_before_ms = connection, ssl_context, 0, 0
        return connection
