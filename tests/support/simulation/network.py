"""Connections between simulated processes and brokers: latency, silence, breaks and lost answers.

`SimConnection` has the interface of `BrokerConnection`. A broker serves the requests of one connection one after the
other. A request that has left arrives, whatever happens to the process that sent it.

Fetch answers are bytes. Other answers are handed over as the objects that kafka-python would decode (`HandedOver`),
since the wire adds nothing to them but time; `Network.has_wire` encodes and decodes them all the same.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from protocol.api_keys import ApiKey
from protocol.header import response_body_position
from tests.support.simulation.apis import VERSIONS, SimApis
from tests.support.simulation.cluster import HOST, SimBroker, SimCluster
from tests.support.simulation.fetches import AskedFetch, AskedPartition, fetch
from tests.support.simulation.loop import VirtualLoop
from tiers.broker.connection import unchecked
from tiers.broker.sasl import SaslCredentials
from tiers.errors import BrokerError

_FASTEST_S = 0.0002
_SPREAD_S = 0.002 - _FASTEST_S


class HandedOver(NamedTuple):
    """An answer as an object, in the place of its bytes."""

    answer: Any


class HandedOverResponses:
    """Stands in for kafka-python's registry of response classes: it "decodes" what was handed over."""

    @staticmethod
    def get_response_class(header: Any) -> Any:
        return HandedOverResponses

    @staticmethod
    def decode(body: Any, version: int) -> Any:
        return body.answer


