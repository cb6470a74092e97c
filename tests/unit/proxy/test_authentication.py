"""Authentication passes through with every mechanism, and changes the treatment of later requests."""

from __future__ import annotations

import logging

import pytest

from protocol.primitives import INT16
from proxy.wire.exchange import Buffers, Exchange
from tests.support.fakes.broker.fake_broker import FakeBroker
from tests.support.fakes.broker.wire import connected, request, response
from tests.support.proxy.proxy_harness import ForwardingHandler, proxy_before

HANDLED = 1


def handshake(mechanism: str) -> bytes:
    return request(17, 0, 1, INT16.pack(len(mechanism)) + mechanism.encode())


HANDSHAKE_ANSWER = response(1, b"\x00\x00\x00\x00\x00\x00")


def noting_connections(seen: list[int]) -> ForwardingHandler:
    def answer(exchange: Exchange, payload: memoryview) -> Buffers:
        seen.append(exchange.connection_id)
        return (payload,)

    return ForwardingHandler(answer)


@pytest.mark.parametrize(
    ("mechanism", "rounds"), [("PLAIN", 1), ("OAUTHBEARER", 1), ("SCRAM-SHA-256", 2), ("SCRAM-SHA-512", 2)]
)
async def test_after_raw_tokens_requests_are_requests_again(mechanism: str, rounds: int) -> None:
    seen: list[int] = []
    async with (
        FakeBroker() as broker,
        proxy_before(broker, handlers={HANDLED: noting_connections(seen)}) as proxy,
        connected(proxy.port) as client,
    ):
        # All at once: what comes behind the tokens waits, and is read for what it is.
        await client.send(request(HANDLED, 1, 0), handshake(mechanism), *[b"t"] * rounds, request(HANDLED, 1, 2))
        upstream = await broker.accepted()
        for said, answered in (
            (request(HANDLED, 1, 0), response(0)),
            (handshake(mechanism), HANDSHAKE_ANSWER),
            *[(b"t", b"")] * rounds,
            (request(HANDLED, 1, 2), response(2)),
        ):
            assert await upstream.receive() == said
            await upstream.send(answered)
            assert await client.receive() == answered
    before, after = seen
    assert before != after


async def test_raw_tokens_of_an_unknown_mechanism_never_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with FakeBroker() as broker, proxy_before(broker) as proxy, connected(proxy.port) as client:
        await client.send(handshake("GSSAPI"))
        upstream = await broker.accepted()
        await upstream.receive()
        await upstream.send(HANDSHAKE_ANSWER)
        await client.receive()
        for token in (b"\x00user\x00password", b"", b"again"):
            await client.send(token)
            assert await upstream.receive() == token
            await upstream.send(token[::-1])
            assert await client.receive() == token[::-1]
    assert "SaslHandshake v0" in caplog.records[0].message


async def test_requests_after_an_authentication_are_remembered_apart() -> None:
    seen: list[int] = []
    async with (
        FakeBroker() as broker,
        proxy_before(broker, handlers={HANDLED: noting_connections(seen)}) as proxy,
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
