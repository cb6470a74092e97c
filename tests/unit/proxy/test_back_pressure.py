"""A silent peer costs at most one read buffer."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest

from protocol.primitives import INT32
from proxy.wire.exchange import Exchange
from proxy.wire.flow_control import READ_BUFFER_BYTES
from tests.support.fakes.broker.fake_broker import FakeBroker
from tests.support.fakes.broker.wire import OPAQUE, Wire, connected, frame, request, response
from tests.support.proxy.proxy_harness import ForwardingHandler, forwarded, proxy_before, relayed
from tests.support.proxy.tls_sides import client_side, connected_by_tls, for_clients
from tests.support.servers.certificates import Authority
from tests.support.tiers.waiting import until

MIB = 1024 * 1024
pytestmark = pytest.mark.usefixtures("every_relay")


def resident_bytes() -> int:
    """Returns the memory without mapped files, since code that runs for the first time maps more of them."""
    _, resident, of_files, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - of_files) * 4096


async def pump(wire: Wire, total_bytes: int) -> None:
    piece = bytes(range(256)) * 256
    for _ in range(total_bytes // len(piece)):
        await wire.send_raw(piece)


async def flows(counter: object, name: str) -> None:
    """Until the proxy has read nothing for a while: the stream has stalled."""
    before, still = -1, 0
    while still < 20:
        await asyncio.sleep(0.005)
        now = getattr(counter, name)
        still = still + 1 if now == before else 0
        before = now


async def test_a_64_mib_response_to_a_client_that_stalls_stays_in_the_sockets() -> None:
    async with relayed(receive_buffer_bytes=64 * 1024) as (client, broker, proxy), asyncio.TaskGroup() as tasks:
        upstream = await forwarded(client, broker, request(OPAQUE, 4, 1))
        gc.collect()
        before = resident_bytes()
        await upstream.send_raw(INT32.pack(4 + 64 * MIB) + INT32.pack(1))
        sender = tasks.create_task(pump(upstream, 64 * MIB))
        await flows(proxy.metrics, "bytes_from_brokers")
        assert not sender.done()
        assert proxy.metrics.bytes_from_brokers < 32 * MIB
        assert resident_bytes() - before < 4 * MIB
        assert await client.receive_raw(8) == INT32.pack(4 + 64 * MIB) + INT32.pack(1)
        piece = bytes(range(256)) * 256
        for _ in range(64 * MIB // len(piece)):
            assert await client.receive_raw(len(piece)) == piece


async def test_a_large_request_to_a_broker_that_stalls_stays_in_the_sockets() -> None:
    async with relayed() as (client, broker, proxy), asyncio.TaskGroup() as tasks:
        upstream = await forwarded(client, broker, request(OPAQUE, 4, 1))
        before = resident_bytes()
        body = request(OPAQUE, 4, 2)
        await client.send_raw(INT32.pack(len(body) + 64 * MIB) + body)
        sender = tasks.create_task(pump(client, 64 * MIB))
        await flows(proxy.metrics, "bytes_from_clients")
        assert not sender.done()
        assert resident_bytes() - before < 4 * MIB
        assert len(await upstream.receive()) == len(body) + 64 * MIB


async def test_slices_survive_while_other_connections_reuse_the_buffer() -> None:
    """The stalled client's unsent bytes must not be overwritten by what other connections read meanwhile."""
    body = bytes(i % 251 for i in range(8 * MIB))
    async with (
        relayed(receive_buffer_bytes=16 * 1024) as (stalled, broker, proxy),
        connected(proxy.port) as busy,
        asyncio.TaskGroup() as tasks,
    ):
        await stalled.send(request(OPAQUE, 4, 1))
        stalled_upstream = await broker.accepted()
        tasks.create_task(stalled_upstream.send(response(1, body)))
        await flows(proxy.metrics, "bytes_from_brokers")
        await busy.send(request(OPAQUE, 4, 1, b"\xff" * MIB))
        busy_upstream = await broker.accepted()
        assert await busy_upstream.receive() == request(OPAQUE, 4, 1, b"\xff" * MIB)
        await busy_upstream.send(response(1, b"\xee" * MIB))
        assert await busy.receive() == response(1, b"\xee" * MIB)
        assert await stalled.receive() == response(1, body)


async def test_later_responses_are_not_read_while_an_answer_waits() -> None:
    gate = asyncio.Event()

    async def late(exchange: object, held: memoryview) -> tuple[bytes]:
        await gate.wait()
        return (bytes(held),)

    async with relayed(handlers={1: ForwardingHandler(late)}) as (client, broker, proxy), asyncio.TaskGroup() as tasks:
        upstream = await forwarded(client, broker, request(1, 4, 1), request(OPAQUE, 4, 2))
        await upstream.send(response(1))
        large = response(2, bytes(32 * MIB))
        sender = tasks.create_task(upstream.send_raw(frame(large)))
        await flows(proxy.metrics, "bytes_from_brokers")
        assert proxy.metrics.bytes_from_brokers <= 2 * READ_BUFFER_BYTES
        gate.set()
        assert await client.receive() == response(1)
        assert await client.receive() == large
        await sender


