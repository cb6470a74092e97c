"""Knows each broker's address, the address at which clients reach it through the proxy, and the topic ids.

The broker with node id N is advertised as (advertised host, base port + N). Node ids and the cluster id stay those of
the cluster. The topology reads the metadata again every few seconds, and at once if an answer names an unknown node. It
binds that node's listener before the answer leaves. So no client ever sees a broker's own address, or a port without a
listener.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from kafka.protocol.metadata import MetadataRequest

from protocol.errors import ErrorCode
from proxy.wire.context import Address
from proxy.wire.server import BrokerEndpoint
from tiers.broker.client import METADATA_WITH_TOPIC_IDS, BrokerClient
from tiers.broker.cluster_metadata import ClusterMetadata
from tiers.errors import BrokerError, BrokerRefusedError
from tiers.lasting_trouble import LastingTrouble

logger = logging.getLogger(__name__)

Listen = Callable[[str, int, BrokerEndpoint], object]
MAX_PORT = 65_535
_NO_ID = UUID(int=0)


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
        refresh_interval_ms: int = 5_000,
        timeout_ms: int = 10_000,
    ) -> None:
        self._client = client
        self._bootstrap_servers = tuple(bootstrap_servers)
        self._addresses = addresses
        self._listen = listen
        self._clock_ms = clock_ms
        self._refresh_interval_ms = refresh_interval_ms
        self._timeout_ms = timeout_ms
        self._metadata: ClusterMetadata | None = None
        self._listening: set[int] = set()
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
            self._metadata = await self._read(0, self._timeout_ms)
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

    async def refresh(self, max_age_ms: int = 0, timeout_ms: int | None = None) -> bool:
        """Reads the cluster's metadata unless it is younger than `max_age_ms`. Returns False if no broker answered."""
        metadata = await self._read(max_age_ms, timeout_ms or self._timeout_ms)
        if metadata is not None:
            self._follow(metadata)
        return metadata is not None

    async def _read(self, max_age_ms: int, timeout_ms: int) -> ClusterMetadata | None:
        try:
            metadata = await self._client.metadata(max_age_ms, timeout_ms)
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
        self._trouble = self.refusal = None
        return metadata

    def _follow(self, metadata: ClusterMetadata) -> None:
        before = {} if self._metadata is None or not self.is_ready else self._metadata.brokers
        self._metadata = metadata
        for node_id, broker in metadata.brokers.items():
            self._listen_for(node_id)
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
            self._listen(self._addresses.host, port, BrokerEndpoint(node_id, lambda: self.broker_addresses(node_id)))
        except OSError as error:
            logger.error(
                "the listener for broker %d cannot be opened: %s",
                node_id, error,
                extra={"node_id": node_id, "port": port},
            )  # fmt: skip
            return
        self._listening.add(node_id)

    # Addresses

    def advertised_address(self, node_id: int) -> Address:
        """Returns the address at which clients reach the broker through the proxy. Binds a listener for a new node."""
        if node_id not in self._listening:
            self._listen_for(node_id)
            self._wake.set()
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
        """Returns None if the name is unknown, or was learned more than `max_age_ms` ago. Never waits."""
        metadata = self._metadata
        if metadata is None or (max_age_ms is not None and self._clock_ms() - metadata.fetched_at_ms > max_age_ms):
            return None
        topic = metadata.topics.get(name)
        return None if topic is None or topic.topic_id.int == 0 else topic.topic_id

    async def resolve_topic_id(self, name: str, max_age_ms: int, timeout_ms: int) -> UUID | None:
        """Returns the topic's id as of at most `max_age_ms` ago. None if there is no such topic, or no answer."""
        if (known := self.topic_id(name, max_age_ms)) is not None:
            return known
        for age_ms in (max_age_ms, 0):  # even young metadata may be older than the topic
            if not await self.refresh(age_ms, timeout_ms):
                return None
            if (known := self.topic_id(name)) is not None:
                return known
        return None

    async def resolve_topic_name(self, topic_id: UUID, max_age_ms: int, timeout_ms: int) -> str | None:
        """Returns the topic's name as of at most `max_age_ms` ago. None: the cluster has no such topic.

        Raises `BrokerError` without an answer."""
        known = self.topic_name(topic_id)
        if known is not None:
            return known
        if not await self.refresh(max_age_ms, timeout_ms):
            raise BrokerError(f"no broker tells the name of topic {topic_id}", retriable=True)
        return self.topic_name(topic_id)

    async def current_topic_ids(
        self, names: Collection[str], node_id: int | None, timeout_ms: int
    ) -> Mapping[str, UUID]:
        """Returns the topics' ids, which it asks of the broker `node_id` (None: of any broker). Raises `BrokerError`.

        The result has no entry for a topic that the broker does not know."""
        if not names:
            return {}
        topics = [MetadataRequest.MetadataRequestTopic(topic_id=_NO_ID, name=name) for name in dict.fromkeys(names)]
        message = MetadataRequest(topics=topics, allow_auto_topic_creation=False)
        answer: Any = await self._client.request(node_id, message, timeout_ms, min_version=METADATA_WITH_TOPIC_IDS)
        return {topic.name: topic.topic_id for topic in answer.topics if topic.error_code == ErrorCode.NONE}

    def topic_name(self, topic_id: UUID) -> str | None:
        topic = None if self._metadata is None else self._metadata.topics_by_id.get(topic_id)
        return None if topic is None else topic.name
