"""Clients of a simulated proxy: they send frames through the product's handlers, in the context of its process."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from kafka.protocol.admin import (
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
)
from kafka.protocol.consumer import ListOffsetsRequest, ListOffsetsResponse
from kafka.protocol.metadata import MetadataRequest

from protocol.addresses import Address
from protocol.api_keys import ApiKey
from protocol.apis.fetch.request import parse_fetch_request
from protocol.apis.fetch.response import parse_fetch_response
from protocol.header import build_response_header, parse_request_header, response_body_position
from protocol.primitives import Buffer
from proxy.wire.exchange import Answer, BrokerGoneError, Prepare, Request
from tests.support.fakes.broker.fetch_frames import Ask, fetch_frame
from tests.support.simulation.cluster import SimBroker, SimPartition
from tests.support.simulation.fetches import FETCH_VERSION, AskedFetch, AskedPartition, fetch
from tests.support.simulation.loop import VirtualLoop
from tests.support.simulation.network import Network
from tests.support.simulation.oracle import Oracle
from tests.support.simulation.process import SimMachine, SimProcess
from tiers.broker.client import monotonic_ms

_TIMEOUT_S = 8.0
_LIST_OFFSETS_VERSION = 7
_EARLIEST = -2
_DECODED: dict[int, Any] = {
    ApiKey.DELETE_RECORDS: DeleteRecordsRequest,
    ApiKey.DELETE_TOPICS: DeleteTopicsRequest,
    ApiKey.LIST_OFFSETS: ListOffsetsRequest,
    ApiKey.METADATA: MetadataRequest,
}


@dataclass
class Answered:
    error_code: int
    records: memoryview
    aborted: Any
    diverging: int | None
    is_remote: bool
    high_watermark: int
    log_start: int
    is_out_of_date: bool
    """The client asked a broker that was cut off, whose log ends before the offset. Kafka itself refuses the offset
    then, unless the client names a leader epoch that the broker does not know."""
    is_from_old_leader: bool
    """A broker that was cut off answered from its own log. Kafka itself answers records then that were deleted from
    the new leader."""


class SimExchange:
    """One request of a client, as a handler sees it."""

    def __init__(self, network: Network, process: SimProcess, broker: SimBroker, frame: bytes, connection: int) -> None:
        header = parse_request_header(frame)
        self.request = Request(header.api_key, header.api_version, header.correlation_id, frame, monotonic_ms())
        self.tier = "none"
        self.on_sent: Any = None
        self.on_abandoned: Any = None
        self.connection_id = connection
        self.node_id: int | None = broker.node_id
        self._network = network
        self._process = process
        self._broker = broker

    def address_of(self, node_id: int) -> Address | None:
        topology = self._process.topology
        return None if topology is None else topology.listeners[0].advertised_address(node_id)

    def count_decoded(self) -> None:
        """Memory is not simulated."""

    def try_forward(self, frame: Buffer) -> Coroutine[None, None, memoryview] | None:
        return self.forward(bytes(frame))

    async def forward(self, frame: bytes) -> memoryview:
        """Sends a frame to the broker, and returns the payload of its answer."""
        network, broker, name = self._network, self._broker, self._process.name
        answer: asyncio.Future[bytes] = network.loop.create_future()
        incarnation = broker.incarnation

        def is_gone() -> bool:
            return not broker.is_up or broker.incarnation != incarnation or network.is_cut(name, broker.node_id)

        def deliver(payload: bytes) -> None:
            if answer.done():
                return
            if is_gone():
                answer.set_exception(BrokerGoneError())
                answer.exception()
            else:
                answer.set_result(payload)

        def arrive() -> None:
            if is_gone():
                if not answer.done():
                    answer.set_exception(BrokerGoneError())
                    answer.exception()
                return
            _serve(
                network,
                broker,
                frame,
                lambda payload: network.loop.later(network.delay_s(name, broker), deliver, payload),
            )

        network.loop.later(network.delay_s(name, broker), arrive)
        return memoryview(await answer)


def _serve(network: Network, broker: SimBroker, frame: bytes, deliver: Any) -> None:
    header = parse_request_header(frame)
    if header.api_key == ApiKey.FETCH:
        parsed = parse_fetch_request(frame, header.body_position, header.api_version)
        asked = AskedFetch(
            parsed.version, parsed.max_wait_ms, parsed.min_bytes, parsed.max_bytes, parsed.is_read_committed,
            [
                AskedPartition(
                    one.topic, one.partition, one.fetch_offset, one.current_leader_epoch, one.last_fetched_epoch,
                    one.partition_max_bytes,
                )
                for one in parsed.partitions
                if isinstance(one.topic, UUID)
            ],
        )  # fmt: skip
        fetch(network.cluster, broker, asked, header.correlation_id).add_done_callback(
            lambda done: deliver(done.result()), context=network.loop.world
        )
        return
    message = _DECODED[header.api_key].decode(frame, version=header.api_version, header=True)
    message.API_VERSION = header.api_version
    head = build_response_header(ApiKey(header.api_key), header.api_version, header.correlation_id)

    def encode(answer: Any) -> None:
        deliver(bytes(head) + bytes(answer.encode(version=header.api_version)))

    answer = network.apis.answer(broker, message, "a client")
    if isinstance(answer, asyncio.Future):
        answer.add_done_callback(lambda done: encode(done.result()), context=network.loop.world)
    else:
        encode(answer)


class SimClient:
    """A client of one proxy. It reads one partition from the oldest record on, and begins again at times."""

    def __init__(
        self,
        loop: VirtualLoop,
        rng: random.Random,
        network: Network,
        oracle: Oracle,
        machine: SimMachine,
        partition: SimPartition,
        connection: int,
    ) -> None:
        self.loop = loop
        self.rng = rng
        self.network = network
        self.oracle = oracle
        self.machine = machine
        self.partition = partition
        self.position = 0
        self.last_code = 0
        self.is_checking = False
        """Whether `run` leaves the client to a last check."""
        self.is_idle = asyncio.Event()
        self._last_epoch = -1
        self._connection = connection

    async def run(self) -> None:
        self.is_idle.set()
        while True:
            await asyncio.sleep(self.rng.uniform(0.2, 1.2))
            if self.is_checking:
                return
            if self.rng.random() < 0.15:
                self.position, self._last_epoch = self._other_position(), -1
            self.is_idle.clear()
            await self.step()
            self.is_idle.set()

    def _other_position(self) -> int:
        """Returns any offset, or one that the brokers trimmed just now or will trim soon."""
        end = max(0, self.oracle.expected[self.partition].end)
        if self.rng.random() < 0.5:
            return self.rng.randint(0, end)
        return max(0, min(end, self.partition.log.start + self.rng.randint(-20, 5)))

    async def step(self, max_bytes: int | None = None) -> None:
        """Sends one Fetch, and lets the oracle judge the answer."""
        asked, before = self.oracle.asked(self.partition), self.position
        found = await self.fetch(self.position, max_bytes or self.rng.choice((200, 700, 4_000)))
        if found is None:
            self.last_code = -1
            return
        self.last_code = found.error_code
        self.position = self.oracle.answered(
            self.partition, before, asked, found, f"a client of {self.machine.name}",
            may_lack_metadata=self.machine.may_lack_metadata,
        )  # fmt: skip
        if self.position <= before:
            self._last_epoch = -1

    async def fetch(self, offset: int, max_bytes: int) -> Answered | None:
        """Returns the answer; None: the client got none."""
        process, partition = self.machine.process, self.partition
        node = partition.leader if self.rng.random() < 0.9 else self.rng.choice((1, 2, 3))
        if process is None or process.handler(ApiKey.FETCH) is None or node < 0:
            return None
        broker = self.network.cluster.brokers[node]
        if not broker.is_up:
            return None
        local = partition.replicas[node]
        is_cut_off = broker.is_cut_off
        is_out_of_date = is_cut_off and offset > local.end
        frame = fetch_frame(
            FETCH_VERSION,
            [Ask(partition.topic.topic_id, partition.index, offset, max_bytes, leader_epoch=self._epoch(broker))],
            max_wait_ms=self.rng.choice((0, 100, 500)),
            isolation_level=1,
        )
        payload = await self._through(process, broker, ApiKey.FETCH, frame)
        if payload is None:
            return None
        response = parse_fetch_response(
            payload, response_body_position(ApiKey.FETCH, FETCH_VERSION, payload), FETCH_VERSION
        )
        (one,) = response.partitions
        diverging = response.diverging_epoch(one)
        return Answered(
            one.error_code,
            response.records(one),
            response.aborted_transactions(one),
            None if diverging is None else diverging.end_offset,
            bool(len(response.records(one))) and offset < local.start,
            one.high_watermark,
            one.log_start_offset,
            is_out_of_date,
            is_cut_off and local.start <= offset,
        )

    def _epoch(self, broker: SimBroker) -> int:
        view = self.network.cluster.view(broker, self.partition)
        return view.leader_epoch if self.rng.random() < 0.7 else -1

    async def delete_records(self, offset: int) -> int | None:
        """Returns the error code of the answer."""
        process, partition = self.machine.process, self.partition
        if process is None or process.handler(ApiKey.DELETE_RECORDS) is None or partition.leader < 0:
            return None
        request = DeleteRecordsRequest
        topic = request.DeleteRecordsTopic(
            name=partition.topic.name,
            partitions=[
                request.DeleteRecordsTopic.DeleteRecordsPartition(partition_index=partition.index, offset=offset)
            ],
        )
        message = request(topics=[topic], timeout_ms=5_000)
        message.API_VERSION = 2
        message.with_header(correlation_id=7, client_id="user")
        frame = bytes(message.encode(header=True, framed=False))
        broker = self.network.cluster.brokers[partition.leader]
        payload = await self._through(process, broker, ApiKey.DELETE_RECORDS, frame)
        if payload is None:
            return None
        position = response_body_position(ApiKey.DELETE_RECORDS, 2, payload)
        response: Any = DeleteRecordsResponse.decode(payload[position:], version=2)
        return int(response.topics[0].partitions[0].error_code)

    async def delete_topic(self) -> int | None:
        """Returns the error code of the answer."""
        process, partition = self.machine.process, self.partition
        if process is None or process.handler(ApiKey.DELETE_TOPICS) is None:
            return None
        message = DeleteTopicsRequest(topic_names=[partition.topic.name], timeout_ms=5_000)
        message.API_VERSION = 5
        message.with_header(correlation_id=9, client_id="user")
        frame = bytes(message.encode(header=True, framed=False))
        broker = self.network.cluster.brokers[partition.leader]
        payload = await self._through(process, broker, ApiKey.DELETE_TOPICS, frame)
        if payload is None:
            return None
        position = response_body_position(ApiKey.DELETE_TOPICS, 5, payload)
        response: Any = DeleteTopicsResponse.decode(payload[position:], version=5)
        return int(response.responses[0].error_code)

    async def ask_for_earliest(self, until_s: float = 0.0) -> None:
        """Asks for the earliest offset, once or until that time, and lets the oracle judge the answers."""
        while True:
            asked = self.oracle.asked(self.partition)
            found = await self.list_offsets(_EARLIEST)
            if found is not None:
                self.oracle.answered_earliest(
                    self.partition, asked, *found, f"a client of {self.machine.name}",
                    may_lack_metadata=self.machine.may_lack_metadata,
                )  # fmt: skip
            if self.loop.time() >= until_s:
                return
            await asyncio.sleep(0.5)

    async def list_offsets(self, timestamp: int) -> tuple[int, int] | None:
        """Returns the error code and the offset of the answer; None: the client got none."""
        process, partition = self.machine.process, self.partition
        if process is None or process.handler(ApiKey.LIST_OFFSETS) is None or partition.leader < 0:
            return None
        request = ListOffsetsRequest
        asked = request.ListOffsetsTopic.ListOffsetsPartition(
            partition_index=partition.index, current_leader_epoch=-1, timestamp=timestamp
        )
        message = request(
            replica_id=-1, isolation_level=1,
            topics=[request.ListOffsetsTopic(name=partition.topic.name, partitions=[asked])],
        )  # fmt: skip
        message.API_VERSION = _LIST_OFFSETS_VERSION
        message.with_header(correlation_id=8, client_id="user")
        frame = bytes(message.encode(header=True, framed=False))
        broker = self.network.cluster.brokers[partition.leader]
        payload = await self._through(process, broker, ApiKey.LIST_OFFSETS, frame)
        if payload is None:
            return None
        position = response_body_position(ApiKey.LIST_OFFSETS, _LIST_OFFSETS_VERSION, payload)
        response: Any = ListOffsetsResponse.decode(payload[position:], version=_LIST_OFFSETS_VERSION)
        answer = response.topics[0].partitions[0]
        return int(answer.error_code), int(answer.offset)

    async def _through(self, process: SimProcess, broker: SimBroker, api_key: int, frame: bytes) -> bytes | None:
        handler = process.handler(api_key)
        if handler is None:
            return None
        exchange = SimExchange(self.network, process, broker, frame, self._connection)

        async def ask() -> bytes:
            action, respond = handler.on_request(exchange)
            if isinstance(action, Answer):
                return b"".join(bytes(one) for one in action.payload)
            forward = await action.decide() if isinstance(action, Prepare) else action
            if isinstance(forward, Answer):
                return b"".join(bytes(one) for one in forward.payload)
            response = await exchange.forward(bytes(forward.frame))
            assert respond is not None
            answer = respond(response)
            buffers = await answer if isinstance(answer, Coroutine) else answer
            if exchange.on_sent is not None:
                exchange.on_sent()
            return b"".join(bytes(one) for one in buffers)

        asking = process.spawn(ask())
        await asyncio.wait({asking}, timeout=_TIMEOUT_S)
        if not asking.done():
            asking.cancel()
            return None
        payload: bytes | None = None
        with contextlib.suppress(BrokerGoneError, asyncio.CancelledError):
            payload = asking.result()
        return payload
