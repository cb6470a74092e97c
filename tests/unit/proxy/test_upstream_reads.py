"""How much of a large answer the connection to the broker reads at once."""

from __future__ import annotations

import asyncio

import pytest

from protocol.primitives import INT32
from proxy.wire.connection import ClientConnection
from proxy.wire.flow_control import READ_BUFFER_BYTES
from proxy.wire.upstream import UpstreamConnection
from tests.support.fakes.broker.wire import OPAQUE, frame, request, response
from tests.support.proxy.virtual_network import VirtualNetwork
from tests.support.proxy.virtual_proxy import VirtualProxy, run_virtually


def test_a_transport_that_cannot_splice_reads_whole_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """So does TLS to the broker, also if the client speaks plain text."""
    monkeypatch.setattr(ClientConnection, "can_splice", True)

    async def main(network: VirtualNetwork) -> None:
        async with asyncio.TaskGroup() as tasks:
            proxy = VirtualProxy(network, tasks)
            client = proxy.connect()
            client.send(frame(request(OPAQUE, 4, 1)))
            await asyncio.sleep(1)
            network.brokers[0].send(INT32.pack(4 + READ_BUFFER_BYTES) + response(1, b"begun"))
            await asyncio.sleep(1)
            upstream = network.transports[-1].get_protocol()
            assert isinstance(upstream, UpstreamConnection)
            assert upstream.streaming_slot is not None
            assert len(upstream.get_buffer(-1)) == READ_BUFFER_BYTES
            client.reset()
            await asyncio.sleep(1)

    run_virtually(main)
