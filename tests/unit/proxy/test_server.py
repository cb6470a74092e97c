"""Draining: requests in progress are answered, a waiting Fetch at once and empty. Then the connections close."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from kafka.protocol.consumer import FetchResponse

from protocol.api_keys import ApiKey
from protocol.header import response_body_position
from proxy.handlers import drain_answers
from proxy.wire.exchange import Buffers, Exchange
from proxy.wire.limits import Limits
from proxy.wire.server import BrokerEndpoint
from tests.support.fakes.broker.fake_broker import FakeBroker
from tests.support.fakes.broker.wire import connected, frame, request, response
from tests.support.proxy.proxy_harness import PATIENT, ForwardingHandler, forwarded, proxy_before, relayed
from tests.support.tiers.waiting import until

FETCH, OPAQUE, SHARE_FETCH = 1, 12, 78


def empty_fetch(api_version: int, correlation_id: int) -> Buffers:
    return (response(correlation_id, b"empty"),)


async def test_an_idle_connection_closes_at_once() -> None:
    async with relayed() as (client, broker, proxy):
        await client.send(request(OPAQUE, 4, 1))
        await (await broker.accepted()).send(response(1))
        await client.receive()
        assert await proxy.server.drain()
        assert await client.ended() == b""
        assert proxy.metrics.closed == {"drained": 1}


async def test_requests_in_progress_are_answered_and_no_new_one_is_read() -> None:
    async with relayed() as (client, broker, proxy):
        upstream = await forwarded(client, broker, request(OPAQUE, 4, 1))
        async with asyncio.TaskGroup() as tasks:
            drained = tasks.create_task(proxy.server.drain())
            await asyncio.sleep(0)
            await client.send(request(OPAQUE, 4, 2))
            await upstream.send(response(1, b"answered"))
            assert await client.receive() == response(1, b"answered")
            assert await drained
        assert await upstream.ended() == b""


async def test_a_request_that_has_left_in_part_is_completed() -> None:
    async with relayed() as (client, broker, proxy):
        whole = request(OPAQUE, 4, 1, b"x" * 100_000)
        await client.send_raw(frame(whole)[:50_000])
        upstream = await broker.accepted()
        assert await upstream.receive_raw(10_000)
        async with asyncio.TaskGroup() as tasks:
            drained = tasks.create_task(proxy.server.drain())
            await asyncio.sleep(0)
            await client.send_raw(frame(whole)[50_000:])
            assert await upstream.receive_raw(len(whole) + 4 - 10_000)
            await upstream.send(response(1))
            assert await client.receive() == response(1)
            assert await drained


async def test_a_waiting_fetch_is_answered_empty() -> None:
    started = asyncio.Event()

    async def never(exchange: Exchange, held: memoryview) -> Buffers:
        started.set()
        await asyncio.Event().wait()
        return ()

    handler = ForwardingHandler(never)
    async with (
        relayed(handlers={FETCH: handler}, drain_answers={FETCH: empty_fetch}) as (remote, broker, proxy),
        connected(proxy.port) as local,
    ):
        remote_upstream = await forwarded(remote, broker, request(FETCH, 4, 1))
        await remote_upstream.send(response(1))
        await started.wait()
        local_upstream = await forwarded(local, broker, request(FETCH, 4, 2), request(OPAQUE, 4, 3))
        async with asyncio.TaskGroup() as tasks:
            drained = tasks.create_task(proxy.server.drain())
            assert await remote.ended() == frame(response(1, b"empty"))
            assert await local.receive() == response(2, b"empty")
            await local_upstream.send(response(2, b"long poll is over"), response(3, b"answered"))
            assert await local.ended() == frame(response(3, b"answered"))
            assert await drained
        assert [state.times_abandoned for state in handler.states] == [1, 1]


async def test_an_answer_that_has_arrived_behind_a_waiting_fetch_leaves() -> None:
    started = asyncio.Event()

    async def never(exchange: Exchange, held: memoryview) -> Buffers:
        started.set()
        await asyncio.Event().wait()
        return ()

    handlers = {FETCH: ForwardingHandler(never)}
    async with relayed(handlers=handlers, drain_answers={FETCH: empty_fetch}) as (client, broker, proxy):
        upstream = await forwarded(client, broker, request(FETCH, 4, 1), request(OPAQUE, 4, 2))
        await upstream.send(response(1), response(2, b"answered"))
        await started.wait()
        arrive = 2 * len(frame(response(1))) + len(b"answered")
        await until(lambda: proxy.metrics.bytes_from_brokers >= arrive)
        assert await proxy.server.drain()
        assert await client.ended() == frame(response(1, b"empty")) + frame(response(2, b"answered"))


@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        ((request(FETCH, 4, 1), request(OPAQUE, 4, 2)), frame(response(1, b"empty"))),
        ((request(SHARE_FETCH, 1, 1),), b""),
    ],
    ids=["a request behind a long poll", "a share fetch"],
)
async def test_what_a_broker_answers_late_does_not_keep_a_drain_waiting(sent: Sequence[bytes], answered: bytes) -> None:
    """The broker would begin it after the long poll. A ShareFetch is not answered early: it may acknowledge records."""
    handlers = {FETCH: ForwardingHandler(lambda exchange, held: (held,))}
    limits = PATIENT.model_copy(update={"half_close_timeout_ms": 1})
    async with relayed(handlers=handlers, drain_answers={FETCH: empty_fetch}, limits=limits) as (client, broker, proxy):
        await forwarded(client, broker, *sent)
        assert await proxy.server.drain()
        assert await client.ended() == answered
        assert proxy.metrics.closed == {"drained": 1}


async def test_a_fetch_that_arrives_in_part_before_a_drain_is_answered_empty() -> None:
    handler = ForwardingHandler(lambda exchange, held: (held,))
    async with relayed(handlers={FETCH: handler}, drain_answers={FETCH: empty_fetch}) as (client, broker, proxy):
        upstream = await forwarded(client, broker, request(OPAQUE, 4, 1))
        sent = frame(request(FETCH, 4, 2))
        arrive = proxy.metrics.bytes_from_clients + len(sent) - 1
        await client.send_raw(sent[:-1])
        await until(lambda: proxy.metrics.bytes_from_clients >= arrive)
        async with asyncio.TaskGroup() as tasks:
            drained = tasks.create_task(proxy.server.drain())
            await upstream.send(response(1))
            assert await client.receive() == response(1)
            await client.send_raw(sent[-1:])
            assert await client.ended() == frame(response(2, b"empty"))
            assert await drained


async def test_every_other_broker_is_served_in_the_first_half_of_a_drain() -> None:
    async with FakeBroker() as broker, proxy_before(broker) as proxy:
        _, port = proxy.server.listen("127.0.0.1", 0, BrokerEndpoint(2, lambda: broker.addresses))
        async with connected(proxy.port) as to_1, connected(port) as to_2:
            await to_1.send(request(OPAQUE, 4, 1))
            await (await broker.accepted()).send(response(1))
            await to_1.receive()
            await to_2.send(request(OPAQUE, 4, 1))
            upstream = await broker.accepted()
            await upstream.send(response(1))
            await to_2.receive()
            async with asyncio.TaskGroup() as tasks:
                drained = tasks.create_task(proxy.server.drain(node_ids=(2, 1)))
                assert await to_1.ended() == b""
                await to_2.send(request(OPAQUE, 4, 2))
                await upstream.send(response(2, b"still served"))
                assert await to_2.receive() == response(2, b"still served")
                assert await to_2.ended() == b""
                assert await drained


async def test_a_short_drain_halves_its_pause() -> None:
    limits = Limits(drain_timeout_ms=400)
    async with FakeBroker() as broker, proxy_before(broker, limits=limits) as proxy:
        _, port = proxy.server.listen("127.0.0.1", 0, BrokerEndpoint(2, lambda: broker.addresses))
        async with connected(proxy.port), connected(port):
            await until(lambda: proxy.server.open_connections >= 2)
            assert await proxy.server.drain(node_ids=(1, 2))
        assert proxy.metrics.closed == {"drained": 2}


async def test_a_connection_that_outlives_the_drain_is_cut() -> None:
    limits = Limits(drain_timeout_ms=20)
    async with relayed(limits=limits) as (client, broker, proxy):
        await client.send(request(OPAQUE, 4, 1))
        await (await broker.accepted()).receive()
        assert not await proxy.server.drain()
    assert proxy.metrics.closed == {"stopped": 1}


async def test_a_drained_server_accepts_no_connection() -> None:
    async with FakeBroker() as broker, proxy_before(broker) as proxy:
        assert await proxy.server.drain()
        await asyncio.sleep(0)
        refused = False
        try:
            async with connected(proxy.port) as late:
                refused = await late.ended() == b""
        except ConnectionRefusedError:
            refused = True
        assert refused


@pytest.mark.parametrize("version", [4, 12, 18])
def test_an_empty_fetch_is_throttled_and_sessionless(version: int) -> None:
    payload = b"".join(drain_answers.empty_fetch(version, 77))
    assert int.from_bytes(payload[:4], "big", signed=True) == 77
    body = payload[response_body_position(ApiKey.FETCH, version, payload) :]
    decoded = FetchResponse.decode(body, version=version)
    assert (decoded.throttle_time_ms, list(decoded.responses)) == (1, [])
    if version >= 7:
        assert (decoded.error_code, decoded.session_id) == (0, 0)
