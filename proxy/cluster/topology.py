"""Knows the brokers' addresses, keeps their listeners open, and refreshes the topic ids.

The topology asks for the brokers every few seconds, and at once if an answer or a client names an unknown node. A
listener is open before the answer leaves that names its broker. So no client ever sees a broker's own address, or a
port without a listener. Each of these requests names the topics that clients use, and no others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence

from proxy.cluster.broker_listeners import BrokerListeners, Listen, ListenerAddresses
from proxy.cluster.topic_directory import TopicDirectory
from proxy.wire.context import Address
from tiers.broker.client import BrokerClient
from tiers.broker.cluster_metadata import ClusterMetadata
from tiers.errors import BrokerError, BrokerRefusedError, reason_of
from tiers.lasting_trouble import LastingTrouble

logger = logging.getLogger(__name__)

_LEAST_PAUSE_S = 0.05
_LOGGED_AFTER_MS = 60_000
_SILENT_READS = 2


class Topology:
    def __init__(
        self,
        client: BrokerClient,
        bootstrap_servers: Sequence[Address],
        listeners: Iterable[tuple[ListenerAddresses, Listen]],
        *,
        clock_ms: Callable[[], int],
        own_topics: Collection[str] = (),
        refresh_interval_ms: int = 5_000,
        timeout_ms: int = 10_000,
    ) -> None:
        """`own_topics` are those whose ids must always be known."""
        self._client = client
        self._bootstrap_servers = tuple(bootstrap_servers)
        self.listeners = [
            BrokerListeners(addresses, listen, self.broker_addresses, self._any_broker, self._wake_up)
            for addresses, listen in listeners
        ]
        self._clock_ms = clock_ms
        self.topics = TopicDirectory(client, clock_ms, own_topics)
        self._refresh_interval_ms = refresh_interval_ms
        self._timeout_ms = timeout_ms
        self._metadata: ClusterMetadata | None = None
        self._wake = asyncio.Event()
        self._first_read = asyncio.Event()
        self._trouble: str | None = None
        self._failing = LastingTrouble(
            logger,
            "the cluster's metadata cannot be read",
            "the cluster's metadata can be read again",
            clock_ms=clock_ms,
        )
        self._answered_at_ms = clock_ms()
        self._silent_since_ms = 0
        self._silent_reads = 0
        """The reads in a row that no broker answered. `_silent_since_ms` is the time of the first."""
        self._is_logged = False
        self._reason = ""
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
    def node_ids(self) -> Collection[int]:
        """The brokers that the last answer named. Empty before the first."""
        return () if self._metadata is None else self._metadata.brokers.keys()

    @property
    def trouble(self) -> str | None:
        """Why the last attempt to read the cluster failed. None if it succeeded."""
        return self._trouble

    @property
    def silence(self) -> tuple[str, int] | None:
        """Why no broker answered the last two reads, and for how many ms none has; None if one has answered."""
        if self._silent_reads < _SILENT_READS:
            return None
        return self._reason, self._clock_ms() - self._silent_since_ms

    @property
    def unreachable(self) -> list[str]:
        """Why clients reach no broker; empty if one has answered within the interval of the reads and their deadline.

        A read may ask a broker that has just died. So one read that fails in time shows nothing yet."""
        silent_ms = self._clock_ms() - self._answered_at_ms
        if silent_ms < self._refresh_interval_ms + self._timeout_ms:
            return []
        return [f"no broker has answered for {silent_ms // 1000} s: {self._trouble or 'no error so far'}"]

    @property
    def serves_a_broker(self) -> bool:
        """Whether clients can reach at least one broker through the proxy."""
        return any(listener.serves(node_id) for listener in self.listeners for node_id in self.node_ids)

    @property
    def unserved(self) -> list[str]:
        """The brokers that clients cannot reach through the proxy, one line each."""
        return [line for listener in self.listeners for line in listener.unserved]

    async def wait_for_cluster(self) -> None:
        """Waits until the cluster has been read once. Opens no listeners. Raises `BrokerRefusedError`."""
        later, self._failing = (
            self._failing,
            LastingTrouble(
                logger,
                "no broker has answered yet: the proxy asks again every second, and opens no port for clients before",
                "a broker answers",
                clock_ms=self._clock_ms,
            ),
        )
        while True:
            if await self.meet_cluster():
                self._failing = later
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
        """Binds the bootstrap port of every listener. Raises `OSError`."""
        for listener in self.listeners:
            listener.listen_for_bootstrap()

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
            # Clients choose the names of the brokers that they ask for, so they must not set the pace.
            await asyncio.sleep(_LEAST_PAUSE_S)
            self._wake.clear()

    async def refresh(self) -> bool:
        """Asks for the brokers, and for the topics that clients use. Returns False if no broker answered."""
        metadata = await self._read()
        if metadata is not None:
            self._follow(metadata)
        return metadata is not None

    async def _read(self) -> ClusterMetadata | None:
        names, asked_at_ms = self.topics.names(), self._clock_ms()
        try:
            metadata = await self._client.named(names, (), self._timeout_ms)
        except BrokerError as error:
            refusal = error if isinstance(error, BrokerRefusedError) else None
            if refusal is not None or error.code is not None or not error.retriable:
                self._note_answer()
            else:
                self._note_silence(error)
            if refusal is not None and self.refusal is None:
                logger.error("the brokers reject the proxy: %s", error)
            elif refusal is None:
                self._failing.found(error=str(error))
            self._trouble, self.refusal = str(error), refusal
            return None
        if self.refusal is not None:
            logger.info("the brokers accept the proxy again")
        self._failing.ended()
        self._note_answer()
        self.topics.note(metadata, names, asked_at_ms)
        self._trouble = self.refusal = None
        return metadata

    def _note_answer(self) -> None:
        self._answered_at_ms, self._silent_reads, self._is_logged = self._clock_ms(), 0, False

    def _note_silence(self, error: BrokerError) -> None:
        """Logs an error when no broker has answered for a while: the only broker may restart."""
        now_ms = self._clock_ms()
        if not self._silent_reads:
            self._silent_since_ms = now_ms
        self._silent_reads += 1
        self._reason = reason_of(error)
        if not self._is_logged and now_ms - self._answered_at_ms >= _LOGGED_AFTER_MS:
            self._is_logged = True
            logger.error("no broker has answered for a minute", extra={"error": str(error)})

    def _follow(self, metadata: ClusterMetadata) -> None:
        before = {} if self._metadata is None or not self.is_ready else self._metadata.brokers
        self._metadata = metadata
        for listener in self.listeners:
            listener.follow(metadata.brokers)
            for node_id, broker in metadata.brokers.items():
                known = before.get(node_id)
                is_known = known is not None and (known.host, known.port) == (broker.host, broker.port)
                if is_known or not listener.serves(node_id):
                    continue
                host, port = listener.addresses.advertised(node_id)
                logger.info(
                    "broker %d at %s:%d is advertised as %s:%d",
                    node_id, broker.host, broker.port, host, port,
                    extra={"node_id": node_id},
                )  # fmt: skip
        self._first_read.set()

    def _wake_up(self) -> None:
        """Lets the next refresh begin now."""
        self._wake.set()

    # Addresses

    def broker_addresses(self, node_id: int) -> Sequence[Address]:
        """Returns the broker's current address, as a list of at most one. An unknown broker triggers a refresh."""
        broker = None if self._metadata is None else self._metadata.brokers.get(node_id)
        if broker is None:
            self._wake_up()
            return ()
        return ((broker.host, broker.port),)

    def _any_broker(self) -> Sequence[Address]:
        """Returns the addresses for the bootstrap port: the configured servers, then the brokers of the cluster."""
        named = () if self._metadata is None else ((b.host, b.port) for b in self._metadata.brokers.values())
        return tuple(dict.fromkeys((*self._bootstrap_servers, *named)))
