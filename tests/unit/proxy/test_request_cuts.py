"""Where TCP cuts the stream of a client changes neither what reaches the broker nor whether the connection ends."""

from __future__ import annotations

import asyncio

import pytest

from protocol.api_keys import ApiKey
from protocol.primitives import INT16
from proxy.handlers.produce import ProduceHandler
from proxy.process.app import pass_through_handlers
from tests.support.fakes.broker.wire import OPAQUE, frame, request
from tests.support.proxy.virtual_network import VirtualNetwork
from tests.support.proxy.virtual_proxy import VirtualProxy, run_virtually

HEAD_BYTES, CLIENT_ID = 8, b"\0\4test"
FIRST = frame(request(OPAQUE, 4, 1))
PRODUCE_BODY = bytes.fromhex("ffff 0001 00007530 00000001 0001 74 00000001 00000000 00000001 00")
"""Version 3: no transactional id, acks 1, a timeout, and one partition of the topic "t" with a byte of records."""


def outcome(*pieces: bytes) -> tuple[bytes, bool]:
    """Returns the bytes that the broker gets, and whether the client's connection ends, without an answer."""

    async def main(network: VirtualNetwork) -> tuple[bytes, bool]:
        async with asyncio.TaskGroup() as tasks:
            handlers = pass_through_handlers()
            proxy = VirtualProxy(network, tasks, handlers=handlers, prefix_handlers={ApiKey.PRODUCE: ProduceHandler()})
            client = proxy.connect()
            for piece in pieces:
                client.send(piece)
                await asyncio.sleep(1)
            got = bytes(network.brokers[0].received), client.has_ended
            client.reset()
            network.brokers[0].reset()
            await asyncio.sleep(1)
            return got

    return run_virtually(main)


@pytest.mark.parametrize("length", [-(2**15), -2, -1, 0, 4, 5, 30_000, 2**15 - 1])
@pytest.mark.parametrize(
    ("api_key", "version", "body"),
    [(OPAQUE, 4, b""), (ApiKey.FETCH, 17, bytes(8)), (ApiKey.PRODUCE, 3, PRODUCE_BODY)],
    ids=["passes as it arrives", "held", "held in part"],
)
def test_every_cut_has_the_same_outcome(api_key: int, version: int, body: bytes, length: int) -> None:
    asked = request(api_key, version, 2, body)
    client_id = INT16.pack(length) + (CLIENT_ID[2:] if length >= 0 else b"")
    asked = asked[:HEAD_BYTES] + client_id + asked[HEAD_BYTES + len(CLIENT_ID) :]
    stream = FIRST + frame(asked)
    whole = outcome(stream)
    assert whole[0].startswith(FIRST)
    if length < 0:
        assert whole == (stream, False)
    assert {outcome(stream[:cut], stream[cut:]) for cut in range(1, len(stream))} == {whole}
