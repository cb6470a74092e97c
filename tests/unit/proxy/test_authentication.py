"""Authentication passes through with every mechanism, and changes the treatment of later requests."""

from __future__ import annotations

import pytest

from proxy.wire.exchange import Buffers, Exchange
from tests.support.fakes.broker.sasl import authenticate_answer, handshake, handshake_answer
from tests.support.fakes.broker.wire import request, response
from tests.support.proxy.proxy_harness import ForwardingHandler, relayed

HANDLED = 1


def noting_connections(seen: list[int]) -> ForwardingHandler:
    def answer(exchange: Exchange, payload: memoryview) -> Buffers:
        seen.append(exchange.connection_id)
        return (payload,)

    return ForwardingHandler(answer)


@pytest.mark.parametrize("mechanism", ["PLAIN", "OAUTHBEARER", "SCRAM-SHA-256", "SCRAM-SHA-512"])
async def test_after_raw_tokens_requests_are_requests_again(mechanism: str) -> None:
    tokens = [b"r=nonce", b"v=signature"] if mechanism.startswith("SCRAM") else [b""]
    seen: list[int] = []
    async with relayed(handlers={HANDLED: noting_connections(seen)}) as (client, broker, _):
        # All at once: what comes behind the tokens waits, and is read for what it is.
        sent = (request(HANDLED, 1, 0), handshake(0, mechanism), *[b"t"] * len(tokens), request(HANDLED, 1, 2))
        await client.send(*sent)
        upstream = await broker.accepted()
        for said, answered in zip(sent, (response(0), handshake_answer(), *tokens, response(2)), strict=True):
            assert await upstream.receive() == said
            await upstream.send(answered)
            assert await client.receive() == answered
    before, after = seen
    assert before != after


async def test_requests_after_an_authentication_are_remembered_apart() -> None:
    seen: list[int] = []
    async with relayed(handlers={HANDLED: noting_connections(seen)}) as (client, broker, _):
        # All at once: the first request is answered only after the broker was asked to authenticate.
        await client.send(*(request(key, 1, number) for number, key in enumerate((HANDLED, 36, HANDLED, HANDLED))))
        upstream = await broker.accepted()
        for number in range(4):
            await upstream.receive()
            answer = authenticate_answer(number) if number == 1 else response(number)
            await upstream.send(answer)
            assert await client.receive() == answer
    before, *after = seen
    assert after == [after[0], after[0]]
    assert after[0] != before
