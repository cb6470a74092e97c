"""Authentication passes through, whatever the mechanism; what it changes for the requests that follow."""

from __future__ import annotations

import logging

import pytest

from proxy.exchange import Buffers, Exchange
from tests.fakes.broker.fake_broker import FakeBroker
from tests.fakes.broker.wire import connected, request, response
from tests.proxy.proxy_harness import ForwardingHandler, proxy_before

HANDLED = 1


async def test_after_sasl_handshake_v0_raw_tokens_pass_both_ways(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with FakeBroker() as broker, proxy_before(broker) as proxy, connected(proxy.port) as client:
        await client.send(request(17, 0, 1, b"\x00\x05PLAIN"))
        upstream = await broker.accepted()
        await upstream.receive()
        await upstream.send(response(1, b"\x00\x00\x00\x00\x00\x00"))
        await client.receive()
        await client.send(b"\x00user\x00password")
        assert await upstream.receive() == b"\x00user\x00password"
        await upstream.send(b"")
        assert await client.receive() == b""
    assert "SaslHandshake v0" in caplog.records[0].message


async def test_what_follows_an_authentication_is_remembered_apart() -> None:
    seen: list[int] = []

    def answer(exchange: Exchange, payload: memoryview) -> Buffers:
        seen.append(exchange.connection_id)
        return (payload,)

    handlers = {HANDLED: ForwardingHandler(answer)}
    async with (
        FakeBroker() as broker,
        proxy_before(broker, handlers=handlers) as proxy,
        connected(proxy.port) as client,
    ):
        # All at once: the first request is answered only after the broker was asked to authenticate.
        await client.send(*(request(key, 1, number) for number, key in enumerate((HANDLED, 36, HANDLED, HANDLED))))
        upstream = await broker.accepted()
        for number in range(4):
            await upstream.receive()
            await upstream.send(response(number))
            assert await client.receive() == response(number)
    before, *after = seen
    assert after == [after[0], after[0]]
    assert after[0] != before