class Network:
    """Who reaches whom, and how fast. Processes are known by name."""

    def __init__(
        self, loop: VirtualLoop, rng: random.Random, cluster: SimCluster, apis: SimApis, *, has_wire: bool = False
    ) -> None:
        self.loop = loop
        self.rng = rng
        self.cluster = cluster
        self.apis = apis
        self.cuts: set[tuple[str, int]] = set()
        self.slow_ms: dict[str, int] = {}
        """By process: the longest additional delay of a message."""
        self.lost_answers: dict[str, float] = {}
        """By process: how probable it is that a connection breaks instead of bringing an answer, or right after it."""
        self.requests = 0
        self.on_asking_to_trim: Callable[[str], None] = lambda name: None
        """Called when a process sends DeleteRecords, with the name of the process."""
        self.has_wire = has_wire
        """Whether every answer is encoded and decoded."""

    def delay_s(self, name: str, broker: SimBroker) -> float:
        slow_ms = self.slow_ms.get(name, 0) + broker.slow_ms
        delay_s = _FASTEST_S + _SPREAD_S * self.rng.random()
        return delay_s + (self.rng.random() ** 3 * slow_ms / 1000 if slow_ms else 0)

    def is_cut(self, name: str, node: int) -> bool:
        return (name, node) in self.cuts

    def connector(self, name: str) -> Callable[..., Any]:
        async def connect(
            host: str,
            port: int,
            *,
            client_id: str,
            clock_ms: Callable[[], int],
            timeout_ms: int,
            ssl_context: ssl.SSLContext | None,
            credentials: SaslCredentials | None,
        ) -> SimConnection:
            broker = self.cluster.brokers[int(host.removeprefix(HOST))]
            opened: asyncio.Future[None] = self.loop.create_future()
            if not self.is_cut(name, broker.node_id):
                self.loop.later(2 * self.delay_s(name, broker), _resolve, opened)
            try:
                async with asyncio.timeout(timeout_ms / 1000):
                    await opened
            except TimeoutError as error:
                raise BrokerError(f"{host} did not accept a connection", retriable=True) from error
            if not broker.is_up:
                raise BrokerError(f"{host} is not reachable", retriable=True)
            return SimConnection(self, name, broker)

        return connect


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class SimConnection:
    def __init__(self, network: Network, name: str, broker: SimBroker) -> None:
        self.address = f"{HOST}{broker.node_id}:9092"
        self.api_versions = VERSIONS
        self.is_closed = False
        self._network = network
        self._name = name
        self._broker = broker
        self._incarnation = broker.incarnation
        self._pending: dict[asyncio.Future[Any], None] = {}
        self._queue: deque[tuple[Any, int, asyncio.Future[Any]]] = deque()
        self._is_busy = False
        self._is_retired = False
        self._heard_at_s = network.loop.time()
        self._last_arrival_s = 0.0

    async def request(
        self, message: Any, version: int, timeout_ms: int, before_sending: Callable[[], None] = unchecked
    ) -> memoryview:
        network, loop = self._network, self._network.loop
        before_sending()
        if self.is_closed:
            raise BrokerError(f"the connection to {self.address} is closed", retriable=True)
        if message.API_KEY == ApiKey.DELETE_RECORDS:
            network.on_asking_to_trim(self._name)
        answer: asyncio.Future[Any] = loop.create_future()
        self._pending[answer] = None
        message._version = version
        if network.has_wire:
            message.with_header(correlation_id=0, client_id=self._name)
        sent_at_s = loop.now_s
        network.requests += 1
        self._last_arrival_s = max(self._last_arrival_s + 1e-6, sent_at_s + network.delay_s(self._name, self._broker))
        loop.call_at(self._last_arrival_s, self._arrive, message, version, answer, context=loop.world)
        timer = loop.call_at(sent_at_s + timeout_ms / 1000, self._time_out, answer, sent_at_s, timeout_ms)
        try:
            body: memoryview = await answer
            return body
        finally:
            timer.cancel()
            self._pending.pop(answer, None)
            if self._is_retired and not self._pending:
                self.abort("another connection took its place")

    def _time_out(self, answer: asyncio.Future[Any], sent_at_s: float, timeout_ms: int) -> None:
        if self._heard_at_s < sent_at_s:
            self.abort(f"silent for {timeout_ms} ms")
        if not answer.done():
            answer.set_exception(BrokerError(f"{self.address} did not answer in {timeout_ms} ms", retriable=True))

    def _arrive(self, message: Any, version: int, answer: asyncio.Future[Any]) -> None:
        broker = self._broker
        if (self._name, broker.node_id) in self._network.cuts or self.is_closed:
            return
        if not broker.is_up or broker.incarnation != self._incarnation:
            self.abort("the broker is gone")
            return
        self._queue.append((message, version, answer))
        if not self._is_busy:
            self._serve()

    def _serve(self) -> None:
        if not self._queue:
            return
        self._is_busy = True
        message, version, answer = self._queue.popleft()
        network = self._network
        if network.has_wire:
            message = type(message).decode(message.encode(version=version), version=version)
        served: Any
        if message.API_KEY == ApiKey.FETCH:
            served = fetch(network.cluster, self._broker, _asked(message, version), 0)
        else:
            served = network.apis.answer(self._broker, message, self._name)
        if isinstance(served, asyncio.Future):
            served.add_done_callback(
                lambda done: self._answered(message, version, answer, done.result()), context=network.loop.world
            )
        else:
            self._answered(message, version, answer, served)

    def _answered(self, message: Any, version: int, answer: asyncio.Future[Any], served: Any) -> None:
        network = self._network
        body: Any = HandedOver(served)
        if isinstance(served, bytes):
            body = memoryview(served)[response_body_position(ApiKey.FETCH, version, served) :]
        elif network.has_wire:
            body = memoryview(bytes(served.encode(version=version)))
        network.loop.later(network.delay_s(self._name, self._broker), self._deliver, answer, body)
        self._is_busy = False
        self._serve()

    def _deliver(self, answer: asyncio.Future[Any], body: Any) -> None:
        network, broker = self._network, self._broker
        if (self._name, broker.node_id) in network.cuts:
            return
        if not broker.is_up or broker.incarnation != self._incarnation:
            self.abort("the broker is gone")
            return
        lost = network.lost_answers.get(self._name, 0)
        if lost and network.rng.random() < lost:
            self.abort("reset by the network")
            return
        self._heard_at_s = network.loop.now_s
        if not answer.done():
            answer.set_result(body)
        if lost and network.rng.random() < lost:
            self.abort("reset by the network")

    def abort(self, reason: str) -> None:
        self.is_closed = True
        for answer in list(self._pending):
            if not answer.done():
                answer.set_exception(BrokerError(f"{self.address}: {reason}", retriable=True))
                answer.exception()

    def retire(self) -> None:
        self._is_retired = True
        if not self._pending:
            self.abort("another connection took its place")

    async def close(self) -> None:
        self.abort("the client closed the connection")


def _asked(message: Any, version: int) -> AskedFetch:
    return AskedFetch(
        version,
        message.max_wait_ms,
        message.min_bytes,
        message.max_bytes,
        message.isolation_level == 1,
        [
            AskedPartition(
                topic.topic_id,
                one.partition,
                one.fetch_offset,
                one.current_leader_epoch,
                one.last_fetched_epoch,
                one.partition_max_bytes,
            )
            for topic in message.topics
            for one in topic.partitions
        ],
    )
