"""A client that sends and never reads is not read from: the memory for its answers does not grow with its requests."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Mapping
from pathlib import Path

from proxy.wire.exchange import Handler
from proxy.wire.flow_control import READ_BUFFER_BYTES
from tests.support.fakes.broker.fake_broker import FakeBroker
from tests.support.fakes.broker.wire import Wire, connected, frame, request, response
from tests.support.proxy.proxy_harness import AnsweringHandler, Proxy, proxy_before
from tests.support.proxy.tls_sides import client_side, connected_by_tls, for_clients
from tests.support.servers.certificates import Authority

ANSWERED = 40
ANSWER = response(7, bytes(4096))
REQUEST = frame(request(ANSWERED, 1, 7))
"""The proxy answers this request itself, so no broker slows the client down. The answer is larger than the request."""
HANDLERS: Mapping[int, Handler] = {ANSWERED: AnsweringHandler(ANSWER[4:])}
MIB = 1024 * 1024
IN_THE_SOCKETS_BYTES = 16 * MIB
"""More than the kernel buffers for two ends of a connection."""


def resident_bytes() -> int:
    """Returns the memory without mapped files, since code that runs for the first time maps more of them."""
    _, resident, of_files, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - of_files) * 4096


async def send_for_ever(client: Wire) -> None:
    while True:
        await client.send_raw(REQUEST * 1_000)


async def check_what_is_held(proxy: Proxy, client: Wire) -> None:
    await client.send_raw(REQUEST)
    assert await client.receive() == ANSWER
    gc.collect()
    before = resident_bytes()
    sending = asyncio.get_running_loop().create_task(send_for_ever(client))
    await proxy.reads_no_more_from("clients")
    assert not sending.done()
    sending.cancel()
    (connection,) = proxy.server.connections
    assert connection.is_full
    assert len(connection.queue.slots) <= 1
    answered_bytes = proxy.metrics.requests[ANSWERED] * len(frame(ANSWER))
    assert answered_bytes < IN_THE_SOCKETS_BYTES
    unprocessed_bytes = proxy.metrics.bytes_from_clients - proxy.metrics.requests[ANSWERED] * len(REQUEST)
    assert unprocessed_bytes < READ_BUFFER_BYTES
    assert resident_bytes() - before < IN_THE_SOCKETS_BYTES


async def test_a_client_that_never_reads_is_not_read_from() -> None:
    async with (
        FakeBroker() as broker,
        proxy_before(broker, handlers=HANDLERS) as proxy,
        connected(proxy.port, receive_buffer_bytes=16 * 1024) as client,
    ):
        await check_what_is_held(proxy, client)
        client.reset()


async def test_a_tls_client_that_never_reads_is_not_read_from(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with (
        FakeBroker() as broker,
        proxy_before(broker, handlers=HANDLERS, tls=for_clients(authority)) as proxy,
        connected_by_tls(proxy.port, client_side(authority)) as client,
    ):
        await check_what_is_held(proxy, client)
        client.abort()


async def test_a_client_that_reads_late_gets_every_answer() -> None:
    requests = 10_000
    async with (
        FakeBroker() as broker,
        proxy_before(broker, handlers=HANDLERS) as proxy,
        connected(proxy.port, receive_buffer_bytes=16 * 1024) as client,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(client.send_raw(REQUEST * requests))
        await proxy.reads_no_more_from("clients")
        assert proxy.metrics.requests[ANSWERED] < requests
        gc.collect()
        before = resident_bytes()
        for _ in range(requests):
            assert await client.receive() == ANSWER
        assert resident_bytes() - before < 4 * MIB
