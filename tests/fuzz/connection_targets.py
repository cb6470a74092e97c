"""What must hold for any sequence of whole, torn, reordered and malformed frames from clients and brokers.

The input is a program: one byte says what happens next, and the following bytes say to whom and how much. At the end,
everybody who still can behaves well. Then the following must hold:

* Every request of a client that kept the protocol is answered, in order and unchanged, or the connection is closed, and
  its cause is counted.
* A connection buffers a bounded number of bytes, whatever its client sends and does not read.
* One callback of the event loop begins a bounded number of requests.
* No exception escapes. When all connections have ended, no task, connection, timer or memory grant is left.
"""

from __future__ import annotations

import asyncio
import logging
from enum import IntEnum

from protocol.frame import LENGTH_BYTES, REQUEST_HEAD_BYTES
from proxy.wire.connection import ClientConnection
from proxy.wire.flow_control import BufferPool
from proxy.wire.limits import Limits
from proxy.wire.memory import HoldBudget
from proxy.wire.upstream import UpstreamConnection
from tests.fuzz.connection_world import LARGE, MALFORMED, STRAY_ANSWER, Broker, Client, is_answered_by_the_proxy, router
from tests.support.fakes.broker.wire import frame
from tests.support.proxy.virtual_network import Peer, VirtualNetwork
from tests.support.proxy.virtual_proxy import VirtualProxy, run_virtually

MAX_CLIENTS = 4
REQUEST_BYTES = LENGTH_BYTES + REQUEST_HEAD_BYTES
MAX_STEPS = 120
IN_FLIGHT = (256, 1, 2, 7)
READ_BYTES = 4096
"""The read buffers are small, so that frames come in parts and a few requests fill them."""
BUFFERED_BYTES = 6 * READ_BYTES + 2 * LARGE + 1024
"""What one connection may buffer: the rest of a read from each side, on both ways, a held request, and one answer that
was complete when the client stopped to read."""
REQUESTS_PER_CALLBACK = 2 * READ_BYTES // REQUEST_BYTES
"""Those of a read, and those that the read before it left."""
_SETTLE_S = 120.0
_SETTLE_ROUNDS = 100
"""Thousands of requests may be answered one after the other, each after most of a second."""


TOGETHER = 128
"""Added to a step: nothing of it is delivered before the next step is made."""


class Step(IntEnum):
    """What happens next, and the numbers that follow. `size` is a number of bytes (`Program.size`)."""

    REQUEST = 0  # client, kind, size
    PART_OF_REQUEST = 1  # client, kind, size, size of the part
    REST_OF_REQUEST = 2  # client, size
    BURST = 3  # client, kind, count
    MALFORMED = 4  # client, which of `MALFORMED`, or random bytes: count and bytes
    CLIENT_STALLS = 5  # client
    CLIENT_READS = 6  # client, size; 0: all, and it goes on reading
    CLIENT_LEAVES = 7  # client, how
    ANSWER = 8  # broker
    PART_OF_ANSWER = 9  # broker, size
    REST_OF_ANSWER = 10  # broker, size
    NOISE = 11  # broker, 0: an answer to another request; or 1, count and random bytes
    BROKER_STALLS = 12  # broker; it goes on if it has stalled
    BROKER_LEAVES = 13  # broker, how
    TIME = 14  # a number whose square is in units of half a millisecond
    CLUSTER = 15  # 0: the proxy drains; 1 to 3: brokers refuse connections, or accept again; else: answer at once


class SmallReads(BufferPool):
    def __init__(self) -> None:
        super().__init__()
        self.current = memoryview(bytearray(READ_BYTES))

    def retire(self) -> memoryview:
        retired, self.current = self.current, memoryview(bytearray(READ_BYTES))
        return retired

    def give_back(self, buffers: list[memoryview]) -> None:
        """Overwrites the buffers, since nobody may refer to them any more."""
        for buffer in buffers:
            buffer[:] = b"\xee" * READ_BYTES
        buffers.clear()


