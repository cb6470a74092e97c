"""How much of a large answer the connection to the broker reads at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from uuid import UUID

import pytest

from protocol.api_keys import ApiKey
from protocol.apis.fetch.encoding import encode_partition, encode_response
from protocol.frame import LENGTH_BYTES
from protocol.primitives import INT32, write_uvarint
from proxy.process.app import pass_through_handlers
from proxy.wire.connection import ClientConnection
from proxy.wire.flow_control import READ_BUFFER_BYTES
from proxy.wire.socket_transport import MIN_SPLICE_BYTES
from proxy.wire.upstream import UpstreamConnection
from tests.support.fakes.broker.wire import OPAQUE, frame, request, response
from tests.support.proxy.proxy_harness import forwarded, relayed
from tests.support.proxy.virtual_network import VirtualNetwork
from tests.support.proxy.virtual_proxy import VirtualProxy, run_virtually

TOPIC = UUID(int=17)


def fetched(partitions: int, records_bytes: int) -> bytes:
    entries = [encode_partition(17, n, log_start_offset=0, records=[bytes(records_bytes)]) for n in range(partitions)]
    return b"".join(map(bytes, encode_response(17, 1, [(TOPIC, entries)])))


def share_fetched(partitions: int, records_bytes: int) -> bytes:
    """A ShareFetch response of version 1 without acquired records and endpoints."""
    records = write_uvarint(records_bytes + 1) + bytes(records_bytes)
    entries = [INT32.pack(n) + b"\0\0\0\0\0\0" + bytes(9) + records + b"\1\0" for n in range(partitions)]
    topics = b"\2" + TOPIC.bytes + write_uvarint(partitions + 1) + b"".join(entries) + b"\0"
    return INT32.pack(1) + b"\0" + bytes(INT32.size) + b"\0\0\0" + bytes(INT32.size) + topics + b"\1\0"


async def reads_of(answer: bytes, api_key: int, version: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the sizes of the reads in which an answer that the proxy splices came from the broker."""
    sizes: list[int] = []
    updated = UpstreamConnection.buffer_updated

    def note(upstream: UpstreamConnection, nbytes: int) -> None:
        sizes.append(nbytes)
        updated(upstream, nbytes)

    monkeypatch.setattr(UpstreamConnection, "buffer_updated", note)
    async with relayed(handlers=pass_through_handlers()) as (client, broker, _), asyncio.TaskGroup() as tasks:
        upstream = await forwarded(client, broker, request(api_key, version, 1))
        tasks.create_task(upstream.send(answer))
        assert await client.receive() == answer
    return sizes


ANSWERS = pytest.mark.parametrize(
    ("api_key", "version", "answer_of"), [(ApiKey.FETCH, 17, fetched), (ApiKey.SHARE_FETCH, 1, share_fetched)]
)


@ANSWERS
@pytest.mark.parametrize("records_bytes", [1_000, 8_000, 30_000, 60_000])
async def test_records_that_are_not_spliced_are_read_by_the_buffer(
    api_key: int,
    version: int,
    answer_of: Callable[[int, int], bytes],
    records_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = answer_of(6_000_000 // records_bytes, records_bytes)
    sizes = await reads_of(answer, api_key, version, monkeypatch)
    assert sum(sizes) == LENGTH_BYTES + len(answer)
    assert len(sizes) <= sum(sizes) / MIN_SPLICE_BYTES


@ANSWERS
async def test_few_of_the_records_that_can_be_spliced_are_read(
    api_key: int, version: int, answer_of: Callable[[int, int], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = answer_of(6, 1_000_000)
    sizes = await reads_of(answer, api_key, version, monkeypatch)
    assert sum(sizes) < len(answer) / 3


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
