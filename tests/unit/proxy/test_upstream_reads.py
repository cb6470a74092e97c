"""How much of a large answer the connection to the broker reads at once."""

from __future__ import annotations

import asyncio
from uuid import UUID

import pytest

from protocol.api_keys import ApiKey
from protocol.apis.fetch.encoding import encode_partition, encode_response
from protocol.frame import LENGTH_BYTES
from proxy.process.app import pass_through_handlers
from proxy.wire.socket_transport import MIN_SPLICE_BYTES
from proxy.wire.upstream import UpstreamConnection
from tests.support.fakes.broker.wire import request
from tests.support.proxy.proxy_harness import forwarded, relayed

TOPIC = UUID(int=17)


def fetched(partitions: int, records_bytes: int) -> bytes:
    entries = [encode_partition(17, n, log_start_offset=0, records=[bytes(records_bytes)]) for n in range(partitions)]
    return b"".join(map(bytes, encode_response(17, 1, [(TOPIC, entries)])))


async def reads_of(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the sizes of the reads in which the answer to a Fetch came from the broker."""
    sizes: list[int] = []
    updated = UpstreamConnection.buffer_updated

    def note(upstream: UpstreamConnection, nbytes: int) -> None:
        sizes.append(nbytes)
        updated(upstream, nbytes)

    monkeypatch.setattr(UpstreamConnection, "buffer_updated", note)
    async with relayed(handlers=pass_through_handlers()) as (client, broker, _), asyncio.TaskGroup() as tasks:
        upstream = await forwarded(client, broker, request(ApiKey.FETCH, 17, 1))
        tasks.create_task(upstream.send(answer))
        assert await client.receive() == answer
    return sizes


@pytest.mark.parametrize("records_bytes", [1_000, 60_000])
async def test_records_that_are_not_spliced_are_read_by_the_buffer(
    records_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = fetched(6_000_000 // records_bytes, records_bytes)
    sizes = await reads_of(answer, monkeypatch)
    assert sum(sizes) == LENGTH_BYTES + len(answer)
    assert len(sizes) <= sum(sizes) / MIN_SPLICE_BYTES


async def test_few_of_the_records_that_can_be_spliced_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = fetched(6, 1_000_000)
    assert sum(await reads_of(answer, monkeypatch)) < len(answer) / 3
