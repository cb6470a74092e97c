"""The handlers of a proxy without a remote tier, on a connection between a client and a broker."""

from __future__ import annotations

import struct

import pytest

from protocol.api_keys import ApiKey
from protocol.primitives import INT16, INT32
from proxy.handlers.produce import ProduceHandler
from proxy.process.app import pass_through_handlers
from proxy.wire.context import Address
from tests.support.fakes.broker.wire import request, response
from tests.support.proxy.proxy_harness import relayed

ENTRY = struct.Struct(">hhh")


def advertised(node_id: int) -> Address:
    return "proxy.example", 9100 + node_id


def produce(version: int, correlation_id: int, acks: int, records: bytes) -> bytes:
    tail = b"\x00" if version >= 9 else b""
    transactional_id = b"\x00" if version >= 9 else b"\xff\xff"
    return request(ApiKey.PRODUCE, version, correlation_id, tail[:0] + transactional_id + INT16.pack(acks) + records)


async def test_api_versions_are_cut_to_what_is_decoded() -> None:
    entries = [(ApiKey.PRODUCE, 0, 99), (ApiKey.FETCH, 4, 99), (ApiKey.VOTE, 0, 2), (ApiKey.HEARTBEAT, 0, 4)]
    body = INT16.pack(0) + INT32.pack(len(entries)) + b"".join(ENTRY.pack(*entry) for entry in entries)
    async with relayed(handlers=pass_through_handlers(), address_of=advertised) as (client, broker, _):
        await client.send(request(ApiKey.API_VERSIONS, 0, 1))
        await (await broker.accepted()).send(response(1, body))
        answer = await client.receive()
        seen = dict[int, tuple[int, int]]()
        for api_key, low, high in ENTRY.iter_unpack(answer[10:]):
            seen[api_key] = (low, high)
        assert seen == {ApiKey.PRODUCE: (0, 13), ApiKey.FETCH: (4, 18), ApiKey.HEARTBEAT: (0, 4)}


async def test_a_future_version_of_api_versions_is_answered_as_by_a_broker() -> None:
    async with relayed(handlers=pass_through_handlers(), address_of=advertised) as (client, _, _):
        await client.send(request(ApiKey.API_VERSIONS, 99, 1, b"whatever follows"))
        assert await client.receive() == response(1, INT16.pack(35) + INT32.pack(1) + ENTRY.pack(18, 0, 4))


@pytest.mark.parametrize("version", [3, 8, 9, 12])
async def test_produce_with_acks_0_has_no_response_and_others_have(version: int) -> None:
    silent = produce(version, 1, 0, b"records" * 100_000)
    answered = produce(version, 2, -1, b"records")
    async with relayed(prefix_handlers={ApiKey.PRODUCE: ProduceHandler()}, address_of=advertised) as (
        client,
        broker,
        _,
    ):
        await client.send(silent, answered)
        upstream = await broker.accepted()
        assert await upstream.receive() == silent
        assert await upstream.receive() == answered
        empty = {3: 0, 8: 0, 9: 1, 12: 1}[version]
        body = (b"\x00" if empty else b"") + (b"\x01" if empty else INT32.pack(0)) + INT32.pack(0)
        body += b"\x00" if empty else b""
        await upstream.send(response(2, body))
        assert await client.receive() == response(2, body)


@pytest.mark.parametrize(("api_key", "version"), [(ApiKey.METADATA, 99), (ApiKey.FETCH, 3), (ApiKey.SHARE_FETCH, 3)])
async def test_a_version_that_was_not_advertised_is_named_in_one_sentence(
    api_key: ApiKey, version: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with relayed(handlers=pass_through_handlers(), address_of=advertised) as (client, _, _):
        await client.send(request(api_key, version, 5, INT32.pack(0)))
        assert await client.ended() == b""
    (line,) = caplog.messages
    said = f"what the client sent is refused: version {version} of API key {int(api_key)}, which was not advertised"
    assert line == f"closing the connection: {said}"
