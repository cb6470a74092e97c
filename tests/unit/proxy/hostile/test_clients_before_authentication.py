"""With SASL on the brokers, the proxy decodes nothing of a client that the broker has not authenticated.

The tokens after SaslHandshake version 0 open no way around the handlers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode
from proxy.wire.exchange import Answer, Exchange, Forward, Handler, Respond
from tests.support.fakes.broker.fake_broker import FakeBroker
from tests.support.fakes.broker.sasl import authenticate, authenticate_answer, handshake, handshake_answer
from tests.support.fakes.broker.wire import OPAQUE, Wire, connected, frame, request, response
from tests.support.proxy.proxy_harness import PATIENT, AnsweringHandler, Proxy, proxy_before, relayed, reply


class Decoding:
    """Counts the requests that the proxy decodes, and marks the broker's answers."""

    def __init__(self) -> None:
        self.decoded = 0

    def on_request(self, exchange: Exchange) -> tuple[Answer | Forward, Respond | None]:
        self.decoded += 1

        return Forward(exchange.request.frame, hold_bytes=None), lambda _: reply(exchange, b"rewritten")


@contextlib.asynccontextmanager
async def sasl_proxy(limit: int = 1_000) -> AsyncIterator[tuple[FakeBroker, Proxy, Decoding]]:
    decoding = Decoding()
    handlers: dict[int, Handler] = dict.fromkeys((ApiKey.METADATA, ApiKey.DELETE_TOPICS), decoding)
    limits = PATIENT.model_copy(update={"max_unauthenticated_request_bytes": limit})
    async with (
        FakeBroker() as broker,
        proxy_before(broker, handlers=handlers, limits=limits, brokers_ask_for_sasl=True) as proxy,
    ):
        yield broker, proxy, decoding


METADATA = request(ApiKey.METADATA, 1, 9)
LARGE = request(OPAQUE, 1, 9, bytes(1_000))


async def exchange_with(client: Wire, upstream: Wire, asked: bytes, answered: bytes) -> None:
    await client.send(asked)
    assert await upstream.receive() == asked
    await upstream.send(answered)
    assert await client.receive() == answered


async def is_decoded(client: Wire, upstream: Wire, decoding: Decoding) -> None:
    await client.send(METADATA)
    assert await upstream.receive() == METADATA
    await upstream.send(response(9, b"a broker's address"))
    assert await client.receive() == response(9, b"rewritten")
    assert decoding.decoded == 1


@contextlib.asynccontextmanager
async def shaken_hands(mechanism: str = "PLAIN") -> AsyncIterator[tuple[Wire, Wire, Decoding]]:
    """Yields the client's side and the broker's side of a connection on which an authentication has begun."""
    async with sasl_proxy() as (broker, proxy, decoding), connected(proxy.port) as client:
        await client.send(handshake(1, mechanism))
        upstream = await broker.accepted()
        assert await upstream.receive() == handshake(1, mechanism)
        await upstream.send(handshake_answer())
        assert await client.receive() == handshake_answer()
        yield client, upstream, decoding


