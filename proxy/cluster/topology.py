"""Knows each broker's address, the address at which clients reach it through the proxy, and the topic ids.

The broker with node id N is advertised as (advertised host, base port + N). Node ids and the cluster id stay those of
the cluster. The topology asks for the brokers every few seconds, and at once if an answer names an unknown node. It
binds that node's listener before the answer leaves. So no client ever sees a broker's own address, or a port without a
listener. Each of these requests names the topics that clients use, and no others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from protocol.errors import ErrorCode
from proxy.cluster.topic_directory import TopicDirectory
from proxy.wire.context import Address
from proxy.wire.server import BrokerEndpoint
from tiers.bounded_gather import bounded_gather
from tiers.broker.client import BrokerClient
from tiers.broker.cluster_metadata import ClusterMetadata
from tiers.errors import BrokerError, BrokerRefusedError
from tiers.lasting_trouble import LastingTrouble

logger = logging.getLogger(__name__)

Listen = Callable[[str, int, BrokerEndpoint], object]
MAX_PORT = 65_535
_DISCARD_PORT = 9
_BROKERS_AT_ONCE = 16
_ONE_BROKER_MS = 2_000


@dataclass(frozen=True, slots=True)
class ListenerAddresses:
    """`host` is the address to bind. `advertised_host` is the address that clients get."""

    host: str
    advertised_host: str
    bootstrap_port: int
    base_port: int

    def advertised(self, node_id: int) -> Address:
        return self.advertised_host, self.base_port + node_id


class Topology:
    def __init__(
        self,
        client: BrokerClient,
        bootstrap_servers: Sequence[Address],
        addresses: ListenerAddresses,
        listen: Listen,
        *,
        clock_ms: Callable[[], int],
        own_topics: Collection[str] = (),
        refresh_interval_ms: int = 5_000,
        timeout_ms: int = 10_000,
    ) -> None:
        """`own_topics` are those whose ids must always be known."""
        self._client = client
        self._bootstrap_servers = tuple(bootstrap_servers)
        self._addresses = addresses
        self._listen = listen
        self._clock_ms = clock_ms
        self._topics = TopicDirectory(client, clock_ms, own_topics)
        self._refresh_interval_ms = refresh_interval_ms
        self._timeout_ms = timeout_ms
        self._metadata: ClusterMetadata | None = None
        self._listening: set[int] = set()
        self._unserved: dict[int, str] = {}
        """By node id: why the broker's listener cannot be opened."""
        self._wake = asyncio.Event()
        self._first_read = asyncio.Event()
        self._trouble: str | None = None
        self._failing = LastingTrouble(
            logger,
            "the cluster's metadata cannot be read",
            "the cluster's metadata can be read again",
            clock_ms=clock_ms,
        )
        self.refusal: BrokerRefusedError | None = None
        """Set while the brokers reject the proxy's own connections."""

    @property
    def is_ready(self) -> bool:
        """Whether the cluster has been read once. Each of its brokers then has a listener, unless the bind failed."""
        return self._first_read.is_set()

    @property
    def cluster_id(self) -> str | None:
        return None if self._metadata is None else self._metadata.cluster_id

    @property
    def trouble(self) -> str | None:
        """Why the last attempt to read the cluster failed. None if it succeeded."""
        return self._trouble

    @property
    def unserved(self) -> list[str]:
        """The brokers that clients cannot reach through the proxy, one line each."""
        return [f"broker {node_id} has no listener: {reason}" for node_id, reason in sorted(self._unserved.items())]

    async def wait_for_cluster(self) -> None:
        """Waits until the cluster has been read once. Opens no listeners. Raises `BrokerRefusedError`."""
        while True:
            if await self.meet_cluster():
                return
            await asyncio.sleep(1)

    async def meet_cluster(self) -> bool:
        """Reads the cluster if it has not been read yet, and returns whether it has been.

        Raises `BrokerRefusedError` if the brokers reject the proxy: they have never accepted it with these settings."""
        if self._metadata is None:
            self._metadata = await self._read()
            if self._metadata is None and self.refusal is not None:
                raise self.refusal
        return self._metadata is not None

    def listen_for_bootstrap(self) -> None:
        """Binds the bootstrap port. Raises `OSError`."""
        self._listen(self._addresses.host, self._addresses.bootstrap_port, BrokerEndpoint(None, self._any_broker))

    async def wait_until_ready(self) -> None:
        await self._first_read.wait()

    async def run(self) -> None:
        """Follows the cluster's metadata until cancelled."""
        while True:
            await self.refresh()
            delay_ms = self._refresh_interval_ms if self._trouble is None else min(1_000, self._refresh_interval_ms)
            try:
                async with asyncio.timeout(delay_ms / 1000):
                    await self._wake.wait()
            except TimeoutError:
                continue
            self._wake.clear()

    async def refresh(self) -> bool:
        """Asks for the brokers, and for the topics that clients use. Returns False if no broker answered."""
        metadata = await self._read()
        if metadata is not None:
            self._follow(metadata)
        return metadata is not None

    async def _read(self) -> ClusterMetadata | None:
        names, asked_at_ms = self._topics.names(), self._clock_ms()
        try:
            metadata = await self._client.named(names, (), self._timeout_ms)
        except BrokerError as error:
            refusal = error if isinstance(error, BrokerRefusedError) else None
            if refusal is not None and self.refusal is None:
                logger.error("the brokers reject the proxy: %s", error)
            elif refusal is None:
                self._failing.found(error=str(error))
            self._trouble, self.refusal = str(error), refusal
            return None
        if self.refusal is not None:
            logger.info("the brokers accept the proxy again")
        self._failing.ended()
        self._topics.note(metadata, names, asked_at_ms)
        self._trouble = self.refusal = None
        return metadata

    def _follow(self, metadata: ClusterMetadata) -> None:
        before = {} if self._metadata is None or not self.is_ready else self._metadata.brokers
        self._metadata = metadata
        self._unserved = {node_id: why for node_id, why in self._unserved.items() if node_id in metadata.brokers}
        for node_id, broker in metadata.brokers.items():
            self._listen_for(node_id)
            if node_id not in self._listening:
                continue
            known = before.get(node_id)
            if known is None or (known.host, known.port) != (broker.host, broker.port):
                host, port = self._addresses.advertised(node_id)
                logger.info(
                    "broker %d at %s:%d is advertised as %s:%d",
                    node_id, broker.host, broker.port, host, port,
                    extra={"node_id": node_id},
                )  # fmt: skip
        self._first_read.set()

    def _listen_for(self, node_id: int) -> None:
        if node_id in self._listening:
            return
        port = self._addresses.base_port + node_id
        try:
            if port > MAX_PORT:
                raise OSError(f"port {port} does not exist: lower listener.base.port")
            if port == self._addresses.bootstrap_port:
                raise OSError(f"port {port} is listener.bootstrap.port: change one of the two settings")
            self._listen(self._addresses.host, port, BrokerEndpoint(node_id, lambda: self.broker_addresses(node_id)))
        except OSError as error:
            reason = error.strerror or str(error)
            if self._unserved.get(node_id) != reason:
                self._unserved[node_id] = reason
                logger.error(
                    "the listener for broker %d cannot be opened: %s",
                    node_id, reason,
                    extra={"node_id": node_id, "port": port},
                )  # fmt: skip
            return
        self._listening.add(node_id)
        if self._unserved.pop(node_id, None) is not None:
            logger.info("the listener for a broker is open now", extra={"node_id": node_id, "port": port})

    # Addresses

    def advertised_address(self, node_id: int) -> Address:
        """Returns the address at which clients reach the broker through the proxy. Binds a listener for a new node.

        If the port cannot be bound, a stranger may serve it. Clients then get a name that has no address."""
        if node_id not in self._listening and node_id not in self._unserved:
            self._listen_for(node_id)
            self._wake.set()
        if node_id in self._unserved:
            return f"broker-{node_id}-has-no-listener.invalid", _DISCARD_PORT
        return self._addresses.advertised(node_id)

    def address_map(self) -> dict[int, tuple[Address, Address]]:
        """Returns, by node id, the broker's own address and its advertised address."""
        brokers = {} if self._metadata is None else self._metadata.brokers
        return {
            node_id: ((broker.host, broker.port), self._addresses.advertised(node_id))
            for node_id, broker in sorted(brokers.items())
        }

    def broker_addresses(self, node_id: int) -> Sequence[Address]:
        """Returns the broker's current address, as a list of at most one. An unknown broker triggers a refresh."""
        broker = None if self._metadata is None else self._metadata.brokers.get(node_id)
        if broker is None:
            self._wake.set()
            return ()
        return ((broker.host, broker.port),)

    def _any_broker(self) -> Sequence[Address]:
        """Returns the addresses for the bootstrap port: the configured servers, then the brokers of the cluster."""
        named = () if self._metadata is None else ((b.host, b.port) for b in self._metadata.brokers.values())
        return tuple(dict.fromkeys((*self._bootstrap_servers, *named)))

    # Topics

    def topic_id(self, name: str, max_age_ms: int | None = None) -> UUID | None:
        """Returns None if the name is unknown, or was asked for more than `max_age_ms` ago. Never waits.

        The next refresh asks for an unknown name."""
        return self._topics.topic_id(name, max_age_ms)

    async def resolve_topic_id(self, name: str, max_age_ms: int, timeout_ms: int) -> UUID | None:
        """Returns the topic's id as of at most `max_age_ms` ago. None if there is no such topic, or no answer."""
        try:
            return await self._topics.resolve_id(name, max_age_ms, timeout_ms)
        except BrokerError as error:
            logger.debug("no broker tells the id of a topic", extra={"topic": name, "error": str(error)})
            return None

    async def resolve_topic_name(self, topic_id: UUID, max_age_ms: int, timeout_ms: int) -> str | None:
        """Returns the topic's name. None: the cluster has had no such topic since `max_age_ms` ago.

        Raises `BrokerError` without an answer."""
        return await self._topics.resolve_name(topic_id, timeout_ms)

    async def current_topic_ids(
        self, names: Collection[str], node_id: int | None, timeout_ms: int
    ) -> Mapping[str, UUID]:
        """Returns the topics' ids, which it asks of the broker `node_id` (None: of any broker). Raises `BrokerError`.

        The result has no entry for a topic that the broker does not know."""
        if not names:
            return {}
        answer = await self._client.named(names, (), timeout_ms, node_id=node_id)
        return {topic.name: topic.topic_id for topic in answer.topics.values() if topic.error == ErrorCode.NONE}

    async def all_topic_ids(self, names: Collection[str], timeout_ms: int) -> Mapping[str, Collection[UUID]]:
        """Returns the ids that the topics have at any broker that can be reached. Raises `BrokerError` without one."""
        nodes = list((await self._client.brokers(timeout_ms=timeout_ms)).brokers)
        one_ms = min(_ONE_BROKER_MS, timeout_ms)

        async def said_by(node_id: int) -> Mapping[str, UUID] | BrokerError:
            try:
                return await self.current_topic_ids(names, node_id, one_ms)
            except BrokerError as error:
                return error

        answers = await bounded_gather(nodes, said_by, _BROKERS_AT_ONCE)
        found = [answer for answer in answers if not isinstance(answer, BrokerError)]
        if not found:
            raise BrokerError(f"no broker tells the ids of topics: {answers[0]}", retriable=True)
        return {name: {answer[name] for answer in found if name in answer} for name in names}

    def topic_name(self, topic_id: UUID) -> str | None:
        return self._topics.topic_name(topic_id)

    def known_topic_id(self, name: str) -> UUID | None:
        """Returns the topic's latest known id. Any thread may call it."""
        return self._topics.known_id(name)

    def known_topic_name(self, topic_id: UUID) -> str | None:
        """Returns the topic's latest known name. Any thread may call it."""
        return self._topics.known_name(topic_id)
