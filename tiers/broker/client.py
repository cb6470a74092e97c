"""`BrokerClient` sends the proxy's own requests to the cluster's brokers, by node id, each with a deadline.

* It has one connection per broker and *lane*. A broker answers one request of a connection at a time. So a long poll
  (Fetch with a wait, JoinGroup) uses its own lane, and all short requests share the default lane.
* It does not retry requests, because only the caller knows whether its request may be sent twice. If `node_id` is None,
  it tries to connect to one broker after the other. `BrokerError.retriable` says whether a retry may help. The caller
  handles the error codes inside responses.
* Attempts to connect back off per address, with full jitter, from 50 ms to 1 s. There is no background task.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar
from uuid import UUID

from kafka.protocol.api_header import ResponseClassRegistry

from protocol.errors import ErrorCode, ProtocolError
from tiers.broker.cluster_metadata import ClusterMetadata
from tiers.broker.connection import BrokerConnection, unchecked
from tiers.broker.metadata_reads import Address, Deadline, MetadataReads
from tiers.broker.sasl import SaslCredentials
from tiers.broker.tls import TlsContext
from tiers.errors import BrokerError
from tiers.model.ids import TopicIdPartition

DEFAULT_LANE = ""
DEFAULT_METADATA_MAX_AGE_MS = 30_000
DEFAULT_REQUEST_TIMEOUT_MS = 30_000
_BACKOFF_BASE_MS = 50
_BACKOFF_CAP_MS = 1000

T = TypeVar("T")


_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def monotonic_ms() -> int:
    """Returns the time since some start. On Linux it goes on while the machine is suspended."""
    return time.clock_gettime_ns(_CLOCK) // 1_000_000


def wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


class Leader(NamedTuple):
    node_id: int
    leader_epoch: int


class Connection(Protocol):
    """The part of `BrokerConnection` that the client uses."""

    address: str

    @property
    def api_versions(self) -> Mapping[int, tuple[int, int]]: ...

    @property
    def is_closed(self) -> bool: ...

    async def request(
        self, message: Any, version: int, timeout_ms: int, before_sending: Callable[[], None] = ...
    ) -> memoryview: ...

    def abort(self, reason: str) -> None: ...

    def retire(self) -> None: ...

    async def close(self) -> None: ...


class Connect(Protocol):
    """Opens a connection to a broker, as `BrokerConnection.connect` does. Raises `BrokerError`."""

    async def __call__(
        self,
        host: str,
        port: int,
        *,
        client_id: str,
        clock_ms: Callable[[], int],
        timeout_ms: int,
        ssl_context: ssl.SSLContext | None,
        credentials: SaslCredentials | None,
    ) -> Connection: ...


@dataclass(slots=True)
class _Link:
    """The slot of a connection, which may be closed and opened again, and its backoff."""

    lock: asyncio.Lock
    connection: Connection | None = None
    ssl_context: ssl.SSLContext | None = None
    """The context with which `connection` was opened."""
    failures: int = 0
    not_before_ms: int = 0


class BrokerClient:
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
        self._bootstrap = tuple(bootstrap)
        self._client_id = client_id
        self.tls = tls
        self._credentials = credentials
        self._request_timeout_ms = request_timeout_ms
        self._clock_ms = clock_ms
        self._jitter = jitter
        self._open_connection = connect
        self._links: dict[tuple[Address, str], _Link] = {}
        self._retired: list[Connection] = []
        self._reads = MetadataReads(self.request_raw, clock_ms, self._forget_others)
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

    @property
    def cached_metadata(self) -> ClusterMetadata | None:
        """The brokers that were named last, and the topics that were read, however old; None before the first read."""
        return self._reads.known

    async def metadata(
        self, max_age_ms: int = DEFAULT_METADATA_MAX_AGE_MS, timeout_ms: int | None = None
    ) -> ClusterMetadata:
        """Returns the metadata of all topics, read at most `max_age_ms` before this call.

        With 0, the request to the broker begins after this call. Concurrent callers share one refresh. Raises
        `BrokerError`. The answer of a large cluster is expensive for the broker: ask for `brokers`, or for the topics
        that are needed (`named`, `leader_of`), where that is enough."""
        return await self._reads.at_most_as_old(max_age_ms, timeout_ms or self._request_timeout_ms, is_whole=True)

    async def brokers(
        self, max_age_ms: int = DEFAULT_METADATA_MAX_AGE_MS, timeout_ms: int | None = None
    ) -> ClusterMetadata:
        """Returns the brokers, read at most `max_age_ms` before this call, and the topics that are known already.

        Raises `BrokerError`."""
        return await self._reads.at_most_as_old(max_age_ms, timeout_ms or self._request_timeout_ms, is_whole=False)

    async def named(
        self,
        names: Collection[str],
        ids: Collection[UUID] = (),
        timeout_ms: int | None = None,
        *,
        node_id: int | None = None,
    ) -> ClusterMetadata:
        """Returns the brokers, and those of the topics `names` and `ids` that the asked broker knows, read now.

        The broker is `node_id`, or any. Only topics that the proxy may not describe have an error. Raises
        `BrokerError`."""
        return await self._reads.named(names, ids, timeout_ms or self._request_timeout_ms, node_id)

    async def topic_named(self, topic: str, timeout_ms: int | None = None) -> ClusterMetadata:
        """Returns the brokers and `topic`, as a broker that knows it says now, if any broker does.

        A new topic exists before all brokers know it. Only if no broker knows the topic, there is no such topic."""
        return await self._reads.naming(topic, timeout_ms or self._request_timeout_ms, is_whole=False)

    async def metadata_naming(self, topic: str, timeout_ms: int | None = None) -> ClusterMetadata:
        """Does the same as `topic_named`, and returns all other topics too."""
        return await self._reads.naming(topic, timeout_ms or self._request_timeout_ms, is_whole=True)

    async def of_any_broker(self, ask: Callable[[int, int], Awaitable[T]], timeout_ms: int | None = None) -> T:
        """Calls `ask(node_id, timeout_ms)` for one broker after the other, and returns the first result.

        The metadata names a broker for a while after it died, so a retriable error leads to the next broker. Raises the
        last `BrokerError`, or the first that is not retriable."""
        deadline = Deadline(self._clock_ms, timeout_ms or self._request_timeout_ms)
        nodes = sorted((await self.brokers(timeout_ms=deadline.remaining_ms())).brokers)
        for left in range(len(nodes), 0, -1):
            try:
                return await ask(nodes[-left], deadline.share(left).remaining_ms())
            except BrokerError as error:
                if not error.retriable or left == 1:
                    raise
        raise AssertionError("metadata always names a broker")

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
        topic = self._reads.known_topic(partition.topic_id, not_before_ms) if max_age_ms > 0 else None
        found = None if topic is None else topic.partitions.get(partition.partition)
        if found is None:
            topic = await self._reads.topic(partition.topic_id, timeout_ms or self._request_timeout_ms)
            found = None if topic is None else topic.partitions.get(partition.partition)
        if found is None:
            raise BrokerError(f"there is no partition {partition} with its topic id", ErrorCode.UNKNOWN_TOPIC_ID)
        if found.leader_id < 0:
            raise BrokerError(f"{partition} has no leader", ErrorCode.LEADER_NOT_AVAILABLE, retriable=True)
        return Leader(found.leader_id, found.leader_epoch)

    async def request(
        self,
        node_id: int | None,
        message: Any,
        timeout_ms: int | None = None,
        *,
        min_version: int = 0,
        max_version: int | None = None,
        lane: str = DEFAULT_LANE,
        before_sending: Callable[[], None] = unchecked,
    ) -> Any:
        """Sends kafka-python's request object and returns its response object.

        `before_sending` is called when the connection is usable, right before the request leaves. If it raises an
        exception, nothing is sent.

        If `node_id` is None, it asks any broker. It uses the highest version that the broker and kafka-python support,
        up to `max_version`. Raises `BrokerError`, with UNSUPPORTED_VERSION when that version is below `min_version`.
        The request must be one that gets a response."""
        body, version = await self.request_raw(
            node_id,
            message,
            timeout_ms,
            min_version=min_version,
            max_version=max_version,
            lane=lane,
            before_sending=before_sending,
        )
        message.API_VERSION = version
        response_class = ResponseClassRegistry.get_response_class(message.header)
        try:
            return response_class.decode(body, version=version)
        except Exception as error:  # for malformed bytes the decoder raises exceptions of many types
            raise BrokerError(f"a response to {message.name} v{version} cannot be read: {error!r}") from error

    async def request_raw(
        self,
        node_id: int | None,
        message: Any,
        timeout_ms: int | None = None,
        *,
        min_version: int = 0,
        max_version: int | None = None,
        lane: str = DEFAULT_LANE,
        before_sending: Callable[[], None] = unchecked,
    ) -> tuple[memoryview, int]:
        """Does the same as `request`, but returns the undecoded body of the response and the version."""
        deadline = Deadline(self._clock_ms, timeout_ms or self._request_timeout_ms)
        connection = await self._connection(node_id, lane, deadline)
        version = self._version(connection, message, min_version, max_version)
        try:
            return await connection.request(message, version, deadline.remaining_ms(), before_sending), version
        except ProtocolError as error:
            connection.abort("the broker sent bytes that are no Kafka response")
            raise BrokerError(f"{connection.address} sent bytes that are no Kafka response: {error}") from error

    @staticmethod
    def _version(connection: Connection, message: Any, min_version: int, max_version: int | None) -> int:
        lowest, highest = connection.api_versions.get(message.API_KEY, (0, -1))
        highest = min(highest, int(message.max_version))
        if max_version is not None:
            highest = min(highest, max_version)
        if highest < max(lowest, min_version):
            raise BrokerError(
                f"{connection.address} supports no version of {message.name} that the proxy can use",
                ErrorCode.UNSUPPORTED_VERSION,
            )
        return highest

    async def _connection(self, node_id: int | None, lane: str, deadline: Deadline) -> Connection:
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
        known = () if self._reads.known is None else [(b.host, b.port) for b in self._reads.known.brokers.values()]
        addresses = dict.fromkeys([*known, *self._bootstrap])

        def rank(address: Address) -> tuple[int, float]:
            link = self._links.get((address, lane))
            return (0 if link is None else link.failures), self._jitter()

        return sorted(addresses, key=rank)

    async def _address_of(self, node_id: int, deadline: Deadline) -> Address:
        metadata = self._reads.known
        if metadata is None or node_id not in metadata.brokers:
            metadata = await self.brokers(0, deadline.remaining_ms())
        broker = metadata.brokers.get(node_id)
        if broker is None:
            raise BrokerError(f"the cluster names no broker {node_id}", retriable=True)
        return broker.host, broker.port

    async def _connect(self, address: Address, lane: str, deadline: Deadline) -> Connection:
        if self._is_closed:
            raise BrokerError("the client is closed")
        link = self._links.get((address, lane))
        if link is None:
            link = self._links[address, lane] = _Link(asyncio.Lock())
        if (connection := self._usable(link)) is not None:
            return connection
        try:
            async with asyncio.timeout(deadline.remaining_ms() / 1000), link.lock:
                if (connection := self._usable(link)) is not None:
                    return connection
                if (wait_ms := link.not_before_ms - self._clock_ms()) > 0:
                    await asyncio.sleep(wait_ms / 1000)
                return await self._connect_now(link, address, deadline)
        except TimeoutError as error:
            raise BrokerError(f"no connection to {address[0]}:{address[1]} in time", retriable=True) from error

    def _usable(self, link: _Link) -> Connection | None:
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

    async def _connect_now(self, link: _Link, address: Address, deadline: Deadline) -> Connection:
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
            cap_ms = min(_BACKOFF_CAP_MS, _BACKOFF_BASE_MS << min(link.failures, 10))
            link.not_before_ms = self._clock_ms() + int(cap_ms * self._jitter())
            raise
        if self._is_closed:
            await connection.close()
            raise BrokerError("the client is closed")
        link.connection, link.ssl_context, link.failures, link.not_before_ms = connection, ssl_context, 0, 0
        return connection