@pytest.mark.parametrize(
    "sent",
    [METADATA, request(ApiKey.DELETE_TOPICS, 1, 9, bytes(500)), LARGE],
    ids=["Metadata", "DeleteTopics", "a large Heartbeat"],
)
async def test_a_request_before_authentication_closes_the_connection(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with sasl_proxy() as (_, proxy, decoding), connected(proxy.port) as client:
        await client.send(sent)
        assert await client.ended() == b""
        assert decoding.decoded == 0
    assert "before the client has authenticated" in caplog.records[0].message


@pytest.mark.parametrize(
    "sent", [authenticate(bytes(1_000)), handshake(1, "x" * 1_000)], ids=["SaslAuthenticate", "SaslHandshake"]
)
async def test_an_authentication_has_a_limit(sent: bytes) -> None:
    async with sasl_proxy() as (_, proxy, _), connected(proxy.port) as client:
        await client.send(sent)
        assert await client.ended() == b""


@pytest.mark.parametrize(
    ("mechanism", "error_code", "token"),
    [
        ("PLAIN", ErrorCode.SASL_AUTHENTICATION_FAILED, b""),
        ("PLAIN", ErrorCode.ILLEGAL_SASL_STATE, b""),
        ("SCRAM-SHA-256", ErrorCode.NONE, b"r=nonce"),
        ("OAUTHBEARER", ErrorCode.NONE, b'{"status":"invalid_token"}'),
    ],
)
async def test_an_answer_that_is_no_success_lifts_no_limit(mechanism: str, error_code: int, token: bytes) -> None:
    async with shaken_hands(mechanism) as (client, upstream, decoding):
        await exchange_with(client, upstream, authenticate(b"t"), authenticate_answer(1, error_code, token))
        await client.send(METADATA)
        assert await client.ended() == b""
        assert decoding.decoded == 0
        assert await upstream.ended() == b""


@pytest.mark.parametrize(
    ("mechanism", "tokens"),
    [("PLAIN", [b""]), ("SCRAM-SHA-512", [b"r=nonce", b"v=signature"]), ("OAUTHBEARER", [b""]), ("GSSAPI", [b"any"])],
)
async def test_a_success_lifts_the_limits(mechanism: str, tokens: list[bytes]) -> None:
    async with shaken_hands(mechanism) as (client, upstream, decoding):
        for token in tokens:
            await exchange_with(client, upstream, authenticate(b"t"), authenticate_answer(token=token))
        await exchange_with(client, upstream, LARGE, response(9))
        await is_decoded(client, upstream, decoding)


async def test_a_failed_reauthentication_ends_the_rights() -> None:
    async with shaken_hands() as (client, upstream, decoding):
        await exchange_with(client, upstream, authenticate(b"t"), authenticate_answer())
        await exchange_with(client, upstream, handshake(1, "PLAIN"), handshake_answer())
        await client.send(authenticate(b"wrong"), METADATA)
        assert await upstream.receive() == authenticate(b"wrong")
        answer = authenticate_answer(error_code=ErrorCode.SASL_AUTHENTICATION_FAILED)
        await upstream.send(answer)
        assert await client.receive() == answer
        assert await client.ended() == b""
        assert decoding.decoded == 0


@pytest.mark.parametrize(
    ("sent", "refused"),
    [
        (handshake(0, "PLAIN"), handshake_answer(ErrorCode.ILLEGAL_SASL_STATE)),
        (handshake(1, "PLAIN"), handshake_answer(ErrorCode.ILLEGAL_SASL_STATE)),
        (authenticate(b"t"), authenticate_answer(error_code=ErrorCode.ILLEGAL_SASL_STATE)),
    ],
    ids=["handshake 0", "handshake 1", "a token"],
)
async def test_a_refused_handshake_or_token_changes_nothing(sent: bytes, refused: bytes) -> None:
    """A broker refuses both on a connection that is authenticated, and answers its requests as before."""
    async with shaken_hands() as (client, upstream, decoding):
        await exchange_with(client, upstream, authenticate(b"t"), authenticate_answer())
        await exchange_with(client, upstream, sent, refused)
        await is_decoded(client, upstream, decoding)


async def test_a_split_handshake_is_held_until_it_is_whole() -> None:
    async with sasl_proxy() as (broker, proxy, decoding), connected(proxy.port) as client:
        whole = frame(handshake(0, "PLAIN"))
        for position in range(len(whole)):
            await client.send_raw(whole[position : position + 1])
            await asyncio.sleep(0)
        upstream = await broker.accepted()
        assert await upstream.receive() == handshake(0, "PLAIN")
        await upstream.send(handshake_answer())
        assert await client.receive() == handshake_answer()
        await exchange_with(client, upstream, b"token", b"")
        await is_decoded(client, upstream, decoding)


@pytest.mark.parametrize(("mechanism", "token"), [("SCRAM-SHA-256", b"r=nonce"), ("OAUTHBEARER", b"{}")])
async def test_raw_tokens_that_end_without_success_close_the_connection(mechanism: str, token: bytes) -> None:
    async with sasl_proxy() as (broker, proxy, decoding), connected(proxy.port) as client:
        await client.send(handshake(0, mechanism), b"1", b"2", METADATA)
        upstream = await broker.accepted()
        assert await upstream.receive() == handshake(0, mechanism)
        await upstream.send(handshake_answer())
        for raw in (b"1", b"2"):
            assert await upstream.receive() == raw
            await upstream.send(token)
        assert await client.ended() == frame(handshake_answer()) + frame(token)
        assert decoding.decoded == 0
        assert await upstream.ended() == b""


async def test_raw_tokens_without_a_known_end_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    async with sasl_proxy() as (broker, proxy, _), connected(proxy.port) as client:
        await client.send(handshake(0, "GSSAPI"), b"token")
        assert await client.ended() == b""
        assert await (await broker.accepted()).ended() == b""
    assert "the client must use SaslHandshake version 1" in caplog.records[0].message


async def test_the_error_log_shows_no_token_behind_a_refused_handshake() -> None:
    async with sasl_proxy() as (broker, proxy, _), connected(proxy.port) as client:
        await client.send(handshake(0, "PLAIN"), b"\0bob\0secret-password")
        upstream = await broker.accepted()
        assert await upstream.receive() == handshake(0, "PLAIN")
        await upstream.send(handshake_answer(ErrorCode.ILLEGAL_SASL_STATE))
        assert await client.receive() == handshake_answer(ErrorCode.ILLEGAL_SASL_STATE)
        assert await client.ended() == b""
        (entry,) = proxy.server.errors.incidents
        assert (entry.kind, entry.client_id, entry.api) == ("undecodable", "test", None)


async def test_a_mechanism_without_a_known_end_lets_one_request_pass() -> None:
    """The broker closes the connection at that request if the authentication has not ended."""
    async with shaken_hands("GSSAPI") as (client, upstream, decoding):
        await exchange_with(client, upstream, authenticate(b"t"), authenticate_answer(token=b"more, please"))
        await client.send(METADATA, METADATA, METADATA)
        assert await upstream.receive() == METADATA
        await upstream.close()
        assert await client.ended() == b""
        assert decoding.decoded == 1


async def test_an_answer_after_an_unknown_mechanism_lifts_the_limits() -> None:
    async with shaken_hands("GSSAPI") as (client, upstream, decoding):
        for _ in range(2):
            await exchange_with(client, upstream, authenticate(b"t"), authenticate_answer(token=b"more, please"))
        await client.send(METADATA, METADATA, METADATA)
        assert await upstream.receive() == METADATA
        await upstream.send(response(9, b"a broker's address"))
        assert await upstream.receive() == METADATA
        assert await upstream.receive() == METADATA
        assert decoding.decoded == 3


@pytest.mark.parametrize(
    "sent",
    [b"", frame(LARGE)[:-1], frame(METADATA)[:-1], frame(request(ApiKey.LEAVE_GROUP, 0, 9))],
    ids=["nothing", "a part", "a part of a held request", "an answer of the proxy"],
)
async def test_a_client_that_leaves_its_mechanism_unfinished_stays_unknown(sent: bytes) -> None:
    limits = PATIENT.model_copy(update={"connection_setup_timeout_ms": 500})
    handlers: dict[int, Handler] = {ApiKey.METADATA: Decoding(), ApiKey.LEAVE_GROUP: AnsweringHandler(b"refused")}
    async with relayed(handlers=handlers, limits=limits, brokers_ask_for_sasl=True) as (client, broker, proxy):
        await client.send(handshake(1, "GSSAPI"))
        upstream = await broker.accepted()
        assert await upstream.receive() == handshake(1, "GSSAPI")
        await upstream.send(handshake_answer())
        assert await client.receive() == handshake_answer()
        await exchange_with(client, upstream, authenticate(b"t"), authenticate_answer(token=b"more, please"))
        await client.send_raw(sent)
        await client.ended()
        assert await proxy.closed_by("setup_timeout") == {"setup_timeout": 1}