async def test_no_answer_is_made_for_a_client_that_does_not_take_the_one_before() -> None:
    made: list[int] = []

    async def large(exchange: Exchange, held: memoryview) -> tuple[bytes, bytes]:
        await asyncio.sleep(0)
        made.append(exchange.request.correlation_id)
        return bytes(held[:4]), bytes(8 * MIB)

    requests = 20
    async with relayed(receive_buffer_bytes=16 * 1024, handlers={1: ForwardingHandler(large)}) as (
        client,
        broker,
        proxy,
    ):
        upstream = await forwarded(client, broker, *(request(1, 4, n) for n in range(requests)))
        await upstream.send(*(response(n) for n in range(requests)))
        before = resident_bytes()
        await until(lambda: bool(made))
        await flows(proxy.metrics, "bytes_from_brokers")
        assert len(made) == 1
        assert resident_bytes() - before < 12 * MIB
        for n in range(requests):
            assert await client.receive() == response(n, bytes(8 * MIB))
        assert made == list(range(requests))


@pytest.mark.parametrize("is_read", [True, False])
async def test_memory_is_released_when_the_client_has_the_answer_or_is_gone(is_read: bool) -> None:
    made, sent = asyncio.Event(), asyncio.Event()

    def large(exchange: Exchange, held: memoryview) -> tuple[bytes, bytes]:
        exchange.on_sent = sent.set
        made.set()
        return bytes(held[:4]), bytes(32 * MIB)

    async with relayed(receive_buffer_bytes=16 * 1024, handlers={1: ForwardingHandler(large)}) as (
        client,
        broker,
        proxy,
    ):
        upstream = await forwarded(client, broker, request(1, 4, 1))
        await upstream.send(response(1))
        async with asyncio.timeout(60):
            await made.wait()
            await flows(proxy.metrics, "bytes_from_brokers")
            assert not sent.is_set()
            if is_read:
                assert await client.receive() == response(1, bytes(32 * MIB))
            else:
                await client.close()
            await sent.wait()


async def test_with_tls_an_answer_keeps_its_memory_until_the_client_took_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A transport of TLS counts nothing of what it has handed on to the socket's own transport."""
    authority = Authority(tmp_path)
    sent: list[int] = []

    def large(exchange: Exchange, held: memoryview) -> tuple[bytes, ...]:
        exchange.on_sent = lambda: sent.append(exchange.request.correlation_id)
        return bytes(held[:4]), bytes(READ_BUFFER_BYTES - 7), b"", bytes(32 * MIB)

    body = bytes(READ_BUFFER_BYTES - 7 + 32 * MIB)
    async with (
        FakeBroker() as broker,
        proxy_before(broker, handlers={1: ForwardingHandler(large)}, tls=for_clients(authority)) as proxy,
        connected_by_tls(proxy.port, client_side(authority)) as client,
        asyncio.timeout(60),
    ):
        upstream = await forwarded(client, broker, *(request(1, 4, n) for n in range(3)))
        await upstream.send(*(response(n) for n in range(3)))
        await flows(proxy.metrics, "bytes_from_brokers")
        assert sent == []
        for n in range(3):
            assert await client.receive() == response(n, body)
        await until(lambda: len(sent) >= 3)
    assert not caplog.records


async def test_by_tls_what_was_answered_leaves_before_the_end(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with (
        FakeBroker() as broker,
        proxy_before(
            broker,
            handlers={1: ForwardingHandler(lambda _, held: (bytes(held[:4]), bytes(16 * MIB)))},
            tls=for_clients(authority),
        ) as proxy,
        connected_by_tls(proxy.port, client_side(authority)) as client,
        asyncio.timeout(60),
    ):
        upstream = await forwarded(client, broker, request(1, 4, 1))
        await upstream.send(response(1))
        await flows(proxy.metrics, "bytes_from_brokers")
        await upstream.close()
        assert await client.receive() == response(1, bytes(16 * MIB))
        await client.ended()


async def test_memory_of_an_answer_that_is_never_made_is_released() -> None:
    sent, gate = asyncio.Event(), asyncio.Event()

    async def never(exchange: Exchange, held: memoryview) -> tuple[bytes]:
        exchange.on_sent = sent.set
        gate.set()
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    async with relayed(handlers={1: ForwardingHandler(never)}) as (client, broker, _):
        upstream = await forwarded(client, broker, request(1, 4, 1))
        await upstream.send(response(1))
        async with asyncio.timeout(60):
            await gate.wait()
            await client.close()
            await sent.wait()
