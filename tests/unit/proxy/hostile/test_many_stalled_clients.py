"""A thousand clients that stall at once: there are not enough pipes for all of them, and each gets its answer."""

from __future__ import annotations

import contextlib
from pathlib import Path

from proxy.wire.socket_transport import MAX_PIPES, MIN_SPLICE_BYTES
from tests.support.fakes.broker.fake_broker import FakeBroker
from tests.support.fakes.broker.wire import OPAQUE, Wire, connected, request, response
from tests.support.proxy.proxy_harness import proxy_before

CLIENTS = 1_000
BODY = bytes(n % 251 for n in range(200 * 1024))


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_a_thousand_stalled_clients_all_get_their_answers() -> None:
    assert CLIENTS > MAX_PIPES
    assert len(BODY) > MIN_SPLICE_BYTES
    files = open_files()

    class Answering(FakeBroker):
        async def serve(self, wire: Wire) -> None:
            await wire.receive_when_it_comes()
            await wire.send(response(1, BODY))  # the connection stays until the broker stops

    async with Answering() as broker, proxy_before(broker) as proxy, contextlib.AsyncExitStack() as stack:
        asking = [
            await stack.enter_async_context(connected(proxy.port, receive_buffer_bytes=4096)) for _ in range(CLIENTS)
        ]
        for client in asking:
            await client.send(request(OPAQUE, 4, 1))
        await proxy.reads_no_more_from("brokers")
        for client in asking:
            assert await client.receive() == response(1, BODY)
    assert open_files() <= files + 8
