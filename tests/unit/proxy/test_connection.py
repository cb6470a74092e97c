"""Order, silence, ends and limits of one connection, as transcripts between a client and a broker."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.errors import TruncatedError
from proxy.wire.exchange import BegunRequest, Buffers, CutThrough, Exchange, Respond
from proxy.wire.limits import Limits
from proxy.wire.response_queue import Slot
from tests.support.fakes.broker.fake_broker import FakeBroker
from tests.support.fakes.broker.wire import connected, frame, request, response
from tests.support.proxy import proxy_harness
from tests.support.proxy.proxy_harness import (
    AnsweringHandler,
    ForwardingHandler,
    PreparingHandler,
    forwarded,
    proxy_before,
    relayed,
    reply,
)

pytestmark = pytest.mark.usefixtures("every_relay")

OPAQUE, HANDLED, OTHER = 12, 1, 3
PATIENT = proxy_harness.PATIENT.model_copy(update={"half_close_timeout_ms": 60_000})


async def test_opaque_frames_pass_byte_for_byte_both_ways() -> None:
    async with relayed() as (client, broker, _):
        await client.send(request(OPAQUE, 4, 7, b"body"))
        upstream = await broker.accepted()
        assert await upstream.receive() == request(OPAQUE, 4, 7, b"body")
        await upstream.send(response(7, b"answer"))
        assert await client.receive() == response(7, b"answer")


async def test_a_waiting_answer_delays_later_responses_but_no_request() -> None:
    gate = asyncio.Event()

    async def late(exchange: Exchange, held: memoryview) -> tuple[bytes, bytes]:
        await gate.wait()
        return bytes(held[:4]), b"late"

    handler = ForwardingHandler(late)
    async with relayed(handlers={HANDLED: handler}) as (client, broker, _):
        await client.send(request(HANDLED, 4, 1), request(OPAQUE, 4, 2), request(HANDLED, 4, 3))
        upstream = await broker.accepted()
        for correlation_id in (1, 2, 3):
            assert (await upstream.receive())[4:8] == correlation_id.to_bytes(4)
        await upstream.send(response(1, b"held"), response(2, b"second"), response(3, b"held"))
        await client.send(request(OPAQUE, 4, 4))
        assert (await upstream.receive())[4:8] == (4).to_bytes(4)
        await upstream.send(response(4, b"fourth"))
        gate.set()
        assert await client.receive() == response(1, b"late")
        assert await client.receive() == response(2, b"second")
        assert await client.receive() == response(3, b"late")
        assert await client.receive() == response(4, b"fourth")


async def test_an_answer_without_the_broker_waits_for_its_turn() -> None:
    async with relayed(handlers={HANDLED: AnsweringHandler(b"ours")}) as (client, broker, _):
        await client.send(request(OPAQUE, 4, 1), request(HANDLED, 4, 2), request(OPAQUE, 4, 3))
        upstream = await broker.accepted()
        assert await upstream.receive() == request(OPAQUE, 4, 1)
        assert await upstream.receive() == request(OPAQUE, 4, 3)
        await upstream.send(response(1, b"a"), response(3, b"b"))
        assert [await client.receive() for _ in range(3)] == [
            response(1, b"a"),
            response(2, b"ours"),
            response(3, b"b"),
        ]


async def test_responses_above_hold_bytes_stream_through_the_patcher() -> None:
    class Upper:
        passing_bytes = untaken_bytes = 0

        def feed(self, data: memoryview, max_groups: int) -> tuple[bytes]:
            return (bytes(data).upper(),)

        def skip(self, count: int) -> None:
            raise AssertionError

    handler = ForwardingHandler(lambda exchange, held: reply(exchange, b"held"), hold_bytes=16, patcher=Upper)
    async with relayed(handlers={HANDLED: handler}) as (client, broker, _):
        await client.send(request(HANDLED, 4, 1), request(HANDLED, 4, 2))
        upstream = await broker.accepted()
        await upstream.send(response(1, b"small"), response(2, b"large" * 1000))
        assert await client.receive() == response(1, b"held")
        assert await client.receive() == response(2, b"LARGE" * 1000)


async def test_a_handler_may_ask_the_broker_more_until_a_later_request_was_sent() -> None:
    refused: list[bool] = []

    async def ask_again(exchange: Exchange, held: memoryview) -> tuple[bytes, bytes]:
        more = exchange.try_forward(request(OTHER, 4, 99))
        if more is None:
            refused.append(True)
            return bytes(held[:4]), b"alone"
        return bytes(held[:4]), bytes((await more)[4:])

    handler = ForwardingHandler(ask_again)
    async with relayed(handlers={HANDLED: handler}) as (client, broker, _):
        upstream = await forwarded(client, broker, request(HANDLED, 4, 1))
        await upstream.send(response(1))
        assert await upstream.receive() == request(OTHER, 4, 99)
        await client.send(request(OPAQUE, 4, 2))
        await upstream.receive()
        await upstream.send(response(99, b"more"), response(2, b"next"))
        assert await client.receive() == response(1, b"more")
        assert await client.receive() == response(2, b"next")

        await client.send(request(HANDLED, 4, 3), request(OPAQUE, 4, 4))
        await upstream.receive()
        await upstream.receive()
        await upstream.send(response(3), response(4))
        assert await client.receive() == response(3, b"alone")
        assert refused == [True]


class SilentProduce:
    """acks=0 when the byte after ten others says so: a prefix that may come in pieces."""

    def on_prefix(self, begun: BegunRequest, prefix: memoryview) -> tuple[CutThrough, Respond | None]:
        if len(prefix) < 24:
            raise TruncatedError("more")
        return CutThrough(no_response=prefix[23] == 0), None


async def test_a_request_that_is_prepared_goes_before_the_later_ones() -> None:
    prepared = request(HANDLED, 4, 2, b"changed")
    handler = PreparingHandler(prepared)
    async with relayed(handlers={HANDLED: handler}) as (client, broker, _):
        await client.send(request(OPAQUE, 4, 1), request(HANDLED, 4, 2), request(OPAQUE, 4, 3))
        upstream = await broker.accepted()
        assert await upstream.receive() == request(OPAQUE, 4, 1)
        await handler.asked.wait()
        await client.send(request(OPAQUE, 4, 4))
        await upstream.send(response(1))
        assert await client.receive() == response(1)
        handler.gate.set()
        assert await upstream.receive() == prepared
        assert await upstream.receive() == request(OPAQUE, 4, 3)
        assert await upstream.receive() == request(OPAQUE, 4, 4)
        await upstream.send(response(2), response(3), response(4))
        for correlation_id in (2, 3, 4):
            assert await client.receive() == response(correlation_id)


async def test_a_client_that_leaves_ends_the_preparation() -> None:
    handler = PreparingHandler(b"")
    async with FakeBroker() as broker, proxy_before(broker, handlers={HANDLED: handler}) as proxy:
        async with connected(proxy.port) as client:
            await client.send(request(HANDLED, 4, 2))
            await handler.asked.wait()
            client.reset()
        async with asyncio.timeout(60):
            await handler.states[0].abandoned.wait()


async def test_a_request_without_a_response_takes_no_turn() -> None:
    async with relayed(prefix_handlers={0: SilentProduce()}) as (client, broker, proxy):
        silent = request(0, 3, 1, b"123456789" + b"\x00" + b"records" * 50_000)
        answered = request(0, 3, 2, b"123456789" + b"\x01" + b"records")
        for start, end in ((0, 6), (6, 20)):
            await client.send_raw(frame(silent)[start:end])
            async with asyncio.timeout(60):
                while proxy.metrics.bytes_from_clients < end:  # noqa: ASYNC110 - a counter has no event
                    await asyncio.sleep(0.001)
        await client.send_raw(frame(silent)[20:] + frame(answered))
        upstream = await broker.accepted()
        assert await upstream.receive() == silent
        assert await upstream.receive() == answered
        await upstream.send(response(2, b"ok"))
        assert await client.receive() == response(2, b"ok")


async def test_the_bytes_of_a_slow_prefix_are_not_examined_one_by_one() -> None:
    examined: list[int] = []

    class LateProduce:
        def on_prefix(self, begun: BegunRequest, prefix: memoryview) -> tuple[CutThrough, Respond | None]:
            examined.append(len(prefix))
            if len(prefix) < 200:
                raise TruncatedError("more")
            return CutThrough(), None

    async with relayed(prefix_handlers={0: LateProduce()}) as (client, broker, proxy):
        sent = request(0, 3, 1, bytes(400))
        for end, byte in enumerate(frame(sent), 1):
            await client.send_raw(bytes([byte]))
            async with asyncio.timeout(60):
                while proxy.metrics.bytes_from_clients < end:  # noqa: ASYNC110 - a counter has no event
                    await asyncio.sleep(0)
        upstream = await broker.accepted()
        assert await upstream.receive() == sent
    assert len(examined) < 10


async def test_a_request_that_ends_within_its_prefix_ends_the_connection() -> None:
    async with relayed(prefix_handlers={0: SilentProduce()}) as (client, _, proxy):
        await client.send(request(0, 3, 1, b"short"))
        assert await client.ended() == b""
        assert await proxy.closed_by("protocol_error") == {"protocol_error": 1}


async def test_requests_sent_right_before_a_close_still_reach_the_broker() -> None:
    async with (
        FakeBroker() as broker,
        proxy_before(broker, prefix_handlers={0: SilentProduce()}, limits=PATIENT) as proxy,
    ):
        sent = request(0, 3, 1, b"123456789" + b"\x00" + b"records" * 100_000)
        async with connected(proxy.port) as client:
            await client.send(sent)
        upstream = await broker.accepted()
        assert await upstream.receive() == sent
        assert await upstream.ended() == b""


async def test_a_half_closed_client_gets_its_answers_and_then_the_end() -> None:
    async with relayed(limits=PATIENT) as (client, broker, _):
        await client.send(request(OPAQUE, 4, 1), request(OPAQUE, 4, 2))
        client.half_close()
        upstream = await broker.accepted()
        await upstream.receive()
        await upstream.receive()
        await upstream.send(response(1, b"a"), response(2, b"b"))
        assert await client.ended() == frame(response(1, b"a")) + frame(response(2, b"b"))
        assert await upstream.ended() == b""


async def test_a_half_closed_client_that_is_never_answered_is_closed_in_time() -> None:
    limits = Limits(half_close_timeout_ms=20)
    async with relayed(limits=limits) as (client, _, proxy):
        await client.send(request(OPAQUE, 4, 1))
        client.half_close()
        assert await client.ended() == b""
        assert proxy.metrics.closed == {"half_closed": 1}


async def test_a_client_that_leaves_abandons_what_waits_for_it() -> None:
    started = asyncio.Event()
    cancelled = asyncio.Event()

    async def never(exchange: Exchange, held: memoryview) -> tuple[bytes]:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return (b"",)

    handler = ForwardingHandler(never)
    async with relayed(handlers={HANDLED: handler}) as (client, broker, _):
        upstream = await forwarded(client, broker, request(HANDLED, 4, 1), request(HANDLED, 4, 2))
        await upstream.send(response(1))
        await started.wait()
        client.reset()
        assert await upstream.ended() == b""
        await cancelled.wait()
        assert [state.times_abandoned for state in handler.states] == [1, 1]


async def test_a_handler_that_fails_closes_its_connection_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(exchange: Exchange, held: memoryview) -> tuple[bytes]:
        raise RuntimeError("broken handler")

    async with (
        relayed(handlers={HANDLED: ForwardingHandler(fail)}) as (victim, broker, proxy),
        connected(proxy.port) as other,
    ):
        await victim.send(request(HANDLED, 4, 1))
        upstream = await broker.accepted()
        await upstream.send(response(1))
        assert await victim.ended() == b""
        await other.send(request(OPAQUE, 4, 1))
        await (await broker.accepted()).send(response(1, b"fine"))
        assert await other.receive() == response(1, b"fine")
    assert [record.message for record in caplog.records] == ["closing the connection: a request handler failed"]


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "a client speaks TLS on this plain-text port"),
        (b"\xff\xff\xff\xff12345678", "a frame with the negative length -1"),
        (b"GET / HTTP/1.1\r\n\r\n", "a client speaks HTTP on this port for Kafka's clients"),
        (
            b"\x7f\x00\x00\x0012345678",
            "a frame of 2130706432 bytes, above the limit of 104857600 bytes (limits.socket.request.max.bytes)",
        ),
        (b"\x00\x00\x00\x041234", "what the client sent is refused: a request of 4 bytes"),
    ],
)
async def test_bytes_that_are_not_kafka_are_logged_once_and_reach_no_broker(
    sent: bytes, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with relayed() as (client, _, _):
        await client.send_raw(sent)
        assert await client.ended() == b""
        assert len(caplog.records) == 1
        assert said in caplog.records[0].message


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (frame(response(8, b"x")), "what the broker sent is refused: a "),
        (b"\xff\xff\xff\xff1234", "what the broker sent is refused: a "),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "the broker speaks HTTP"),
    ],
)
async def test_a_broker_that_breaks_the_order_or_the_frames_is_cut_off(
    sent: bytes, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with relayed() as (client, broker, _):
        upstream = await forwarded(client, broker, request(OPAQUE, 4, 7))
        await upstream.send_raw(sent)
        assert await client.ended() == b""
        assert said in caplog.records[0].message


async def test_pipelining_beyond_the_limit_waits_in_the_client_s_socket() -> None:
    async with relayed(limits=Limits(max_in_flight=3)) as (client, broker, _):
        await client.send(*(request(OPAQUE, 4, n) for n in range(50)))
        upstream = await broker.accepted()
        for n in range(50):
            assert (await upstream.receive())[4:8] == n.to_bytes(4)
            await upstream.send(response(n))
            assert await client.receive() == response(n)


async def test_an_answer_that_was_cancelled_before_it_ran_is_closed() -> None:
    """Otherwise Python warns of it, on a line of the log."""

    async def answer() -> Buffers:
        return (b"never",)

    async def finish(pending: Coroutine[None, None, Buffers]) -> None:
        await pending

    owner: Any = SimpleNamespace(connection_id=1, node_id=None)
    slot, pending = Slot(owner, HANDLED, 4, 7, 0.0), answer()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(finish(pending))
        slot.runs(task, pending)
        slot.abandon()
    assert task.cancelled()
    await asyncio.sleep(0)
    assert inspect.getcoroutinestate(pending) == inspect.CORO_CLOSED