class Program:
    """Reads an input as numbers. Its end reads as zeros."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def has_ended(self) -> bool:
        return self._at >= len(self._data)

    def number(self, below: int = 256) -> int:
        value = self._data[self._at] if self._at < len(self._data) else 0
        self._at += 1
        return value % below

    def size(self) -> int:
        """Returns a number of bytes: a few, or up to some thousands."""
        value = self.number()
        return value if value < 200 else (value - 199) * 333

    def part(self) -> bytes:
        count = self.number(24)
        self._at += count
        return self._data[self._at - count : self._at]


class Run:
    def __init__(self, network: VirtualNetwork, tasks: asyncio.TaskGroup, program: Program) -> None:
        self.network = network
        self.program = program
        self.clients: list[Client] = []
        self.brokers: list[Broker] = []
        self.budget = HoldBudget(1 << 20)
        self.connections: list[ClientConnection] = []
        limits = Limits(
            max_in_flight=IN_FLIGHT[program.number(len(IN_FLIGHT))],
            max_request_bytes=1 << 20,
            max_held_request_bytes=LARGE,
            max_held_response_bytes=4 * LARGE,
            send_timeout_ms=1 << 40,
            connection_setup_timeout_ms=1 << 40,
        )
        routes = router(self.budget)
        self.proxy = VirtualProxy(
            network, tasks, handlers=routes.handlers, prefix_handlers=routes.prefix_handlers, limits=limits
        )
        self.proxy.context.buffers = SmallReads()
        self.is_drained = False
        self.was_refused = False
        network.on_connection = self._accept
        network.count = lambda: sum(self.proxy.metrics.requests.values())

    def _accept(self, peer: Peer) -> None:
        upstream = peer.transport.get_protocol()
        assert isinstance(upstream, UpstreamConnection)
        client = upstream._client
        assert isinstance(client, ClientConnection)
        self.brokers.append(Broker(peer, self.clients[self.connections.index(client)]))

    async def run(self) -> None:
        for _ in range(MAX_STEPS):
            if self.program.has_ended:
                break
            step = self.program.number()
            self._make(Step(step % len(Step)))
            if step < TOGETHER:
                await asyncio.sleep(0.001)
                self._check_bounds()
        await self._finish()

    def _client(self) -> Client:
        index = self.program.number(MAX_CLIENTS)
        while index >= len(self.clients):
            peer = self.proxy.connect()
            connection = peer.transport.get_protocol()
            assert isinstance(connection, ClientConnection)
            self.connections.append(connection)
            self.clients.append(Client(peer))
        return self.clients[index]

    def _make(self, step: Step) -> None:
        number = self.program.number
        if step <= Step.CLIENT_LEAVES:
            client = self._client()
            if not client.has_left:
                self._make_client(step, client)
        elif step <= Step.BROKER_LEAVES:
            index = number(MAX_CLIENTS)
            if self.brokers:
                self._make_broker(step, self.brokers[index % len(self.brokers)])
        elif step == Step.TIME:
            self.network.now_s += number() ** 2 / 2000
        else:
            self._make_cluster(number(8))

    def _make_client(self, step: Step, client: Client) -> None:
        number, size = self.program.number, self.program.size
        match step:
            case Step.REQUEST:
                client.send(number(), size())
            case Step.PART_OF_REQUEST:
                client.send(number(), size(), size())
            case Step.REST_OF_REQUEST:
                client.flush(size())
            case Step.BURST:
                kind, count = number(), number()
                for _ in range(count * 8 if is_answered_by_the_proxy(kind) else count):
                    client.send(kind, 10)
            case Step.MALFORMED:
                client.flush()
                client.is_excused = True
                which = number(2 * len(MALFORMED))
                if which >= len(MALFORMED):
                    client.is_unchecked = True
                client.peer.send(self.program.part() if which >= len(MALFORMED) else MALFORMED[which])
            case Step.CLIENT_STALLS:
                client.peer.stall()
            case Step.CLIENT_READS:
                size_bytes = size()
                if size_bytes:
                    client.peer.read(size_bytes)
                else:
                    client.peer.resume()
            case _:
                client.is_excused = client.has_left = True
                if number(2):
                    client.peer.reset()
                else:
                    client.peer.half_close()

    def _make_broker(self, step: Step, broker: Broker) -> None:
        number, size = self.program.number, self.program.size
        match step:
            case Step.ANSWER:
                broker.answer()
            case Step.PART_OF_ANSWER:
                broker.answer(size())
            case Step.REST_OF_ANSWER:
                broker.flush(size())
            case Step.NOISE:
                broker.flush()
                broker.client.is_excused = True
                if number(2):
                    broker.client.is_unchecked = True
                    broker.peer.send(self.program.part())
                else:
                    broker.peer.send(frame(STRAY_ANSWER))
            case Step.BROKER_STALLS:
                if broker.peer.reads:
                    broker.peer.stall()
                else:
                    broker.peer.resume()
            case _:
                broker.client.is_excused = True
                broker.unsent.clear()
                if number(2):
                    broker.peer.reset()
                else:
                    broker.peer.half_close()

    def _make_cluster(self, choice: int) -> None:
        if choice == 0:
            self.is_drained = True
            for connection in list(self.proxy.registry):
                connection.drain()
        elif choice < 4:
            self.network.refuses = not self.network.refuses
            self.was_refused = True
        elif self.brokers:
            broker = self.brokers[-1]
            broker.answers_at_once = not broker.answers_at_once

    def _is_excused(self, client: Client) -> bool:
        return client.is_excused or self.is_drained or (self.was_refused and client.peer.has_ended)

    def _check_bounds(self) -> None:
        assert self.network.most_per_callback <= REQUESTS_PER_CALLBACK, "too much work in one callback"
        for connection in self.proxy.registry:
            size_bytes = buffered_bytes(connection)
            assert size_bytes <= BUFFERED_BYTES, f"one connection buffers {size_bytes} bytes"

    async def _finish(self) -> None:
        """Lets everybody behave well, checks the answers, and ends all connections."""
        self.network.refuses = False
        for client in self.clients:
            client.flush()
            client.peer.resume()
        for _ in range(_SETTLE_ROUNDS):
            for broker in self.brokers:
                broker.answers_at_once = True
                broker.peer.resume()
                broker.answer()
                broker.answer_all()
            await asyncio.sleep(_SETTLE_S)
            if not any(client.expected for client in self.clients if not self._is_excused(client)):
                break
        for client in self.clients:
            is_excused = self._is_excused(client)
            assert is_excused or not client.peer.has_ended, "a client that kept the protocol was closed"
            assert is_excused or not client.expected, f"{len(client.expected)} requests have no answer"
            if not client.has_left:
                client.peer.half_close()
        await asyncio.sleep(_SETTLE_S)
        for client in self.clients:
            assert self._is_excused(client) or client.peer.has_ended, "a client that has left is still connected"
        for broker in self.brokers:
            broker.peer.reset()
        await asyncio.sleep(_SETTLE_S)
        assert len(self.proxy.registry) == 0, "a connection is left"
        metrics = self.proxy.metrics
        assert sum(metrics.closed.values()) == len(self.clients)
        assert metrics.open_connections == 0
        assert len(self.proxy.context.upstreams) == 0, "a connection to a broker is left"
        assert self.budget.reserved_bytes == self.budget.holding_count == 0, "memory is still granted"
        assert self.proxy.admissions._total == 0, "a place of a connection is still taken"
        assert all(transport.has_closed for transport in self.network.transports)
        assert len(asyncio.all_tasks()) == 1, "a task is left"


def buffered_bytes(connection: ClientConnection) -> int:
    reader, upstream = connection._reader, connection._upstream
    answers = [slot.answer for slot in connection.queue.slots if slot.answer is not None]
    found = sum(len(buffer) for answer in answers for buffer in answer)
    found += sum(map(len, connection.outlet._unsent)) + sum(map(len, connection._to_client))
    found += (0 if reader._stash is None else reader._stash.size_bytes) + len(reader._partial or b"")
    found += sum(map(len, reader._to_broker))
    if connection._transport is not None:
        found += connection._transport.get_write_buffer_size()
    if upstream is not None:
        found += sum(len(part.data) for part in upstream._stash) + len(upstream._held or b"")
        if upstream._transport is not None:
            found += upstream._transport.get_write_buffer_size()
    return found


def connections(data: bytes) -> bool:
    """Whatever clients and brokers do, everybody who keeps the protocol is served, and nothing is left behind."""
    program = Program(data)

    async def main(network: VirtualNetwork) -> bool:
        async with asyncio.TaskGroup() as tasks:
            run = Run(network, tasks, program)
            await run.run()
        return any(not client.is_excused and client.correlation_id for client in run.clients)

    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        return run_virtually(main)
    finally:
        logging.disable(disabled)
