"""Every request of a pipelining client is answered, in order: whatever the limit, the splits and the broker's pace."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.wire.exchange import Answer, BegunRequest, CutThrough, Exchange, Forward, Handler, HandlerState, Prepare
from tests.support.fakes.broker.fake_broker import FakeBroker
from tests.support.fakes.broker.wire import OPAQUE, Wire, connected, frame, request, response
from tests.support.proxy.proxy_harness import PATIENT, AnsweringHandler, ForwardingHandler, proxy_before, reply
from tiers.event_loop import EventLoop

pytestmark = pytest.mark.usefixtures("every_relay")

ANSWERED, HELD, LATE, PREPARED, REFUSED_LATER, STREAMED, SILENT = 40, 41, 42, 43, 44, 45, 46
KINDS = (OPAQUE, ANSWERED, HELD, LATE, PREPARED, REFUSED_LATER, STREAMED, SILENT)
BODY = b"a response that is longer than what is held"


class PreparedLater:
    """Forwards the request after some turns of the loop."""

    def __init__(self, turns: int) -> None:
        self._turns = turns

    def on_request(self, exchange: Exchange) -> tuple[Answer | Forward | Prepare, HandlerState | None]:
        async def forward() -> Forward:
            for _ in range(self._turns):
                await asyncio.sleep(0)
            return Forward(exchange.request.frame, hold_bytes=None)

        _, state = ForwardingHandler(lambda _, held: (bytes(held),)).on_request(exchange)
        return Prepare(forward), state


class RefusedLater:
    """Answers the request itself after some turns of the loop."""

    def __init__(self, turns: int) -> None:
        self._turns = turns

    def on_request(self, exchange: Exchange) -> tuple[Prepare, HandlerState | None]:
        async def answer() -> Answer:
            for _ in range(self._turns):
                await asyncio.sleep(0)
            return Answer(reply(exchange, BODY))

        return Prepare(answer), None


class Silent:
    """A request without a response."""

    def on_prefix(self, begun: BegunRequest, prefix: memoryview) -> tuple[CutThrough, HandlerState | None]:
        return CutThrough(no_response=True), None


def handlers(turns: int) -> Mapping[int, Handler]:
    async def late(exchange: Exchange, held: memoryview) -> Sequence[bytes]:
        for _ in range(exchange.request.correlation_id % 3 * turns):
            await asyncio.sleep(0)
        return (bytes(held),)

    return {
        ANSWERED: AnsweringHandler(BODY),
        HELD: ForwardingHandler(lambda _, held: (bytes(held),)),
        LATE: ForwardingHandler(late),
        PREPARED: PreparedLater(turns),
        REFUSED_LATER: RefusedLater(turns),
        STREAMED: ForwardingHandler(lambda exchange, _: reply(exchange, b"held"), hold_bytes=8),
    }


async def converse(kinds: Sequence[int], max_in_flight: int, cuts: Sequence[int], pace: int, turns: int) -> None:
    limits = PATIENT.model_copy(update={"max_in_flight": max_in_flight})
    stream = b"".join(frame(request(kind, 1, number)) for number, kind in enumerate(kinds))
    at_broker = [number for number, kind in enumerate(kinds) if kind not in (ANSWERED, REFUSED_LATER)]
    answered = [number for number, kind in enumerate(kinds) if kind != SILENT]

    arrived: asyncio.Queue[bytes] = asyncio.Queue()

    async def receive(upstream: Wire) -> None:
        for number in at_broker:
            received = await upstream.receive()
            assert received == request(kinds[number], 1, number)
            if kinds[number] != SILENT:
                arrived.put_nowait(response(number, BODY))

    async def answer() -> None:
        """Answers everything that has arrived, and lets the loop turn `pace` times before each group of answers."""
        upstream = await broker.accepted()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(receive(upstream))
            left = sum(kinds[number] != SILENT for number in at_broker)
            while left:
                answers = [await arrived.get()]
                for _ in range(pace):
                    await asyncio.sleep(0)
                while not arrived.empty():
                    answers.append(arrived.get_nowait())
                await upstream.send(*answers)
                left -= len(answers)

    async with (
        FakeBroker() as broker,
        proxy_before(broker, handlers=handlers(turns), prefix_handlers={SILENT: Silent()}, limits=limits) as proxy,
        connected(proxy.port) as client,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(answer())
        start = 0
        for end in sorted({*(cut % len(stream) for cut in cuts), len(stream)}):
            await client.send_raw(stream[start:end])
            start = end
            await asyncio.sleep(0)
        for number in answered:
            assert await client.receive() == response(number, BODY)


@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=24),
    max_in_flight=st.integers(1, 4),
    cuts=st.lists(st.integers(0, 2_000), max_size=6),
    pace=st.integers(0, 30),
    turns=st.integers(0, 3),
)
def test_pipelined_requests_of_all_kinds_are_answered_in_order(
    kinds: list[int], max_in_flight: int, cuts: list[int], pace: int, turns: int
) -> None:
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(converse(kinds, max_in_flight, cuts, pace, turns))
